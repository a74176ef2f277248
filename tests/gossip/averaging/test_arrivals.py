"""Part sizes follow the upload rates that members measure of each other."""

from math import inf

import numpy as np

from gossip.averaging.arrivals import Arrivals, UploadRate
from gossip.averaging.group import RATE_UNKNOWN, GroupMember, owners_of
from gossip.averaging.messages import Arrived
from gossip.averaging.outcome import Patience
from tests.gossip.averaging.network import Averaging, group_of, members_of
from tests.gossip.swarm import peer_of

ITEMS = 4_000_000
UPLOADS = (4e6, 4e6, 4e6, 4e5)
"""Upload rates in bytes per second. The last member has a tenth of the others' rate."""


def best_seconds(uploads: tuple[float, ...]) -> float:
    """Return the shortest possible time of a round, which the slowest uploader determines. Every member sends
    the parts that it does not own to their owners, and its own part to all others.
    """
    others, size = len(uploads) - 1, 4 * ITEMS

    def parts(seconds: float) -> float:
        return sum(min(1.0, max(0.0, (seconds * each / size - 1) / (others - 1))) for each in uploads)

    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if parts(middle) >= 1 else (middle, high)
    return max(high, *(size / each for each in uploads))


def test_with_parts_sized_by_measured_uploads_a_round_is_nearly_optimal() -> None:
    rates = [UploadRate() for _ in UPLOADS]
    draws = np.random.default_rng(1)
    seconds = []
    for number in range(4):
        claims = [rate.claimed for rate in rates]
        group = group_of(members_of(4, nonce=number, rates=claims), ITEMS, number=number)
        vectors = {place: draws.standard_normal(ITEMS).astype(np.float32) for place in range(4)}
        world = Averaging(group, vectors, patience=Patience(300.0, 300.0, 300.0, 300.0, 50.0, 300.0))
        world.rates = dict(enumerate(UPLOADS))
        done: list[float] = []

        def look(world: Averaging = world, done: list[float] = done) -> None:
            if not done and all(world.results.values()):
                done.append(world.now)

        world.hooks.append(look)
        world.start()
        world.run(1_000.0)
        assert len(world.successes) == 4
        seconds.append(done[0])
        for place, rate in enumerate(rates):
            rate.measured(world.attempts[place].upload_rate)
    best = best_seconds(UPLOADS)
    assert seconds[0] > 1.2 * best, "with equal parts, the slow member should delay all"
    assert seconds[-1] < 1.15 * best, (seconds, best)


def test_a_member_without_measurements_is_assumed_to_be_median() -> None:
    rates = [8_000_000, RATE_UNKNOWN, 8_000_000, 100]
    group = group_of(members_of(4, rates=rates), 1_000_000)
    sizes = [owner.end - owner.begin for owner in owners_of(group) if owner.place < 3]
    assert max(sizes) - min(sizes) <= 4_096
    equal = group_of(members_of(4, rates=[RATE_UNKNOWN] * 4), 1_000_000)
    assert len(owners_of(equal)) == 4


def test_a_single_low_report_of_a_members_rate_is_not_believed() -> None:
    own = Arrivals(bytes(32), 0.0)
    for place, microseconds in ((1, 1_000_000), (2, 1_000_000), (3, 900_000_000)):
        own.take(place, Arrived(bytes(32), 1_000_000, microseconds), 1_000_000)
    assert own.upload_rate == 3_000_000
    own.take(4, Arrived(bytes(32), 2**52, 1), 1_000_000)
    assert own.upload_rate == 3_000_000, "the claimed bytes do not exceed the bytes sent"


def test_reported_rates_are_rounded_and_within_bounds() -> None:
    rate = UploadRate()
    assert rate.claimed == RATE_UNKNOWN
    rate.measured(None)
    assert rate.claimed == RATE_UNKNOWN
    for measured in (1.0, 1e6, 1.02e6, 1e30):
        rate = UploadRate()
        rate.measured(measured)
        GroupMember(peer_of(0), bytes(16), rate.claimed)
        assert RATE_UNKNOWN < rate.claimed < inf
    near = []
    for measured in (1e6, 1.02e6):
        rate = UploadRate()
        rate.measured(measured)
        near.append(rate.claimed)
    assert near[0] == near[1]
