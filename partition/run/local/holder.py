"""The rules of a member that holds a stage for the heads of columns.

A node has one stage of its own, and further ones where it stands in for machines that are gone
(`partition.run.local.regrouping`). A further one ends once another node holds the stage and has gone on.
"""

from typing import Literal, Protocol

from partition.run.local.due import Due
from partition.run.local.reports import Reports, training
from partition.run.local.seat import StageSeat

RENEWALS_MAX = 3
"""How often a newcomer takes over a newer state for a head that is further: a member may claim any step."""
SPARE_SECONDS = 10.0
"""A further stage that has had no head for so long ends, if others hold it: a column that lost another stage
has its head back sooner."""


Deed = Literal["call", "average", "hand on"]
"""The deed of a holder: call for heads, and average; average; or hand its state on, for which the head may be
waiting."""


class StageNumbers(Protocol):
    """The numbers of a held stage: after how many steps they are, and the reports of its other holders."""

    @property
    def step(self) -> int: ...
    @property
    def has_state(self) -> bool: ...
    @property
    def reports(self) -> Reports: ...


class StageHolder:
    """One held stage of a run of so many `steps`."""

    def __init__(self, numbers: StageNumbers, number: int, steps: int, *, is_further: bool = False) -> None:
        self.seat = StageSeat(number)
        self.wanted_step: int | None = None
        """The step that a head asked for, where this newcomer's state is older."""
        self._numbers = numbers
        self._steps = steps
        self._is_further = is_further
        self._due = Due()
        self._has_worked = False
        self._renewals = 0

    def refusal(self, step: int) -> tuple[str, bool]:
        """Return why this stage does not work for a head after so many steps, "" where it does, and whether
        the head may ask again once a newer state is here."""
        if step > self._steps:
            return "a step beyond the end of the run", False
        if not self._numbers.has_state:
            return "its state is not here yet", False
        if self._is_older(step):
            self.wanted_step = step
            return "its state is of an earlier step", True
        return "", False

    def _is_older(self, step: int) -> bool:
        """Return whether this newcomer's state is older than that of another holder, who is as far as the
        head: the one that gives the stage to it."""
        numbers = self._numbers
        if self._has_worked or numbers.step >= step or self._renewals >= RENEWALS_MAX:
            return False
        return any(each.has_state and each.step.reaches(step) for each in numbers.reports.values())

    def applied(self, samples: int) -> None:
        """Note a step of the head with so many samples; 0 where it only begins."""
        self._has_worked |= samples > 0

    def take_renewal(self) -> int | None:
        """Return the step of the state to take over now for a head, None where there is none to."""
        step, self.wanted_step = self.wanted_step, None
        if step is None or self.seat.head is not None:
            return None
        self._renewals += 1
        return step

    def next_deed(self, *, is_idle: bool, has_converged: bool) -> Deed:
        """Return what to do now. `is_idle`: no step is made here any more, so no step of the head calls for a
        round; nor does one where the run `has_converged`."""
        if self.seat.head is None:
            return "call"
        return "average" if is_idle or has_converged else "hand on"

    def is_spare(self, now: float) -> bool:
        """Return whether another node holds this stage, which is a further one here, and has gone on."""
        numbers = self._numbers
        waited = self._due.waited(now, "a head", self.seat.head is None)
        if not (self._is_further and self._has_worked and training(numbers.reports)) or waited < 0:
            return False
        beyond = numbers.step + 1
        is_past = any(each.has_state and each.step.reaches(beyond) for each in numbers.reports.values())
        return is_past or waited >= SPARE_SECONDS
