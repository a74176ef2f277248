"""Assignment of the stages of a column in local mode when there are fewer nodes than stages. No I/O.

The model is cut in the same way in all columns, because only equal stages can be averaged. So a node takes
additional stages rather than other layers, and gives them away again later. Not here: when to do so, and
which nodes to ask (`node.local.merging`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise

from msgspec.structs import replace

from crypto.identity import PeerId
from partition.plan.merging import Refused, merged_stages, stage_pace
from partition.plan.plan import Plan, StagePlan
from partition.plan.problem import Problem, Split
from partition.plan.rebalance import step_nanoseconds
from partition.plan.tables import Tables


@dataclass(frozen=True)
class Takers:
    """The node that takes each stage without a holder (`by_stage`), the resulting number of nodes, and the
    factor by which steps become slower."""

    by_stage: Mapping[int, PeerId]
    nodes: int
    slower: Fraction


def find_takers(
    plan: Plan, holders: Mapping[int, PeerId], rates: Mapping[PeerId, int], refused: Refused
) -> Takers | None:
    """Return the nodes that take the stages of `plan` that have no holder in `holders`; None if no node
    can."""
    rows: list[tuple[int, int, PeerId | None]] = []
    for number, stage in enumerate(plan.stages):
        holder = holders.get(number)
        if rows and holder is not None and rows[-1][2] == holder:
            rows[-1] = (rows[-1][0], stage.last_layer, holder)
        else:
            rows.append((stage.first_layer, stage.last_layer, holder))
    nobody = plan.stages[0].replicas
    spans = tuple(
        StagePlan(first, last, nobody if holder is None else (holder,), (1,)) for first, last, holder in rows
    )
    groups = [[] if holder is None else [(holder, max(1, rates.get(holder, 1)))] for _, _, holder in rows]
    merged = merged_stages(replace(plan, stages=spans), groups, refused)
    if merged is None:
        return None
    takers = {}
    for number, stage in enumerate(plan.stages):
        if number not in holders:
            span = next(row for row in merged if row.first_layer <= stage.first_layer < row.last_layer)
            takers[number] = PeerId(span.replicas[0])
    single = [replace(stage, rates=(max(1, rates.get(holders[number], 1)),)) for number, stage in
              enumerate(plan.stages) if number in holders]  # fmt: skip
    slower = max(map(stage_pace, merged)) / max(map(stage_pace, single))
    return Takers(takers, len(merged), slower)


def moves_that_pay(
    problem: Problem,
    plan: Plan,
    holders: Sequence[PeerId],
    free: Sequence[PeerId],
    *,
    steps_left: int,
    seconds: float,
    gain_percent_min: int,
    pause_nanoseconds: int,
) -> list[tuple[tuple[int, ...], PeerId]]:
    """Return the moves of stages to the `free` nodes that pay off, the best first. Each is the moved stages
    and the node that takes them.

    A move must shorten a step by `gain_percent_min`, and must gain twice the cost of its pause and copies if
    a step takes `seconds` now. `holders` has the holder of each stage. The first stage stays with its head,
    and a node that gives stages away keeps at least one.
    """
    tables = Tables(problem)
    places = {peer.name: place for place, peer in enumerate(problem.peers)}
    now = _step(problem, plan, holders, places, tables)
    found: list[tuple[int, tuple[int, ...], PeerId]] = []
    for first, end in combinations(range(1, len(holders) + 1), 2):
        given = tuple(range(first, end))
        if len({holders[stage] for stage in given}) > 1 or holders.count(holders[first]) <= len(given):
            continue
        layers = problem.layers[plan.stages[first].first_layer : plan.stages[end - 1].last_layer]
        moved = sum(layer.parameter_bytes for layer in layers) * (1 + problem.moments)
        cost = pause_nanoseconds + moved * 1_000_000_000 // max(1, problem.default_link.bytes_per_second)
        for peer in free:
            after = [*holders[:first], *[peer] * len(given), *holders[end:]]
            time = _step(problem, plan, after, places, tables)
            if now is None or time is None:
                continue
            gains = steps_left * seconds * 1e9 * (now - time) / now
            if 100 * now >= (100 + gain_percent_min) * time and 2 * cost <= gains:
                found.append((time, given, peer))
    return [(given, peer) for _, given, peer in sorted(found)]


def _step(
    problem: Problem, plan: Plan, holders: Sequence[PeerId], places: Mapping[str, int], tables: Tables
) -> int | None:
    """Return the nanoseconds of a step; None if a holder's stages are not adjacent."""
    ends = [n for n in range(1, len(holders)) if holders[n] != holders[n - 1]]
    spans = list(pairwise([0, *ends, len(holders)]))
    if len({holders[first] for first, _ in spans}) < len(spans):
        return None
    return step_nanoseconds(
        problem,
        Split(
            tuple(
                (plan.stages[first].first_layer, plan.stages[last - 1].last_layer) for first, last in spans
            ),
            tuple((places[holders[first].hex()],) for first, _ in spans),
            0,
            0,
        ),
        tables,
    )
