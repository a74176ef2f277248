"""The roster (list of participants) of an averaging run: the core, in virtual time."""

from random import Random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip import roster
from gossip.claims import COUNT_MAX
from gossip.roster import Entered, Leave, Left, Names, Report, Roster
from gossip.rosters import Rosters
from sim.engine import Engine
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.ports import Wire

RUN, TENSORS, LINEAGE = (blake3(name).digest() for name in (b"run", b"tensors", b"lineage"))


def peer_of(number: int) -> PeerId:
    return PeerId(blake3(number.to_bytes(8, "big")).digest())


class World:
    """Return participants that greet each other through the first one."""

    def __init__(
        self, count: int, *, loss: float = 0.0, seed: int = 1, kept: int = roster.PARTICIPANTS_MAX
    ) -> None:
        self.kept = kept
        self.events: list[tuple[float, PeerId, object]] = []
        self.engine = Engine(
            SimLinks(NetworkModel(loss=loss), seed),
            publish=lambda now, peer, event: self.events.append((now, peer, event)),
            wires={"": Wire(roster.Message, roster.MESSAGE_BYTES_MAX)},
        )
        self.peers = [peer_of(number) for number in range(count)]
        self.cores: list[Rosters] = []
        for number in range(count):
            self.start(number, at=0.0)

    def start(self, number: int, *, at: float, signature: bytes = TENSORS) -> Rosters:
        core = Rosters(self.peers[number], Random(number), participants_max=self.kept)
        core.open(RUN, signature, at, int(at * 1000))
        self.engine.add(self.peers[number], core, at=at)
        self.engine.call(
            at, self.peers[number], lambda _, now: self.roster(core).introduce(now, self.peers[:1])
        )
        self.cores[number : number + 1] = [core]
        return core

    @staticmethod
    def roster(core: Rosters) -> Roster:
        found = core.get(RUN)
        assert found is not None
        return found

    def known(self, number: int) -> set[PeerId]:
        return set(self.roster(self.cores[number]).reports)


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_participants_find_all_others_through_any_one(loss: float) -> None:
    world = World(20, loss=loss)
    world.engine.run(10.0)
    for number, peer in enumerate(world.peers):
        assert world.known(number) == set(world.peers) - {peer}
    entered = [event for _, _, event in world.events if isinstance(event, Entered)]
    assert len(entered) == 20 * 19


def test_a_report_reaches_all_within_one_message() -> None:
    world = World(4)
    world.engine.run(5.0)
    told = {"step": 7, "samples": 64, "rounds": 2, "lineage": LINEAGE, "has_state": True}
    core = World.roster(world.cores[2])
    world.engine.call(5.0, world.peers[2], lambda _, now: core.tell(now, **told))  # type: ignore[arg-type]  # of several types
    world.engine.run(5.5)
    for number in (0, 1, 3):
        report = World.roster(world.cores[number]).reports[world.peers[2]]
        assert report.step.equals(7)
        assert report.samples.equals(64)
        assert report.has_state


def test_a_silent_participant_is_forgotten_and_may_return_after_a_restart() -> None:
    world = World(3)
    world.engine.kill(world.peers[1], 5.0)
    world.engine.run(20.0)
    gone = [event for _, _, event in world.events if isinstance(event, Left)]
    assert {(event.peer, event.reason) for event in gone} == {(world.peers[1], "silent")}
    assert world.known(0) == {world.peers[2]}
    world.start(1, at=21.0)
    world.engine.run(30.0)
    assert world.known(0) == {world.peers[1], world.peers[2]}
    assert World.roster(world.cores[0]).reports[world.peers[1]].number > 21_000


def test_peers_with_different_tensors_are_counted_but_not_averaged_with() -> None:
    world = World(2)
    world.engine.kill(world.peers[1], 0.5)
    world.start(1, at=1.0, signature=LINEAGE)
    world.engine.run(4.0)
    assert world.known(0) == set()
    assert World.roster(world.cores[0]).strangers == 1


def test_a_peer_that_leaves_is_forgotten_immediately() -> None:
    world = World(3)
    world.engine.run(3.0)
    world.engine.call(3.0, world.peers[1], lambda core, _: core.close(RUN))
    world.engine.run(3.5)
    assert world.known(0) == {world.peers[2]}


def test_only_participants_may_name_others() -> None:
    core = Roster(peer_of(0), RUN, TENSORS, Random(1), 0.0, 1)
    assert core.receive(0.0, peer_of(1), Names(RUN, (peer_of(2),))) == []
    core.receive(0.0, peer_of(1), Report(RUN, TENSORS, 1, 0, 0, 0, LINEAGE))
    greeted = core.receive(0.1, peer_of(1), Names(RUN, (peer_of(2),)))
    assert peer_of(2) in [peer for peer, _ in greeted]


