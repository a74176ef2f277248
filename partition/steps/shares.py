"""The groups in which a stage sums: its own gradients over its replicas, tied weights over several stages.

Members and layout follow from graph and plan, so every replica finds the same groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partition.model.graph import StageGraph
from partition.stage import StageSpecification
from partition.stage_layout import parameter_layout


@dataclass(frozen=True)
class Share:
    """One group of elements: `spans` of the arena, summed over the replicas of `stages`.

    `name` is 0 for a stage's own elements, else 1 + the first of the rows: the same for all sharers.
    """

    name: int
    stages: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def shares(specification: StageSpecification, graphs: Sequence[StageGraph]) -> tuple[Share, ...]:
    """Return the groups in which a stage sums; `graphs` are all stages of the plan."""
    index = specification.graph.index
    holders: dict[int, tuple[int, ...]] = {}
    for row in specification.graph.tied:
        holders[row] = tuple(graph.index for graph in graphs if row in graph.rows)
    own = 0
    tied: dict[tuple[int, ...], list[tuple[int, tuple[int, int]]]] = {}
    for slot in parameter_layout(specification):
        if slot.parameter.kind == "frozen":
            continue
        if slot.is_tied:
            # Rows come in their order, so every stage lines them up alike.
            span = (slot.offset, slot.offset + slot.size)
            tied.setdefault(holders[slot.row], []).append((slot.row, span))
        else:
            own = slot.offset + slot.size
    found = [Share(0, (index,), ((0, own),))]
    for stages, rows in tied.items():
        found.append(Share(1 + rows[0][0], stages, tuple(span for _, span in rows)))
    return tuple(found)
