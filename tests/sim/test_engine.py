"""The heap engine, tried with toy cores: runs are repeatable, and the order of events within one instant is
defined."""

import gc
import math
import sys
from typing import Any
from weakref import ref

import pytest

from crypto.encoding import encode
from crypto.errors import LocalProtocolError
from crypto.identity import PeerId
from node.services.driver import Sends
from sim.engine import Engine
from sim.network.clocks import LocalClock
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.network.sizes import SentTraffic, envelope_bytes
from sim.ports import Wire
from sim.seeds import seeded_peer, seeded_rng
from sim.trace import Trace
from tests.sim.toys import Message, Ping, Pinger, Ponged

A, B, C = sorted(seeded_peer(1, index) for index in range(3))
NAMES = {A: "A", B: "B", C: "C"}


def ring(seed: int, *, model: NetworkModel | None = None, wires: dict[str, Wire] | None = None) -> Trace:
    """Run ten pingers for two seconds."""
    trace = Trace()
    engine = Engine(SimLinks(model or NetworkModel(loss=0.1), seed), trace=trace, wires=wires)
    peers = [seeded_peer(1, index) for index in range(10)]
    for peer in peers:
        others = [other for other in peers if other != peer]
        engine.add(peer, Pinger(others, seeded_rng(seed, peer), now=0.0, period_seconds=0.1))
    engine.run(2.0)
    return trace


def pinger(others: list[PeerId], period_seconds: float = 0.1) -> Pinger:
    return Pinger(others, seeded_rng(1), now=0.0, period_seconds=period_seconds)


class Listener:
    """A core that records its calls in order, and wakes when told to."""

    def __init__(self, deadline: float = math.inf) -> None:
        self.events: list[Any] = []
        self.deadline = deadline
        self.heard: list[tuple[float, str]] = []

    def receive(self, now: float, sender: PeerId, message: Ping) -> Sends:
        self.heard.append((now, f"ping {message.number} of {NAMES.get(sender, '?')}"))
        return []

    def wake(self, now: float) -> Sends:
        self.heard.append((now, "wake"))
        self.deadline = math.inf
        return []


def test_the_same_seed_gives_the_same_digest() -> None:
    assert ring(1).digest() == ring(1).digest()


def test_different_seeds_give_different_digests() -> None:
    assert len({ring(seed).digest() for seed in range(4)}) == 4


def test_the_real_codec_changes_nothing_but_the_cost() -> None:
    assert ring(1).digest() == ring(1, wires={"": Wire(Message, 1_232)}).digest()


def test_running_in_small_pieces_gives_the_same_as_in_one_piece() -> None:
    digests = []
    for pieces in (1, 40):
        trace = Trace()
        engine = Engine(SimLinks(NetworkModel(0.01, 0.09), 1), trace=trace)
        engine.add(A, pinger([B, C]))
        engine.add(B, pinger([A, C]))
        engine.add(C, pinger([A, B]))
        for piece in range(pieces):
            engine.run(2.0 * (piece + 1) / pieces)
        digests.append(trace.digest())
    assert digests[0] == digests[1]


def test_within_an_instant_deliveries_precede_commands_and_wakes() -> None:
    engine = Engine(SimLinks(NetworkModel(), 1))
    listener = Listener(deadline=0.15)

    def called(core: Listener, now: float) -> Sends:
        core.heard.append((now, "call"))
        return []

    engine.add(A, listener)
    for peer in (C, B):
        engine.add(peer, Listener())
        engine.call(0.1, peer, lambda core, now: [(A, Ping(1)), (A, Ping(2))])
    engine.call(0.15, A, called)
    engine.run(1.0)
    assert [what for _, what in listener.heard] == [
        "ping 1 of B",
        "ping 2 of B",
        "ping 1 of C",
        "ping 2 of C",
        "call",
        "wake",
    ]
    assert {time for time, _ in listener.heard} == {0.15}
    assert engine.counters["tied"] == 5


def test_a_killed_peer_sends_and_receives_nothing() -> None:
    engine = Engine(SimLinks(NetworkModel(), 1))
    one, other = pinger([B]), pinger([A])
    engine.add(A, one)
    engine.add(B, other)
    engine.kill(B, 0.5)
    engine.run(2.0)
    assert 0.4 < max(time for time, _, _ in one.received) <= 0.55
    assert max(time for time, _, _ in other.received) < 0.5
    assert engine.counters["missed"] >= 14


