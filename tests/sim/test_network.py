"""The simulated links: the times and latencies of messages, their loss and duplication, the locations of
peers, NATs, queues and clocks. Each random figure depends only on the seed and on what it is used for."""

import math
from collections import Counter
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import LocalProtocolError
from crypto.identity import PeerId
from sim.network.clocks import LocalClock
from sim.network.instants import TICKS_PER_SECOND, after, instant, nearest_instant, ticks
from sim.network.links import SimLinks
from sim.network.model import Access, Nat, NetworkModel, Region
from sim.network.nat import MAPPING_SECONDS
from sim.network.queues import Fifo, LinkQueue, Parcel, Uplink
from sim.seeds import seeded_peer

A, B, C = (seeded_peer(1, index) for index in range(3))
TICKS = st.integers(0, 10**13)
SECONDS = st.floats(0, 1e7)


@given(TICKS)
def test_a_time_in_whole_microseconds_is_not_rounded(tick: int) -> None:
    time = tick / 1_000_000
    assert instant(time) == time == nearest_instant(time)


@given(SECONDS)
def test_times_are_rounded_up_to_the_next_microsecond(seconds: float) -> None:
    assert seconds <= instant(seconds) < seconds + 1.01e-6


def test_an_infinite_time_stays_infinite() -> None:
    assert instant(math.inf) == math.inf
    assert instant(-math.inf) == -math.inf


def test_equal_sums_of_durations_give_the_same_instant() -> None:
    assert after(after(0.0, 0.1), 0.2) == after(0.0, 0.3) == 0.3


@given(TICKS, st.floats(0, 1e3))
def test_a_message_always_arrives_later_than_it_was_sent(ticks: int, seconds: float) -> None:
    now = ticks / 1_000_000
    due = after(now, seconds)
    assert due > now
    assert instant(due) == due


def travel_times(links: SimLinks, count: int, *, one: PeerId = A, other: PeerId = B) -> list[tuple[int, ...]]:
    """Send `count` messages, one per millisecond. Return the travel times of each message's copies in ticks;
    the tuple of a lost message is empty."""
    sender = links.sender(one, "")
    return [sender.trips(number * 1_000, links.at(other)) for number in range(count)]


def test_loss_and_delays_on_a_link_do_not_depend_on_other_links() -> None:
    model = NetworkModel(0.02, 0.2, jitter_seconds=0.05, loss=0.3, duplication=0.2, reordering=0.2)
    quiet, busy = SimLinks(model, 7), SimLinks(model, 7)
    a, b = busy.sender(A, ""), busy.sender(B, "")
    among = []
    for number in range(50):
        b.trips(number * 1_000, busy.at(A))
        a.trips(number * 1_000, busy.at(C))
        among.append(a.trips(number * 1_000, busy.at(B)))
        busy.sender(A, "other").trips(number * 1_000, busy.at(B))
    assert travel_times(quiet, 50) == among


def test_messages_sent_at_the_same_instant_have_independent_delays() -> None:
    links = SimLinks(NetworkModel(jitter_seconds=0.05), 7)
    sender = links.sender(A, "")
    assert len({sender.trips(1_000_000, links.at(B)) for _ in range(100)}) > 90


def test_a_different_seed_gives_different_delays() -> None:
    model = NetworkModel(0.02, 0.2, jitter_seconds=0.05)
    assert travel_times(SimLinks(model, 7), 5) != travel_times(SimLinks(model, 8), 5)


def is_share(count: int, of: int, share: float) -> bool:
    """Return whether a count is within four standard deviations of a binomial."""
    return abs(count - share * of) <= 4 * math.sqrt(of * share * (1 - share))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_loss_copies_and_delays_have_the_configured_rates(share: float) -> None:
    lost = travel_times(SimLinks(NetworkModel(loss=share), 3), 4_000)
    assert is_share(lost.count(()), 4_000, share)
    doubled = travel_times(SimLinks(NetworkModel(duplication=share), 3), 4_000)
    assert is_share(sum(len(set(trips)) == 2 for trips in doubled), 4_000, share)
    held = [trip for (trip,) in travel_times(SimLinks(NetworkModel(reordering=share), 3), 4_000)]
    assert is_share(sum(trip > 50_000 for trip in held), 4_000, share)
    assert max(held) <= 150_000


