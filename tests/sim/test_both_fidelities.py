"""The network model gives the same guarantees under the heap engine and under trio: the same tests run under
both.

The last test plays random actions under both, and expects the same outcome.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.identity import PeerId
from sim.network.model import Access, NetworkModel, Region
from sim.network.pace import HANDLING_SECONDS
from sim.network.places import BYTES_PER_MBIT
from sim.network.sizes import envelope_bytes
from tests.sim.plays import PEERS, PROTOCOL, A, B, C, D, Hands, Play

both = pytest.mark.parametrize("fidelity", ["heap", "trio"])

PING_BYTES = envelope_bytes(PROTOCOL) + len(b"\x92\xa4Ping\x01")
"""Bytes of a ping with a small number, including its envelope."""


def rate(pings_per_second: float) -> float:
    """Return the bandwidth in Mbit/s that carries the given number of pings per second."""
    return pings_per_second * PING_BYTES / BYTES_PER_MBIT


def accounts(fates: Counter[str]) -> tuple[int, int]:
    """Return the number of messages sent, and the number that were delivered or lost."""
    names = ("delivered", "lost", "cut", "filtered", "overflowed", "missed")
    return fates["sent"] + fates["duplicated"], sum(fates[name] for name in names)


@both
def test_latency_depends_on_region_and_direction(fidelity: str) -> None:
    model = NetworkModel(
        regions=(Region("east", 0.5, (0.01, 0.01)), Region("west", 0.5, (0.02, 0.02))),
        between_seconds=((0, 0.1), (0.2, 0)),
    )
    play = Play(model)
    for one in PEERS:
        for other in PEERS:
            if one != other:
                play.send(1.0, one, other, 1)
    expected = {("east", "east"): 1.01, ("west", "west"): 1.02, ("east", "west"): 1.1, ("west", "east"): 1.2}
    seen: dict[Any, Any] = {}
    play.at(0.5, lambda hands: seen.update({peer: hands.links.region(peer) for peer in PEERS}))
    outcome = play.perform(fidelity)
    assert set(seen.values()) == {"east", "west"}
    for peer in PEERS:
        for time, what in outcome.messages(peer):
            sender = PEERS["ABCD".index(what[0])]
            assert time == expected[seen[sender], seen[peer]]
    assert outcome.fates["delivered"] == 12


@both
def test_some_messages_arrive_twice_and_some_overtake_others(fidelity: str) -> None:
    play = Play(NetworkModel(duplication=0.3, reordering=0.3, reorder_seconds=0.5))
    for number in range(200):
        play.send(1.0 + number / 100, A, B, number)
    outcome = play.perform(fidelity)
    arrived = Counter(outcome.numbers(B))
    assert len(arrived) == 200
    assert set(arrived.values()) == {1, 2}
    assert 35 < sum(count == 2 for count in arrived.values()) < 85
    firsts = list(dict.fromkeys(outcome.numbers(B)))
    assert firsts != sorted(firsts, key=lambda what: int(what[1:]))
    assert outcome.fates["duplicated"] == arrived.total() - 200


@both
def test_a_narrow_uplink_queues_messages_and_drops_late_ones(
    fidelity: str,
) -> None:
    # Ten messages per second, and room for half a second: one is sent immediately, five wait, and the rest
    # are lost.
    access = Access(1.0, up_mbit_per_second=rate(10), queue_seconds=0.55)
    play = Play(NetworkModel(access=(access,)))
    for number in range(20):
        play.send(1.0, A, (B, C)[number % 2], number)
    outcome = play.perform(fidelity)
    arrivals = sorted(outcome.messages(B) + outcome.messages(C))
    assert [what for _, what in arrivals] == [f"A{number}" for number in range(6)]
    assert [time for time, _ in arrivals] == pytest.approx([1.15 + 0.1 * n for n in range(6)], abs=1e-5)
    assert outcome.fates["overflowed"] == 14


@both
def test_all_senders_to_a_peer_share_its_downlink(fidelity: str) -> None:
    access = Access(1.0, down_mbit_per_second=rate(10), queue_seconds=10)
    play = Play(NetworkModel(access=(access,)))
    for number in range(3):
        for sender in (C, B, A):
            play.send(1.0, sender, D, number)
    outcome = play.perform(fidelity)
    assert outcome.numbers(D) == ["A0", "A1", "A2", "B0", "B1", "B2", "C0", "C1", "C2"]
    times = [time for time, _ in outcome.messages(D)]
    assert times == pytest.approx([1.15 + 0.1 * n for n in range(9)], abs=1e-5)


@both
def test_bytes_are_counted_with_their_envelopes(fidelity: str) -> None:
    play = Play()
    for number in range(5):
        play.send(1.0, A, B, number)
    assert play.perform(fidelity).sent_bytes == 5 * PING_BYTES


@both
def test_a_thawed_peer_receives_waiting_messages_before_its_missed_deadline(fidelity: str) -> None:
    play = Play(period_seconds=0.4)
    play.at(1.0, lambda hands: hands.freeze(B, 2.0))
    for number, sender in enumerate((C, A, C, D)):
        play.send(0.96 + 0.5 * number, sender, B, number)
    outcome = play.perform(fidelity, until=4.0)
    assert outcome.heard[B] == [
        (0.4, "woken"),
        (0.8, "woken"),
        (3.0, "C0"),  # in transit when the freeze began
        (3.0, "A1"),
        (3.0, "C2"),
        (3.0, "D3"),
        (3.0, "woken"),
        (3.4, "woken"),
        (3.8, "woken"),
    ]


@both
def test_nothing_leaves_a_frozen_peer_before_the_thaw(fidelity: str) -> None:
    play = Play()
    play.at(1.0, lambda hands: hands.freeze(A, 1.0))
    play.at(1.5, lambda hands: hands.freeze(A, 1.0))
    play.send(1.2, A, B, 1)
    play.send(1.7, A, B, 2)
    assert play.perform(fidelity).messages(B) == [(2.55, "A1"), (2.55, "A2")]


@both
def test_a_second_freeze_does_not_end_the_first_one(fidelity: str) -> None:
    play = Play()
    play.at(1.0, lambda hands: hands.freeze(B, 2.0))
    play.at(1.5, lambda hands: hands.freeze(B, 0.1))
    play.send(1.2, A, B, 1)
    assert play.perform(fidelity).messages(B) == [(3.0, "A1")]


@both
def test_a_peer_killed_in_a_freeze_does_not_thaw(fidelity: str) -> None:
    play = Play(period_seconds=0.4)
    play.at(1.0, lambda hands: hands.freeze(B, 2.0))
    play.at(1.5, lambda hands: hands.kill(B))
    play.send(1.2, A, B, 1)
    play.at(2.0, lambda hands: hands.start(B))
    outcome = play.perform(fidelity, until=3.1)
    assert outcome.heard[B] == [(0.4, "woken"), (0.8, "woken"), (2.4, "woken"), (2.8, "woken")]
    assert outcome.fates["missed"] == 1


@both
def test_a_slow_peer_delays_each_message(fidelity: str) -> None:
    play = Play()
    play.at(0.5, lambda hands: hands.slow(B, 100.0))
    for number in range(3):
        play.send(1.0, A, B, number)
        play.send(1.01 + 0.01 * number, A, B, 10 + number)
    play.at(3.0, lambda hands: hands.slow(B, 1.0))
    play.send(3.0, A, B, 20)
    play.send(3.01, A, B, 21)
    outcome = play.perform(fidelity)
    busy_until = 1.05 + 3 * 100 * HANDLING_SECONDS
    assert outcome.messages(B) == [
        *((1.05, f"A{number}") for number in range(3)),
        *((pytest.approx(busy_until), f"A{number}") for number in (10, 11, 12)),
        (3.05, "A20"),
        (3.06, "A21"),
    ]


@both
def test_messages_reach_a_restarted_peer_unless_they_arrive_while_it_is_down(
    fidelity: str,
) -> None:
    play = Play(NetworkModel(0.2, 0.2))
    play.at(1.0, lambda hands: hands.kill(B))
    play.at(2.0, lambda hands: hands.start(B))
    for number, time in enumerate((0.7, 0.9, 1.7, 1.9, 2.1)):
        play.send(time, A, B, number)
    play.send(0.9, B, A, 7)
    play.send(1.5, B, A, 8)
    play.send(2.5, B, A, 9)
    outcome = play.perform(fidelity)
    assert outcome.numbers(B) == ["A0", "A3", "A4"]
    assert outcome.numbers(A) == ["B7", "B9"]
    assert outcome.fates["missed"] == 2


@both
def test_a_split_cuts_messages_sent_during_it(fidelity: str) -> None:
    play = Play()
    play.at(1.0, lambda hands: hands.links.split([A, B], [C]))
    play.at(2.0, lambda hands: hands.links.heal())
    for number, time in enumerate((0.98, 1.5, 2.5)):
        for other in (B, C, D):
            play.send(time, A, other, number)
    outcome = play.perform(fidelity)
    assert outcome.numbers(B) == ["A0", "A1", "A2"]
    assert outcome.numbers(C) == outcome.numbers(D) == ["A0", "A2"]
    assert outcome.fates["cut"] == 2


@both
def test_temporary_blocks_deafness_and_losses_affect_only_their_targets(fidelity: str) -> None:
    play = Play()
    play.at(1.0, lambda hands: hands.links.block(A, B))
    play.at(1.0, lambda hands: hands.links.deafen(C))
    play.at(1.0, lambda hands: hands.links.disturb(D, 1.0))
    for one in PEERS:
        for other in PEERS:
            if one != other:
                play.send(1.5, one, other, 1)
                play.send(2.5, one, other, 2)
    play.at(2.0, lambda hands: hands.links.unblock(A, B))
    play.at(2.0, lambda hands: hands.links.deafen(C, deaf=False))
    play.at(2.0, lambda hands: hands.links.disturb(D, 0.0))
    outcome = play.perform(fidelity)
    heard = {peer: [what for what in outcome.numbers(peer) if what.endswith("1")] for peer in PEERS}
    assert heard == {A: ["B1", "C1"], B: ["C1"], C: [], D: []}
    assert sum(len(outcome.messages(peer)) for peer in PEERS) == 3 + 12


@both
def test_two_peers_behind_nats_connect_once_both_have_sent(fidelity: str) -> None:
    play = Play(NetworkModel(access=(Access(1.0, nat="restricted"),)))
    for number in range(3):
        play.send(1.0 + number, A, B, number)
        play.send(1.5 + number, B, A, number)
    outcome = play.perform(fidelity)
    assert outcome.numbers(B) == ["A1", "A2"]
    assert outcome.numbers(A) == ["B0", "B1", "B2"]
    assert outcome.fates["filtered"] == 1


# Random actions.


def send(hands: Hands, one: PeerId, other: PeerId, *numbers: int) -> None:
    for number in numbers if one != other else ():
        hands.send(one, other, number)


peers = st.sampled_from(PEERS)
seconds = st.floats(0.001, 1.5)
DEEDS: list[st.SearchStrategy[Callable[[Hands], object]]] = [
    st.builds(lambda a, b, n: lambda hands: send(hands, a, b, n), peers, peers, st.integers(0, 99)),
    st.builds(lambda a, b, n: lambda hands: send(hands, a, b, n), peers, peers, st.integers(0, 99)),
    st.builds(lambda a, b: lambda hands: send(hands, a, b, *range(5)), peers, peers),
    st.builds(lambda a, s: lambda hands: hands.freeze(a, s), peers, seconds),
    st.builds(lambda a, f: lambda hands: hands.slow(a, f), peers, st.sampled_from([1.0, 60.0, 400.0])),
    st.builds(lambda a, b: lambda hands: hands.links.split([a], [b]), peers, peers),
    st.just(lambda hands: hands.links.heal()),
    st.builds(lambda a, b: lambda hands: hands.links.block(a, b), peers, peers),
    st.builds(lambda a, d: lambda hands: hands.links.deafen(a, deaf=d), peers, st.booleans()),
    st.builds(lambda a, p: lambda hands: hands.links.disturb(a, p), peers, st.sampled_from([0.0, 0.5])),
]
mbit = st.one_of(st.just(math.inf), st.floats(0.005, 0.1))
accesses = st.builds(
    Access,
    share=st.just(0.5),
    up_mbit_per_second=mbit,
    down_mbit_per_second=mbit,
    queue_seconds=st.floats(0, 0.3),
    nat=st.sampled_from(["none", "none", "full-cone", "restricted", "symmetric", "blocked"]),
)
models = st.builds(
    NetworkModel,
    nearest_seconds=st.just(0.02),
    farthest_seconds=st.sampled_from([0.02, 0.3]),
    jitter_seconds=st.sampled_from([0.0, 0.1]),
    loss=st.sampled_from([0.0, 0.2]),
    duplication=st.sampled_from([0.0, 0.5]),
    reordering=st.sampled_from([0.0, 0.5]),
    access=st.one_of(st.just(()), st.tuples(accesses, accesses)),
)


@settings(max_examples=60, deadline=None)
@given(models, st.lists(st.one_of(DEEDS), max_size=40), st.integers(0, 5))
def test_any_play_has_the_same_outcome_under_heap_and_trio(
    model: NetworkModel, deeds: list[Callable[[Hands], object]], seed: int
) -> None:
    play = Play(model, seed, period_seconds=0.33)
    for number, deed in enumerate(deeds):
        play.at(0.050_007 * number + 0.000_003, deed)
    heap, by_trio = play.perform("heap", 3.000_001), play.perform("trio", 3.000_001)
    assert heap.heard == by_trio.heard
    for outcome in (heap, by_trio):
        arisen, ended = accounts(outcome.fates)
        assert arisen == ended + outcome.under_way
    assert accounts(heap.fates) == accounts(by_trio.fates)
