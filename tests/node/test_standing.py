"""A node's report of its own state: rounded to steps, limited in size, infrequent, and read by other
nodes."""

from random import Random

import msgspec
import trio
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import clean_text
from crypto.identity import PeerId
from gossip.dissemination import CHANGE_INTERVALS
from gossip.member import METADATA_BYTES_MAX, Status, SwarmMember
from node.placement.offers import offers_of, own_offer
from node.protocols.runs import RUNS_WORD
from node.services.capacity import Capacity
from node.services.metadata import (
    CHANGES_KEPT,
    LOAD_STEP_PERCENT,
    STAGES_TOLD_MAX,
    AdvertisedStanding,
    Metadata,
    change_seconds,
    claimed_standing,
    encode_metadata,
    read_metadata,
    standing_now,
)
from node.services.standing import StandingKeeper
from tests.stack import simulate, swarm

CAPACITY = Capacity("cuda:0", 8, 2**34, 2**35, 1e12, "eu-west")
GIB = 2**30


def test_every_member_reads_the_state_and_stages_of_another() -> None:
    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:
            await trio.sleep(30)
            reader = group.nodes["a"]
            for other in (group.nodes["b"], group.nodes["c"]):
                standing = reader.state.members[other.peer].standing
                assert standing is not None
                assert standing.slots_free == 1
                assert {"stages", RUNS_WORD} <= set(standing.capabilities)
                assert standing.stages == ()

    simulate(scenario)


def test_members_with_a_different_run_version_offer_no_slot() -> None:
    def member(number: int, *words: str) -> SwarmMember:
        metadata = encode_metadata(CAPACITY, accepts_runs=True, standing=AdvertisedStanding(words))
        peer = PeerId(bytes([number]) * 32)
        return SwarmMember(peer, "", (), metadata, Status.ALIVE, 1, 0.0, "", None, None)

    own = own_offer(PeerId(bytes(32)), CAPACITY, has_slot=True)
    offers = offers_of(own, [member(1, "stages", RUNS_WORD), member(2, "stages", "runs/1")])
    assert [offer.has_slot for offer in offers] == [True, True, False]


def test_only_a_change_by_a_whole_step_is_announced() -> None:
    told = standing_now(None, ("stages",), 60.0, (10 * GIB, 16 * GIB), 1, ())
    assert told == AdvertisedStanding(("stages",), 50, 10 * GIB, 1, ())
    assert standing_now(told, ("stages",), 74.0, (11 * GIB, 16 * GIB), 1, ()) == told
    for changed in (
        standing_now(told, ("stages",), 76.0, (10 * GIB, 16 * GIB), 1, ()),
        standing_now(told, ("stages",), 60.0, (8 * GIB, 16 * GIB), 1, ()),
        standing_now(told, ("stages",), 60.0, (10 * GIB, 16 * GIB), 0, ()),
        standing_now(told, ("stages",), 60.0, (10 * GIB, 16 * GIB), 1, (("ab" * 8, 2),)),
        standing_now(told, (), 60.0, (10 * GIB, 16 * GIB), 1, ()),
    ):
        assert changed != told


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_the_announced_load_is_within_one_step_of_the_true_load(loads: list[float]) -> None:
    told: AdvertisedStanding | None = None
    for load in loads:
        told = standing_now(told, (), load, (0, 0), 0, ())
        assert told.load_percent % LOAD_STEP_PERCENT == 0
        assert abs(told.load_percent - min(load, 10_000)) < 1.5 * LOAD_STEP_PERCENT


standings = st.builds(
    AdvertisedStanding,
    st.lists(st.text(max_size=4), max_size=8).map(tuple),
    st.integers(0, 10_000),
    st.integers(0, 2**62),
    st.integers(0, 255),
    st.lists(st.tuples(st.just("0123abcd"), st.integers(0, 65_535)), max_size=STAGES_TOLD_MAX).map(tuple),
)


@given(standings, st.text(max_size=60))
def test_oversized_reports_drop_stages_before_the_capacity(standing: AdvertisedStanding, place: str) -> None:
    capacity = Capacity("cuda:0", 8, 2**34, 2**35, 1e12, place)
    data = encode_metadata(capacity, accepts_runs=True, standing=standing)
    read = read_metadata(data)
    if len(data) <= METADATA_BYTES_MAX:
        assert read is not None
        assert read.location == clean_text(place)
        if read.standing is not None and read.standing.stages:
            assert read.standing.capabilities == tuple(map(clean_text, standing.capabilities))


def test_a_reader_accepts_reports_of_either_version() -> None:
    old = msgspec.msgpack.encode([1, True, "cpu", 2, 100, 200, 1e9, "here"])
    read = read_metadata(old)
    assert read is not None
    assert read.standing is None
    assert claimed_standing(old) is None
    new = encode_metadata(
        CAPACITY, accepts_runs=True, standing=AdvertisedStanding(("stages",), 25, GIB, 1, (("ab", 0),))
    )
    assert isinstance(read_metadata(new), Metadata)
    assert claimed_standing(new) is not None
    assert read_metadata(new + b"x") is None


class Virtual:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def test_a_changing_load_is_announced_within_the_gossip_rate() -> None:
    clock, told, rng = Virtual(), [0], Random(1)

    def look(_told: AdvertisedStanding) -> AdvertisedStanding:
        return AdvertisedStanding((), 25 * rng.randrange(40), 0, 1, ())

    def tell() -> None:
        told[0] += 1

    keeper = StandingKeeper(clock, "lan", first=AdvertisedStanding(), look=look, tell=tell, live=lambda: 10)
    for _ in range(1_000):
        clock.now += 5.0
        keeper.look()
    assert CHANGES_KEPT < told[0] <= CHANGES_KEPT + 5_000 / CHANGE_INTERVALS + 1
    assert change_seconds(1.0, 2_000) == 4_000.0
