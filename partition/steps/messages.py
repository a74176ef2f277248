"""What trainer and replicas say to each other about a step, beside frames.

Every message names the plan by hash; a receiver drops what belongs to another plan. All are
idempotent: a repeat changes nothing, so after a broken stream everything unanswered is sent again.
"""

from math import isfinite
from typing import Annotated

import msgspec

from crypto.identity import PeerId
from partition.plan.plan import MICROBATCHES_MAX, REPLICAS_MAX, STAGES_MAX, Count, Hash, Peer
from partition.stage import METRICS_MAX

REASON_LENGTH_MAX = 300
DROPPED_MAX = STAGES_MAX * REPLICAS_MAX
EVALUATIONS_IN_FLIGHT_MAX = 32
"""Held-out micro-batches under way at once: enough to keep every stage busy, little to hold.

The trainer feeds no number this far past one it still waits for, so a replica forgets older ones.
"""


SAMPLES_MAX = 2**31
"""What one micro-batch may count: samples, or the tokens of a long text. A step has 4,096 of them at most."""


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base: the plan it belongs to."""

    plan: Hash


class Sync(StepMessage, frozen=True, kw_only=True, tag="sync"):
    """Trainer to replica: a plan has come into force; drop what is in flight and say where you are.

    `dropped` as in Drop: who was lost before every replica had answered.
    """

    dropped: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=DROPPED_MAX)] = ()


class Apply(StepMessage, frozen=True, kw_only=True, tag="apply"):
    """Trainer to replica: all have reduced; divide the totals by `samples` and step the optimizer.

    `squared_norm` is that of all stages' totals.
    """

    step: Count
    attempt: Count
    samples: Annotated[int, msgspec.Meta(ge=1, le=SAMPLES_MAX * MICROBATCHES_MAX)]
    squared_norm: float | None = None


class Synced(StepMessage, frozen=True, kw_only=True, tag="synced"):
    """Replica to trainer: `step` steps are applied; `reduced` the attempt held ready, `applied` the last."""

    step: Count
    reduced: Count | None
    applied: Apply | None


class Counted(StepMessage, frozen=True, kw_only=True, tag="counted"):
    """Replica to trainer: this micro-batch's gradient is in my sums.

    The last stage says the loss summed over `samples`; both are 0 from the others.
    """

    step: Count
    microbatch: Count
    stage: Annotated[int, msgspec.Meta(ge=0, lt=STAGES_MAX)]
    samples: Count
    loss: float


class Evaluated(StepMessage, frozen=True, kw_only=True, tag="evaluated"):
    """Last stage to trainer: one held-out micro-batch; `loss` and `metrics` are sums over its samples."""

    microbatch: Count
    samples: Count
    loss: float
    metrics: Annotated[tuple[float, ...], msgspec.Meta(max_length=METRICS_MAX)]

    @property
    def is_finite(self) -> bool:
        """Whether all its numbers are."""
        return isfinite(self.loss) and all(isfinite(value) for value in self.metrics)


class StageCommit(msgspec.Struct, frozen=True, array_like=True):
    """One replica of one stage, and the micro-batches its sums count."""

    stage: Annotated[int, msgspec.Meta(ge=0, lt=STAGES_MAX)]
    replica: Peer
    microbatches: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MICROBATCHES_MAX)]


class StepCommit(StepMessage, frozen=True, kw_only=True, tag="commit"):
    """Trainer to replica: what the step consists of. Each stage counts each micro-batch exactly once."""

    step: Count
    attempt: Count
    replicas: Annotated[tuple[StageCommit, ...], msgspec.Meta(max_length=DROPPED_MAX)]


class Reduced(StepMessage, frozen=True, kw_only=True, tag="reduced"):
    """Replica to trainer: I hold the total of my stage; `digest` is BLAKE3 of its bytes.

    `squared_norm` is that of the total, over the parameters the stage speaks for; infinite where it cannot be
    applied.
    """

    step: Count
    attempt: Count
    digest: Hash
    squared_norm: float | None = None


class Applied(StepMessage, frozen=True, kw_only=True, tag="applied"):
    """Replica to trainer: the optimizer has stepped; `digest` is BLAKE3 of the parameters."""

    step: Count
    digest: Hash


class Drop(StepMessage, frozen=True, kw_only=True, tag="drop"):
    """Trainer to replica: these peers are out, in this order; send again what now goes elsewhere.

    `step` is the step being counted: a reduction of it is void, one of an earlier step stands.
    """

    step: Count
    dropped: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=DROPPED_MAX)]


class Failed(StepMessage, frozen=True, kw_only=True, tag="failed"):
    """Replica to trainer: I cannot go on, and why."""

    reason: Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]


TrainerMessage = Sync | Apply | StepCommit | Drop
ReplicaMessage = Synced | Counted | Evaluated | Reduced | Applied | Failed

Sends = list[tuple[PeerId, object]]
