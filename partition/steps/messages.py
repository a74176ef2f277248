"""Messages between committer, trainers and replicas about a step, beside frames.

Every message names the plan by hash; a receiver drops messages of another plan. All are idempotent: a repeat
changes nothing, so after a broken stream everything unanswered is sent again.
"""

from math import isfinite
from typing import Annotated

import msgspec

from crypto.facts import Fact
from crypto.identity import PeerId
from partition.plan.plan import (
    MICROBATCHES_MAX,
    NO_HASH,
    REPLICAS_MAX,
    STAGES_MAX,
    Count,
    Hash,
    Peer,
    StageNumber,
    StepNumber,
)
from partition.stage import METRICS_MAX
from partition.steps.validation import Series

REASON_LENGTH_MAX = 300
ROWS_MAX = STAGES_MAX * REPLICAS_MAX
EVALUATIONS_IN_FLIGHT_MAX = 32
"""Held-out micro-batches under way at once: enough to keep every stage busy, little to hold."""
SKIPPED_MAX = 10
"""Diverged steps in a row that a run may skip: more skips would not bring it back."""
RATE_MAX = 10**12
"""A factor of a million on the learning rate: larger ones end a run at once."""
RATE_UNIT = 10**6
SAMPLES_MAX = 2**31
"""The most that one micro-batch may count: samples, or the tokens of a long text. A step has at most 4,096
micro-batches."""

