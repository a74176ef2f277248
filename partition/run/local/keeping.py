"""The schedule of copies of a stage's state: on a member's own disk, and of others' stages.

A copy is made as often as the run's manifest says, and less often where it takes long.
"""

from dataclasses import dataclass

from crypto.identity import PeerId

KEEP_SHARE = 50
"""A state that takes a second to put away is put away once in so many: at most 2 % of the time."""
FETCH_SHARE = 10
"""A state that takes a second to fetch, in which its owner may be computing, is fetched once in so many."""
LOOK_SECONDS = 1.0
"""How often a copy of another's stage is looked after."""


@dataclass(frozen=True)
class CopyStage:
    """Copy the state of a stage from its holder, None for any, if that is due. The answer says whether the
    copy is here; it is None where none was made."""

    stage: int
    holder: PeerId | None


class CopySchedule:
    """The schedule of one copy, which is made `every` so many steps, 0 for never."""

    def __init__(self, every: int) -> None:
        self.step = 0
        """The step of the newest copy."""
        self._every = every
        self._not_before = 0.0
        self._is_busy = False

    def is_due(self, now: float, step: int) -> bool:
        """Return whether a state after so many steps is to be copied."""
        is_time = now >= self._not_before and not self._is_busy
        return bool(self._every) and step - self.step >= self._every and is_time

    def begin(self) -> None:
        """Note that a copy is being written."""
        self._is_busy = True

    def ended(self, now: float, begun: float) -> None:
        """Note that a copy is written, or could not be, and when that was `begun`."""
        self._is_busy = False
        self._not_before = now + KEEP_SHARE * (now - begun)