def test_delivery_rates_of_access_links_and_disturbances_multiply() -> None:
    links = SimLinks(NetworkModel(loss=0.1, access=(Access(1.0, loss=0.2),)), 3)
    links.disturb(B, 0.5)
    assert is_share(travel_times(links, 4_000).count(()), 4_000, 1 - 0.9 * 0.8 * 0.8 * 0.5)
    links.disturb(B, 0.0)
    assert is_share(travel_times(links, 4_000).count(()), 4_000, 1 - 0.9 * 0.8 * 0.8)


def test_latencies_are_uniform_and_equal_in_both_directions() -> None:
    links = SimLinks(NetworkModel(0.02, 0.2), 5)
    peers = [seeded_peer(5, index) for index in range(150)]
    drawn = [links.latency_seconds(one, other) for one in peers for other in peers if one < other]
    tenths = Counter(int((seconds - 0.02) / 0.018) for seconds in drawn)
    assert sorted(tenths) == list(range(10))
    # The pairs share their ends, so they are not independent; still each tenth holds about its share.
    assert max(tenths.values()) < 1.2 * min(tenths.values())
    assert links.latency_seconds(A, B) == links.latency_seconds(B, A)


def test_jitter_adds_to_the_latency_and_is_bounded() -> None:
    trips = [trip for (trip,) in travel_times(SimLinks(NetworkModel(jitter_seconds=0.01), 5), 200)]
    assert min(trips) >= 50_000
    assert max(trips) <= 60_000
    assert len(set(trips)) > 100


EUROPE = Region("europe", 0.6, (0.005, 0.02))
ASIA = Region("asia", 0.4, (0.01, 0.03))
CONTINENTS = NetworkModel(regions=(EUROPE, ASIA), between_seconds=((0.0, 0.12), (0.15, 0.0)))


def test_regions_have_their_shares_and_latencies_depend_on_direction() -> None:
    links = SimLinks(CONTINENTS, 1)
    peers = [seeded_peer(5, index) for index in range(1_000)]
    for number, peer in enumerate(peers):
        links.place(peer, number)
    europe = [peer for peer in peers if links.region(peer) == "europe"]
    asia = [peer for peer in peers if links.region(peer) == "asia"]
    assert is_share(len(europe), 1_000, 0.6)
    assert len(europe) + len(asia) == 1_000
    assert links.latency_seconds(europe[0], asia[0]) == 0.12
    assert links.latency_seconds(asia[0], europe[0]) == 0.15
    assert all(0.005 <= links.latency_seconds(one, other) <= 0.02 for one, other in pairwise(europe))
    assert all(0.01 <= links.latency_seconds(one, other) <= 0.03 for one, other in pairwise(asia))


def test_a_peers_location_depends_only_on_its_number() -> None:
    one, other = SimLinks(CONTINENTS, 1), SimLinks(CONTINENTS, 1)
    for number in range(50):
        one.place(seeded_peer(1, number), number)
        other.place(seeded_peer(2, number), number)
    for number in range(50):
        assert one.region(seeded_peer(1, number)) == other.region(seeded_peer(2, number))
    with pytest.raises(LocalProtocolError):
        one.place(seeded_peer(1, 0), 0)


def test_peers_without_a_configured_access_have_no_nat_or_rate_limit() -> None:
    links = SimLinks(NetworkModel(access=(Access(0.3, nat="blocked"), Access(0.2, up_mbit_per_second=1))), 1)
    places = [links.at(seeded_peer(1, index)) for index in range(1_000)]
    assert is_share(sum(place.nat is not None for place in places), 1_000, 0.3)
    assert is_share(sum(place.up is not None for place in places), 1_000, 0.2)
    assert is_share(sum(place.nat is None and place.up is None for place in places), 1_000, 0.5)


# Disturbances of links.


def test_splits_may_overlap_and_end_one_by_one() -> None:
    links = SimLinks(NetworkModel(), 1)
    first = links.split([A], [B])
    second = links.split([C])
    assert not any(links.reaches(one, other) for one, other in ((A, B), (B, C), (C, A)))
    links.heal(first)
    assert links.reaches(A, B)
    assert not links.reaches(B, C)
    assert travel_times(links, 1, other=C) == [()]
    assert links.counters["cut"] == 1
    links.heal(second)
    assert links.reaches(B, C)
    assert links.is_even
    links.split([A])
    assert not links.reaches(A, seeded_peer(1, 99)), (
        "the split does not separate peers that were unknown when it began"
    )
    links.heal()
    assert links.reaches(A, B)


