"""Messages between committer, trainers and replicas about a step, in addition to frames.

Every message names the plan by its hash; a receiver drops messages of another plan. All are idempotent:
repeating a message changes nothing, so after a broken stream everything unanswered is sent again.
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
"""Maximum number of held-out micro-batches in progress: enough to keep every stage busy, but few to hold in
memory."""
SKIPPED_MAX = 10
"""Maximum number of successive diverged steps that a run skips. After that it would not recover."""
RATE_MAX = 10**12
"""Maximum factor on the learning rate, a million. A larger one would end a run immediately."""
RATE_UNIT = 10**6
SAMPLES_MAX = 2**31
"""Maximum count of one micro-batch: samples, or the tokens of a long text. A step has at most 4,096
micro-batches."""

WorkCount = Annotated[int, msgspec.Meta(ge=0, le=2**46)]
"""A number of bytes of one replica in a step, at most 70 TB, so that JSON can still represent the sum over a
stage."""
Numbers = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MICROBATCHES_MAX)]


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages. `plan` is the hash of the plan that the message belongs to."""

    plan: Hash


class Sync(StepMessage, frozen=True, kw_only=True, tag="sync"):
    """Committer to replica: a new plan is in force; report your state."""


class Apply(StepMessage, frozen=True, kw_only=True, tag="apply"):
    """Committer to replica: all replicas have reduced; divide the totals by `samples` and step the optimizer.

    `squared_norm` is the squared norm of all stages' totals. `loss` is summed over the samples: a new
    committer that must finish the step knows the loss only from here.

    If `skipped` is above 0, the step diverged and changes nothing; `skipped` is the number of successive
    diverged steps, including this one. Then no totals are needed, and `samples` and `loss` have no meaning.
    `rate`, in millionths, multiplies the learning rate of this step; it carries the effect of a revision, and
    is the same on all replicas because it is sent here. `validated` is the series of validations up to this
    step, so that the next committer continues it.
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

    `step` steps are applied; None if the replica has no state yet, because it has just joined. `counted` are
    the micro-batches of the open step whose gradients are in its sums. `samples` and `losses` are the values
    of each of these, and are 0 except in the last stage. `begun` are micro-batches between their two passes.
    `reduced` is the attempt whose total is ready, `applied` the latest Apply, and `digest` the digest of the
    parameters, NO_HASH if unknown. `pace_nanoseconds` is the time of a micro-batch on this replica, 0 if it
    has applied none yet.
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
    """The owners of one stage's micro-batches: for each position in the opened range, the index of the owning
    replica.

    `counted` are the micro-batches that are already in the owner's sums, so no frame needs to be sent for
    them.
    """

    owners: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MICROBATCHES_MAX)]
    counted: Numbers = ()


class Open(StepMessage, frozen=True, kw_only=True, tag="open"):
    """Committer to replicas and trainers: the micro-batches to compute, and their owners.

    For training, these are all micro-batches of step `step`. For evaluation (`train` false), they are any
    range of held-out ones: those for validation come first, then those for the test. A validation may precede
    a step. A higher `attempt` replaces the routes of the same step: a sender whose receiver is no longer the
    owner sends the same bytes to the new owner, and a replica that has summed a micro-batch that it does not
    own takes it out again.
    """

    step: StepNumber
    attempt: Count
    train: bool
    first: Count
    stages: Annotated[tuple[StageRoutes, ...], msgspec.Meta(min_length=1, max_length=STAGES_MAX)]


class Progress(StepMessage, frozen=True, kw_only=True, tag="progress"):
    """Replica to committer: the forward pass of this micro-batch is done here, and its output is on its way.
    `train` is False if the micro-batch is held out."""

    step: StepNumber
    microbatch: Count
    stage: StageNumber
    train: bool = True


class Counted(StepMessage, frozen=True, kw_only=True, tag="counted"):
    """Replica to committer: this micro-batch's gradient is in my sums.

    The last stage states the loss summed over `samples`; other stages send 0 for both.
    """

    step: StepNumber
    microbatch: Count
    stage: StageNumber
    samples: Count
    loss: float


class Evaluated(StepMessage, frozen=True, kw_only=True, tag="evaluated"):
    """Last stage to committer: the result of one held-out micro-batch, with the parameters after `step`
    steps. `loss` and `metrics` are sums over its samples."""

    step: StepNumber
    microbatch: Count
    samples: Count
    loss: float
    metrics: Annotated[tuple[float, ...], msgspec.Meta(max_length=METRICS_MAX)]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all metrics are finite."""
        return isfinite(self.loss) and all(isfinite(value) for value in self.metrics)