def test_a_peer_added_later_starts_later() -> None:
    engine = Engine(SimLinks(NetworkModel(), 1))
    one, late = pinger([B]), pinger([A])
    engine.add(A, one)
    engine.add(B, late, at=1.0)
    engine.run(2.0)
    assert min(time for time, _, _ in late.received) >= 1.0
    assert min(time for time, _, _ in one.received) >= 1.0


def test_events_are_published_with_their_time_and_peer() -> None:
    seen: list[tuple[float, PeerId, Any]] = []
    engine = Engine(
        SimLinks(NetworkModel(), 1), publish=lambda now, peer, event: seen.append((now, peer, event))
    )
    engine.add(A, pinger([B], period_seconds=1.0))
    engine.add(B, Pinger([], seeded_rng(1), now=0.0, period_seconds=1.0))
    engine.run(1.5)
    assert seen == [(1.1, A, Ponged(1, B))]


def test_a_deadline_that_moves_later_wakes_only_once() -> None:
    engine = Engine(SimLinks(NetworkModel(), 1))
    listener = Listener(deadline=1.0)

    def postpone(core: Listener, now: float) -> Sends:
        core.deadline = now + 1.0
        return []

    engine.add(A, listener)
    for tenth in range(1, 10):
        engine.call(tenth / 10, A, postpone)
    engine.run(5.0)
    assert [time for time, _ in listener.heard] == [1.9]


def test_a_deadline_that_never_advances_is_reported_as_a_bug() -> None:
    class Stuck(Listener):
        def wake(self, now: float) -> Sends:
            return []

    engine = Engine(SimLinks(NetworkModel(), 1))
    engine.add(A, Stuck(deadline=0.5))
    with pytest.raises(LocalProtocolError, match="does not move on"):
        engine.run(1.0)


def test_garbage_is_refused_and_counted() -> None:
    engine = Engine(SimLinks(NetworkModel(), 1), wires={"": Wire(Message, 1_232)})
    listener = Listener()
    engine.add(A, listener)
    engine.add(B, Listener())
    engine.call(0.1, B, lambda core, now: [(A, "not a message of this protocol")])
    engine.run(1.0)
    assert listener.heard == []
    assert engine.counters["refused"] == 1


def test_a_peer_cannot_have_two_cores_for_one_protocol() -> None:
    engine = Engine(SimLinks(NetworkModel(), 1))
    engine.add(A, Listener())
    engine.add(A, Listener(), protocol="other")
    engine.add(A, Listener())
    with pytest.raises(LocalProtocolError, match="already"):
        engine.run(1.0)


def test_a_killed_peer_restarts_with_a_new_core() -> None:
    engine = Engine(SimLinks(NetworkModel(), 1))
    one, first, second = pinger([B]), Listener(deadline=0.7), Listener(deadline=1.7)
    engine.add(A, one)
    engine.add(B, first)
    engine.kill(B, 0.5)
    engine.run(1.0)
    engine.add(B, second, at=1.0)
    engine.run(2.0)
    assert max(time for time, _ in first.heard) < 0.5
    assert min(time for time, _ in second.heard) > 1.0
    assert (1.7, "wake") in second.heard


def test_a_command_acts_immediately_but_not_on_departed_peers() -> None:
    engine = Engine(SimLinks(NetworkModel(), 1))
    one, other = pinger([B]), Listener()
    engine.add(A, one)
    engine.add(B, other)
    engine.run(0.01)
    engine.command(A, lambda core, now: [(B, Ping(7))])
    engine.kill(A, 0.01)
    engine.run(0.02)
    engine.command(A, lambda core, now: [(B, Ping(8))])
    engine.run(1.0)
    assert other.heard == [(0.06, "ping 7 of A")]


def test_trace_entries_are_ordered_by_time_and_peer() -> None:
    trace = Trace(keep=True)
    engine = Engine(SimLinks(NetworkModel(), 1), trace=trace)
    engine.add(B, pinger([A]))
    engine.add(A, pinger([B]))
    engine.run(1.0)
    entries = trace.entries()
    assert len(entries) == trace.count > 40
    assert entries == sorted(entries, key=lambda entry: (entry.time, entry.peer))
    assert {entry.what for entry in entries} == {"received", "woken", "learnt", "sent"}


