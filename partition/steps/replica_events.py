"""Work items that a replica's core gives to its driver, one at a time, and events that make them void."""

from dataclasses import dataclass

from crypto.identity import PeerId
from partition.codecs.codec import Payload
from partition.plan.plan import NO_HASH
from partition.steps.messages import RATE_UNIT, Apply, Waiting


@dataclass(frozen=True)
class ForwardReady:
    """Do a forward pass; all its inputs are here. The driver answers with `forwarded`."""

    plan: bytes
    step: int
    attempt: int
    microbatch: int
    train: bool
    input: Payload
    labels: Payload | None


@dataclass(frozen=True)
class BackwardReady:
    """Do a backward pass; the gradient of the micro-batch's output is here. The driver answers with
    `backwarded`."""

    plan: bytes
    step: int
    attempt: int
    microbatch: int
    gradient: Payload


@dataclass(frozen=True)
class SubtractReady:
    """Take this micro-batch out of the sums, by doing both passes again with the opposite sign. The driver
    answers with `removed`."""

    plan: bytes
    step: int
    microbatch: int
    input: Payload
    labels: Payload | None
    gradient: Payload | None


@dataclass(frozen=True)
class ForgetReady:
    """Drop what the stage holds of this micro-batch between its two passes. The driver answers with
    `forgotten`."""

    plan: bytes
    step: int
    microbatch: int


@dataclass(frozen=True)
class ReduceReady:
    """Sum the stage's gradients over its replicas. The driver answers with `reduced`.

    `members` are the replicas of every stage, in the plan's order, because tied parameters are summed over
    several stages.
    """

    plan: bytes
    step: int
    attempt: int
    members: tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True)
class ApplyReady:
    """Step the optimizer with the totals, and its learning rate times `rate`; or drop the step if it
    `is_skipped`. The driver answers with `applied`."""

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
    """Keep a copy of the stage as it is after `step` steps. The driver answers with `saved` once the copy is
    made, even if it is not written yet."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class StepDiscarded:
    """Forget the micro-batches in progress and set the sums to zero, because the stage's state is void. The
    driver answers with `discarded`."""

    plan: bytes


@dataclass(frozen=True)
class FillReady:
    """Take over parameters and moments as they are after `step` steps: from `sources` or, if there are none,
    from `checkpoint`. `digest` is the BLAKE3 hash of the parameters, or NO_HASH. The driver answers with
    `filled`."""

    plan: bytes
    step: int
    digest: bytes
    sources: tuple[PeerId, ...]
    checkpoint: bytes = NO_HASH


@dataclass(frozen=True)
class ReduceVoided:
    """The reduction in progress is void; its result must not be reported."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class FillVoided:
    """The filling in progress is void, because its sources may be gone; its result must not be reported."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class ReduceAsked:
    """The committer asks which peers the reduction in progress waits for."""

    plan: bytes
    step: int
    attempt: int

    def answer(self, left: int, peers: tuple[PeerId, ...] = (), *, for_sums: bool = False) -> Waiting:
        """Return the replica's answer to the committer."""
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
"""Events about work that was handed out already."""
