"""Whether a member sees that some head trains: without one, those that hold other stages can do nothing.

A head holds the first stage. When the last one is gone, so are the numbers of that stage, unless it comes
back with its disk or the requester has a copy of them for another node (`node.local.copies`). Members that
have waited long enough end the run and say why.
"""

from collections.abc import Mapping

import trio

from crypto.identity import PeerId
from gossip.claims import ClaimedCount
from gossip.roster import Report

HEADLESS_SECONDS = 300.0
"""A holder waits so long for a head: longer than a node takes to start again, and than most steps."""
FOLLOWING_SECONDS = HEADLESS_SECONDS / 2
"""A requester that only follows believes the holders so much sooner, for they say it only for a while."""


class HeadWatch:
    """One member's. `seen` and `follow` take signs of heads."""

    def __init__(self, *, is_holder: bool) -> None:
        """`is_holder`: this member holds a stage but the first."""
        self._is_holder = is_holder
        self._patience_seconds = HEADLESS_SECONDS if is_holder else FOLLOWING_SECONDS
        self._seen_at = trio.current_time()
        self._steps: dict[PeerId, ClaimedCount] = {}

    def seen(self) -> None:
        """A head is there."""
        self._seen_at = trio.current_time()

    def follow(self, reports: Mapping[PeerId, Report], head: PeerId | None, *, is_training: bool) -> None:
        """Take what the others of the same stage say of themselves, and which `head` this holder works for.
        The steps of other holders move only where heads train."""
        steps = {peer: report.step for peer, report in reports.items()}
        is_here = head is not None
        if not self._is_holder:
            is_here = is_training or any(report.has_state for report in reports.values())
        if is_here or steps != self._steps:
            self._steps = steps
            self.seen()

    @property
    def is_stranded(self) -> bool:
        """Whether there has been no sign of a head for too long."""
        return trio.current_time() - self._seen_at >= self._patience_seconds


def stranded_reason(stage: int) -> str:
    """Return why a run ends for those that hold `stage`, counted from 0."""
    return (
        f"no head has come for stage {stage + 1} in {HEADLESS_SECONDS / 60:.0f} min: whoever held the first "
        "stage is gone, and its numbers with it"
    )
