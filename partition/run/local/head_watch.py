"""The watch for heads: without a head that trains, holders of other stages can do nothing.

A head holds the first stage. Once the last head is gone, the parameters of the first stage are gone too,
unless a head returns with its disk or the requester has a copy for another node. Members that have waited
long enough end the run and report the reason.
"""

from crypto.identity import PeerId
from partition.run.local.reports import Reports, StepClaim, training

HEADLESS_SECONDS = 300.0
"""How long a holder waits for a head: longer than a node's restart, and longer than most steps."""
FOLLOWING_SECONDS = HEADLESS_SECONDS / 2
"""How long a requester that only follows its run waits for a head. It is shorter, because holders report the
loss only for a while."""


class HeadWatch:
    """One member's watch. `seen` and `follow` note signs of heads."""

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
        """Note the reports of other members with the same stage, and the `head` of this holder. The steps of
        other holders advance only while heads train."""
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
    """Return the reason for ending a run, as holders of `stage` (counted from 0) give it."""
    return (
        f"no head has come for stage {stage + 1} in {HEADLESS_SECONDS / 60:.0f} min: "
        "the holders of the first stage are gone, and its parameters with them"
    )
