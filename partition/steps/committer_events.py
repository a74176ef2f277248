"""Events of a committer for its shell."""

from collections.abc import Mapping
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.steps.messages import Apply, Work
from partition.steps.validation import Series


def divergence(what: str) -> str:
    """Return the failure text of a run with numbers that are not finite, and what may help."""
    return f"{what}; a lower train.learning_rate, or train.clip_norm, may help"


@dataclass(frozen=True)
class StepApplied:
    """A step is final on every replica. `loss` is the mean over its samples.¶ `work` is the work of each
    replica, by stage, in the plan's order; nothing for those that applied it under an earlier plan.
    `replicas` are those that compute. A committer begins with the last step before its own, which may have
    been reported already: then `attempt` is the same. `diverged` is why the step changed nothing, empty where
    it did; if set, `loss` and `samples` are 0."""

    step: int
    attempt: int
    loss: float
    samples: int
    replicas: int
    work: tuple[tuple[Work, ...], ...]
    diverged: str = ""


def no_number(what: str) -> str:
    """Return the same for one number."""
    return divergence(f"{what} is no finite number any more")


def step_applied(
    plan: Plan, apply: Apply, applied: Mapping[PeerId, Work], diverged: str = ""
) -> "StepApplied":
    """Return the event of a step that this Apply ended, with the work of the replicas that `applied` it under
    this plan. `diverged` is why it was skipped, where this committer knows."""
    work = tuple(tuple(applied.get(PeerId(peer), Work()) for peer in stage.replicas) for stage in plan.stages)
    replicas = sum(len(stage.computing) for stage in plan.stages)
    if apply.skipped:
        return StepApplied(
            apply.step, apply.attempt, 0.0, 0, replicas, work, diverged or "its numbers were not finite"
        )
    mean = apply.loss / apply.samples
    return StepApplied(apply.step, apply.attempt, mean, apply.samples, replicas, work)


@dataclass(frozen=True)
class MicrobatchesMoved:
    """`count` micro-batches of this replica went to the others of its stage."""

    step: int
    stage: int
    peer: PeerId
    count: int


@dataclass(frozen=True)
class Resumed:
    """Once per plan, when its first Open is made: the run goes on with `step`.

    `replayed` micro-batches of it are computed again (one in two stages counts twice), as far as visible: no
    replica of the plan has begun them, though the next stage has begun them or the previous one has counted
    them. `filled` have taken their stage from others.
    """

    step: int
    replayed: int
    filled: tuple[PeerId, ...]


@dataclass(frozen=True)
class ReplicaRebuilt:
    """A replica held other parameters than its stage after `step` steps, and has taken theirs."""

    step: int
    stage: int
    peer: PeerId


@dataclass(frozen=True)
class ReplicaFailed:
    """The run cannot go on with this replica, or trainer (`stage` is None): a plan without it is wanted.

    `step` is the one whose computation failed there; None for another failure.
    """

    peer: PeerId
    stage: int | None
    reason: str
    step: int | None = None


@dataclass(frozen=True)
class StepsPaused:
    """`step` steps are applied, and no more are opened under this plan."""

    step: int


@dataclass(frozen=True)
class TrainingEvaluated:
    """All held-out samples have been evaluated: sums over them."""

    samples: int
    loss: float
    metrics: tuple[float, ...]


@dataclass(frozen=True)
class Validated:
    """All validation samples have been evaluated with the state after `step` steps: sums over them.

    `converged`: no further step is opened. `is_kept`: this state may become the result. A new committer may
    report it again.
    """

    step: int
    sums: TrainingEvaluated
    series: Series
    converged: bool
    is_kept: bool


@dataclass(frozen=True)
class BestWanted:
    """All steps are done, and the state after `step` steps validated best: it has to be restored."""

    step: int


@dataclass(frozen=True)
class TrainingFailed:
    """The run cannot go on under this plan, and why; `stage` is the one without a holder, if that is the
    reason.

    `microbatch` is the one whose data the model does not take, and whether it is for training.
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
