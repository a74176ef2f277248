"""What is let in here: a plan that is of its run, and a stage that fits its model and this machine.

The plan may be a stranger's, so the planner's arithmetic is done again before anything is allocated.
"""

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from node.runs.manifest import Run, check_run
from node.runs.placement import layer_costs
from partition.plan.cost import stage_memory_bytes
from partition.plan.plan import Plan, decode_plan
from partition.stage import StageSpecification


def check_plan(signer: Signer, manifest: Fact, data: bytes, planner: PeerId) -> tuple[Run, Plan]:
    """A run and a plan of it by `planner` with a part for this node; else RemoteProtocolError."""
    run, plan = check_run(signer, manifest), decode_plan(data)
    asked = (run.id, run.requester, run.manifest.microbatches)
    if (plan.run, plan.requester, plan.microbatches) != asked:
        raise RemoteProtocolError("a plan that is not of its run")
    if plan.planner != planner or signer.peer not in plan.members:
        raise RemoteProtocolError("a plan that its sender may not bring here")
    return run, plan


def misfit(run: Run, plan: Plan, stage: int, memory_bytes: int) -> str | None:
    """Why this stage cannot be here, in words for a person; None if it can."""
    row, manifest = plan.stages[stage], run.manifest
    try:
        make_specification(run, plan, stage, threads=1, device="cpu")
    except ValueError as error:
        return str(error)
    layers = layer_costs(manifest)[row.first_layer : row.last_layer]
    needed = stage_memory_bytes(layers, manifest.microbatch * manifest.microbatches)
    if needed > memory_bytes:
        return f"{needed / 1e9:.2f} GB of memory needed, {memory_bytes / 1e9:.2f} GB offered"
    return None


def make_specification(run: Run, plan: Plan, stage: int, *, threads: int, device: str) -> StageSpecification:
    """What a stage process needs to know. Raises ValueError where the stage does not fit the model."""
    manifest, row = run.manifest, plan.stages[stage]
    return StageSpecification(
        run=run.random_key,
        model=manifest.model,
        sample_shape=manifest.sample_shape,
        classes=manifest.classes,
        first_layer=row.first_layer,
        last_layer=row.last_layer,
        dtype=manifest.dtype,
        seed=manifest.seed,
        optimizer=manifest.optimizer,
        threads=threads,
        device=device,
        samples_max=manifest.microbatch,
        codec=manifest.codec,
    )
