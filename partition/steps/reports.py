"""The reports of a replica to its committer under one plan, kept so that they can be repeated over a new
stream.

The reports become void when a new plan begins, and after a step.
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
"""Kinds of reports about held-out micro-batches."""


def unusable(plan: bytes, frame: OpenedFrame, reason: str, *, of_values: bool) -> BadFrame:
    """Return the report that a stage cannot use the payload of a frame."""
    return BadFrame(plan=plan, frame=frame.fact, reason=reason[:REASON_LENGTH_MAX], of_values=of_values)


def diverged(plan: bytes, done: ForwardReady | SaveReady, reason: str) -> Diverged:
    """Return the report that a stage's result of a pass, or the state that it should save, is not finite."""
    train, number = (done.train, done.microbatch) if isinstance(done, ForwardReady) else (True, None)
    reason = reason[:REASON_LENGTH_MAX]
    return Diverged(plan=plan, step=done.step, train=train, microbatch=number, reason=reason)


def progress(plan: bytes, done: ForwardReady, stage: int) -> Progress:
    """Return the report that a forward pass of `stage` is done."""
    return Progress(plan=plan, step=done.step, microbatch=done.microbatch, stage=stage, train=done.train)


def evaluated(
    plan: bytes, done: ForwardReady, samples: int, loss: float, metrics: tuple[float, ...]
) -> Evaluated:
    """Return the report of the last stage on a held-out micro-batch."""
    where = {"step": done.step, "microbatch": done.microbatch}
    return Evaluated(plan=plan, samples=samples, loss=loss, metrics=metrics, **where)


class SentReports:
    """Reports by kind and micro-batch (0 if a report is about none). Only the newest report of each
    counts."""

    def __init__(self) -> None:
        self._committer = PeerId(b"")
        self._kept: dict[tuple[str, int], StepMessage] = {}

    def begin(self, committer: PeerId) -> None:
        """Begin a new plan, which has this committer."""
        self._committer = committer
        self._kept.clear()

    def clear(self) -> None:
        """Forget all reports, because a step is over."""
        self._kept.clear()

    def say(self, name: str, number: int, message: StepMessage) -> Sends:
        """Send a report now, and keep it to be repeated if it may have been lost."""
        self._kept[name, number] = message
        return [(self._committer, message)]

    def again(self, name: str) -> Sends:
        """Repeat the latest report of this kind."""
        message = self._kept.get((name, 0))
        return [] if message is None else [(self._committer, message)]

    def drop(self, name: str) -> None:
        """Drop a report that is no longer true."""
        self._kept.pop((name, 0), None)

    def all(self) -> Sends:
        """Repeat every report."""
        return [(self._committer, message) for message in self._kept.values()]

    def useless(self, owned: Callable[[int], bool]) -> Sends:
        """Return the reports of unusable frames of these micro-batches."""
        return [
            (self._committer, message)
            for (_, number), message in self._kept.items()
            if isinstance(message, BadFrame) and owned(number)
        ]

    def forget_held_out(self, first: int) -> None:
        """Forget held-out micro-batches before `first`, which are done in all stages."""
        for key in [key for key in self._kept if key[0] in HELD_OUT and key[1] < first]:
            del self._kept[key]
