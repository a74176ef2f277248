"""Admission checks: a plan belongs to its run, a model to its manifest, a stage fits this machine.

The plan may be a stranger's, so the planner's arithmetic is repeated before anything is allocated. The
stage's own process measures its real needs by a dry run (`partition.execute.admit`). Cutting and counting
take time, so only `check_plan` may run on the event loop.
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
"""The entry point that is trained."""


@dataclass(frozen=True)
class Machine:
    """The resources that this node gives to a stage: cores, the device, the memory limit, and whether it may
    run without the fences that this system lacks."""

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
    """Return a run and a plan of it, by `sender`, with a part for this node. Raises RemoteProtocolError.

    Only the requester sends the first plan, and signs it (`history`) once it is in force. A member of its
    roster may also send a plan in force (`is_in_force`), since the requester may have died. A member of the
    roster brings a later plan to newcomers, with its history.
    """
    run, plan = check_run(signer, manifest), decode_plan(data)
    if (plan.run, plan.microbatches) != (run.id, run.manifest.microbatches):
        raise RemoteProtocolError("a plan that is not of its run")
    may_bring = sender in plan.roster
    if not plan.height:
        is_handed_on = is_in_force and history is not None and may_bring
        may_bring = run.requester == plan.committer and (sender == run.requester or is_handed_on)
    if not may_bring or signer.peer not in plan.roster:
        raise RemoteProtocolError("a plan that its sender may not bring here")
    if plan.height and history is None:
        raise RemoteProtocolError("a plan without its history")
    teller = sender if plan.height else run.requester
    if history is not None and replay(signer, run.requester, history) != (plan, teller):
        raise RemoteProtocolError("a plan with the history of another, or told by somebody else")
    return run, plan


def train_entry(graph: Graph) -> Entry:
    """The entry point that is trained. Raises RemoteProtocolError: the graph has none with a loss."""
    for entry in graph.entries:
        if entry.name == TRAIN and entry.loss is not None and entry is graph.entries[0]:
            return entry
    raise RemoteProtocolError("the model was captured without a loss, so it cannot be trained")


def check_model(manifest: Manifest, graph: Graph) -> None:
    """Check that a graph matches its manifest in more than the hash. Raises RemoteProtocolError."""
    entry = train_entry(graph)
    if not graph.symbols:
        raise RemoteProtocolError("the model was captured for a batch of one size only")
    check_sizes(graph.symbols, manifest.sizes_max)
    if tuple(metric.name for metric in entry.metrics) != manifest.metrics:
        raise RemoteProtocolError("a manifest whose metrics are not the model's")


def _check_layers(graph: Graph, plan: Plan) -> None:
    if plan.stages[-1].last_layer != len(graph.layers):
        raise RemoteProtocolError(f"a plan that does not end with layer {len(graph.layers)} of the model")


def cut_plan(graph: Graph, name: bytes, plan: Plan) -> tuple[StageGraph, ...]:
    """Every stage of a plan; else RemoteProtocolError."""
    _check_layers(graph, plan)
    ranges = [(stage.first_layer, stage.last_layer) for stage in plan.stages]
    try:
        return cut_layers(graph, name, ranges)
    except ValueError as error:
        raise RemoteProtocolError(f"a plan that does not fit its model: {error}") from None


def rejection_reason(run: Run, graph: Graph, plan: Plan, stage: int, machine: Machine) -> str | None:
    """Why this stage cannot be here, in words for a person; None if it can."""
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
            return f"weights tied between {members} replicas, at most {GROUP_MAX} can sum them up"
    return None


def needed_bytes(manifest: Manifest, graph: Graph, plan: Plan, stage: int) -> int:
    """Peak memory of a stage, by the planner's own formula. Raises ValueError: sizes that do not fit."""
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
    """Return how many micro-batches a stage has at most between forward and backward.

    A plan's schedule sends a stage as many as there are stages from it on. The head of a column has as many
    in flight as there are stages, and if a later stage is slow they all wait between the two passes of an
    earlier one.
    """
    if manifest.local is not None:
        return min(manifest.microbatches, stages)
    if manifest.pipeline == "gpipe":
        return manifest.microbatches
    return min(manifest.microbatches, stages - stage)


def input_frame_bytes(manifest: Manifest, graph: Graph) -> int:
    """The larger of the two frames by which a trainer feeds one micro-batch: inputs and labels."""
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
    """Return the specification for a stage's process, its reductions, and the specification's bytes.

    Raises:
        RemoteProtocolError: no such stage can be.
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
