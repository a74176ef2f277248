"""The best cut of the layers for groups in a given order, by dynamic programming from the last stage to the
first.

For throughput, the slowest stage or edge counts (min-max); for latency and energy, the sum counts. The result
is exact for the given order; `partition.plan.search` chooses the groups and their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partition.plan.problem import Split
from partition.plan.tables import IMPOSSIBLE, Tables, Times

_SUM_MAX = 1 << 60
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Cut:
    """Groups in order, their cut, and its cost. `value` is the min-max or the sum; `score` is used to compare
    cuts."""

    groups: Groups
    ranges: tuple[tuple[int, int], ...]
    value: int
    score: int

    @property
    def fits(self) -> bool:
        """Whether the cut respects memory and constraints."""
        return self.value < IMPOSSIBLE

    @property
    def order(self) -> tuple[int, int, Groups, tuple[tuple[int, int], ...]]:
        """The sort key; lower is better. If scores are equal, fewer stages win, then the groups that sort
        first."""
        return self.score, len(self.groups), self.groups, self.ranges


def best_cut(tables: Tables, groups: Groups, below: int = 1 << 62) -> Cut | None:
    """Return the best cut for `groups` in this order; None if its score cannot be below `below`."""
    is_sum = tables.problem.objective != "throughput"
    steps = max(1, tables.problem.microbatches)
    tails: list[Times] = []
    value = _last(tables, groups)
    for number in range(len(groups) - 2, -1, -1):
        edge = tables.edge(groups[number], groups[number + 1])
        tail = np.minimum(value + edge, _SUM_MAX) if is_sum else np.maximum(value, edge)
        tails.append(tail)
        cost = tables.stage(groups[number], len(groups) - number)
        if number == 0:
            cost = cost[:1]
        value = _joined(cost, tail, is_sum=is_sum).min(axis=1)
    best = int(value[0])
    if (best if is_sum else (steps - 1) * min(best, 1 << 40)) >= below:
        return None
    ranges = _trace(tables, groups, tails[::-1], is_sum=is_sum)
    score = best
    if not is_sum:
        score = _step_score(tables, groups, ranges, best, steps)
    return Cut(groups, ranges, best, score) if score < below else None


def balanced(tables: Tables, cut: Cut) -> Cut:
    """Return the cut of the same groups with the most even computing time among equally good cuts.

    If an edge is slower than every stage, all cuts whose edges are equally slow tie. The first of these cuts
    gives one peer a single layer and the next peer all others, which gains nothing, and loses much if the
    links turn out to be faster.
    """
    if tables.problem.objective != "throughput" or not cut.fits or len(cut.groups) == 1:
        return cut
    groups = cut.groups
    tails: list[Times] = []
    value = _last(tables, groups)
    for number in range(len(groups) - 2, -1, -1):
        edge = tables.edge(groups[number], groups[number + 1])
        tail = np.maximum(value, np.where(edge <= cut.value, 0, _SUM_MAX))
        tails.append(tail)
        cost = tables.stage(groups[number], len(groups) - number)
        value = _joined(cost[:1] if number == 0 else cost, tail, is_sum=False).min(axis=1)
    if int(value[0]) > cut.value:
        return cut
    ranges = _trace(tables, groups, tails[::-1], is_sum=False)
    score = _step_score(tables, groups, ranges, cut.value, max(1, tables.problem.microbatches))
    return Cut(groups, ranges, cut.value, score) if score <= cut.score else cut


def _last(tables: Tables, groups: Groups) -> Times:
    cost = tables.stage(groups[-1], 1)
    return cost[:1, -1] if len(groups) == 1 else cost[:, -1]


def _joined(cost: Times, tail: Times, *, is_sum: bool) -> Times:
    found: Times = np.minimum(cost + tail, _SUM_MAX) if is_sum else np.maximum(cost, tail)
    return found


def _trace(
    tables: Tables, groups: Groups, tails: Sequence[Times], *, is_sum: bool
) -> tuple[tuple[int, int], ...]:
    ranges = []
    start = 0
    for number, tail in enumerate(tails):
        row = tables.stage(groups[number], len(groups) - number)[start]
        end = int(_joined(row, tail, is_sum=is_sum).argmin())
        ranges.append((start, end))
        start = end
    return (*ranges, (start, tables.count))


def _step_score(
    tables: Tables, groups: Groups, ranges: Sequence[tuple[int, int]], bottleneck: int, steps: int
) -> int:
    """Return the nanoseconds of a step: the pipeline fills once, then its slowest part sets the pace."""
    if bottleneck >= IMPOSSIBLE:
        # Every cut that fits is better. Among cuts that do not fit, the one that exceeds its limits least is
        # best.
        return (1 << 61) + min(bottleneck, 1 << 60)
    passes = tables.pass_times(ranges, groups)
    return (steps - 1) * max(bottleneck, in_flight_pace(tables, groups, passes)) + passes[0]


def in_flight_pace(tables: Tables, groups: Groups, passes: Sequence[int]) -> int:
    """Return the minimum nanoseconds per micro-batch that follow, by Little's law, from the limit on
    micro-batches in flight.

    A full stage begins the next micro-batch only when one has returned. Until then, possibly only its links
    are busy.
    """
    problem = tables.problem
    if problem.hides_links:
        return 0
    stages = len(groups)
    return max(
        passed // (problem.in_flight(stages - number) * len(group))
        for number, (passed, group) in enumerate(zip(passes, groups, strict=True))
    )


def as_split(tables: Tables, cut: Cut, *, is_exact: bool) -> Split:
    """Return the cut as a solver's answer."""
    slowest = 0
    for number, ((first, last), group) in enumerate(zip(cut.ranges, cut.groups, strict=True)):
        slowest = max(slowest, int(tables.group_time(group)[first, last]))
        if number + 1 < len(cut.groups):
            slowest = max(slowest, tables.transfer(group, cut.groups[number + 1], last))
    return Split(cut.ranges, cut.groups, slowest, cut.score, is_exact)
