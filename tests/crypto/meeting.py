"""Connect two or three `Sessions` without a network, by carrying their packets by hand."""

import random
from collections import Counter
from collections.abc import Callable

from crypto.identity import Identity, PeerId
from crypto.sessions.core import Received, Sessions
from crypto.sessions.macs import Source
from crypto.sessions.packets import Datagram
from crypto.sessions.table import SessionLimits
from crypto.swarm import Swarm

PING = "/peerloom/ping/1"
WALL = 1_800_000_000_000
SWARM = Swarm("test")


class Node:
    """One peer's sessions, its address, and its received messages."""

    def __init__(
        self,
        number: int,
        *,
        swarm: Swarm = SWARM,
        now: float = 0.0,
        wall: int = WALL,
        life: int = 0,
        admits: Callable[[PeerId], bool] = lambda _peer: True,
        limits: SessionLimits | None = None,
    ) -> None:
        rng = random.Random(number * 1_000 + life)
        self.identity = Identity(bytes((number,)) * 32)
        self.peer = self.identity.peer
        self.source: Source = (f"10.0.0.{number}", 9_000)
        self.counters: Counter[str] = Counter()
        self.arrived: list[Datagram] = []
        self.sessions = Sessions(
            self.identity,
            swarm,
            rng.randbytes,
            now=now,
            wall_milliseconds=wall,
            counters=self.counters,
            admits=admits,
            limits=limits,
        )

    def send(self, now: float, to: "Node", payload: bytes, protocol: str = PING) -> list[bytes]:
        return self.sessions.send(now, to.peer, protocol, payload)

    def receive(self, now: float, packet: bytes, source: Source) -> Received:
        received = self.sessions.receive(now, packet, source)
        if received.datagram is not None:
            self.arrived.append(received.datagram)
        return received

    @property
    def payloads(self) -> list[bytes]:
        return [datagram.payload for datagram in self.arrived]


def carry(now: float, sender: Node, receiver: Node, packets: list[bytes]) -> None:
    """Deliver packets and their answers, until no more answers come."""
    for packet in packets:
        carry(now, receiver, sender, receiver.receive(now, packet, sender.source).answers)


def acquainted(first: int = 1, second: int = 2, **limits: int) -> tuple[Node, Node]:
    """Return two peers that have a session; `limits` apply to the second."""
    one, other = Node(first), Node(second, limits=SessionLimits(**limits))
    carry(0.0, one, other, one.send(0.0, other, b"hello"))
    assert other.payloads == [b"hello"]
    other.arrived.clear()
    return one, other


def wake(now: float, node: Node, others: dict[PeerId, Node]) -> None:
    """Deliver the packets that are due at one node to the other nodes."""
    for peer, packet in node.sessions.wake(now):
        carry(now, node, others[peer], [packet])