def test_a_core_with_a_wrong_clock_wakes_by_its_own_time() -> None:
    clock = LocalClock(offset_seconds=100.0, drift=-0.05)
    woken: list[tuple[float, float]] = []

    class Sleeper(Listener):
        def wake(self, now: float) -> Sends:
            assert now >= self.deadline
            woken.append((now, self.deadline))
            self.deadline += 0.7
            return []

    seen: list[float] = []
    engine = Engine(SimLinks(NetworkModel(), 1), publish=lambda now, peer, event: seen.append(now))
    sleeper = Sleeper(deadline=clock.local(0.0) + 0.7)
    engine.add(A, sleeper, clock=clock)
    engine.add(B, Listener())
    engine.call(1.0, B, lambda core, now: [(A, Ping(1))])

    def call(core: Sleeper, now: float) -> Sends:
        core.heard.append((now, "call"))
        core.events.append(Ponged(1, A))
        return []

    engine.call(2.0, A, call)
    engine.run(100.0)
    assert sleeper.heard == [(clock.local(1.05), "ping 1 of B"), (clock.local(2.0), "call")]
    assert seen == [2.0], "a published event does not have the true time"
    assert len(woken) == int(95 / 0.7)
    assert all(now - deadline < 2e-6 for now, deadline in woken)


def test_messages_are_counted_by_protocol_and_peer_and_bytes_on_request() -> None:
    def traffic(count_bytes: bool) -> Engine:
        engine = Engine(SimLinks(NetworkModel(), 1), count_bytes=count_bytes)
        for peer in (A, B):
            engine.add(peer, Listener())
            engine.add(peer, Listener(), protocol="other")
        engine.call(0.1, A, lambda core, now: [(B, Ping(1)), (B, Ping(1_000))])
        engine.call(0.1, A, lambda core, now: [(C, Ping(1))], protocol="other")
        engine.call(0.1, B, lambda core, now: [(A, Ping(1))])
        engine.run(1.0)
        assert engine.counters["sent"] == 4
        assert engine.counters["missed"] == 1
        return engine

    engine = traffic(count_bytes=False)
    assert engine.traffic() == {"": SentTraffic(3, 0), "other": SentTraffic(1, 0)}
    engine = traffic(count_bytes=True)
    sizes = [len(encode(Ping(number))) + envelope_bytes("") for number in (1, 1_000)]
    assert engine.traffic(A) == {
        "": SentTraffic(2, sum(sizes)),
        "other": SentTraffic(1, sizes[0] + len("other")),
    }
    assert engine.traffic()[""] == SentTraffic(3, sum(sizes) + sizes[0])


def test_a_thousand_restarts_do_not_use_up_memory() -> None:
    engine = Engine(SimLinks(NetworkModel(), 1))
    engine.add(A, pinger([B]))
    lives = []
    for life in range(1_000):
        core = pinger([A])
        lives.append(ref(core))
        engine.add(B, core, at=life)
        engine.kill(B, at=life + 0.5)
        del core
        engine.run(life + 0.9)
    assert len(engine._ports.all) == 2
    assert len(list(engine._calendar)) < 20
    assert all(life() is None for life in lives)
    arisen, delivered = engine.counters["sent"], engine.counters["delivered"]
    assert arisen == delivered + engine.counters["missed"] + engine.under_way
    assert delivered > 5_000


def test_memory_does_not_grow_with_pairs_of_peers() -> None:
    engine = Engine(SimLinks(NetworkModel(0.01, 0.08, jitter_seconds=0.01, loss=0.1), 1))
    peers = [seeded_peer(1, index) for index in range(60)]
    for peer in peers:
        engine.add(peer, Listener())

    def everybody(core: Listener, now: float) -> Sends:
        return [(peer, Ping(1)) for peer in peers]

    def blocks() -> int:
        engine.run(engine.now + 1.0)
        for port in engine._ports.all:
            assert isinstance(port.core, Listener)
            port.core.heard.clear()
        gc.collect()
        return sys.getallocatedblocks()

    blocks()
    before = blocks()
    for peer in peers:
        engine.call(engine.now, peer, everybody)
    assert blocks() - before < 60 * 60, "a pair of peers costs a memory block or more"
