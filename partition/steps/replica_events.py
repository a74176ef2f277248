"""Work items of a replica's core for its shell, one at a time; and the voiding of them."""

from dataclasses import dataclass

from crypto.identity import PeerId
from partition.codecs.codec import Payload
from partition.plan.plan import NO_HASH
from partition.steps.messages import RATE_UNIT, Apply, Waiting


@dataclass(frozen=True)
class ForwardReady:
    """All inputs of a forward pass are here. The shell answers with `forwarded`."""

    plan: bytes
    step: int
    attempt: int
    microbatch: int
    train: bool
    input: Payload
    labels: Payload | None


@dataclass(frozen=True)
class BackwardReady:
    """The gradient of this micro-batch's output is here. The shell answers with `backwarded`."""

    plan: bytes
    step: int
    attempt: int
    microbatch: int
    gradient: Payload


@dataclass(frozen=True)
class SubtractReady:
    """Take this micro-batch out of the sums: both passes again, with the sign turned. Then `removed`."""

    plan: bytes
    step: int
    microbatch: int
    input: Payload
    labels: Payload | None
    gradient: Payload | None


@dataclass(frozen=True)
class ForgetReady:
    """Drop what the stage holds of this micro-batch between its passes. Then `forgotten`."""

    plan: bytes
    step: int
    microbatch: int


@dataclass(frozen=True)
class ReduceReady:
    """Sum the stage's gradients over its replicas. The shell answers with `reduced`.

    `members` are those of every stage, each in the plan's order: what is tied is summed over stages too.
    """

    plan: bytes
    step: int
    attempt: int
    members: tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True)
class ApplyReady:
    """Step the optimizer on the totals, its learning rate times `rate`, or drop what `is_skipped`. The shell
    answers with `applied`."""

    plan: bytes
    step: int
    attempt: int
    samples: int
    squared_norm: float | None
    is_skipped: bool = False
    rate: float = 1.0


def apply_ready(row: Apply) -> ApplyReady:
    """Return the work item of an Apply."""
    rate = row.rate / RATE_UNIT
    return ApplyReady(row.plan, row.step, row.attempt, row.samples, row.squared_norm, row.skipped > 0, rate)


@dataclass(frozen=True)
class SaveReady:
    """Keep a copy of the stage as it is after `step` steps. `saved` once it is copied, written or not."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class StepDiscarded:
    """Forget the micro-batches in flight and zero the sums: the stage's contents are void. Then
    `discarded`."""

    plan: bytes


@dataclass(frozen=True)
class FillReady:
    """Take parameters and moments as they are after `step` steps: from `sources`, or, where there are none,
    from `checkpoint`. `digest` is BLAKE3 of the parameters, or NO_HASH. The shell answers with `filled`."""

    plan: bytes
    step: int
    digest: bytes
    sources: tuple[PeerId, ...]
    checkpoint: bytes = NO_HASH


@dataclass(frozen=True)
class ReduceVoided:
    """The reduction under way is void; nothing is reported of it."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class FillVoided:
    """The filling under way is void, since its sources may be gone; nothing is reported of it."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class ReduceAsked:
    """The committer asks which peers the reduction under way waits for."""

    plan: bytes
    step: int
    attempt: int

    def answer(self, left: int, peers: tuple[PeerId, ...] = (), *, for_sums: bool = False) -> Waiting:
        """Return a replica's answer."""
        return Waiting(
            plan=self.plan,
            step=self.step,
            attempt=self.attempt,
            left=left,
            peers=peers,
            for_sums=for_sums,
        )


WorkItem = (
    ForwardReady
    | BackwardReady
    | SubtractReady
    | ForgetReady
    | ReduceReady
    | ApplyReady
    | SaveReady
    | StepDiscarded
    | FillReady
)

ReplicaEvent = ReduceAsked | ReduceVoided | FillVoided
"""Events about work that has been handed out already."""
