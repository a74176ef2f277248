"""Events of a committer for its driver."""

from collections.abc import Mapping
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.steps.messages import Apply, Work
from partition.steps.validation import Series


def divergence(what: str) -> str:
    """Return the failure text of a run with values that are not finite, and the settings that may help."""
    return f"{what}; a lower train.learning_rate, or train.clip_norm, may help"


@dataclass(frozen=True)
class StepApplied:
    """A step is final on every replica. `loss` is the mean over its samples.

    `work` is the work of each replica, by stage, in the plan's order; it is empty for replicas that
    applied the step under an earlier plan. `replicas` is the number of replicas that compute. A committer
    begins by reporting the last step before its own. If that step was reported already, `attempt` is the
    same. `diverged` is the reason why the step changed nothing, or empty; if it is set, `loss` and
    `samples` are 0."""

    step: int
    attempt: int
    loss: float
    samples: int
    replicas: int
    work: tuple[tuple[Work, ...], ...]
    diverged: str = ""


def no_number(what: str) -> str:
    """Return the failure text for one value that is not finite."""
    return divergence(f"{what} is no longer finite")


def step_applied(
    plan: Plan, apply: Apply, applied: Mapping[PeerId, Work], diverged: str = ""
) -> "StepApplied":
    """Return the event of the step that this Apply has ended, with the work of the replicas that `applied` it
    under this plan. `diverged` is why the step was skipped, if this committer knows."""
    work = tuple(tuple(applied.get(PeerId(peer), Work()) for peer in stage.replicas) for stage in plan.stages)
    replicas = sum(len(stage.computing) for stage in plan.stages)
    if apply.skipped:
        return StepApplied(
            apply.step, apply.attempt, 0.0, 0, replicas, work, diverged or "its values were not finite"
        )
    mean = apply.loss / apply.samples
    return StepApplied(apply.step, apply.attempt, mean, apply.samples, replicas, work)


@dataclass(frozen=True)
class MicrobatchesMoved:
    """`count` micro-batches of this replica were given to other replicas of its stage."""

    step: int
    stage: int
    peer: PeerId
    count: int


@dataclass(frozen=True)
class Resumed:
    """The run continues with `step`. Reported once per plan, when its first Open is made.

    `replayed` is the number of its micro-batches that are computed again, as far as visible (a micro-batch
    counts once for each such stage): no replica of the plan has begun them, although the next stage has begun
    them or the previous stage has counted them. `filled` are the replicas that took their state from others.
    """

    step: int
    replayed: int
    filled: tuple[PeerId, ...]


@dataclass(frozen=True)
class ReplicaRebuilt:
    """A replica had different parameters from its stage after `step` steps, and has taken over the stage's
    parameters."""

    step: int
    stage: int
    peer: PeerId


@dataclass(frozen=True)
class ReplicaFailed:
    """The run cannot continue with this replica, or with this trainer (`stage` is None): a plan without it is
    wanted.

    `step` is the step whose computation failed there; None for any other failure.
    """

    peer: PeerId
    stage: int | None
    reason: str
    step: int | None = None


@dataclass(frozen=True)
class StepsPaused:
    """`step` steps are applied, and no more steps are opened for now."""

    step: int


@dataclass(frozen=True)
class TrainingEvaluated:
    """All held-out samples have been evaluated. The values are sums over them."""

    samples: int
    loss: float
    metrics: tuple[float, ...]


@dataclass(frozen=True)
class Validated:
    """All validation samples have been evaluated with the state after `step` steps. `sums` are sums over
    them.

    `converged`: no further step is opened. `is_kept`: this state may become the result. A new committer may
    report the same validation again.
    """

    step: int
    sums: TrainingEvaluated
    series: Series
    converged: bool
    is_kept: bool


@dataclass(frozen=True)
class BestWanted:
    """All steps are done, and the state after `step` steps had the best validation: it must be restored."""

    step: int


@dataclass(frozen=True)
class TrainingFailed:
    """The run cannot continue under this plan, for this reason. `stage` is the stage without a holder, if
    that is the reason.

    `microbatch` is the micro-batch whose data the model cannot take, and whether it is for training.
    """

    reason: str
    stage: int | None = None
    microbatch: tuple[int, bool] | None = None


Event = (
    StepApplied
    | MicrobatchesMoved
    | Resumed
    | ReplicaRebuilt
    | ReplicaFailed
    | StepsPaused
    | TrainingEvaluated
    | Validated
    | BestWanted
    | TrainingFailed
)
