"""A stage that a member of a run in local mode holds: how far its numbers are, and its rounds.

Not here: the numbers, and for whom the stage computes (`partition.run.local.holder`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.run.ending import Ending
from partition.run.local.courses import CatchUp, Course
from partition.run.local.due import Due
from partition.run.local.reports import Reports, is_at_end, is_begun, training
from partition.run.local.round_schedule import RoundSchedule


@dataclass(frozen=True)
class Resume:
    """Go on from the last state here, of an earlier life. The answer says whether there is one."""


@dataclass(frozen=True)
class LookFurther:
    """Look whether another holder is beyond this stage, and likely is where it says. The answer says so."""


@dataclass(frozen=True)
class ReportStage:
    """Tell the other holders how far this stage is. No answer."""


@dataclass(frozen=True)
class UseRound:
    """Use the result of a round that is over. The answer says whether it failed, and others held it."""


@dataclass(frozen=True)
class BeginRound:
    """Begin a round in the background. No answer."""


@dataclass(frozen=True)
class HandOn:
    """Make a copy for those that wait for one. No answer."""


@dataclass(frozen=True)
class KeepState:
    """Put the state away, if that is due. No answer."""


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
        self.reports = reports
        self._due = Due()

    @property
    def training(self) -> Sequence[PeerId]:
        """Return the other holders that have a state."""
        return training(self.reports())

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
        return is_at_end(self.reports(), self.step, self.counts.steps)

    def lacks_mean(self) -> bool:
        """Return whether a result made now would be this member's numbers alone."""
        return self.rounds.lacks_mean(self.step, len(self.training), self.axes)

    def note_end(self) -> None:
        """Count since when the run has been about to end."""
        is_ending = self.is_at_end or self._ending.series.has_converged
        self.rounds.ending_for = self._due.waited(self.now(), "an end", is_ending)

    # Where it goes on from

    def begin(self) -> Course[None]:
        """Go on from the state of the others, or from the last one here where nobody is further."""
        is_resumed: bool = yield Resume()
        is_needed: bool = (yield LookFurther()) if is_resumed else is_begun(self.reports())
        if is_needed:
            yield CatchUp(is_needed=not is_resumed)
        self.has_state = True

    # Between two steps

    def between(self, *, is_still: bool, keeps: bool = True) -> Course[None]:
        """Use a round that is over, and begin the next unless the numbers are to be `is_still`; hand on the
        state, and put it away unless it is not finite (`keeps`)."""
        yield ReportStage()
        if (yield UseRound()):
            yield CatchUp()
        self.note_end()
        counts, rounds = self.counts, self.rounds
        if not is_still and rounds.is_due(counts.step, is_idle=counts.is_idle):
            if self.training:
                yield BeginRound()
            else:
                rounds.skip(self.now(), counts.step, counts.samples)
        yield HandOn()
        if keeps:
            yield KeepState()
