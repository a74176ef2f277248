"""One scenario, told once and run by both drivers; `python -m tests.sim.agreement SEED` prints the digests.

Twelve peers, each with SWIM and Kademlia, over links of exactly 50 ms, so that messages sent at one
instant arrive at one instant, and some loss. They join, store a record, find it, and lose two of
their number. Local commands fall on odd microseconds: within an instant only the order of
deliveries and wakes is promised by both drivers, not that of commands.
"""

import sys
from collections.abc import Callable
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
from dht.settings import Settings
from gossip.member import Profile
from gossip.swim import PROTOCOL as SWIM
from gossip.swim import Swim
from node.services.driver import Core, Driver, Sends
from sim.engine import Engine, Order, Wire
from sim.network.instants import instant
from sim.network.links import Links
from sim.network.model import NetworkModel
from sim.seams import EPOCH_SECONDS, Medium, SimClock, SimInbox
from sim.seeds import HashSigner, seeded_peer, seeded_rng
from sim.trace import Trace, TracedCore

WIRES = {
    SWIM: Wire(gossip.messages.Message, gossip.messages.MESSAGE_BYTES_MAX),
    KADEMLIA: Wire(dht.messages.Message, dht.messages.MESSAGE_BYTES_MAX),
}
PEERS = 12
END_SECONDS = 8.0
MODEL = NetworkModel(nearest_seconds=0.05, farthest_seconds=0.05, loss=0.03)


@dataclass(frozen=True)
class Outcome:
    """What a driver made of the scenario. `ties` counts events at the same instant of the same core."""

    trace: Trace
    ties: int


class Story:
    """The scenario for one seed: fresh cores, and what is done to them when."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.peers = [seeded_peer(seed, index) for index in range(PEERS)]
        self.cores: list[tuple[PeerId, str, Core]] = []
        for index, peer in enumerate(self.peers):
            signer = HashSigner(peer, "home", seed)
            address = make_address(f"10.0.0.{index + 1}", 9747, peer)
            swim = Swim(
                signer,
                Profile(f"n{index}", (address,)),
                gossip.settings.Settings.local(),
                seeded_rng(seed, SWIM, peer),
                incarnation=1,
                now=0.0,
            )
            kademlia = Kademlia(
                signer, Settings(k=4, find_width=4), seeded_rng(seed, KADEMLIA, peer), (address,)
            )
            kademlia.wall_offset = EPOCH_SECONDS
            self.cores += [(peer, SWIM, swim), (peer, KADEMLIA, kademlia)]
        self.orders = self._orders()
        self.kills = [(4.000_019, self.peers[3]), (4.300_023, self.peers[7])]

    def _orders(self) -> list[tuple[float, PeerId, str, Order]]:
        first, second, last = self.peers[0], self.peers[1], self.peers[-1]
        orders: list[tuple[float, PeerId, str, Order]] = []
        for index, peer in enumerate(self.peers[1:]):
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


def by_engine(seed: int, *, codec: bool = True) -> Outcome:
    """The heap engine."""
    story, trace = Story(seed), Trace(keep=True)
    engine = Engine(Links(MODEL, seed), trace=trace, wires=WIRES if codec else None)
    for peer, protocol, core in story.cores:
        engine.add(peer, core, protocol=protocol)
    for at, peer, protocol, order in story.orders:
        engine.call(at, peer, order, protocol=protocol)
    for at, peer in story.kills:
        engine.kill(peer, at)
    engine.run(END_SECONDS)
    return Outcome(trace, engine.counters["tied"])


def by_trio(seed: int) -> Outcome:
    """The node's own driver, on the simulated network, under trio's virtual clock."""
    return trio.run(_drive, seed, clock=MockClock(autojump_threshold=0))


async def _drive(seed: int) -> Outcome:
    story, trace = Story(seed), Trace(keep=True)
    medium = Medium(Links(MODEL, seed))
    networks = {peer: medium.attach(peer) for peer in story.peers}
    for network in networks.values():
        for other in networks.values():
            network.learn(other.peer, other.addresses)
    inboxes: list[SimInbox] = []
    drivers: dict[tuple[PeerId, str], Driver] = {}
    traced: dict[tuple[PeerId, str], TracedCore[Any]] = {}
    scopes = {peer: trio.CancelScope() for peer in story.peers}
    for peer, protocol, core in story.cores:
        traced[peer, protocol] = TracedCore(core, peer, protocol, trace)
        inboxes.append(networks[peer].inbox(protocol))
        drivers[peer, protocol] = Driver(
            traced[peer, protocol],
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

    async with trio.open_nursery() as nursery:
        for peer in story.peers:
            nursery.start_soon(live, peer)
        for at, peer, protocol, order in story.orders:
            nursery.start_soon(_at, at, _command(drivers[peer, protocol], traced[peer, protocol], order))
        for at, peer in story.kills:
            nursery.start_soon(_at, at, partial(kill, peer))
        await trio.sleep_until(END_SECONDS)
        nursery.cancel_scope.cancel()
    return Outcome(trace, sum(inbox.ties for inbox in inboxes))


def _command(driver: Driver, core: TracedCore[Any], order: Order) -> Callable[[], None]:
    return lambda: driver.command(lambda now: core.call(now, order))


async def _at(time: float, act: Callable[[], None]) -> None:
    await trio.sleep_until(instant(time))
    act()


def _sends(sends: Any) -> Sends:
    return list(sends)


def _ignore(*_: object) -> None:
    pass


if __name__ == "__main__":
    for outcome in (by_engine(int(sys.argv[1])), by_trio(int(sys.argv[1]))):
        sys.stdout.write(outcome.trace.digest() + "\n")
