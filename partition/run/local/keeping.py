"""The schedule of state copies: of a member's own stage on its disk, and of other members' stages.

Copies are made as often as the manifest says, and less often if a copy takes long. The first copy of another
member's stage is made after its first step, because without a copy the run ends if that member dies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.run.local.courses import Course

KEEP_SHARE = 50
"""Minimum interval between saves, as a multiple of the time that a save takes, so that saving takes at most 2
% of the time."""
FETCH_SHARE = 10
"""Minimum interval between fetches, as a multiple of the time that a fetch takes. The owner of the state may
be computing meanwhile."""
FIRST_STEP = 1
"""The step after which another member's stage is copied for the first time."""
LOOK_SECONDS = 1.0
"""Seconds between two checks whether a copy of another member's stage is due."""


@dataclass(frozen=True)
class CopyStage:
    """Fetch and store the state of a stage from `holder` (None: from any holder). The answer is a StageCopy;
    None if no holder hands over its state."""

    stage: int
    holder: PeerId | None


@dataclass(frozen=True)
class StageCopy:
    """A fetched copy of a stage at this step. `is_stored`: it is on the disk."""

    step: int
    is_stored: bool


class CopySchedule:
    """The schedule of one copy, which is made every `every` steps, or never if `every` is 0."""

    def __init__(self, every: int, *, first: int | None = None) -> None:
        """`first` is the step at which the first copy is due; `every` if it is not given."""
        self.step = 0
        """The step of the newest copy; 0 if there is none yet."""
        self._every = every
        self._first = every if first is None else first
        self._not_before = 0.0
        self._is_busy = False

    def is_due(self, now: float, step: int) -> bool:
        """Return whether a copy is due at `step`."""
        is_time = now >= self._not_before and not self._is_busy
        due_at = self.step + self._every if self.step else self._first
        return bool(self._every) and step >= due_at and is_time

    def begin(self) -> None:
        """Note that a copy is being written."""
        self._is_busy = True

    def ended(self, now: float, begun: float) -> None:
        """Note that the copy that began at the time `begun` has ended, successfully or not."""
        self._is_busy = False
        self._not_before = now + KEEP_SHARE * (now - begun)


class StageCopying:
    """The copies that one member makes of other members' stages, one at a time."""

    def __init__(
        self, schedules: Mapping[int, CopySchedule], *, step: Callable[[], int], now: Callable[[], float]
    ) -> None:
        """`schedules` has one entry for each copied stage. `step` returns the step that the schedules refer
        to."""
        self.schedules = schedules
        self._step = step
        self.now = now
        self._not_before = 0.0

    def copy(self, stage: int, holder: PeerId | None = None) -> Course[bool | None]:
        """Copy the state of a stage if a copy is due. Return whether the copy is stored; None if no copy was
        made."""
        begun, schedule = self.now(), self.schedules[stage]
        if begun < self._not_before or not schedule.is_due(begun, self._step()):
            return None
        made: StageCopy | None = yield CopyStage(stage, holder)
        if made is None:
            return None
        schedule.step = made.step
        self._not_before = self.now() + FETCH_SHARE * (self.now() - begun)
        return made.is_stored
