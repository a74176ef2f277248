"""One scenario, defined once and run by both drivers; `python -m tests.sim.agreement SEED` prints the
digests.

Twelve peers, each with SWIM and Kademlia, join, store a record and find it; two of them die. The links are
even or rough. Even links take exactly 50 ms, with some loss, so that messages sent in one instant also arrive
in one instant. Rough links have two regions, asymmetric delays, duplicates, messages held back, narrow
accesses, NATs and wrong clocks. In addition one peer freezes, one is slow, the swarm is split for a while,
and one link is blocked. Local commands are given at odd microseconds: within an instant both drivers promise
only the order of deliveries and wakes, not of commands.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio
from trio.testing import MockClock

import dht.messages
import gossip.messages
import gossip.settings
from crypto.contact import make_address
from crypto.identity import PeerId
from dht.kademlia import Kademlia
from dht.keys import record_key
from dht.messages import PROTOCOL as KADEMLIA
from dht.records import sign_record
from dht.settings import KademliaSettings
from gossip.member import Profile
from gossip.swim import PROTOCOL as SWIM
from gossip.swim import Swim
from node.services.driver import Core, Driver, Sends
from sim.engine import Engine
from sim.inbox import SimInbox
from sim.network.clocks import SkewedCore, act
from sim.network.instants import instant
from sim.network.links import SimLinks
from sim.network.model import Access, NetworkModel, Region
from sim.ports import Order, Wire
from sim.seams import EPOCH_SECONDS, SimClock, SimNetworkFabric
from sim.seeds import HashSigner, seeded_peer, seeded_rng
from sim.trace import Trace, TracedCore

WIRES = {
    SWIM: Wire(gossip.messages.Message, gossip.messages.MESSAGE_BYTES_MAX),
    KADEMLIA: Wire(dht.messages.Message, dht.messages.MESSAGE_BYTES_MAX),
}
PEERS = 12
END_SECONDS = 8.000_003
EVEN = NetworkModel(nearest_seconds=0.05, farthest_seconds=0.05, loss=0.03)
ROUGH = NetworkModel(
    loss=0.02,
    duplication=0.1,
    reordering=0.1,
    reorder_seconds=0.03,
    regions=(Region("here", 0.6, (0.02, 0.02)), Region("there", 0.4, (0.01, 0.04))),
    between_seconds=((0.0, 0.05), (0.07, 0.0)),
    access=(
        Access(0.5, up_mbit_per_second=0.4, down_mbit_per_second=0.8, queue_seconds=0.05),
        Access(0.2, up_mbit_per_second=2.0, nat="restricted"),
        Access(0.1, nat="symmetric"),
    ),
    clock_offset_seconds=0.5,
    clock_drift=0.01,
)
FATES = ("sent", "delivered", "lost", "cut", "duplicated", "filtered", "overflowed", "missed")


@dataclass(frozen=True)
class Outcome:
    """A driver's outcome of the scenario. `ties` counts events at the same instant in the same core. `fates`
    counts messages by their outcome (`FATES`). `under_way` counts messages still in flight.
    """

    trace: Trace
    ties: int
    fates: dict[str, int]
    under_way: int


class Story:
    """Return the scenario for one seed: fresh cores, and the timed actions on them."""

    def __init__(self, seed: int, model: NetworkModel) -> None:
        self.seed = seed
        self.links = SimLinks(model, seed)
        self.peers = [seeded_peer(seed, index) for index in range(PEERS)]
        self.cores: list[tuple[PeerId, str, Core]] = []
        for index, peer in enumerate(self.peers):
            signer = HashSigner(peer, "home", seed)
            self.links.place(peer, index)
            address = make_address(f"10.0.0.{index + 1}", 9747, peer)
            swim = Swim(
                signer,
                Profile(f"n{index}", (address,)),
                gossip.settings.SwimSettings.local(),
                seeded_rng(seed, SWIM, peer),
                incarnation=1,
                now=0.0,
            )
            kademlia = Kademlia(
                signer, KademliaSettings(k=4, find_width=4), seeded_rng(seed, KADEMLIA, peer), (address,)
            )
            kademlia.wall_offset = EPOCH_SECONDS
            self.cores += [(peer, SWIM, swim), (peer, KADEMLIA, kademlia)]
        self.orders = self._orders()
        self.kills = [(4.000_019, self.peers[3]), (4.300_023, self.peers[7])]
        self.freezes: list[tuple[float, PeerId, float]] = []
        self.slow: dict[PeerId, float] = {}
        self.changes: list[tuple[float, Callable[[], object]]] = []
        if model is ROUGH:
            one, other, *rest = self.peers
            self.freezes = [(2.500_029, self.peers[4], 0.7), (2.900_029, self.peers[4], 0.6)]
            self.slow = {self.peers[5]: 40.0}
            self.changes = [
                (3.200_031, lambda: self.links.split(rest[:4], rest[4:])),
                (3.700_031, lambda: self.links.heal()),
                (3.900_031, lambda: self.links.block(one, other)),
                (5.000_031, lambda: self.links.disturb(other, 0.5)),
            ]

    def _orders(self) -> list[tuple[float, PeerId, str, Order]]:
        # The first peer that all others can reach without having been dialled by it first.
        first = next(peer for peer in self.peers if self.links.at(peer).nat is None)
        second, last = self.peers[1], self.peers[-1]
        orders: list[tuple[float, PeerId, str, Order]] = []
        for index, peer in enumerate(peer for peer in self.peers if peer != first):
            at = 0.010_007 + index * 0.020_003
            orders.append((at, peer, SWIM, lambda core, now: _sends(core.join(now, [first]))))
            orders.append((at, peer, KADEMLIA, lambda core, now: _sends(core.join(now, [first]))))
        key = record_key("test", b"the answer")
        fact = sign_record(
            HashSigner(second, "home", self.seed), key, b"42", sequence=1, expires=int(EPOCH_SECONDS) + 600
        )
        orders.append((2.000_013, second, KADEMLIA, lambda core, now: _sends(core.store(now, fact)[1])))
        orders.append((3.000_017, last, KADEMLIA, lambda core, now: _sends(core.find(now, key)[1])))
        return orders


def by_engine(seed: int, model: NetworkModel = EVEN, *, codec: bool = True) -> Outcome:
    """Run with the heap engine."""
    story, trace = Story(seed, model), Trace(keep=True)
    engine = Engine(story.links, trace=trace, wires=WIRES if codec else None)
    for peer, protocol, core in story.cores:
        engine.add(peer, core, protocol=protocol, clock=story.links.clock(peer))
    for at, peer, protocol, order in story.orders:
        engine.call(at, peer, order, protocol=protocol)
    for at, peer in story.kills:
        engine.kill(peer, at)
    for at, peer, seconds in story.freezes:
        engine.freeze(peer, instant(at), seconds)
    for peer, factor in story.slow.items():
        engine.slow(peer, factor)
    for at, change in story.changes:
        engine.run(instant(at))
        change()
    engine.run(END_SECONDS)
    return _outcome(trace, engine.counters, engine.counters["tied"], engine.under_way)


def by_trio(seed: int, model: NetworkModel = EVEN) -> Outcome:
    """Run with the node's own driver, on the simulated network, under trio's virtual clock."""
    return trio.run(_drive, seed, model, clock=MockClock(autojump_threshold=0))


def _outcome(trace: Trace, counters: Mapping[str, int], ties: int, under_way: int) -> Outcome:
    return Outcome(trace, ties, {name: counters.get(name, 0) for name in FATES}, under_way)


async def _drive(seed: int, model: NetworkModel) -> Outcome:
    story, trace = Story(seed, model), Trace(keep=True)
    medium = SimNetworkFabric(story.links)
    networks = {peer: medium.attach(peer) for peer in story.peers}
    for network in networks.values():
        for other in networks.values():
            network.learn(other.peer, [other.outside])
    inboxes: list[SimInbox] = []
    drivers: dict[tuple[PeerId, str], Driver] = {}
    cores: dict[tuple[PeerId, str], SkewedCore] = {}
    scopes = {peer: trio.CancelScope() for peer in story.peers}
    for peer, protocol, core in story.cores:
        clock = story.links.clock(peer)
        cores[peer, protocol] = SkewedCore(TracedCore(core, peer, protocol, trace), clock)
        inboxes.append(networks[peer].inbox(protocol))
        drivers[peer, protocol] = Driver(
            cores[peer, protocol],
            protocol,
            WIRES[protocol].message_type,
            message_bytes_max=WIRES[protocol].message_bytes_max,
            network=networks[peer],
            clock=SimClock(),
            publish=_ignore,
            refuse=_ignore,
        )

    async def live(peer: PeerId) -> None:
        with scopes[peer]:
            async with trio.open_nursery() as nursery:
                for protocol in WIRES:
                    nursery.start_soon(drivers[peer, protocol].run)

    def kill(peer: PeerId) -> None:
        medium.kill(peer)
        scopes[peer].cancel()

    deeds: list[tuple[float, Callable[[], object]]] = list(story.changes)
    deeds += [(at, partial(kill, peer)) for at, peer in story.kills]
    deeds += [(at, partial(medium.freeze, peer, seconds)) for at, peer, seconds in story.freezes]
    for at, peer, protocol, order in story.orders:
        deeds.append((at, _command(drivers[peer, protocol], cores[peer, protocol], order)))
    for peer, factor in story.slow.items():
        medium.slow(peer, factor)
    async with trio.open_nursery() as nursery:
        for peer in story.peers:
            nursery.start_soon(live, peer)
        for at, deed in deeds:
            nursery.start_soon(_at, at, deed)
        await trio.sleep_until(END_SECONDS)
        nursery.cancel_scope.cancel()
    return _outcome(trace, medium.counters, sum(inbox.ties for inbox in inboxes), medium.under_way)


def _command(driver: Driver, core: SkewedCore, order: Order) -> Callable[[], None]:
    return lambda: driver.command(lambda now: act(core, now, order))


async def _at(time: float, deed: Callable[[], object]) -> None:
    await trio.sleep_until(instant(time))
    deed()


def _sends(sends: Any) -> Sends:
    return list(sends)


def _ignore(*_: object) -> None:
    pass


if __name__ == "__main__":
    for run in (by_engine, by_trio):
        sys.stdout.write(run(int(sys.argv[1]), ROUGH).trace.digest() + "\n")
