"""The clock of a run's stall: from the death that stops it, not from its discovery.

A member cannot know when another died. It knows when the last step was committed and when it last heard the
lost one; nothing was computed since the later of the two.
"""

from collections.abc import Collection

from crypto.identity import PeerId
from partition.plan.plan import ROSTER_MAX


class StallClock:
    """One member's view of one run; times are monotonic seconds. `since` is when the last stall began."""

    def __init__(self, now: float) -> None:
        self.since = self._moved_at = now
        self._stands = False
        self._heard_at: dict[bytes, float] = {}

    def heard(self, now: float, peer: PeerId) -> None:
        """Note a message of the run from this peer."""
        if peer in self._heard_at or len(self._heard_at) < ROSTER_MAX:
            self._heard_at[peer] = now

    def moved(self, now: float) -> None:
        """Note that a step was committed, or the first one after a stall opened."""
        self._moved_at = now
        self._stands = False

    def entered(self, now: float, lost: Collection[bytes] | None) -> None:
        """Note that a plan is in force, without these; None for the first plan here.

        A second plan before anything moved prolongs the stall of the first.
        """
        if lost is None:
            self.since = self._moved_at = now
            return
        if self._stands:
            return
        self._stands = True
        heard = [self._heard_at[peer] for peer in lost if peer in self._heard_at]
        began = min(heard, default=self._moved_at) if lost else now
        self.since = max(began, self._moved_at)
