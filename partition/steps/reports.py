"""What a replica has told the committer of its plan, kept to be said again over a new stream.

Under another plan, and after a step, none of it means anything any more.
"""

from collections.abc import Callable

from crypto.identity import PeerId
from partition.steps.frames import OpenedFrame
from partition.steps.messages import (
    REASON_LENGTH_MAX,
    BadFrame,
    Diverged,
    Evaluated,
    Progress,
    Sends,
    StepMessage,
)
from partition.steps.replica_events import ForwardReady, SaveReady

HELD_OUT = ("evaluated", "held out", "unusable input", "unusable labels", "diverged")
"""What is said of micro-batches that are evaluated."""


def unusable(plan: bytes, frame: OpenedFrame, reason: str, *, of_values: bool) -> BadFrame:
    """The report that a stage cannot use what came with a frame."""
    return BadFrame(plan=plan, frame=frame.fact, reason=reason[:REASON_LENGTH_MAX], of_values=of_values)


def diverged(plan: bytes, done: ForwardReady | SaveReady, reason: str) -> Diverged:
    """The report that what a stage computes in a pass, or the state it should save, is not finite."""
    train, number = (done.train, done.microbatch) if isinstance(done, ForwardReady) else (True, None)
    reason = reason[:REASON_LENGTH_MAX]
    return Diverged(plan=plan, step=done.step, train=train, microbatch=number, reason=reason)


def progress(plan: bytes, done: ForwardReady, stage: int) -> Progress:
    """The report that a forward pass of `stage` is done."""
    return Progress(plan=plan, step=done.step, microbatch=done.microbatch, stage=stage, train=done.train)


def evaluated(
    plan: bytes, done: ForwardReady, samples: int, loss: float, metrics: tuple[float, ...]
) -> Evaluated:
    """The report of the last stage on a held-out micro-batch."""
    where = {"step": done.step, "microbatch": done.microbatch}
    return Evaluated(plan=plan, samples=samples, loss=loss, metrics=metrics, **where)


class SentReports:
    """By what they say and of which micro-batch, 0 where it is of none: of each only the newest counts."""

    def __init__(self) -> None:
        self._committer = PeerId(b"")
        self._kept: dict[tuple[str, int], StepMessage] = {}

    def begin(self, committer: PeerId) -> None:
        """Another plan is in force, and this its committer."""
        self._committer = committer
        self._kept.clear()

    def clear(self) -> None:
        """A step is over."""
        self._kept.clear()

    def say(self, name: str, number: int, message: StepMessage) -> Sends:
        """Now, and again where it may have been lost."""
        self._kept[name, number] = message
        return [(self._committer, message)]

    def again(self, name: str) -> Sends:
        """The last of this name."""
        message = self._kept.get((name, 0))
        return [] if message is None else [(self._committer, message)]

    def drop(self, name: str) -> None:
        """It is not so any more."""
        self._kept.pop((name, 0), None)

    def all(self) -> Sends:
        """Everything."""
        return [(self._committer, message) for message in self._kept.values()]

    def useless(self, owned: Callable[[int], bool]) -> Sends:
        """Return what could not be used of these."""
        return [
            (self._committer, message)
            for (_, number), message in self._kept.items()
            if isinstance(message, BadFrame) and owned(number)
        ]

    def forget_held_out(self, first: int) -> None:
        """Those before `first` have been through everywhere."""
        for key in [key for key in self._kept if key[0] in HELD_OUT and key[1] < first]:
            del self._kept[key]