WorkCount = Annotated[int, msgspec.Meta(ge=0, le=2**46)]
"""The most bytes of one replica in a step, 70 TB: the sum over a stage is still a number for JSON."""
Numbers = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MICROBATCHES_MAX)]


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base: the plan that the message belongs to."""

    plan: Hash


class Sync(StepMessage, frozen=True, kw_only=True, tag="sync"):
    """Committer to replica: a plan has come into force; report your state."""


class Apply(StepMessage, frozen=True, kw_only=True, tag="apply"):
    """Committer to replica: all have reduced; divide the totals by `samples` and step the optimizer.

    `squared_norm` is that of all stages' totals. `loss` is summed over the samples: a successor that has to
    finish the step knows it only from here.

    `skipped` above 0: the step diverged and changes nothing, with as many steps in a row as this, itself
    counted. It needs no totals, and `samples` and `loss` mean nothing. `rate`, in millionths, multiplies the
    learning rate of this step: the effect of a revision, the same on all replicas because it is sent here.
    `validated` is the series of validations up to this step, so that the next committer goes on with it.
    """

    step: StepNumber
    attempt: Count
    samples: Annotated[int, msgspec.Meta(ge=1, le=SAMPLES_MAX * MICROBATCHES_MAX)]
    squared_norm: float | None = None
    loss: float = 0.0
    skipped: Annotated[int, msgspec.Meta(ge=0, le=SKIPPED_MAX)] = 0
    rate: Annotated[int, msgspec.Meta(ge=0, le=RATE_MAX)] = RATE_UNIT
    validated: Series | None = None


class Synced(StepMessage, frozen=True, kw_only=True, tag="synced"):
    """Replica to committer: its state.

    `step` steps are applied, or None where it has nothing yet: it has just joined. `counted` are the
    micro-batches of the open step whose gradients are in its sums; `samples` and `losses` are those of each,
    0 but on the last stage. `begun` are between their two passes there. `reduced` is the attempt whose total
    it holds ready, `applied` its last Apply, `digest` that of its parameters, NO_HASH where it knows none.
    `pace_nanoseconds` is the time of a micro-batch here, 0 where none was applied yet.
    """

    step: StepNumber | None
    counted: Numbers = ()
    samples: Numbers = ()
    losses: Annotated[tuple[float, ...], msgspec.Meta(max_length=MICROBATCHES_MAX)] = ()
    begun: Numbers = ()
    reduced: Count | None = None
    applied: Apply | None = None
    digest: Hash = NO_HASH
    pace_nanoseconds: Count = 0


class StageRoutes(msgspec.Struct, frozen=True, array_like=True):
    """Owners of one stage's micro-batches: for each position of the opened range, its replica's place.

    `counted` are the numbers that are in the owner's sums already: no frame needs to be sent for them.
    """

    owners: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MICROBATCHES_MAX)]
    counted: Numbers = ()


class Open(StepMessage, frozen=True, kw_only=True, tag="open"):
    """Committer to replicas and trainers: the micro-batches to compute, and their owners.

    For training, all of step `step`; for evaluation (`train` false), any range of held-out ones: those for
    validation come first, then those for the test. A step may be validated before it is opened. A higher
    `attempt` replaces the routes of the same step: a sender whose receiver is no longer the owner sends the
    same bytes to the new owner, and a replica that has summed a micro-batch it does not own takes it out
    again.
    """

    step: StepNumber
    attempt: Count
    train: bool
    first: Count
    stages: Annotated[tuple[StageRoutes, ...], msgspec.Meta(min_length=1, max_length=STAGES_MAX)]


class Progress(StepMessage, frozen=True, kw_only=True, tag="progress"):
    """Replica to committer: the forward pass of this micro-batch is done here, its output is on its way.
    `train` is False where it is held out."""

    step: StepNumber
    microbatch: Count
    stage: StageNumber
    train: bool = True


class Counted(StepMessage, frozen=True, kw_only=True, tag="counted"):
    """Replica to committer: this micro-batch's gradient is in my sums.

    The last stage says the loss summed over `samples`; both are 0 from the others.
    """

    step: StepNumber
    microbatch: Count
    stage: StageNumber
    samples: Count
    loss: float


class Evaluated(StepMessage, frozen=True, kw_only=True, tag="evaluated"):
    """Last stage to committer: one held-out micro-batch, with the parameters after `step` steps; `loss` and
    `metrics` are sums over its samples."""

    step: StepNumber
    microbatch: Count
    samples: Count
    loss: float
    metrics: Annotated[tuple[float, ...], msgspec.Meta(max_length=METRICS_MAX)]

    @property
    def is_finite(self) -> bool:
        """Whether all its numbers are finite."""
        return isfinite(self.loss) and all(isfinite(value) for value in self.metrics)


class StageCommit(msgspec.Struct, frozen=True, array_like=True):
    """One replica of one stage, and the micro-batches its sums count."""

    stage: StageNumber
    replica: Peer
    microbatches: Numbers


class StepCommit(StepMessage, frozen=True, kw_only=True, tag="commit"):
    """Committer to replica: the contents of the step. Each stage counts each micro-batch exactly once."""

    step: StepNumber
    attempt: Count
    replicas: Annotated[tuple[StageCommit, ...], msgspec.Meta(max_length=ROWS_MAX)]


class Reduced(StepMessage, frozen=True, kw_only=True, tag="reduced"):
    """Replica to committer: I hold the total of my stage; `digest` is BLAKE3 of its bytes.

    `squared_norm` is that of the total, over the parameters the stage speaks for; infinite where it cannot be
    applied.
    """

    step: StepNumber
    attempt: Count
    digest: Hash
    squared_norm: float | None = None


class Work(msgspec.Struct, frozen=True, array_like=True):
    """The work of one replica in a step: its computing time, and the bytes it sent.

    `sent_bytes` towards the last stage, `returned_bytes` towards the first, each as they went over the wire.
    `replayed` frames went out a second time. `rounding` is the codecs' rounding of activations and of
    gradients: for each the squared error and the squared norm, summed.
    """

    busy_nanoseconds: Count = 0
    sent_bytes: WorkCount = 0
    returned_bytes: WorkCount = 0
    replayed: WorkCount = 0
    rounding: Annotated[tuple[tuple[float, float], ...], msgspec.Meta(max_length=2)] = ()


class Applied(StepMessage, frozen=True, kw_only=True, tag="applied"):
    """Replica to committer: the optimizer has stepped; `digest` is BLAKE3 of the parameters."""

    step: StepNumber
    digest: Hash
    work: Work = Work()


class Fill(StepMessage, frozen=True, kw_only=True, tag="fill"):
    """Committer to a replica that has just joined, or holds other parameters than its peers: take theirs.

    `sources` are replicas of the same stage at `step`; `digest` is BLAKE3 of their parameters, NO_HASH where
    none is known, `applied` their last Apply. Answered by Synced.
    """

    step: StepNumber
    digest: Hash
    sources: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=REPLICAS_MAX)]
    applied: Apply | None = None


class Save(StepMessage, frozen=True, kw_only=True, tag="save"):
    """Committer to replica: keep a copy of your state of `step`, before the next is opened."""

    step: StepNumber


class BadFrame(StepMessage, frozen=True, kw_only=True, tag="unusable"):
    """Replica to committer: my stage cannot use the payload of this frame, and goes on without.

    `frame` is its header as its author signed it: it proves that the frame was sent; the payload is the
    accuser's word. `of_values`: it came as it was sent, and the model does not take a number in it.
    """

    frame: Fact
    reason: Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]
    of_values: bool = False


class Diverged(StepMessage, frozen=True, kw_only=True, tag="diverged"):
    """Replica to committer: my stage's result of sound frames is not finite, as it would be on any other
    replica. `microbatch` is None where it is the state after `step` steps that is not finite."""

    step: Count
    train: bool
    microbatch: Count | None
    reason: Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]


class StallQuestion(StepMessage, frozen=True, kw_only=True, tag="ask"):
    """Committer to a replica that has not reported: nothing has happened for long; report what you wait
    for."""

    step: StepNumber
    attempt: Count


class Waiting(StepMessage, frozen=True, kw_only=True, tag="waiting"):
    """Replica to committer: the report that I owe is still to come.

    `left` falls as long as work goes on. `peers` are those I wait for: they owe me summands, or only sums;
    none where the work is my own.
    """

    step: StepNumber
    attempt: Count
    left: Count
    peers: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=ROWS_MAX)] = ()
    for_sums: bool = False


class Failed(StepMessage, frozen=True, kw_only=True, tag="failed"):
    """Replica to committer: I cannot go on, and why; `step` where its computation failed."""

    reason: Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]
    step: Count | None = None


CommitterMessage = Sync | Apply | StepCommit | Open | Fill | Save | StallQuestion
ReplicaMessage = (
    Synced | Progress | Counted | Evaluated | Reduced | Applied | Waiting | BadFrame | Diverged | Failed
)

Sends = list[tuple[PeerId, object]]
