"""A stage that a member of a run in local mode holds: how far its numbers are, and its rounds.

Not here: the numbers, and for whom the stage computes (`partition.run.local.holder`).
"""

from collections.abc import Callable, Sequence

from crypto.identity import PeerId
from partition.run.ending import Ending
from partition.run.local.due import Due
from partition.run.local.reports import Reports, is_at_end, training
from partition.run.local.round_schedule import RoundSchedule


class StageCounts:
    """The counts of a stage's numbers in a run of so many `steps`."""

    def __init__(self, steps: int) -> None:
        self.step = 0
        self.samples = 0
        self.is_waiting = False
        """Whether no step can be made here: the stage has no head, or its column lacks others."""
        self.steps = steps

    @property
    def is_idle(self) -> bool:
        """Whether no step is made here now: all of the run were, or stages are missing."""
        return self.step >= self.steps or self.is_waiting


class MemberStage:
    """One stage of one member."""

    def __init__(
        self,
        counts: StageCounts,
        rounds: RoundSchedule,
        ending: Ending,
        *,
        reports: Callable[[], Reports],
        now: Callable[[], float],
    ) -> None:
        """`reports` returns the reports of the others that hold this stage."""
        self.counts = counts
        self.rounds = rounds
        self.has_state = False
        self.now = now
        self._ending = ending
        self._reports = reports
        self._due = Due()

    @property
    def training(self) -> Sequence[PeerId]:
        """Return the other holders that have a state."""
        return training(self._reports())

    @property
    def axes(self) -> int:
        """The number of rounds that average all holders: one for each axis of their grid."""
        return 1

    @property
    def step(self) -> int:
        """The steps that these numbers have."""
        return self.counts.step

    @property
    def is_at_end(self) -> bool:
        """Whether the steps of the run are done, as far as others can be believed."""
        return is_at_end(self._reports(), self.step, self.counts.steps)

    def lacks_mean(self) -> bool:
        """Return whether a result made now would be this member's numbers alone."""
        return self.rounds.lacks_mean(self.step, len(self.training), self.axes)

    def note_end(self) -> None:
        """Count since when the run has been about to end."""
        is_ending = self.is_at_end or self._ending.series.has_converged
        self.rounds.ending_for = self._due.waited(self.now(), "an end", is_ending)