class StageCommit(msgspec.Struct, frozen=True, array_like=True):
    """One replica of one stage, and the micro-batches in its sums."""

    stage: StageNumber
    replica: Peer
    microbatches: Numbers


class StepCommit(StepMessage, frozen=True, kw_only=True, tag="commit"):
    """Committer to replica: the content of the step. Each stage counts each micro-batch exactly once."""

    step: StepNumber
    attempt: Count
    replicas: Annotated[tuple[StageCommit, ...], msgspec.Meta(max_length=ROWS_MAX)]


class Reduced(StepMessage, frozen=True, kw_only=True, tag="reduced"):
    """Replica to committer: I have the total of my stage; `digest` is the BLAKE3 hash of its bytes.

    `squared_norm` is the squared norm of the total, over the parameters for which the stage reports; it is
    infinite if the total cannot be applied.
    """

    step: StepNumber
    attempt: Count
    digest: Hash
    squared_norm: float | None = None


class Work(msgspec.Struct, frozen=True, array_like=True):
    """The work of one replica in a step: its computing time, and the bytes that it sent.

    `sent_bytes` went to the next stage, `returned_bytes` to the previous stage, each as counted on the wire.
    `replayed` frames were sent a second time. `rounding` is the codecs' rounding of activations and of
    gradients: for each, the sums of the squared error and of the squared norm.
    """

    busy_nanoseconds: Count = 0
    sent_bytes: WorkCount = 0
    returned_bytes: WorkCount = 0
    replayed: WorkCount = 0
    rounding: Annotated[tuple[tuple[float, float], ...], msgspec.Meta(max_length=2)] = ()


class Applied(StepMessage, frozen=True, kw_only=True, tag="applied"):
    """Replica to committer: the optimizer has stepped; `digest` is the BLAKE3 hash of the parameters."""

    step: StepNumber
    digest: Hash
    work: Work = Work()


class Fill(StepMessage, frozen=True, kw_only=True, tag="fill"):
    """Committer to a replica that has just joined, or whose parameters differ from its stage's: take over the
    stage's parameters.

    `sources` are replicas of the same stage at `step`. `digest` is the BLAKE3 hash of their parameters,
    NO_HASH if unknown; `applied` is their latest Apply. The answer is Synced.
    """

    step: StepNumber
    digest: Hash
    sources: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=REPLICAS_MAX)]
    applied: Apply | None = None


class Save(StepMessage, frozen=True, kw_only=True, tag="save"):
    """Committer to replica: keep a copy of your state after `step` steps, before the next step is opened."""

    step: StepNumber


class BadFrame(StepMessage, frozen=True, kw_only=True, tag="unusable"):
    """Replica to committer: my stage cannot use the payload of this frame, and goes on without it.

    `frame` is its header as its author signed it. It proves that the frame was sent, but about the payload
    there is only the accuser's claim. `of_values`: the payload arrived as it was sent, but has a value that
    the model does not take.
    """

    frame: Fact
    reason: Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]
    of_values: bool = False


class Diverged(StepMessage, frozen=True, kw_only=True, tag="diverged"):
    """Replica to committer: my stage's result of valid frames is not finite; any other replica would get the
    same result. `microbatch` is None if it is the state after `step` steps that is not finite."""

    step: Count
    train: bool
    microbatch: Count | None
    reason: Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]


class StallQuestion(StepMessage, frozen=True, kw_only=True, tag="ask"):
    """Committer to a replica that has not reported: nothing has happened for long; report what you are
    waiting for."""

    step: StepNumber
    attempt: Count


class Waiting(StepMessage, frozen=True, kw_only=True, tag="waiting"):
    """Replica to committer: the report that I owe is still to come.

    `left` falls as long as work progresses. `peers` are those for which I wait, empty if the work is my own.
    They owe me summands, or only sums (`for_sums`).
    """

    step: StepNumber
    attempt: Count
    left: Count
    peers: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=ROWS_MAX)] = ()
    for_sums: bool = False


class Failed(StepMessage, frozen=True, kw_only=True, tag="failed"):
    """Replica to committer: I cannot continue, for this reason. `step` is set if computing that step
    failed."""

    reason: Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]
    step: Count | None = None


CommitterMessage = Sync | Apply | StepCommit | Open | Fill | Save | StallQuestion
ReplicaMessage = (
    Synced | Progress | Counted | Evaluated | Reduced | Applied | Waiting | BadFrame | Diverged | Failed
)

Sends = list[tuple[PeerId, object]]
