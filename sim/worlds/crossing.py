"""Paths between simulated peers behind routers: connections and their upkeep. No I/O and no real clock.

A path is one direct connection, or two connections through a relay. Both of its ends run the multiplexer of a
real node. Its pings keep the mappings of routers open and detect a dead path. `sim.worlds.routed` decides on
paths and requests them; `sim.worlds.open_paths` keeps the open ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from crypto.identity import PeerId
from node.services.relays.ledger import Announced, RelayLedger
from node.services.relays.places import PlaceLease, PlaceSearch
from node.transport.datagram_paths import DatagramPaths
from node.transport.multiplexed import Way
from node.transport.multiplexer import Multiplexer
from node.transport.punching import PunchBudget, SeenPlaces
from sim.network.instants import after
from sim.network.links import SimLinks
from sim.network.machines import RoutedMachine, TcpLink, connect
from sim.network.routers import Endpoint

Latency = Callable[[PeerId, PeerId], float]


class Traveller:
    """One process lifetime of a peer, from a start to the next stop: the objects with which its node deals
    with routers, relays and other peers."""

    def __init__(self, machine: RoutedMachine, ledger: RelayLedger, budget: PunchBudget, number: int) -> None:
        self.machine = machine
        self.peer = machine.peer
        self.number = number
        self.ledger = ledger
        self.budget = budget
        self.seen = SeenPlaces()
        self.search = PlaceSearch()
        self.datagrams = DatagramPaths()
        self.wants_places = False
        self.circuits: dict[PeerId, SimPath] = {}
        """For each relay, the path on which this peer keeps its reservation (place) there."""
        self.heard: dict[PeerId, tuple[Endpoint, float]] = {}
        """The source of a peer's latest datagram, and its time."""
        self.observers: dict[PeerId, TcpLink] = {}


@dataclass(eq=False)
class SimPath:
    """A path from `first`, which requested it, to `other`: one connection, or one connection from each of the
    two to a relay."""

    first: Traveller
    other: Traveller
    way: Way
    connections: tuple[TcpLink, ...]
    ready_at: float
    relay: Traveller | None = None
    circuit: Announced | None = None
    lease: PlaceLease | None = None
    """The reservation at a relay that is renewed on this path, or None."""
    used_at: float = 0.0
    is_over: bool = False
    cores: dict[PeerId, Multiplexer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used_at = self.ready_at
        for end in (self.first, self.other):
            self.cores[end.peer] = Multiplexer(self.ready_at, is_first=end is self.first)

    @property
    def deadline(self) -> float:
        """Return the time when one of the path's ends must ping, or check for the answer."""
        return min(core.deadline for core in self.cores.values())

    def end_opposite(self, end: Traveller) -> Traveller:
        """Return the end opposite to `end`."""
        return self.other if end is self.first else self.first

    def arrives(self, sender: Traveller, now: float, latency: Latency) -> float | None:
        """Send from one end; return the arrival time at the opposite end, or None if the packet does not
        arrive."""
        receiver = self.end_opposite(sender)
        if self.relay is None:
            if not self.connections[0].passes(sender.machine, now):
                return None
            return after(now, latency(sender.peer, receiver.peer))
        near, far = self.connections if sender is self.first else self.connections[::-1]
        if not (near.passes(sender.machine, now) and far.passes(self.relay.machine, now)):
            return None
        return after(now, latency(sender.peer, self.relay.peer) + latency(self.relay.peer, receiver.peer))


def dial(one: Traveller, other: Traveller, now: float) -> TcpLink | None:
    """Connect one peer to a second; None if the second cannot be dialled."""
    return connect(one.machine, other.machine, other.machine.place_for(one.machine, "tcp", now), now)


def latencies(links: SimLinks, one: Traveller, other: Traveller) -> tuple[float, float]:
    """Return the seconds from one peer to another, and back."""
    return links.latency_seconds(one.peer, other.peer), links.latency_seconds(other.peer, one.peer)