def test_a_block_cuts_one_direction_and_deaf_peers_can_still_send() -> None:
    links = SimLinks(NetworkModel(), 1)
    links.block(A, B)
    assert (links.reaches(A, B), links.reaches(B, A), links.reaches(A, C)) == (False, True, True)
    links.unblock(A, B)
    assert links.reaches(A, B)
    links.deafen(A)
    assert (links.reaches(A, B), links.reaches(B, A)) == (True, False)
    links.deafen(A, deaf=False)
    assert links.reaches(B, A)
    assert links.is_even


# NATs.


def natted(one: Nat, other: Nat) -> tuple[SimLinks, PeerId, PeerId]:
    """Return links, and two peers behind NATs of these kinds."""
    links = SimLinks(NetworkModel(access=(Access(0.5, nat=one), Access(0.5, nat=other))), 1)
    peers = [seeded_peer(1, index) for index in range(50)]
    a = next(peer for peer in peers if links.at(peer).access.nat == one)
    b = next(peer for peer in peers if links.at(peer).access.nat == other and peer != a)
    return links, a, b


STRANGER = seeded_peer(3, 0)


def send(links: SimLinks, one: PeerId, other: PeerId, at: float) -> bool:
    """Send a datagram, which takes 0.05 s. Return whether the NATs let it pass."""
    links.sender(one, "").trips(ticks(at), links.at(other))
    return links.lets_in(one, other, at + 0.05)


@pytest.mark.parametrize(
    ("one", "other", "passes"),
    [
        # `passes`: whether each of four datagrams arrives. They go from one to other, back, from one to
        # other, back.
        ("none", "none", (True, True, True, True)),
        ("none", "full-cone", (False, True, True, True)),
        ("none", "restricted", (False, True, True, True)),
        ("none", "symmetric", (False, True, True, True)),
        ("none", "blocked", (False, False, False, False)),
        ("restricted", "restricted", (False, True, True, True)),
        ("restricted", "symmetric", (False, True, True, True)),
        ("symmetric", "restricted", (False, False, True, True)),
        ("symmetric", "symmetric", (False, False, False, False)),
        ("full-cone", "full-cone", (False, True, True, True)),
    ],
)
def test_each_kind_of_nat_admits_the_expected_peers(one: Nat, other: Nat, passes: tuple[bool, ...]) -> None:
    links, a, b = natted(one, other)
    seen = tuple(
        send(links, sender, receiver, at)
        for at, (sender, receiver) in enumerate(((a, b), (b, a), (a, b), (b, a)), start=1)
    )
    assert seen == passes
    assert links.counters["filtered"] == seen.count(False)


def test_a_full_cone_nat_admits_everyone_after_its_peer_sent_a_packet() -> None:
    links, a, b = natted("none", "full-cone")
    assert not links.may_open(b, 1.0)
    links.sender(b, "").trips(ticks(1.0), links.at(a))
    assert send(links, STRANGER, b, 2.0)
    assert links.may_open(b, 2.0)
    assert not send(links, STRANGER, b, 1.0 + MAPPING_SECONDS)


def test_a_nat_mapping_opens_after_the_first_packet_and_closes_when_idle() -> None:
    links, a, b = natted("none", "restricted")
    links.sender(b, "").trips(ticks(1.0), links.at(a))
    assert not links.lets_in(a, b, 1.0)
    assert links.lets_in(a, b, 1.0 + MAPPING_SECONDS)
    assert not links.lets_in(a, b, 1.000_001 + MAPPING_SECONDS)
    for second in range(2_000):
        links.sender(b, "").trips(ticks(200.0 + second), links.at(seeded_peer(2, second)))
    nat = links.at(b).nat
    assert nat is not None
    assert len(nat._mappings) < 1_100, "an expired mapping was kept"


@pytest.mark.parametrize("nat", ["restricted", "symmetric", "blocked"])
def test_peers_behind_a_nat_can_open_streams_but_not_receive_them(nat: Nat) -> None:
    links, a, b = natted("none", nat)
    links.sender(b, "").trips(ticks(1.0), links.at(a))
    assert links.may_open(a, 2.0)
    assert not links.may_open(b, 2.0)


# Queues.