def test_an_older_report_changes_nothing() -> None:
    core = Roster(peer_of(0), RUN, TENSORS, Random(1), 0.0, 1)
    core.receive(0.0, peer_of(1), Report(RUN, TENSORS, 5, 9, 0, 0, LINEAGE))
    core.receive(0.0, peer_of(1), Report(RUN, TENSORS, 4, 8, 0, 0, LINEAGE))
    assert core.reports[peer_of(1)].step.equals(9)
    with pytest.raises(RemoteProtocolError):
        core.receive(0.0, peer_of(1), Leave(TENSORS))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_a_valid_message(data: bytes) -> None:
    try:
        message: roster.Message = decode(data, roster.Message, bytes_max=roster.MESSAGE_BYTES_MAX)
    except RemoteProtocolError:
        return
    assert decode(encode(message), roster.Message, bytes_max=roster.MESSAGE_BYTES_MAX) == message


def test_the_longest_messages_fit_a_datagram() -> None:
    names = Names(RUN, tuple(peer_of(number) for number in range(roster.NAMES_MAX)))
    most = COUNT_MAX - 1
    report = Report(RUN, TENSORS, 2**48 - 1, most, most, most, LINEAGE, True, True)
    assert max(len(encode(names)), len(encode(report))) < 1_100


def test_a_roster_is_bounded_for_any_reporters() -> None:
    core = Roster(peer_of(0), RUN, TENSORS, Random(1), 0.0, 1)
    for number in range(1, roster.PARTICIPANTS_MAX + 50):
        core.receive(0.0, peer_of(number), Report(RUN, TENSORS, 1, 0, 0, 0, LINEAGE))
    assert len(core.reports) == roster.PARTICIPANTS_MAX
    for first in range(2_000, 6_000, roster.NAMES_MAX):
        names = tuple(peer_of(number) for number in range(first, first + roster.NAMES_MAX))
        core.receive(0.0, peer_of(1), Names(RUN, names))
    assert len(core._candidates) <= roster.CANDIDATES_MAX


@pytest.mark.parametrize("come_first", [False, True], ids=["honest-first", "eclipse-first"])
def test_nearby_ids_of_one_network_do_not_fill_a_roster(come_first: bool) -> None:
    """These ids are generated until their hashes are next to this peer's, nearer than those of any honest
    peer."""
    own = Roster(
        peer_of(0), RUN, TENSORS, Random(1), 0.0, 1,
        network_of=lambda peer: b"rack" if peer in near else blake3(peer).digest()[:3],
    )  # fmt: skip
    peers = [peer_of(number) for number in range(1, 12_000)]
    peers.sort(key=own._distance)
    near, honest = set(peers[:1_100]), Random(2).sample(peers[1_100:], 300)
    for group in [near, honest] if come_first else [honest, near]:
        for peer in group:
            own.receive(0.0, peer, Report(RUN, TENSORS, 1, 0, 0, 0, LINEAGE))
    assert set(honest) <= set(own.reports)
    assert len(own.reports) == roster.PARTICIPANTS_MAX
    own.receive(0.0, honest[0], Names(RUN, (peers[-1],)))
    assert peers[-1] in own._candidates  # far away, and in a network with few members


def test_a_roster_within_one_network_keeps_the_nearest_members() -> None:
    own = Roster(
        peer_of(0), RUN, TENSORS, Random(1), 0.0, 1, participants_max=40, network_of=lambda _peer: b"rack"
    )
    peers = [peer_of(number) for number in range(1, 200)]
    for peer in peers:
        own.receive(0.0, peer, Report(RUN, TENSORS, 1, 0, 0, 0, LINEAGE))
    assert set(own.reports) == set(sorted(peers, key=own._distance)[:40])


def test_a_full_list_keeps_the_nearest_and_estimates_the_total() -> None:
    count, kept = 70, 12
    world = World(count, kept=kept)
    world.engine.run(25.0)

    def place(peer: PeerId) -> int:
        return int.from_bytes(blake3(RUN + peer).digest()[:8], "big")

    shares = []
    for number, peer in enumerate(world.peers):
        found = world.roster(world.cores[number])
        assert not found.is_whole
        assert len(found.reports) <= kept
        others = sorted(world.peers, key=lambda other, own=peer: place(other) ^ place(own))  # type: ignore[misc]  # bound now
        shares.append(len(world.known(number) & set(others[1 : kept + 1])) / kept)
    assert min(shares) > 0.8
    estimates = sorted(world.roster(core).count for core in world.cores)
    assert 0.75 * count < estimates[count // 2] < 1.35 * count, estimates


def test_a_list_is_complete_again_once_enough_have_left() -> None:
    world = World(12, kept=8)
    world.engine.run(20.0)
    found = world.roster(world.cores[0])
    assert not world.roster(world.cores[0]).is_whole
    for peer in world.peers[4:]:
        found.lost(peer)
    assert world.roster(world.cores[0]).is_whole
    assert found.count == len(found.reports) + 1


def test_a_silent_participant_is_forgotten_at_the_deadline() -> None:
    """In floating point, 0.1 + 8 - 8 is less than 0.1. So if the limit were computed differently from the
    deadline, it would not be reached when the deadline comes."""
    own = Roster(peer_of(0), RUN, TENSORS, Random(1), 0.0, 1)
    own.receive(0.1, peer_of(1), Report(RUN, TENSORS, 1, 0, 0, 0, LINEAGE))
    own.wake(0.1 + roster.SILENT_SECONDS)
    assert not own.reports
    assert own.deadline > 0.1 + roster.SILENT_SECONDS
