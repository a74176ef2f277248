"""Creates the events that announce plans and runs to people."""

from crypto.identity import PeerId
from node.events import RunAccepted, RunEnded, RunPlanned, StageLeased
from node.protocols.manifest import Run
from partition.plan.plan import NO_HASH, Plan, committee, plan_hash
from partition.plan.quorum import indispensable


def run_planned(at: float, run: Run, plan: Plan) -> RunPlanned:
    """Return the event that `plan` came into force on this node at the wall time `at`."""
    waits = run.manifest.on_lost_quorum != "fork"
    return RunPlanned(
        at=at,
        run=run.text,
        plan=plan_hash(plan).hex()[:16],
        height=plan.height,
        trainer=plan.committer,
        planner=committee(plan)[0],
        layers=tuple((stage.first_layer, stage.last_layer) for stage in plan.stages),
        stages=tuple(tuple(PeerId(peer) for peer in stage.replicas) for stage in plan.stages),
        trainers=tuple(PeerId(peer) for peer in plan.trainers),
        witnesses=plan.witnesses,
        pauses_without=indispensable(plan, run.tie_breaker) if waits else (),
        restored_step=plan.step if plan.restored != NO_HASH else None,
        standbys=plan.standbys,
    )


def stage_leased(at: float, run: Run, plan: Plan, stage: int) -> StageLeased:
    """Return the event that this node is opening a stage of `plan`."""
    row = plan.stages[stage]
    return StageLeased(at=at, run=run.text, stage=stage, layers=(row.first_layer, row.last_layer))


def run_accepted(at: float, run: Run) -> RunAccepted:
    """Return the event for a run that this node takes part in or requests."""
    manifest = run.manifest
    return RunAccepted(
        at=at,
        run=run.text,
        model=manifest.model,
        data=manifest.data,
        steps=manifest.steps,
        requester=run.requester,
        metrics=manifest.metrics,
    )


def run_ended(at: float, run: Run, outcome: str, detail: str, weights: str, *, is_here: bool) -> RunEnded:
    """Return the event that a run has ended on this node; `is_here`: its result is on this node."""
    return RunEnded(at=at, run=run.text, outcome=outcome, detail=detail, weights=weights, is_here=is_here)