@given(st.lists(st.tuples(st.integers(0, 2_000_000), st.integers(1, 100_000), st.booleans()), max_size=40))
def test_a_queue_keeps_its_order_its_rate_and_its_bound(
    sent: list[tuple[int, int, bool]],
) -> None:
    fifo = Fifo(50_000, 0.5)
    last, served = 0.0, 0
    for tick, size, waits in sorted(sent):
        now = tick / TICKS_PER_SECOND
        begin = max(now, fifo.free_at)
        out = fifo.enter(now, size, waits=waits)
        if out == math.inf:
            assert begin - now > 0.5
            assert not waits
            continue
        served += size
        assert begin - now <= 0.5 or waits
        assert out > now
        assert out >= last
        assert out == pytest.approx(begin + size / 50_000, abs=2e-6)
        last = out
    assert fifo.free_at >= served / 50_000 * 0.999_999 or not served


Sent = list[tuple[int, int, str, int]]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from("ab"), st.integers(1, 90_000))),
    st.randoms(use_true_random=False),
)
def test_queue_delays_do_not_depend_on_the_order_of_the_driver(sent: Sent, random: Random) -> None:
    """The driver sends the messages of one peer over one protocol in order. It may interleave messages of
    different peers or protocols.
    """

    def run(shuffled: bool) -> tuple[list[tuple[float, int]], int]:
        ups = [Uplink(200_000, 0.3) for _ in range(3)]
        down = Fifo(150_000, 0.3)
        carrier = LinkQueue()
        landed: list[tuple[float, int]] = []
        waiting = sorted(enumerate(sent), key=lambda each: each[1][0])
        if shuffled:
            lots: dict[tuple[int, str], float] = {}
            waiting.sort(key=lambda e: (e[1][0], lots.setdefault((e[1][1], e[1][2]), random.random())))
        for index, (tick, peer, protocol, size) in waiting:
            now = tick / TICKS_PER_SECOND
            if random.random() < 0.5 or not shuffled:
                carrier.advance(now)
            parcel = Parcel(
                seeded_peer(1, peer),
                protocol,
                down,
                size,
                (500 * peer,),
                lambda due, p: landed.append((due, p.item)),
                index,
            )
            carrier.send(now, ups[peer], parcel)
        carrier.advance(1e9)
        assert carrier.deadline == math.inf
        assert carrier.under_way == 0
        assert len(landed) + carrier.overflowed == len(sent)
        return sorted(landed), carrier.overflowed

    assert run(shuffled=False) == run(shuffled=True)


# Clocks.


@given(st.floats(-1e4, 1e4), st.floats(-0.1, 0.1), st.floats(0, 1e6))
def test_a_deadline_on_a_wrong_clock_is_converted_exactly(offset: float, drift: float, local: float) -> None:
    clock = LocalClock(offset, drift)
    at = clock.instant(local)
    assert clock.local(at) >= local
    assert clock.local(at - 3e-6) < local
    assert clock.instant(math.inf) == math.inf


def test_clocks_differ_within_the_given_offset_and_drift() -> None:
    links = SimLinks(NetworkModel(clock_offset_seconds=2.0, clock_drift=0.01), 1)
    clocks = [links.clock(seeded_peer(1, index)) for index in range(200)]
    offsets, drifts = [clock.offset_seconds for clock in clocks], [clock.drift for clock in clocks]
    assert -2 <= min(offsets) < -1.8 < 1.8 < max(offsets) <= 2
    assert -0.01 <= min(drifts) < -0.009 < 0.009 < max(drifts) <= 0.01
    assert links.clock(A) == SimLinks(links.model, 1).clock(A)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nearest_seconds = 0.2\nfarthest_seconds = 0.1", "nearest_seconds is above"),
        ("loss = 1.5", "<= 1"),
        ("jitter_seconds = -0.1", ">= 0"),
        ("access = [{share = 0.7}, {share = 0.7}]", "more than 1"),
        ("access = [{share = 1.0, up_mbit_per_second = 0.0}]", "> 0"),
        ("regions = [{name = 'a', share = 0.7}]", "sum up to 1"),
        ("regions = [{name = 'a', share = 0.5}, {name = 'a', share = 0.5}]", "same name"),
        ("regions = [{name = 'a', share = 1.0, inside_seconds = [0.2, 0.1]}]", "inside_seconds"),
        ("regions = [{name = 'a', share = 1.0}]\nbetween_seconds = [[0.1, 0.2]]", "1 rows of 1"),
    ],
)
def test_an_invalid_model_is_refused(text: str, says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.toml.decode(text, type=NetworkModel)
