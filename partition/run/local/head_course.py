"""The course of a head in local mode: complete the column, resume from a state, and make steps.

If the column breaks, the open step is dropped everywhere, and repeated once the column is complete again. Not
here: the holders of the other stages (`partition.run.local.column`), and the arithmetic.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.run.local.courses import ColumnBroken, Course, Sleep
from partition.run.local.crew import MemberCrew
from partition.run.local.member_ending import MemberEnding
from partition.run.local.member_stage import MemberStage
from partition.run.local.regrouping import ColumnRegrouping
from partition.run.local.start_barrier import StartBarrier

LOOK_SECONDS = 0.5
"""Seconds between two checks of a head that cannot make steps."""
DIVERGED_MAX = 10
"""Number of successive non-finite steps after which training has diverged, as in exact mode."""


@dataclass(frozen=True)
class TryFirstValues:
    """Evaluate the initial parameters of the stage. No answer."""


@dataclass(frozen=True)
class BeginSteps:
    """Prepare for steps from the present state. No answer."""


@dataclass(frozen=True)
class MakeStep:
    """Make one step with all stages of the column. The answer is whether the step was not finite."""


@dataclass(frozen=True)
class DropStep:
    """Release the holders of the column and drop the open step, for a `reason`. `is_news`: the column was
    complete before. No answer."""

    reason: str
    is_news: bool


class HeadCourse:
    """The course of one head, with its `own` stage."""

    regrouping: ColumnRegrouping | None = None
    """The regrouping of the column, once it is open."""

    def __init__(
        self,
        own: MemberStage,
        crew: MemberCrew,
        finish: MemberEnding,
        barrier: StartBarrier,
        *,
        stages: int,
        live: Callable[[], Collection[PeerId]],
    ) -> None:
        """`live` returns the nodes that are believed alive."""
        self._own = own
        self._crew = crew
        self._finish = finish
        self._barrier = barrier
        self._stages = stages
        self._live = live

    def train(self) -> Course[None]:
        """Train endlessly."""
        own, finish = self._own, self._finish
        while True:
            try:
                yield from self._mend()
                if not finish.has_state:
                    yield TryFirstValues()
                    yield from own.begin()
                    finish.has_state = True
                    yield BeginSteps()
                    finish.schedule.evaluated(own.step)
                    # if there are several stages, the columns of other heads may be incomplete for long
                    if not own.step and self._stages == 1:
                        yield from self._barrier.hold(self._crew, self._live, own.now, self._between)
                yield from self._turn()
            except ColumnBroken as error:
                is_news = finish.has_state and not own.counts.is_waiting
                own.counts.is_waiting = True
                yield DropStep(str(error), is_news)

    def _mend(self) -> Course[None]:
        """Find holders for the missing stages. If there are none yet, other nodes are asked to take part
        (`partition.run.local.recruiting`)."""
        column, crew, has_state = self._crew.holders_of, self._crew, self._finish.has_state
        if column is None:
            return
        if column.missing:
            live = self._live()
            yield from column.mend([peer for peer in crew.holders if peer in live], crew.others)
        elif self.regrouping is not None and has_state:
            yield from self.regrouping.hand_over()
        self._own.counts.is_waiting = bool(column.missing)
        if column.missing and not has_state:
            yield Sleep(LOOK_SECONDS)
            raise ColumnBroken("stages are missing")

    def _between(self) -> Course[None]:
        """Do the work that is due between two steps."""
        own, finish = self._own, self._finish
        # Proposed parameters must not change.
        yield from own.between(is_still=finish.schedule.is_waiting, keeps=not finish.diverged)
        yield from finish.evaluate(own)
        yield from finish.judge(own)

    def _turn(self) -> Course[None]:
        """Do the work that is due, then make one step."""
        own, finish = self._own, self._finish
        yield from self._between()
        is_still = finish.schedule.is_waiting or finish.schedule.holds_still
        if is_still or own.counts.is_idle or own.is_at_end:
            yield Sleep(LOOK_SECONDS)  # the end is being agreed on, or a stage is missing
            return
        is_diverged: bool = yield MakeStep()
        finish.diverged = finish.diverged + 1 if is_diverged else 0
        if finish.diverged >= DIVERGED_MAX:
            reason = f"{DIVERGED_MAX} steps in a row were not finite"
            yield from finish.recover(reason, own)
