"""A tiny event heap that drives a few SWIM cores over a lossy network in virtual time."""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

from blake3 import blake3

from crypto.contact import Address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.member import Event, Profile, Status, SwarmMember
from gossip.messages import MESSAGE_BYTES_MAX, ByStream, Message
from gossip.settings import SwimSettings
from gossip.swim import Sends, Swim
from gossip.view import Place

DATAGRAM_BYTES_MAX = 1_232


class HashSigner:
    """Signs with a keyed hash. For tests this is as good as Ed25519, and faster."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer

    def sign(self, purpose: str, body: bytes) -> Fact:
        return Fact(self.peer, body, _seal(self.peer, purpose, body))

    def check(self, purpose: str, fact: Fact) -> PeerId:
        if fact.signature != _seal(fact.author, purpose, fact.body):
            raise RemoteProtocolError("wrong signature")
        return PeerId(fact.author)


def _seal(author: bytes, purpose: str, body: bytes) -> bytes:
    return blake3(b"secret" + author + purpose.encode() + b"\0" + body).digest(length=64)


def peer_of(number: int) -> PeerId:
    return PeerId(blake3(number.to_bytes(8, "big")).digest())


def profile_of(number: int, metadata: bytes = b"") -> Profile:
    return Profile(f"n{number}", (Address("ip4", "127.0.0.1", 1000 + number),), metadata)


Arrival = tuple[PeerId, bytes, bool]
"""The sender, the message, and whether it came over a stream."""


class Swarm:
    """Cores by number. `blocked(a, b)` returns whether all messages from a to b are lost, and
    `without_datagrams(a, b)` returns whether only datagrams are lost. A message that came over a stream is
    answered over the stream.
    """

    place: Place | None = None

    def __init__(self, count: int, settings: SwimSettings, seed: int = 1, loss: float = 0.0) -> None:
        self.rng = Random(seed)
        self.settings = settings
        self.loss = loss
        self.now = 0.0
        self.cores: dict[int, Swim] = {}
        self.numbers: dict[PeerId, int] = {}
        self.events: dict[int, list[Event]] = defaultdict(list)
        self.trace: list[str] = []
        self.sent_bytes = 0
        self.blocked: Callable[[int, int], bool] = lambda _a, _b: False
        self.without_datagrams: Callable[[int, int], bool] = lambda _a, _b: False
        self.stalled: dict[int, float] = {}
        self._heap: list[tuple[float, int, int, Arrival | None]] = []
        self._order = itertools.count()
        self._answered: PeerId | None = None
        for number in range(count):
            self.start(number)

    def start(
        self, number: int, incarnation: int = 1, join: int | None = None, metadata: bytes = b""
    ) -> Swim:
        """Start or restart a node. It joins through `join`, or by default through its predecessor."""
        peer = peer_of(number)
        core = Swim(
            HashSigner(peer),
            profile_of(number, metadata),
            self.settings,
            Random(self.rng.random()),
            incarnation,
            self.now,
            place=self.place,
        )
        self.cores[number] = core
        self.numbers[peer] = number
        via = join if join is not None else number - 1
        if via >= 0:
            self.send(number, core.join(self.now, [peer_of(via)]))
        self._arm(number)
        return core

    def kill(self, number: int) -> None:
        del self.cores[number]

    def stall(self, number: int, seconds: float) -> None:
        """Suspend the node's machine: messages wait, and timers fire late."""
        self.stalled[number] = self.now + seconds

    def send(self, number: int, sends: Sends) -> None:
        for event in self.cores[number].events:
            self.events[number].append(event)
            self.trace.append(f"{self.now:.6f} {number} {event}")
        self.cores[number].events.clear()
        for peer, sent in sends:
            by_stream = isinstance(sent, ByStream) or peer == self._answered
            data = encode(sent.message if isinstance(sent, ByStream) else sent)
            self.sent_bytes += len(data)
            target = self.numbers.get(peer)
            if target is None or self.blocked(number, target):
                continue
            # A message too large for a datagram goes over a stream, which loses nothing.
            by_stream = by_stream or len(data) > DATAGRAM_BYTES_MAX
            if not by_stream and (self.without_datagrams(number, target) or self.rng.random() < self.loss):
                continue
            arrival = peer_of(number), data, by_stream
            self._push(self.now + 0.0005 + self.rng.random() * 0.002, target, arrival)
        self._arm(number)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, number, arrival = heapq.heappop(self._heap)
            core = self.cores.get(number)
            if core is None:
                continue
            if self.stalled.get(number, 0.0) > self.now:
                self._push(self.stalled[number], number, arrival)
            elif arrival is not None:
                message: Any = decode(arrival[1], Message, bytes_max=MESSAGE_BYTES_MAX)
                sends = core.receive(self.now, arrival[0], message)
                self._answered = arrival[0] if arrival[2] else None
                self.send(number, sends)
                self._answered = None
            elif core.deadline <= self.now:
                self.send(number, core.wake(self.now))
        self.now = until

    def run_until(self, condition: Callable[[], bool], at_most: float) -> float:
        """Return the seconds until `condition` held, checked every 20 ms."""
        begun = self.now
        while not condition():
            assert self.now - begun < at_most, "\n".join(self.trace[-40:])
            self.run(0.02)
        return self.now - begun

    def view(self, number: int) -> dict[int, SwarmMember]:
        return {self.numbers[member.peer]: member for member in self.cores[number].members}

    def all_see(self, target: int, status: Status) -> bool:
        views = (self.view(number).get(target) for number in self.cores if number != target)
        return all(member is not None and member.status is status for member in views)

    def converged(self) -> bool:
        """Return whether all running nodes list exactly each other as alive."""
        running = set(self.cores)
        return all(
            {other for other, member in self.view(number).items() if member.status is Status.ALIVE} == running
            for number in self.cores
        )

    def _arm(self, number: int) -> None:
        if self.cores[number].deadline < float("inf"):
            self._push(max(self.cores[number].deadline, self.now), number, None)

    def _push(self, when: float, number: int, arrival: Arrival | None) -> None:
        heapq.heappush(self._heap, (when, next(self._order), number, arrival))
