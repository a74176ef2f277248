"""How a run in local mode cuts its model: the same stages for all, from the manifest and the graph alone."""

from itertools import accumulate, pairwise

from crypto.identity import PeerId
from node.protocols.manifest import Run
from partition.model.graph import Graph
from partition.plan.layer_costs import layer_costs
from partition.plan.plan import NO_HASH, Plan, StagePlan
from partition.stage import StageSpecification, parameter_layout


def stage_count(run: Run) -> int:
    """Return in how many stages the model is held: each member has one of them."""
    return max(1, run.manifest.stages)


def stage_ranges(run: Run, graph: Graph) -> list[tuple[int, int]]:
    """Return the layers of each stage, of about equal work. Raises ValueError: fewer layers than stages."""
    count, layers = stage_count(run), len(graph.layers)
    if count > layers:
        raise ValueError(f"a model of {layers} layers cannot be cut into {count} stages")
    if count == 1:
        return [(0, layers)]
    done = [0, *accumulate(1 + row.forward_flops for row in layer_costs(graph, run.manifest.sizes_max))]
    ends = [0]
    for number in range(1, count):
        wanted = done[-1] * number / count
        # Every stage, also those to come, has a layer at least.
        possible = [
            end
            for end in range(ends[-1] + 1, layers - (count - number) + 1)
            if not any(first < end < last for first, last in run.manifest.together)
        ]
        if not possible:
            raise ValueError(f"the model cannot be cut into {count} stages beside what stays together")
        ends.append(min(possible, key=lambda end: (abs(done[end] - wanted), end)))
    ends.append(layers)
    return list(pairwise(ends))


def local_plan(run: Run, graph: Graph, me: PeerId) -> Plan:
    """The stages in the form that admission knows; who holds them is not in it. Raises ValueError."""
    rows = tuple(StagePlan(first, last, (me,), (1,)) for first, last in stage_ranges(run, graph))
    return Plan(run.id, NO_HASH, 0, (me,), (me,), run.manifest.microbatches, rows)


def tied_name(specification: StageSpecification) -> str:
    """Return the name of a weight that other stages hold too, empty where there is none."""
    return next((slot.name for slot in parameter_layout(specification) if slot.is_tied), "")
