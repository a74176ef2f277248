"""A tiny event heap that drives many Kademlia cores, with latency and loss, in virtual time."""

import heapq
from collections.abc import Callable
from math import inf
from random import Random
from typing import TypeVar

from crypto.contact import Address, make_address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner, Signer
from crypto.identity import Identity, PeerId
from dht.events import Event
from dht.kademlia import Kademlia, Sends
from dht.keys import Key
from dht.messages import MESSAGE_BYTES_MAX, Message, Ping, Pong
from dht.records import sign_record
from dht.settings import KademliaSettings

WALL = 1_700_000_000.0
"""Unix seconds at virtual time zero."""

Kind = TypeVar("Kind")


def signer(number: int) -> IdentitySigner:
    return IdentitySigner(Identity(number.to_bytes(32, "big")), "test")


def address(number: int) -> Address:
    return make_address(f"10.0.{number // 250}.{number % 250 + 1}", 9747)


def record(
    author: int, key: Key, value: bytes = b"v", sequence: int = 1, expires: float = WALL + 3600
) -> Fact:
    return sign_record(signer(author), key, value, sequence=sequence, expires=int(expires))


class Swarm:
    """Nodes by number; node `i` has the identity `signer(i)`. `tamper` may change a node's packets, and
    `far_seconds` adds latency between a node and all others.
    """

    def __init__(
        self,
        seed: int,
        *,
        loss: float = 0.0,
        settings: KademliaSettings | None = None,
        signer_of: Callable[[int], Signer] = signer,
    ) -> None:
        """`signer_of` may return cheaper signers, for tests with many records."""
        self.rng = Random(seed)
        self.now = 0.0
        self.loss = loss
        self.settings = settings or KademliaSettings()
        self.signer_of = signer_of
        self.nodes: dict[PeerId, Kademlia] = {}
        self.events: dict[PeerId, list[Event]] = {}
        self.refused: list[tuple[PeerId, str]] = []
        self.trace: list[tuple[float, PeerId, PeerId, bytes]] = []
        self.tamper: dict[PeerId, Callable[[Message], Message]] = {}
        self.far_seconds: dict[PeerId, float] = {}
        self._heap: list[tuple[float, int, PeerId, PeerId, bytes | None]] = []
        self._sent = 0

    def start(self, number: int, place: Address | None = None) -> Kademlia:
        rng = Random(self.rng.getrandbits(32))
        node = Kademlia(self.signer_of(number), self.settings, rng, (place or address(number),))
        node.wall_offset = WALL
        self.nodes[node.peer] = node
        self.events[node.peer] = []
        return node

    def grow(self, count: int, where: Callable[[int], Address] = address) -> list[Kademlia]:
        """Return a swarm of `count` nodes that joined one by one, each through a random earlier one, after
        tables have settled."""
        nodes: list[Kademlia] = []
        for number in range(count):
            node = self.start(number, where(number))
            if nodes:
                self.send(node, node.join(self.now, [self.rng.choice(nodes).peer]))
            nodes.append(node)
            self.run(0.5)
        self.run(30)
        return nodes

    def send(self, node: Kademlia, sends: Sends) -> None:
        self.events[node.peer] += node.events
        node.events.clear()
        for peer, message in sends:
            data = encode(self.tamper[node.peer](message) if node.peer in self.tamper else message)
            self.trace.append((self.now, node.peer, peer, data))
            if self.rng.random() >= self.loss:
                far = self.far_seconds.get(node.peer, 0.0) + self.far_seconds.get(peer, 0.0)
                self._push(self.now + self.rng.uniform(0.02, 0.08) + far, node.peer, peer, data)
        # There is one entry for each deadline ever set; outdated entries wake no node.
        if node.deadline < inf:
            self._push(node.deadline, node.peer, node.peer, None)

    def _push(self, at: float, sender: PeerId, receiver: PeerId, data: bytes | None) -> None:
        self._sent += 1
        heapq.heappush(self._heap, (at, self._sent, sender, receiver, data))

    def run(self, seconds: float) -> None:
        """Let virtual time pass. Dead nodes are no longer in `nodes`."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            at, _, sender, receiver, data = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            node = self.nodes.get(receiver)
            if node is not None and data is not None:
                self._deliver(sender, node, data)
            elif node is not None and node.deadline <= self.now:
                self.send(node, node.wake(self.now))
        self.now = end

    def _deliver(self, sender: PeerId, node: Kademlia, data: bytes) -> None:
        try:
            message: Message = decode(data, Message, bytes_max=MESSAGE_BYTES_MAX)
            sends = node.receive(self.now, sender, message)
        except RemoteProtocolError as error:
            self.refused.append((sender, str(error)))
            return
        self.send(node, sends)

    def ask(self, node: Kademlia, order: Callable[[float], tuple[int, Sends]], kind: type[Kind]) -> Kind:
        """Let `node` act, and wait for the event that ends the action."""
        request, sends = order(self.now)
        self.send(node, sends)
        for _ in range(240):
            for event in self.events[node.peer]:
                if isinstance(event, kind) and getattr(event, "request", None) == request:
                    return event
            self.run(0.1)
        raise AssertionError(f"no {kind.__name__} within 24 s")


def token(node: Kademlia, sender: PeerId, now: float = 0.0) -> bytes:
    """Return the token with which `sender` may store at `node`; the pings that `node` then sends stay
    unanswered."""
    for receiver, message in node.receive(now, sender, Ping(0, ())):
        if receiver == sender and isinstance(message, Pong):
            return message.token
    raise AssertionError("a ping is answered")


def lone(number: int = 0) -> Kademlia:
    """Return a node without contacts."""
    return Swarm(17).start(number)


def met(node: Kademlia, peer: PeerId, texts: tuple[str, ...] = ()) -> Kademlia:
    """Add `peer` to `node` as a contact that has answered."""
    ((_, ping),) = node.add(0.0, peer, [])
    assert isinstance(ping, Ping)
    node.receive(0.0, peer, Pong(ping.id, texts))
    return node
