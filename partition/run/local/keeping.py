"""The schedule of state copies: of a member's own stage on its disk, and of other members' stages.

Copies are made as often as the manifest says, and less often if a copy takes long.
"""

from dataclasses import dataclass

from crypto.identity import PeerId

KEEP_SHARE = 50
"""Minimum interval between saves, as a multiple of the time that a save takes, so that saving takes at most 2
% of the time."""
FETCH_SHARE = 10
"""Minimum interval between fetches, as a multiple of the time that a fetch takes. The owner of the state may
be computing meanwhile."""
LOOK_SECONDS = 1.0
"""Seconds between two checks whether a copy of another member's stage is due."""


@dataclass(frozen=True)
class CopyStage:
    """Copy the state of a stage from `holder` (None: from any holder), if a copy is due. The answer is
    whether the copy is here; None if no copy was made."""

    stage: int
    holder: PeerId | None


class CopySchedule:
    """The schedule of one copy, which is made every `every` steps, or never if `every` is 0."""

    def __init__(self, every: int) -> None:
        self.step = 0
        """The step of the newest copy."""
        self._every = every
        self._not_before = 0.0
        self._is_busy = False

    def is_due(self, now: float, step: int) -> bool:
        """Return whether a copy is due at `step`."""
        is_time = now >= self._not_before and not self._is_busy
        return bool(self._every) and step - self.step >= self._every and is_time

    def begin(self) -> None:
        """Note that a copy is being written."""
        self._is_busy = True

    def ended(self, now: float, begun: float) -> None:
        """Note that the copy that began at the time `begun` has ended, successfully or not."""
        self._is_busy = False
        self._not_before = now + KEEP_SHARE * (now - begun)
