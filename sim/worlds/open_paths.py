"""The open paths of all simulated peers behind routers: opened, kept alive by pings, and closed.

`sim.worlds.crossing` defines paths; `sim.worlds.routed` and `sim.worlds.punching` request them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crypto.identity import PeerId
from node.transport.multiplexed import Way
from node.transport.paths import idle_seconds
from sim.events import PathOpened
from sim.network.instants import after
from sim.network.machines import TcpLink
from sim.worlds.crossing import SimPath, Traveller
from sim.worlds.joining import DialGround

PATHS_PER_PAIR_MAX = 4


class OpenPaths:
    """The paths between any two of the peers that are `here`. `lost` is called when a path on which a relay's
    place was kept has ended. `SimPuncher` sets `improve`, which is called periodically for each path through
    a relay."""

    def __init__(
        self,
        ground: DialGround,
        here: Mapping[PeerId, Traveller],
        counters: Counter[str],
        lost: Callable[[SimPath], None],
    ) -> None:
        self.improve: Callable[[SimPath], None]
        self._ground = ground
        self._links = ground.links
        self._here = here
        self._counters = counters
        self._lost = lost
        self._paths: dict[tuple[PeerId, PeerId], list[SimPath]] = {}

    def between(self, one: PeerId, other: PeerId) -> Sequence[SimPath]:
        """Return the open paths between two peers."""
        return self._paths.get(pair_of(one, other), ())

    def best(self, one: Traveller, other: Traveller) -> SimPath | None:
        """Return the best open path between two peers; None if there is none."""
        paths = self.between(one.peer, other.peer)
        ways: tuple[Way, ...] = ("direct", "punched", "relayed")
        return min(paths, key=lambda path: (ways.index(path.way), -path.ready_at), default=None)

    def open(
        self,
        one: Traveller,
        other: Traveller,
        way: Way,
        connections: tuple[TcpLink, ...],
        ready_at: float,
        relay: Traveller | None = None,
        circuit: Any = None,
    ) -> SimPath:
        """Open and watch a path; if there are too many, close the least used one."""
        path = SimPath(one, other, way, connections, ready_at, relay, circuit)
        paths = self._paths.setdefault(pair_of(one.peer, other.peer), [])
        spare = [each for each in paths if each.lease is None]
        if len(paths) >= PATHS_PER_PAIR_MAX and spare:
            self.close(min(spare, key=lambda each: each.used_at))
        self._paths.setdefault(pair_of(one.peer, other.peer), []).append(path)
        self._counters[f"paths {way}"] += 1
        self._ground.tell(self._ground.lives.get(one.peer), PathOpened(other.peer, way))
        self._ground.at(max(ready_at, path.deadline), self._watch, path)
        if way == "relayed":
            self._ground.at(ready_at, self.improve, path)
        return path

    def close(self, path: SimPath) -> None:
        """Close a path, if it is open."""
        if path.is_over:
            return
        path.is_over = True
        pair = pair_of(path.first.peer, path.other.peer)
        self._paths[pair].remove(path)
        if not self._paths[pair]:
            del self._paths[pair]
        if path.relay is not None and path.circuit is not None:
            path.relay.ledger.closed(path.circuit)
        if path.lease is not None:
            path.lease = None
            self._lost(path)

    def _watch(self, path: SimPath) -> None:
        """Make both ends of a path ping when due, or close a dead path."""
        now = self._ground.now
        if path.is_over:
            return
        idle_at = path.used_at + self._idle_seconds(path)
        if path.lease is None and idle_at <= now:
            self.close(path)
            return
        for end in (path.first, path.other):
            if self._here.get(end.peer) is not end:
                continue
            if not path.cores[end.peer].tick(now):
                self._counters["paths silent"] += 1
                self.close(path)
                return
            self._send_frames(path, end, now)
        if not any(self._here.get(end.peer) is end for end in (path.first, path.other)):
            self.close(path)
            return
        due = path.deadline if path.lease is not None else min(path.deadline, max(idle_at, now + 1.0))
        self._ground.at(max(after(now, 0.001), due), self._watch, path)
        if path.way == "relayed":
            self.improve(path)

    def _idle_seconds(self, path: SimPath) -> float:
        others = self.between(path.first.peer, path.other.peer)
        return idle_seconds(path.way, has_better=any(each.way != "relayed" for each in others))

    def _send_frames(self, path: SimPath, end: Traveller, now: float) -> None:
        """Exchange the due frames of a path's end and the answers, each after its trip. Both happen
        immediately here, since no other code reads a path's cores meanwhile."""
        core, other = path.cores[end.peer], path.end_opposite(end)
        while (frame := core.next_frame(now)) is not None:
            arrives = path.arrives(end, now, self._links.latency_seconds)
            if arrives is not None and self._here.get(other.peer) is other:
                path.cores[other.peer].receive(arrives, frame)
                self._send_frames(path, other, arrives)


def pair_of(one: PeerId, other: PeerId) -> tuple[PeerId, PeerId]:
    """Return two peers in the order of their ids."""
    return (one, other) if one < other else (other, one)
