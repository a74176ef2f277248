"""Assembly of the stages of a graph, once the nodes and values of each are known.

No torch. A stage holds the parameters, constants and states that its nodes use. A parameter that no node of
any stage uses (a head that does not contribute to the loss) stays with the stage where its nodes were, and a
named constant with the first stage. So the stages together hold the model's whole state dict.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from partition.model.dataflow import MOMENTUM, RUNNING_MEAN, Flow, NodePlaces
from partition.model.graph import (
    ConstantValue,
    Graph,
    Index,
    ParameterValue,
    StageEntry,
    StageGraph,
    arguments_of,
)


@dataclass
class EntryPart:
    """One entry point in one stage: value ids, and nodes by number, ascending."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    nodes: tuple[int, ...]
    backward_inputs: tuple[int, ...] = ()
    backward_outputs: tuple[int, ...] = ()


def assemble(
    graph: Graph,
    name: bytes,
    flows: Sequence[Flow],
    places: NodePlaces,
    positions: Sequence[int],
    parts: Sequence[Sequence[EntryPart]],
) -> tuple[StageGraph, ...]:
    """Return the stages; `parts` are indexed by entry point and stage."""
    stages = range(len(positions) + 1)
    rows = _parameter_rows(graph, flows, places, positions, parts)
    holders: dict[int, list[int]] = {}
    for stage in stages:
        for row in rows[stage]:
            holders.setdefault(row, []).append(stage)
    constants = _constant_rows(graph, flows, parts)
    states: list[list[int]] = [[] for _ in stages]
    for row in range(len(graph.states)):
        states[bisect_right(positions, places.homes.get(("s", row), -1))].append(row)
    statistics = [_statistics(flow) for flow in flows]
    moves = [_moves(flow, found) for flow, found in zip(flows, statistics, strict=True)]
    return tuple(
        StageGraph(
            graph=name,
            index=stage,
            stages=len(stages),
            symbols=graph.symbols,
            expressions=graph.expressions,
            types=graph.types,
            operators=graph.operators,
            owners=graph.owners,
            rows=rows[stage],
            parameters=tuple(graph.parameters[row] for row in rows[stage]),
            tied=tuple(row for row in rows[stage] if len(holders[row]) > 1),
            borrowed=tuple(row for row in rows[stage] if holders[row][0] < stage),
            constant_rows=constants[stage],
            constants=tuple(graph.constants[row] for row in constants[stage]),
            state_rows=tuple(states[stage]),
            states=tuple(graph.states[row] for row in states[stage]),
            entries=tuple(
                _stage_entry(
                    flow, own[stage], found, to_move, rows[stage], states[stage], is_last=stage == stages[-1]
                )
                for flow, own, found, to_move in zip(flows, parts, statistics, moves, strict=True)
            ),
        )
        for stage in stages
    )


def _parameter_rows(
    graph: Graph,
    flows: Sequence[Flow],
    places: NodePlaces,
    positions: Sequence[int],
    parts: Sequence[Sequence[EntryPart]],
) -> list[tuple[int, ...]]:
    held: list[set[int]] = [set() for _ in range(len(positions) + 1)]
    for flow, own in zip(flows, parts, strict=True):
        for stage, part in enumerate(own):
            for number in part.nodes:
                held[stage].update(row for table, row in flow.keys[number] if table == "p")
    everywhere = set[int]().union(*held)
    for row in range(len(graph.parameters)):
        if row not in everywhere:
            held[bisect_right(positions, places.homes.get(("p", row), -1))].add(row)
    return [tuple(sorted(rows)) for rows in held]


def _constant_rows(
    graph: Graph, flows: Sequence[Flow], parts: Sequence[Sequence[EntryPart]]
) -> list[tuple[int, ...]]:
    held: list[set[int]] = [set() for _ in parts[0]]
    for flow, own in zip(flows, parts, strict=True):
        for stage, part in enumerate(own):
            for number in part.nodes:
                for argument in arguments_of(flow.entry.nodes[number]):
                    if isinstance(argument, ConstantValue):
                        held[stage].add(argument.row)
    everywhere = set[int]().union(*held)
    held[0].update(
        row for row, constant in enumerate(graph.constants) if constant.names and row not in everywhere
    )
    return [tuple(sorted(rows)) for rows in held]


def _statistics(flow: Flow) -> dict[int, tuple[Index, Index, Index]]:
    """Return, by node: its id, its position among the uses of its running statistics, and the number of
    uses."""
    uses: dict[int, list[int]] = {}
    for number in flow.rooted:
        mean = flow.entry.nodes[number].arguments[RUNNING_MEAN]
        if isinstance(mean, ParameterValue):
            uses.setdefault(mean.row, []).append(number)
    return {
        number: (flow.entry.nodes[number].id, place, len(numbers))
        for numbers in uses.values()
        for place, number in enumerate(numbers)
    }


def _stage_entry(
    flow: Flow,
    part: EntryPart,
    statistics: dict[int, tuple[Index, Index, Index]],
    moves: dict[int, tuple[Index, float, Index]],
    rows: Sequence[int],
    states: Sequence[int],
    *,
    is_last: bool,
) -> StageEntry:
    entry = flow.entry
    own_states = frozenset(states)
    moved_here = {row for number in part.nodes if number in statistics for row in _moved_rows(flow, number)}
    first_label = len(entry.inputs)
    labels = tuple(range(first_label, first_label + len(entry.labels))) if is_last else ()
    made = (value for number in part.nodes for value in entry.nodes[number].outputs)
    known = sorted({*part.inputs, *labels, *made})
    return StageEntry(
        name=entry.name,
        inputs=part.inputs,
        labels=labels,
        nodes=tuple(entry.nodes[number] for number in part.nodes),
        outputs=part.outputs,
        backward_inputs=part.backward_inputs,
        backward_outputs=part.backward_outputs,
        types=tuple((value, entry.types[value]) for value in known),
        loss=entry.loss if is_last else None,
        count=entry.count if is_last else None,
        metrics=entry.metrics if is_last else (),
        updates=tuple((row, value) for row, value in entry.updates if row in own_states),
        statistics=tuple(statistics[number] for number in part.nodes if number in statistics),
        moved=tuple(moves[row] for row in rows if row in moves and row not in moved_here),
    )


def _moves(
    flow: Flow, statistics: dict[int, tuple[Index, Index, Index]]
) -> dict[int, tuple[Index, float, Index]]:
    """Return, by row of a batch statistic: the row, the momentum of the norms that update it, and their
    number."""
    found: dict[int, tuple[Index, float, Index]] = {}
    for number, (_, _, uses) in statistics.items():
        arguments = flow.entry.nodes[number].arguments
        momentum = arguments[MOMENTUM] if len(arguments) > MOMENTUM else None
        if isinstance(momentum, int | float):
            found.update({row: (row, float(momentum), uses) for row in _moved_rows(flow, number)})
    return found


def _moved_rows(flow: Flow, number: int) -> list[int]:
    pair = flow.entry.nodes[number].arguments[RUNNING_MEAN : RUNNING_MEAN + 2]
    return [statistic.row for statistic in pair if isinstance(statistic, ParameterValue)]
