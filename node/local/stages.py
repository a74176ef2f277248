"""The cut of a model in local mode. It follows from the manifest and the graph alone, so all members have the
same stages."""

from itertools import accumulate, pairwise

from crypto.identity import PeerId
from gossip.averaging.aggregates import chosen, obstacle_of
from node.averaging.participation import Participation
from node.averaging.rounds import Gate
from node.averaging.service import Averaging
from node.averaging.signature import signature_of
from node.errors import UsageError
from node.protocols.manifest import Manifest, Run
from partition.model.cut import cut_layers
from partition.model.graph import Graph
from partition.plan.layer_costs import layer_costs
from partition.plan.plan import NO_HASH, Plan, StagePlan


def stage_count(run: Run) -> int:
    """Return the number of stages of the model; each member holds one of them."""
    return max(1, run.manifest.stages)


def stage_ranges(manifest: Manifest, graph: Graph) -> list[tuple[int, int]]:
    """Return the layers of each stage, with about equal work. Raises ValueError if there are fewer layers
    than stages, or stages would share a weight."""
    count, layers = max(1, manifest.stages), len(graph.layers)
    if count > layers:
        raise ValueError(f"a model of {layers} layers cannot be cut into {count} stages")
    if count == 1:
        return [(0, layers)]
    done = [0, *accumulate(1 + row.forward_flops for row in layer_costs(graph, manifest.sizes_max))]
    ends = [0]
    for number in range(1, count):
        wanted = done[-1] * number / count
        # Every stage needs at least one layer, including the later ones.
        possible = [
            end
            for end in range(ends[-1] + 1, layers - (count - number) + 1)
            if not any(first < end < last for first, last in manifest.together)
        ]
        if not possible:
            raise ValueError(
                f"the model cannot be cut into {count} stages without splitting layers that stay together"
            )
        ends.append(min(possible, key=lambda end: (abs(done[end] - wanted), end)))
    ends.append(layers)
    ranges = list(pairwise(ends))
    _check_ties(manifest, graph, ranges)
    return ranges


def roster_of(run: Run, stage: int) -> tuple[str, bytes]:
    """Return the name under which the holders of a stage average, and its signature. The run's id in the name
    also identifies the model and its training."""
    place = "" if stage_count(run) == 1 else f":{stage}"
    return f"run:{run.text}{place}", signature_of(f"run in local mode {run.id.hex()}{place}", ())


def open_part(averaging: Averaging, run: Run, stage: int, gate: Gate) -> Participation:
    """Join the averaging of a stage's holders, with the run's aggregation rule. Raises UsageError."""
    settings = run.manifest.local
    assert settings is not None, "a run in local mode"
    name, signature = roster_of(run, stage)
    obstacle = obstacle_of(settings.strategy, settings.codec)
    try:
        rule = chosen(settings.aggregate, is_private=averaging.is_private, obstacle=obstacle)
    except ValueError as error:
        raise UsageError(f"the run's manifest: {error}") from None
    return averaging.open(name, signature, gate, rule)


def local_plan(run: Run, graph: Graph, me: PeerId) -> Plan:
    """Return the stages, without holders, in the form that admission uses. Raises ValueError."""
    rows = tuple(StagePlan(first, last, (me,), (1,)) for first, last in stage_ranges(run.manifest, graph))
    return Plan(run.id, NO_HASH, 0, (me,), (me,), run.manifest.microbatches, rows)


def check_columns(manifest: Manifest, graph: Graph, name: str) -> None:
    """Raise UsageError if a run of several stages is impossible in local mode. `name` is the name of the
    RUN.toml."""
    if manifest.local is None or manifest.stages < 2:
        return
    try:
        stage_ranges(manifest, graph)
    except ValueError as error:
        raise UsageError(f"{name}: plan.stages {manifest.stages}: {error}", "plan.stages = 1") from None


def _check_ties(manifest: Manifest, graph: Graph, ranges: list[tuple[int, int]]) -> None:
    """Raise ValueError if several stages hold the same weight, because columns do not sum its gradients."""
    for stage in cut_layers(graph, manifest.graph_hash, ranges):
        if stage.tied:
            tied = graph.parameters[stage.tied[0]].names[0]
            raise ValueError(f"in local mode a weight must be in one stage, but {tied} would be in several")
