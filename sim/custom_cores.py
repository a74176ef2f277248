"""A user's own protocol in a simulated swarm: any core on the engine, without SWIM and the DHT.

    swarm = CustomSwarm(lambda seat: MyCore(seat.peers, seat.rng), nodes=20, seed=7)
    swarm.crash(3, at=10.0)
    swarm.run(until=60.0)
    assert len(swarm.of(MyEvent)) == 20

A core has the methods `receive(now, sender, message)` and `wake(now)`, which return the messages to send, a
`deadline` and a list `events` (`node.services.driver.Core`). Messages and events are structs or dataclasses.
To replace one of the product's own cores, see `sim.worlds.factories`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from crypto.identity import PeerId
from node.services.driver import Core
from sim.engine import Engine
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.observers import Observation
from sim.ports import Order
from sim.seeds import seeded_peer, seeded_rng
from sim.trace import Trace

LAN = NetworkModel(nearest_seconds=0.001, farthest_seconds=0.01)


@dataclass(frozen=True)
class PeerSlot:
    """The inputs for making one core: its number and name, the names of all peers, and its random
    generator."""

    number: int
    peer: PeerId
    peers: Sequence[PeerId]
    rng: Random


class CustomSwarm:
    """A swarm of one protocol. `make(seat)` is called once for each of `nodes` peers; all start at time 0.
    `network` is the scenario's [network]. Equal `seed`s give equal `digest()`s."""

    def __init__(
        self, make: Callable[[PeerSlot], Core], *, nodes: int = 20, network: NetworkModel = LAN, seed: int = 1
    ) -> None:
        self.peers = tuple(seeded_peer(seed, number) for number in range(nodes))
        self.events: list[Observation] = []
        """The events of all cores, in order."""
        self._trace = Trace()
        links = SimLinks(network, seed)
        self.engine = Engine(links, trace=self._trace, publish=self._learnt)
        self.cores: list[Any] = []
        for number, peer in enumerate(self.peers):
            links.place(peer, number)
            core = make(PeerSlot(number, peer, self.peers, seeded_rng(seed, "own", number)))
            self.cores.append(core)
            self.engine.add(peer, core)

    @property
    def now(self) -> float:
        """Return virtual seconds since the beginning."""
        return self.engine.now

    def run(self, *, until: float) -> None:
        """Play all events up to and including the instant `until`."""
        self.engine.run(until)

    def call(self, number: int, order: Order, *, at: float) -> None:
        """Let local code act on a core at `at`. `order(core, now)` returns the messages to send."""
        self.engine.call(at, self.peers[number], order)

    def crash(self, number: int, *, at: float) -> None:
        """Stop a core at `at`, without a goodbye."""
        self.engine.kill(self.peers[number], at)

    def of(self, kind: type) -> list[Observation]:
        """Return the events of one type."""
        return [observed for observed in self.events if isinstance(observed.event, kind)]

    def digest(self) -> str:
        """Return one hash over all inputs and outputs of the cores."""
        return self._trace.digest()

    def _learnt(self, now: float, peer: PeerId, event: Any) -> None:
        self.events.append(Observation(now, peer, event))
