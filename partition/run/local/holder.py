"""The rules of a member that holds a stage for the heads of columns.

A node has one stage of its own. It may also hold *further* stages in place of machines that are gone
(`partition.run.local.regrouping`). It gives up a further stage once another node holds the stage and has made
progress.
"""

from dataclasses import dataclass
from typing import Literal

from partition.run.ending import Ending
from partition.run.local.courses import CallHeads, Course, Sleep, StageLost
from partition.run.local.due import Due
from partition.run.local.member_ending import MemberEnding
from partition.run.local.member_stage import HandOn, MemberStage, ReportStage
from partition.run.local.seat import StageSeat

LOOK_SECONDS = 0.5
"""Seconds between two checks of a holder without a head."""

RENEWALS_MAX = 3
"""Number of times that a newcomer takes over a newer state for a head that is ahead. It is limited because a
member may claim any step."""
SPARE_SECONDS = 10.0
"""How long a further stage may be without a head before it ends, if other nodes hold the stage. If a column
has merely lost another stage, its head is back sooner."""


Deed = Literal["call", "average", "hand on"]
"""The next deed of a holder: announce itself to heads and average; only average; or hand on its state, for
which the head may be waiting."""


@dataclass(frozen=True)
class OpenToHeads:
    """Accept heads to work for from now on. No answer."""


@dataclass(frozen=True)
class RenewState:
    """Take over another holder's present state if it has at least this many steps. No answer."""

    step: int


@dataclass(frozen=True)
class AverageStage:
    """Follow the course `between`, while no head can begin. No answer."""


class StageHolder:
    """One held stage, with its number."""

    def __init__(
        self,
        stage: MemberStage,
        number: int,
        ending: Ending,
        finish: MemberEnding,
        *,
        is_further: bool = False,
    ) -> None:
        """`finish` is the member's way to the end of the run."""
        self.seat = StageSeat(number)
        self.stage = stage
        self.wanted_step: int | None = None
        """The step of a head that asked while this newcomer's state was older."""
        self.is_released = False
        """Whether another node has come for this further stage."""
        self._ending = ending
        self._finish = finish
        self._is_further = is_further
        self._due = Due()
        self._has_worked = False
        self._renewals = 0

    def refusal(self, step: int) -> tuple[str, bool]:
        """Return why this stage does not work for a head at this step ("" if it does), and whether the head
        may ask again once a newer state is here."""
        if step > self.stage.counts.steps:
            return "the step is beyond the end of the run", False
        if not self.stage.has_state:
            return "its state is not here yet", False
        if self._is_older(step):
            self.wanted_step = step
            return "its state is of an earlier step", True
        return "", False

    def _is_older(self, step: int) -> bool:
        """Return whether this newcomer's state is older than the state of another holder that is as far as
        the head."""
        stage = self.stage
        if self._has_worked or stage.step >= step or self._renewals >= RENEWALS_MAX:
            return False
        return any(each.has_state and each.step.reaches(step) for each in stage.reports().values())

    def applied(self, step: int, samples: int) -> None:
        """Note that the head has made `step` steps, the last one with `samples` samples; 0 when it begins."""
        self._has_worked |= samples > 0
        self.stage.counts.step = step
        self.stage.counts.samples += samples

    def _take_renewal(self) -> int | None:
        """Return the step of the state to take over now for a head, or None."""
        step, self.wanted_step = self.wanted_step, None
        if step is None or self.seat.head is not None:
            return None
        self._renewals += 1
        return step

    def _next_deed(self) -> Deed:
        """Return the next deed. While the head makes no more steps here, or the run has converged, only
        `between` begins rounds."""
        if self.seat.head is None:
            return "call"
        is_idle = self.stage.counts.is_idle or self._ending.series.has_converged
        return "average" if is_idle else "hand on"

    def is_spare(self, now: float) -> bool:
        """Return whether this is a further stage that is no longer needed, because another node holds it too
        and has made progress, or because no head has come for a while."""
        stage = self.stage
        waited = self._due.waited(now, "a head", self.seat.head is None)
        if not (self._is_further and self._has_worked and stage.training) or waited < 0:
            return False
        beyond = stage.step + 1
        is_past = any(each.has_state and each.step.reaches(beyond) for each in stage.reports().values())
        return is_past or waited >= SPARE_SECONDS

    # Its life

    def work(self) -> Course[None]:
        """Hold the stage for heads until it fails or, for a further stage, until it is no longer needed."""
        stage, seat = self.stage, self.seat
        yield from stage.begin()
        if not self._is_further:
            self._finish.has_state = True
        yield ReportStage()
        yield OpenToHeads()
        while not (self.is_released or self.is_spare(stage.now())):
            if seat.failure:
                raise StageLost(seat.failure)
            if (step := self._take_renewal()) is not None:
                yield RenewState(step)
            deed = self._next_deed()
            if deed == "call":
                yield CallHeads(tuple(seat.companions))
            yield HandOn() if deed == "hand on" else AverageStage()
            if deed == "call" and not self._is_further:
                self._finish.end_if_stranded(stage.step)
            yield Sleep(LOOK_SECONDS)

    def between(self) -> Course[None]:
        """Do the work that is due after each step of the head, and periodically while it makes none."""
        self.stage.counts.is_waiting = self.seat.head is None
        yield from self.stage.between(is_still=not self._is_further and self._finish.schedule.is_waiting)

    def settle(self) -> Course[None]:
        """Wait for the last rounds, whose mean will be the result of the run."""
        stage = self.stage
        stage.note_end()
        while stage.rounds.ending_for >= 0 and stage.lacks_mean():
            yield from self.between()
            yield Sleep(LOOK_SECONDS)
