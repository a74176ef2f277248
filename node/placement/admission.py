"""Admission checks: whether a plan belongs to its run, a model to its manifest, and a stage fits this
machine.

The plan may come from an unknown peer, so the planner's arithmetic is repeated before anything is allocated.
The stage's own process measures its real needs with a dry run (`partition.execute.admit`). Cutting and
counting take time, so only `check_plan` may run on the event loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from gossip.allreduce import GROUP_MAX
from node.protocols.manifest import Manifest, Run, check_run
from partition.model.cut import cut_layers
from partition.model.graph import ITEM_BYTES, Entry, Graph, StageGraph
from partition.model.sizes import check_sizes, evaluate, shape_of
from partition.plan.cost import stage_memory_bytes
from partition.plan.history import History, replay
from partition.plan.layer_costs import layer_costs
from partition.plan.plan import Plan, decode_plan
from partition.stage import StageSpecification
from partition.steps.shares import Share, shares

TRAIN = "train"
"""Name of the entry point that is trained."""


@dataclass(frozen=True)
class Machine:
    """The resources that this node gives to a stage: cores, the device, the memory limit, and whether the
    stage may run without fences that this system lacks."""

    threads: int
    device: str
    memory_bytes: int
    allow_unfenced: bool = False


def check_plan(
    signer: Signer,
    manifest: Fact,
    data: bytes,
    history: History | None,
    sender: PeerId,
    *,
    is_in_force: bool = False,
) -> tuple[Run, Plan]:
    """Return a run and a plan of it that `sender` brought and in which this node has a part. Raises
    RemoteProtocolError.

    Only the requester sends the first plan, and signs it (`history`) once it is in force. A member of its
    roster may also send a plan in force (`is_in_force`), since the requester may have died. Later plans are
    brought to newcomers by a member of the roster, with their history.
    """
    run, plan = check_run(signer, manifest), decode_plan(data)
    if (plan.run, plan.microbatches) != (run.id, run.manifest.microbatches):
        raise RemoteProtocolError("the plan does not belong to its run")
    may_bring = sender in plan.roster
    if not plan.height:
        is_handed_on = is_in_force and history is not None and may_bring
        may_bring = run.requester == plan.committer and (sender == run.requester or is_handed_on)
    if not may_bring or signer.peer not in plan.roster:
        raise RemoteProtocolError("the sender may not bring this plan here")
    if plan.height and history is None:
        raise RemoteProtocolError("a plan without its history")
    teller = sender if plan.height else run.requester
    if history is not None and replay(signer, run.requester, history) != (plan, teller):
        raise RemoteProtocolError(
            "the history belongs to a different plan, or was signed by a different peer"
        )
    return run, plan


def train_entry(graph: Graph) -> Entry:
    """Return the entry point that is trained. Raises RemoteProtocolError if the graph has none with a
    loss."""
    for entry in graph.entries:
        if entry.name == TRAIN and entry.loss is not None and entry is graph.entries[0]:
            return entry
    raise RemoteProtocolError("the model was captured without a loss, so it cannot be trained")


def check_model(manifest: Manifest, graph: Graph) -> None:
    """Check that a graph matches its manifest in its sizes and metrics. Raises RemoteProtocolError."""
    entry = train_entry(graph)
    if not graph.symbols:
        raise RemoteProtocolError("the model was captured for only one batch size")
    check_sizes(graph.symbols, manifest.sizes_max)
    if tuple(metric.name for metric in entry.metrics) != manifest.metrics:
        raise RemoteProtocolError("the manifest's metrics are not the model's")


def _check_layers(graph: Graph, plan: Plan) -> None:
    if plan.stages[-1].last_layer != len(graph.layers):
        raise RemoteProtocolError(f"the plan does not end with layer {len(graph.layers)} of the model")


def cut_plan(graph: Graph, name: bytes, plan: Plan) -> tuple[StageGraph, ...]:
    """Return the graphs of all stages of a plan. Raises RemoteProtocolError if the plan does not fit."""
    _check_layers(graph, plan)
    ranges = [(stage.first_layer, stage.last_layer) for stage in plan.stages]
    try:
        return cut_layers(graph, name, ranges)
    except ValueError as error:
        raise RemoteProtocolError(f"the plan does not fit its model: {error}") from None


def rejection_reason(run: Run, graph: Graph, plan: Plan, stage: int, machine: Machine) -> str | None:
    """Return why this stage cannot be placed here, as a text for people; None if it can."""
    _row, manifest = plan.stages[stage], run.manifest
    try:
        check_model(manifest, graph)
        _check_layers(graph, plan)
        needed = needed_bytes(manifest, graph, plan, stage)
    except (RemoteProtocolError, ValueError) as error:
        return str(error)
    if needed > machine.memory_bytes:
        return f"{needed / 1e9:.2f} GB of memory needed, {machine.memory_bytes / 1e9:.2f} GB offered"
    # The slowest check comes last.
    try:
        graphs = cut_plan(graph, manifest.graph_hash, plan)
        specification = make_specification(run, graphs, stage, machine)
    except RemoteProtocolError as error:
        return str(error)
    for share in shares(specification, graphs):
        members = sum(len(plan.stages[index].replicas) for index in share.stages)
        if members > GROUP_MAX:
            return f"weights are tied between {members} replicas; at most {GROUP_MAX} can sum them up"
    return None


def needed_bytes(manifest: Manifest, graph: Graph, plan: Plan, stage: int) -> int:
    """Return the peak memory of a stage, with the planner's own formula. Raises ValueError if sizes do not
    fit."""
    row = plan.stages[stage]
    before = min(1, row.first_layer)
    layers = layer_costs(graph, manifest.sizes_max, row.first_layer - before, row.last_layer)
    return stage_memory_bytes(
        layers[before:],
        _microbatches_in_flight(manifest, len(plan.stages), stage),
        recompute=manifest.recompute,
        moments=manifest.optimizer.moments,
        input_bytes=layers[0].output_bytes if before else input_frame_bytes(manifest, graph),
        microbatches=manifest.microbatches,
    )


def _microbatches_in_flight(manifest: Manifest, stages: int, stage: int) -> int:
    """Return the maximum number of micro-batches of a stage between forward and backward.

    A plan's schedule has as many in flight at a stage as there are stages from it to the last. The head of a
    column has as many in flight as there are stages; if a later stage is slow, all of them may wait between
    the two passes of an earlier stage.
    """
    if manifest.local is not None:
        return min(manifest.microbatches, stages)
    if manifest.pipeline == "gpipe":
        return manifest.microbatches
    return min(manifest.microbatches, stages - stage)


def input_frame_bytes(manifest: Manifest, graph: Graph) -> int:
    """Return the size of the larger of the two frames with which a trainer feeds one micro-batch: inputs and
    labels."""
    entry = train_entry(graph)
    values = evaluate(graph.expressions, manifest.sizes_max)
    largest = 0
    for ports in (entry.inputs, entry.labels):
        kinds = [graph.types[port.type] for port in ports]
        largest = max(largest, sum(prod(shape_of(kind, values)) * ITEM_BYTES[kind.dtype] for kind in kinds))
    return largest


def build_stage_spec(
    run: Run, graph: Graph, plan: Plan, stage: int, machine: Machine
) -> tuple[StageSpecification, tuple[Share, ...], bytes]:
    """Return the specification for a stage's process, the stage's reductions, and the encoded specification.

    Raises:
        RemoteProtocolError: the stage is not possible.
    """
    graphs = cut_plan(graph, run.manifest.graph_hash, plan)
    specification = make_specification(run, graphs, stage, machine)
    return specification, shares(specification, graphs), encode(specification)


def make_specification(
    run: Run, graphs: Sequence[StageGraph], stage: int, machine: Machine
) -> StageSpecification:
    """Return the specification for a stage's process. Raises RemoteProtocolError."""
    manifest = run.manifest
    try:
        return StageSpecification(
            run=run.random_key,
            graph=graphs[stage],
            sizes_max=manifest.sizes_max,
            microbatches=manifest.microbatches,
            seed=manifest.seed,
            optimizer=manifest.optimizer,
            autocast=manifest.autocast,
            recompute=manifest.recompute,
            threads=machine.threads,
            device=machine.device,
            memory_bytes_max=max(1, machine.memory_bytes),
            allow_unfenced=machine.allow_unfenced,
        )
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from None
