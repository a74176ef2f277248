"""A small play on the simulated network, performed by the heap engine or by trio, with the same peers and
actions.

The peers are `Clockwork`s: they record what they receive, and when they are woken. An action is a function
that takes a `Hands` object. It sends messages, freezes, kills or starts peers, or changes `hands.links`, with
the same effect under both engines. No two actions should have the same instant.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from trio.testing import MockClock

from crypto.identity import PeerId
from node.services.driver import Driver, Sends
from sim.engine import Engine
from sim.network.instants import nearest_instant
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.ports import Wire
from sim.seams import SimClock, SimNetworkFabric
from sim.seeds import seeded_peer
from tests.sim.toys import Message, Ping

PROTOCOL = "/peerloom/play/1"
BYTES_MAX = 1_232
PEERS = tuple(sorted(seeded_peer(1, index) for index in range(4)))
A, B, C, D = PEERS
NAMES = dict(zip(PEERS, "ABCD", strict=True))


class Clockwork:
    """A core that wakes every `period_seconds`, and appends (time, event) to `heard`."""

    def __init__(self, heard: list[tuple[float, str]], period_seconds: float, now: float) -> None:
        self.events: list[Any] = []
        self.heard = heard
        self.period_seconds = period_seconds
        self.deadline = now + period_seconds

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        self.heard.append((now, f"{NAMES[sender]}{message.number}"))
        return []

    def wake(self, now: float) -> Sends:
        self.heard.append((now, "woken"))
        self.deadline = now + self.period_seconds
        return []


class Hands(ABC):
    """The actions that a play can use."""

    links: SimLinks

    @abstractmethod
    def send(self, one: PeerId, other: PeerId, number: int) -> None: ...

    @abstractmethod
    def freeze(self, peer: PeerId, seconds: float) -> None: ...

    @abstractmethod
    def slow(self, peer: PeerId, factor: float) -> None: ...

    @abstractmethod
    def kill(self, peer: PeerId) -> None: ...

    @abstractmethod
    def start(self, peer: PeerId) -> None: ...

    @abstractmethod
    def outcome(self) -> "Outcome": ...


@dataclass
class Outcome:
    """`heard` is what each peer received, in order. `fates` counts messages by their outcome (delivered,
    lost, ...). `under_way` is the number of messages still in flight."""

    heard: dict[PeerId, list[tuple[float, str]]]
    fates: Counter[str]
    under_way: int
    sent_bytes: int

    def messages(self, peer: PeerId) -> list[tuple[float, str]]:
        return [(time, what) for time, what in self.heard[peer] if what != "woken"]

    def numbers(self, peer: PeerId) -> list[str]:
        return [what for _, what in self.messages(peer)]


@dataclass
class Play:
    """The actions and their instants. Peers wake every `period_seconds`."""

    model: NetworkModel = field(default_factory=NetworkModel)
    seed: int = 1
    period_seconds: float = math.inf
    deeds: list[tuple[float, Callable[[Hands], object]]] = field(default_factory=list)

    def at(self, time: float, deed: Callable[[Hands], object]) -> None:
        self.deeds.append((nearest_instant(time), deed))

    def send(self, time: float, one: PeerId, other: PeerId, number: int) -> None:
        self.at(time, lambda hands: hands.send(one, other, number))

    def perform(self, fidelity: str, until: float = 10.0) -> Outcome:
        self.deeds.sort(key=lambda deed: deed[0])
        if fidelity == "heap":
            return self._by_heap(until)
        return trio.run(self._by_trio, until, clock=MockClock(autojump_threshold=0))

    def _by_heap(self, until: float) -> Outcome:
        hands = _Heap(self)
        for time, deed in self.deeds:
            hands.engine.run(time)
            deed(hands)
        hands.engine.run(until)
        return hands.outcome()

    async def _by_trio(self, until: float) -> Outcome:
        async with trio.open_nursery() as nursery:
            hands = _Trio(self, nursery)
            for time, deed in self.deeds:
                await trio.sleep_until(time)
                deed(hands)
            await trio.sleep_until(until + 5e-7)  # all events of the last instant have happened
            outcome = hands.outcome()
            nursery.cancel_scope.cancel()
        return outcome


class _Heap(Hands):
    def __init__(self, play: Play) -> None:
        self.links = SimLinks(play.model, play.seed)
        self.heard: dict[PeerId, list[tuple[float, str]]] = {peer: [] for peer in PEERS}
        self.engine = Engine(self.links, wires={PROTOCOL: Wire(Message, BYTES_MAX)}, count_bytes=True)
        self._period_seconds = play.period_seconds
        for peer in PEERS:
            self.start(peer)

    def send(self, one: PeerId, other: PeerId, number: int) -> None:
        self.engine.command(one, lambda core, now: [(other, Ping(number))], protocol=PROTOCOL)

    def freeze(self, peer: PeerId, seconds: float) -> None:
        self.engine.freeze(peer, self.engine.now, seconds)

    def slow(self, peer: PeerId, factor: float) -> None:
        self.engine.slow(peer, factor)

    def kill(self, peer: PeerId) -> None:
        self.engine.kill(peer, self.engine.now)

    def start(self, peer: PeerId) -> None:
        now = self.engine.now
        core = Clockwork(self.heard[peer], self._period_seconds, now)
        self.engine.add(peer, core, protocol=PROTOCOL, at=now)
        self.engine.run(now)

    def outcome(self) -> Outcome:
        sent = self.engine.traffic().get(PROTOCOL)
        assert sent is not None
        return Outcome(self.heard, self.engine.counters, self.engine.under_way, sent.sent_bytes)


class _Trio(Hands):
    def __init__(self, play: Play, nursery: trio.Nursery) -> None:
        self.links = SimLinks(play.model, play.seed)
        self.heard: dict[PeerId, list[tuple[float, str]]] = {peer: [] for peer in PEERS}
        self.medium = SimNetworkFabric(self.links)
        self._period_seconds = play.period_seconds
        self._nursery = nursery
        self._drivers: dict[PeerId, Driver] = {}
        self._scopes: dict[PeerId, trio.CancelScope] = {}
        for peer in PEERS:
            self.start(peer)
        for peer in PEERS:
            self._acquaint(peer)

    def send(self, one: PeerId, other: PeerId, number: int) -> None:
        if self.medium.living(one) is not None:
            self._drivers[one].command(lambda now: [(other, Ping(number))])

    def freeze(self, peer: PeerId, seconds: float) -> None:
        self.medium.freeze(peer, seconds)

    def slow(self, peer: PeerId, factor: float) -> None:
        self.medium.slow(peer, factor)

    def kill(self, peer: PeerId) -> None:
        self.medium.kill(peer)
        self._scopes[peer].cancel()

    def start(self, peer: PeerId) -> None:
        network, clock = self.medium.attach(peer), SimClock()
        self._drivers[peer] = driver = Driver(
            Clockwork(self.heard[peer], self._period_seconds, clock.monotonic()),
            PROTOCOL,
            Message,
            message_bytes_max=BYTES_MAX,
            network=network,
            clock=clock,
            publish=lambda event: None,
            refuse=lambda peer, error: None,
        )
        self._scopes[peer] = trio.CancelScope()
        self._nursery.start_soon(self._live, driver, self._scopes[peer])
        if len(self._drivers) == len(PEERS):
            self._acquaint(peer)

    def _acquaint(self, peer: PeerId) -> None:
        network = self.medium.living(peer)
        for other in PEERS:
            address = self.medium.address(other)
            if network is not None and address is not None:
                network.learn(other, [address])

    async def _live(self, driver: Driver, scope: trio.CancelScope) -> None:
        with scope:
            await driver.run()

    def outcome(self) -> Outcome:
        sent = self.medium.traffic().get(PROTOCOL)
        return Outcome(
            self.heard, self.medium.counters, self.medium.under_way, sent.sent_bytes if sent else 0
        )
