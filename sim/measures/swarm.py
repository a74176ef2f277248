"""The population: which peers are up, and on which side of a split each is. All measures use it; peers are
numbers here.

It is updated only by events, so no measure has to ask the world about each peer each second.
"""

from collections.abc import Mapping

import numpy as np

from crypto.identity import PeerId
from sim.events import NetworkHealed, NetworkSplit, PeerFrozen, PeerStarted, PeerStopped
from sim.measures.rows import Row, known
from sim.observers import Observation, World


class Swarm:
    """The population. Metric: `population_peers`, in total and by region."""

    def __init__(self, world: World) -> None:
        self.peers = tuple(world.peers)
        self.numbers: Mapping[PeerId, int] = {peer: number for number, peer in enumerate(self.peers)}
        self.up = np.zeros(len(self.peers), dtype=bool)
        self.sides = np.zeros(len(self.peers), dtype=np.int32)
        """The side of each peer; peers with the same number reach each other."""
        self.frozen_until = [0.0] * len(self.peers)
        self.count = 0
        self.starts = self.restarts = self.crashes = self.leaves = 0
        self._known = np.zeros(len(self.peers), dtype=bool)
        self._by_region: dict[str, int] = {}
        self._regions: dict[int, str] = {}
        self._node_seconds = 0.0
        self._since = 0.0
        self._least: int | None = None
        self._most = 0
        self.handlers = {
            PeerStarted: self._started,
            PeerStopped: self._stopped,
            PeerFrozen: self._frozen,
            NetworkSplit: self._sided,
            NetworkHealed: self._sided,
        }

    def node_seconds(self, now: float) -> float:
        """Return the summed uptime of all peers until `now`."""
        self._node_seconds += self.count * (now - self._since)
        self._since = now
        return self._node_seconds

    def is_frozen(self, number: int, now: float) -> bool:
        return now < self.frozen_until[number]

    def sample(self, now: float, rows: list[Row]) -> None:
        self._least = self.count if self._least is None else min(self._least, self.count)
        rows.append(Row(now, "population_peers", "", self.count))
        if len(self._by_region) > 1:
            rows += [Row(now, "population_peers", region, up) for region, up in self._by_region.items()]

    def summary(self, now: float) -> dict[str, float | None]:
        return {
            "mean": known(self.node_seconds(now) / now) if now > 0 else None,
            "min": self._least,
            "max": self._most,
            "starts": self.starts,
            "restarts": self.restarts,
            "crashes": self.crashes,
            "leaves": self.leaves,
        }

    def _started(self, observed: Observation) -> None:
        number = self._number(observed)
        self.starts += 1
        self.restarts += bool(self._known[number])
        self._known[number] = True
        if not self.up[number]:
            self._count(observed.time, number, observed.event.region, 1)
        self._most = max(self._most, self.count)

    def _stopped(self, observed: Observation) -> None:
        number = self._number(observed)
        if observed.event.why == "leave":
            self.leaves += 1
        else:
            self.crashes += 1
        if self.up[number]:
            self._count(observed.time, number, self._regions[number], -1)
            self.frozen_until[number] = 0.0

    def _count(self, now: float, number: int, region: str, change: int) -> None:
        self.node_seconds(now)
        self.up[number] = change > 0
        self.count += change
        self._regions[number] = region
        self._by_region[region] = self._by_region.get(region, 0) + change

    def _frozen(self, observed: Observation) -> None:
        self.frozen_until[self._number(observed)] = observed.time + observed.event.seconds

    def _sided(self, observed: Observation) -> None:
        self.sides[:] = 0
        sides = observed.event.sides if isinstance(observed.event, NetworkSplit) else ()
        for side, peers in enumerate(sides, start=1):
            self.sides[[self.numbers[peer] for peer in peers]] = side

    def _number(self, observed: Observation) -> int:
        assert observed.peer is not None, "an event of a peer is published under that peer"
        return self.numbers[observed.peer]
