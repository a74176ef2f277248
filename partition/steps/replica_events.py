"""What a replica's core asks its shell to do with the stage, one item at a time; and what is void of it."""

from dataclasses import dataclass

from crypto.identity import PeerId
from partition.codecs.codec import Payload
from partition.plan.plan import NO_HASH
from partition.steps.messages import RATE_UNIT, Apply, Waiting


@dataclass(frozen=True)
class ForwardReady:
    """All a forward pass needs is here. The shell answers with `forwarded`."""

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
    """Return what an Apply asks of the stage."""
    rate = row.rate / RATE_UNIT
    return ApplyReady(row.plan, row.step, row.attempt, row.samples, row.squared_norm, row.skipped > 0, rate)


@dataclass(frozen=True)
class SaveReady:
    """Keep a copy of the stage as it is after `step` steps. `saved` once it is copied, written or not."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class StepDiscarded:
    """Forget what is in flight and zero the sums: what the stage holds is void. Then `discarded`."""

    plan: bytes


@dataclass(frozen=True)
class FillReady:
    """Take parameters and moments as they are after `step` steps: from `sources`, or, where there are none,
    from `checkpoint`. `digest` is BLAKE3 of the parameters, or NOTHING. The shell answers with `filled`."""

    plan: bytes
    step: int
    digest: bytes
    sources: tuple[PeerId, ...]
    checkpoint: bytes = NO_HASH


@dataclass(frozen=True)
class ReduceVoided:
    """The reduction under way is to be forgotten; nothing is reported of it."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class FillVoided:
    """The filling under way is to be forgotten, for its sources may be gone; nothing is reported of it."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class ReduceAsked:
    """The committer wants to know whom the reduction under way waits for."""

    plan: bytes
    step: int
    attempt: int

    def answer(self, left: int, peers: tuple[PeerId, ...] = (), *, for_sums: bool = False) -> Waiting:
        """Return what a replica says to it."""
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
"""What concerns work that has been handed out already."""
