"""The groups in which a stage sums: its own gradients over its replicas, and tied weights over several
stages.

The members and the layout follow from graph and plan, so every replica computes the same groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partition.model.graph import StageGraph
from partition.stage import StageSpecification
from partition.stage_layout import parameter_layout


@dataclass(frozen=True)
class Share:
    """One group of elements: `spans` of the arena that are summed over the replicas of `stages`.

    `name` is 0 for a stage's own elements. For tied weights it is 1 + the first of their rows, which is the
    same for all stages that share them.
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
            # Rows come in order, so every stage lines them up in the same way.
            span = (slot.offset, slot.offset + slot.size)
            tied.setdefault(holders[slot.row], []).append((slot.row, span))
        else:
            own = slot.offset + slot.size
    found = [Share(0, (index,), ((0, own),))]
    for stages, rows in tied.items():
        found.append(Share(1 + rows[0][0], stages, tuple(span for _, span in rows)))
    return tuple(found)
