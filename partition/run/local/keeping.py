"""The schedule of state copies: of a member's own stage on its disk, and of other members' stages.

Copies are made as often as the manifest says, and less often where a copy takes long.
"""

from dataclasses import dataclass

from crypto.identity import PeerId

KEEP_SHARE = 50
"""Minimum interval for each second that saving a state takes: at most 2 % of the time."""
FETCH_SHARE = 10
"""Minimum interval for each second that fetching a state takes, while its owner may be computing."""
LOOK_SECONDS = 1.0
"""Interval between two checks whether a copy of another's stage is due."""


@dataclass(frozen=True)
class CopyStage:
    """Copy the state of a stage from its holder, None for any, if that is due. The answer says whether the
    copy is here; None: no copy was made."""

    stage: int
    holder: PeerId | None


class CopySchedule:
    """The schedule of one copy, made `every` so many steps, 0 for never."""

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
        """Note that a copy begun at `begun` ended, successfully or not."""
        self._is_busy = False
        self._not_before = now + KEEP_SHARE * (now - begun)
