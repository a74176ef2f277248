"""The watch for heads: without one that trains, members that hold other stages can do nothing.

A head holds the first stage. When the last one is gone, so are the numbers of that stage, unless it comes
back with its disk or the requester has a copy of them for another node. Members that have
waited long enough end the run and say why.
"""

from crypto.identity import PeerId
from partition.run.local.reports import Reports, StepClaim, training

HEADLESS_SECONDS = 300.0
"""How long a holder waits for a head: longer than a node takes to start again, and than most steps."""
FOLLOWING_SECONDS = HEADLESS_SECONDS / 2
"""The same for a requester that only follows: it believes the holders sooner, for they say it only for a
while."""


class HeadWatch:
    """The watch of one member. `seen` and `follow` take signs of heads."""

    def __init__(self, now: float, *, is_holder: bool) -> None:
        """`is_holder`: this member holds a stage but the first."""
        self._is_holder = is_holder
        self._patience_seconds = HEADLESS_SECONDS if is_holder else FOLLOWING_SECONDS
        self._seen_at = now
        self._steps: dict[PeerId, StepClaim] = {}

    def seen(self, now: float) -> None:
        """Note that a head is there."""
        self._seen_at = now

    def follow(self, now: float, reports: Reports, head: PeerId | None, *, is_training: bool) -> None:
        """Note the reports of others with the same stage, and the `head` that this holder works for. The
        steps of other holders move only where heads train."""
        steps = {peer: report.step for peer, report in reports.items()}
        is_here = head is not None
        if not self._is_holder:
            is_here = is_training or bool(training(reports))
        if is_here or steps != self._steps:
            self._steps = steps
            self.seen(now)

    def is_stranded(self, now: float) -> bool:
        """Return whether there has been no sign of a head for too long."""
        return now - self._seen_at >= self._patience_seconds


def stranded_reason(stage: int) -> str:
    """Return why a run ends for those that hold `stage`, counted from 0."""
    return (
        f"no head has come for stage {stage + 1} in {HEADLESS_SECONDS / 60:.0f} min: whoever held the first "
        "stage is gone, and its numbers with it"
    )
