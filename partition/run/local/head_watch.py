"""The watch for heads: without a training head, holders of other stages can do nothing.

A head holds the first stage. Once the last head is gone, so are the parameters of that stage, unless it
returns with its disk or the requester has a copy for another node. Members that have waited long enough end
the run and report why.
"""

from crypto.identity import PeerId
from partition.run.local.reports import Reports, StepClaim, training

HEADLESS_SECONDS = 300.0
"""How long a holder waits for a head: longer than a restart of a node, and than most steps."""
FOLLOWING_SECONDS = HEADLESS_SECONDS / 2
"""The same for a requester that only follows. It is shorter, since holders report the loss only for a
while."""


class HeadWatch:
    """The watch of one member. `seen` and `follow` take signs of heads."""

    def __init__(self, now: float, *, is_holder: bool) -> None:
        """`is_holder`: this member holds a stage other than the first."""
        self._is_holder = is_holder
        self._patience_seconds = HEADLESS_SECONDS if is_holder else FOLLOWING_SECONDS
        self._seen_at = now
        self._steps: dict[PeerId, StepClaim] = {}

    def seen(self, now: float) -> None:
        """Note a sign of a head."""
        self._seen_at = now

    def follow(self, now: float, reports: Reports, head: PeerId | None, *, is_training: bool) -> None:
        """Note the reports of others with the same stage, and the `head` of this holder. The steps of other
        holders advance only where heads train."""
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
    """Return the reason for ending a run, for holders of `stage`, counted from 0."""
    return (
        f"no head has come for stage {stage + 1} in {HEADLESS_SECONDS / 60:.0f} min: whoever held the first "
        "stage is gone, and its numbers with it"
    )
