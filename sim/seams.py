"""The six seams of a simulated node, which run the real `node` under trio's MockClock.

    clock = trio.testing.MockClock(autojump_threshold=0)
    medium = SimNetworkFabric(SimLinks(NetworkModel(), seed))
    trio.run(scenario, clock=clock)

Time is virtual: when every task waits, the clock jumps. A message enters its receiver's inbox when it is
sent, with the instant at which it is due. So the inbox, not the scheduler, decides the order within one
instant, and it is the same order as in `sim.engine`. Trio's scheduler decides the order of tasks within one
instant, so local commands that must repeat exactly should not be given at the instant of a delivery. If
bandwidth is limited, a separate task moves the queues.

From outside, a frozen peer behaves like a stopped process. It sends nothing, messages to it wait, its cores
and stages do not run, and at the thaw they find that their deadlines have long passed. Trio cannot stop the
other tasks of the node: a sleep that ends during the freeze ends on time, and its effects show at the thaw.
Clocks run on, like those of a stopped process.

A wrong clock affects only `wall`. A node sleeps by trio's clock, so `monotonic` is right for all nodes;
`sim.network.clocks.SkewedCore` makes a core run by a drifting clock.

The network of one peer is in `sim.peer_network`; streams are in memory (`sim.streams`). Not modelled:
cookies, rekeying, and the use of a stream for a datagram that is too large for a packet.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator

import trio

from crypto.contact import Address
from crypto.errors import LocalProtocolError
from crypto.identity import PeerId
from node.seams import Seams
from sim.executor import SimExecutor
from sim.local import SimLocal
from sim.network.addresses import Homes
from sim.network.clocks import LocalClock
from sim.network.instants import TICKS_PER_SECOND
from sim.network.links import Sender, SimLinks
from sim.network.pace import PeerPace
from sim.network.places import RIGHT
from sim.network.queues import LinkQueue, Parcel
from sim.network.sizes import SentTraffic, envelope_bytes
from sim.peer_network import SimNetwork, now_seconds
from sim.seeds import seeded_entropy, seeded_rng
from sim.storage import MemoryStorage
from sim.wakeup import SimAlarm

EPOCH_SECONDS = 1_800_000_000.0
"""The wall-clock time at the start of a simulation."""


class SimClock:
    """Trio's clock in whole microseconds. The wall clock starts at `EPOCH_SECONDS`, with the error of
    `clock`."""

    def __init__(self, clock: LocalClock = RIGHT) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return now_seconds()

    def wall(self) -> float:
        return EPOCH_SECONDS + self._clock.local(now_seconds())


class SimNetworkFabric:
    """The part that all simulated networks of one simulation share: which peers exist, their addresses, and
    the queues.

    A stream over a split stalls for `stall_seconds`, then breaks at both ends. By default it breaks
    immediately; a real kernel would notice late, unless a node notices first. With `has_local`, the peers of
    a region share one local network.
    """

    def __init__(self, links: SimLinks, *, stall_seconds: float = 0.0, has_local: bool = False) -> None:
        self.links = links
        self.has_local = has_local
        self._stall_seconds = stall_seconds
        self._networks: dict[PeerId, SimNetwork] = {}
        self.homes = Homes()
        self._paces: dict[PeerId, PeerPace] = {}
        self._traffic: dict[tuple[PeerId, str], SentTraffic] = {}
        self._counts: Counter[str] = Counter()
        self._number = 0
        self._carrier = LinkQueue()
        self._alarm = SimAlarm()
        self._is_carrying = False

    def attach(self, peer: PeerId) -> "SimNetwork":
        """Return a network for `peer` at its own address. A killed peer gets its old address back, and the
        datagrams in flight to it."""
        old = self._networks.get(peer)
        if old is not None and old.alive:
            raise LocalProtocolError("this peer has a network already")
        home = self.homes.settle(peer, is_inside=self.links.at(peer).nat is not None)
        network = self._networks[peer] = SimNetwork(self, peer, home)
        if old is not None:
            network.inherit(old.bequeath())
        return network

    def kill(self, peer: PeerId) -> None:
        """Kill `peer` without a goodbye: its streams break and messages to it are lost."""
        network = self._networks.get(peer)
        if network is not None:
            network.die()

    def freeze(self, peer: PeerId, seconds: float) -> None:
        if self.living(peer) is not None:
            self.later(self.pace(peer).freeze(now_seconds(), seconds), lambda: self._thaw(peer))

    def slow(self, peer: PeerId, factor: float) -> None:
        """Slow down computing at `peer` to `factor` times the normal duration from now on; 1 is normal."""
        self.pace(peer).factor = factor

    def pace(self, peer: PeerId) -> PeerPace:
        """Return the pace of a peer, which is kept across restarts."""
        return self._paces.setdefault(peer, PeerPace())

    def split(self, *sides: Collection[PeerId]) -> int:
        """Split the network (`SimLinks.split`); streams over the split stall or break."""
        number = self.links.split(*sides)
        self.look_at_streams()
        return number

    def heal(self, number: int | None = None) -> None:
        """Heal a split (`SimLinks.heal`); stalled streams continue."""
        self.links.heal(number)
        self.look_at_streams()

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        """Return whether no split lies between the two."""
        return self.links.reaches(one, other)

    def look_at_streams(self) -> None:
        """Stall or break streams over cut links, and resume the others. Call it after `links.block`,
        `links.deafen` and similar calls."""
        for network in self._networks.values():
            network.look_at_streams(self._stall_seconds)

    def living(self, peer: PeerId) -> "SimNetwork | None":
        """Return the network of `peer`, if it is attached and alive."""
        network = self._networks.get(peer)
        return network if network is not None and network.alive else None

    def near(self, peer: PeerId) -> Iterator[tuple[SimLocal, float]]:
        """Yield the local networks in the region of `peer` that it reaches now, with their latency. A peer
        behind a NAT is alone there."""
        links = self.links
        for other, network in self._networks.items():
            if other == peer or network.local is None:
                continue
            is_near = links.region(other) == links.region(peer) and self.reaches(peer, other)
            if is_near and links.at(other).nat is links.at(peer).nat is None:
                yield network.local, links.latency_seconds(peer, other)

    def address(self, peer: PeerId) -> Address | None:
        """Return the outer address of a peer, or its previous one if it was killed."""
        return self.homes.outside(peer)

    @property
    def counters(self) -> Counter[str]:
        """Return the number of datagrams per fate, under the names that `sim.engine.Engine.counters`
        explains."""
        for network in self._networks.values():
            network.miss()
        counters = self.links.counters + self._counts
        counters["overflowed"] += self._carrier.overflowed
        return counters

    @property
    def under_way(self) -> int:
        """Return how many datagrams are in flight, or unread in an inbox."""
        for network in self._networks.values():
            network.miss()
        waiting = sum(network.waiting for network in self._networks.values())
        return self._carrier.under_way + waiting

    def traffic(self, peer: PeerId | None = None) -> dict[str, SentTraffic]:
        """Return the traffic sent for each protocol by `peer`, over all its restarts, or by all peers,
        streams included."""
        sums: dict[str, SentTraffic] = {}
        for (sender, protocol), own in self._traffic.items():
            if peer in (None, sender):
                sums[protocol] = sums.get(protocol, SentTraffic()) + own
        return sums

    def count(self, what: str, number: int = 1) -> None:
        """Count the fate of `number` datagrams."""
        self._counts[what] += number

    def count_traffic(self, sender: PeerId, protocol: str, sent_bytes: int) -> None:
        """Count a message that was sent."""
        key = (sender, protocol)
        self._traffic[key] = self._traffic.get(key, SentTraffic()) + SentTraffic(1, sent_bytes)

    def post(
        self, sender: Sender, peer: PeerId, protocol: str, data: bytes, *, by_stream: bool = False
    ) -> None:
        """Send a datagram, or a message by a stream if `by_stream`."""
        now = now_seconds()
        own = sender.place
        self.count("sent")
        size_bytes = envelope_bytes(protocol) + len(data)
        self.count_traffic(own.peer, protocol, size_bytes)
        if peer not in self._networks:
            self.count("missed")
            return
        target = self.links.at(peer)
        tick = round(now * TICKS_PER_SECOND)
        trips = sender.trips(tick, target, by_stream=by_stream)
        if self.links.is_limited:
            parcel = Parcel(own.peer, protocol, target.down, size_bytes, trips, self._land, (peer, data))
            self._carrier.send(now, own.up, parcel)
            self._watch_queues()
            return
        for trip in trips:
            due = (tick + trip) / TICKS_PER_SECOND
            self._expect(due, peer, own.peer, protocol, data)

    def carry(self, parcel: Parcel) -> None:
        """Send part of a stream."""
        self._carrier.send(now_seconds(), self.links.at(parcel.sender).up, parcel)
        self._watch_queues()

    def later(self, at: float, action: Callable[[], None]) -> None:
        """Run `action` at the instant `at`."""
        self._carrier.later(at, action)
        self._watch_queues()

    def _land(self, due: float, parcel: Parcel) -> None:
        peer, data = parcel.item
        self._expect(due, peer, parcel.sender, parcel.protocol, data)

    def _expect(self, due: float, peer: PeerId, sender: PeerId, protocol: str, data: bytes) -> None:
        self._number += 1
        self._networks[peer].expect(sender, protocol, due, self._number, data)

    def _thaw(self, peer: PeerId) -> None:
        network = self.living(peer)
        if network is not None:
            network.send_held()

    def _watch_queues(self) -> None:
        if not self._is_carrying:
            self._is_carrying = True
            trio.lowlevel.spawn_system_task(self._move_queues, name="queues of the simulated network")
        self._alarm.no_later_than(self._carrier.deadline)

    async def _move_queues(self) -> None:
        while True:
            await self._alarm.sleep_until(self._carrier.deadline)
            self._carrier.advance(now_seconds())


def simulated_seams(
    medium: SimNetworkFabric, peer: PeerId, seed: int, storage: MemoryStorage | None = None
) -> Seams:
    """Return all six seams for one peer attached to `medium`. The caller runs `seams.network.run`."""
    return Seams(
        network=medium.attach(peer),
        clock=SimClock(medium.links.clock(peer)),
        rng=seeded_rng(seed, peer),
        entropy=seeded_entropy(seed, peer),
        executor=SimExecutor(pace=medium.pace(peer)),
        storage=storage or MemoryStorage(),
    )
