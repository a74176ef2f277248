"""The smallest possible bottleneck for up to eight peers: a binary search over dynamic programming on bit
sets.

For a given bottleneck, a state is (the peers used, the group that holds the first stage so far, the number of
stages). The value of a state is the set of layers at which that stage could begin, one bit for each. A
further group is put in front if a stage on it, and an edge from it to the next group, are no slower than the
bottleneck. All states with the same number of stages are processed together. The search handles unequal
replicas and links, and memory that depends on the position in the pipeline. It is the yardstick for
`partition.plan.search`, and it can prove that no split fits.
"""

from typing import Any

import numpy as np

from partition.plan.cuts import Cut, Groups, best_cut
from partition.plan.search import allows, has_replicas
from partition.plan.tables import IMPOSSIBLE, Tables

PEERS_MAX = 8
LAYERS_MAX = 63
"""Maximum number of layers: one bit for each layer and one for the end fit into 64 bits."""
PRECISION = 10_000
"""Precision of the binary search: it ends within one part in this many."""
_BYTE = 256


class ExactSearch:
    """The exact search over all groupings of one problem."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        count = len(tables.problem.peers)
        if count > PEERS_MAX or tables.count > LAYERS_MAX:
            raise ValueError(f"at most {PEERS_MAX} peers and {LAYERS_MAX} layers")
        self._rules = tables.problem.constraints
        self._masks = 1 << count
        self._groups = [
            tuple(place for place in range(count) if mask >> place & 1) for mask in range(self._masks)
        ]
        self._usable = [bool(group) and has_replicas(self._rules, group) for group in self._groups]
        self._depths = self._rules.stages or min(count, tables.count)
        self._used, self._front, self._next = self._transitions()
        self._costs = [self._cost(depth) for depth in range(1, self._depths + 1)]
        self._edges = self._edge_table()

    def _transitions(self) -> tuple[Any, Any, Any]:
        """Return, for each transition, the peers used, the group in front, and the group to put before it,
        sorted by the resulting state."""
        rows = []
        for used in range(1, self._masks):
            rest = self._masks - 1 - used
            fronts = [mask for mask in range(1, used + 1) if mask & ~used == 0 and self._usable[mask]]
            nexts = [mask for mask in range(1, rest + 1) if mask & ~rest == 0 and self._usable[mask]]
            rows += [(used | after, after, used, front) for after in nexts for front in fronts]
        rows.sort()
        table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return table[:, 2], table[:, 3], table[:, 1]

    def _cost(self, depth: int) -> Any:
        size = self._tables.count + 1
        found = np.full((self._masks, size, size), 2 * IMPOSSIBLE, dtype=np.int64)
        for mask in range(1, self._masks):
            if self._usable[mask]:
                found[mask] = self._tables.stage(self._groups[mask], depth)
        return found

    def _edge_table(self) -> Any:
        """Return a table of the nanoseconds that each cut takes on the edge between two groups: (group, next
        group, cut)."""
        size = self._tables.count + 1
        found = np.full((self._masks, self._masks, size), 2 * IMPOSSIBLE, dtype=np.int64)
        pairs = np.unique(self._next * self._masks + self._front)
        for pair in pairs.tolist():
            before, after = divmod(pair, self._masks)
            found[before, after] = self._tables.edge(self._groups[before], self._groups[after])
        return found

    def least(self, low: int, high: int) -> int:
        """Return the smallest bottleneck from `low` to `high`, within one part in PRECISION. `high` must be
        known to suffice."""
        while high - low > max(1, high // PRECISION):
            middle = (low + high) // 2
            if self._reach(middle) is None:
                low = middle
            else:
                high = middle
        return high

    def split(self, bound: int) -> Cut | None:
        """Return a cut whose bottleneck is at most `bound`; None if there is none."""
        reached = self._reach(bound)
        return None if reached is None else self._walk(reached, bound)

    def _reach(self, bound: int) -> list[Any] | None:
        """Return the reachable starts for each number of stages, up to the first number for which layer 0 is
        reachable; None if it never is."""
        size = self._tables.count + 1
        powers = np.uint64(1) << np.arange(size, dtype=np.uint64)
        allowed = ((self._edges <= bound) * powers).sum(axis=2, dtype=np.uint64)
        masks = np.arange(self._masks)
        reach: Any = np.zeros((self._masks, self._masks), dtype=np.uint64)
        reach[masks, masks] = ((self._costs[0][:, :, -1] <= bound) * powers).sum(axis=1, dtype=np.uint64)
        levels = [reach]
        target = (self._used | self._next) * self._masks + self._next
        firsts = np.flatnonzero(np.diff(target, prepend=-1))
        for depth in range(1, self._depths + 1):
            if self._rules.stages in (0, depth) and (levels[-1] & np.uint64(1)).any():
                return levels
            if depth == self._depths or not len(target):
                break
            starts = ((self._costs[depth] <= bound) * powers[None, :, None]).sum(axis=1, dtype=np.uint64)
            ends = levels[-1][self._used, self._front] & allowed[self._next, self._front]
            found = _gathered(_byte_tables(starts), self._next, ends)
            reach = np.zeros(self._masks * self._masks, dtype=np.uint64)
            reach[target[firsts]] = np.bitwise_or.reduceat(found, firsts)
            levels.append(reach.reshape(self._masks, self._masks))
        return None

    def _walk(self, levels: list[Any], bound: int) -> Cut:
        """Follow the reached states to a sequence of groups from the first stage on; return the best cut for
        these groups."""
        used, front = (int(row[0]) for row in np.nonzero(levels[-1] & np.uint64(1)))
        groups = [front]
        start = 0
        for depth in range(len(levels) - 1, 0, -1):
            used &= ~front
            cost = self._costs[depth][front, start]
            for after in range(1, self._masks):
                starts = int(levels[depth - 1][used, after])
                edge = self._edges[front, after]
                ends = [
                    end
                    for end in range(start + 1, self._tables.count)
                    if starts >> end & 1 and edge[end] <= bound and cost[end] <= bound
                ]
                if ends:
                    start, front = ends[0], after
                    groups.append(after)
                    break
        chosen: Groups = tuple(self._groups[mask] for mask in groups)
        assert allows(self._rules, chosen, self._tables.count)
        cut = best_cut(self._tables, chosen)
        assert cut is not None
        return cut


def _byte_tables(starts: Any) -> Any:
    """Return, for each byte of a set of ends, the unions of the rows that the byte selects: (masks, bytes,
    256)."""
    masks, size = starts.shape
    count = -(-size // 8)
    padded = np.zeros((masks, count * 8), dtype=np.uint64)
    padded[:, :size] = starts
    rows = padded.reshape(masks, count, 8)
    found = np.zeros((masks, count, _BYTE), dtype=np.uint64)
    for byte in range(1, _BYTE):
        lowest = (byte & -byte).bit_length() - 1
        found[:, :, byte] = found[:, :, byte & (byte - 1)] | rows[:, :, lowest]
    return found


def _gathered(byte_tables: Any, groups: Any, ends: Any) -> Any:
    found = np.zeros(len(groups), dtype=np.uint64)
    for number in range(byte_tables.shape[1]):
        byte = ((ends >> np.uint64(8 * number)) & np.uint64(_BYTE - 1)).astype(np.int64)
        found |= byte_tables[groups, number, byte]
    return found
