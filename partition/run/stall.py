"""The duration of a run's stall, measured from the death that caused it rather than from its discovery.

A member cannot know when another member died. It knows the time of the latest committed step and of the lost
member's latest message. The stall began at the later of the two, because nothing was computed after it.
"""

from collections.abc import Collection

from crypto.identity import PeerId
from partition.plan.plan import ROSTER_MAX


class StallClock:
    """One member's view of one run. Times are monotonic seconds. `since` is the beginning of the latest
    stall."""

    def __init__(self, now: float) -> None:
        self.since = self._moved_at = now
        self._stands = False
        self._heard_at: dict[bytes, float] = {}

    def heard(self, now: float, peer: PeerId) -> None:
        """Note a message of the run from this peer."""
        if peer in self._heard_at or len(self._heard_at) < ROSTER_MAX:
            self._heard_at[peer] = now

    def moved(self, now: float) -> None:
        """Note that a step was committed, or that the first step after a stall was opened."""
        self._moved_at = now
        self._stands = False

    def entered(self, now: float, lost: Collection[bytes] | None) -> None:
        """Note that a plan without the `lost` members is in force; None for the first plan here.

        If a second plan comes into force before any progress, the stall that the first one reported
        continues.
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
