"""A stage of a member in local mode: the progress of its parameters, and its rounds.

Not here: the parameters, and the head for which the stage computes (`partition.run.local.holder`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from crypto.identity import PeerId
from partition.run.ending import Ending
from partition.run.local.courses import Course, Sleep, StageLost
from partition.run.local.due import Due
from partition.run.local.keeping import CopySchedule
from partition.run.local.reports import Reports, is_at_end, is_begun, training
from partition.run.local.round_schedule import RoundSchedule

CATCH_UPS_MAX = 5
"""Maximum number of attempts to take over a state before a member gives up."""
AGAIN_SECONDS = 1.0
"""Seconds between two attempts."""


@dataclass(frozen=True)
class Resume:
    """Resume from the latest state on this node's disk. The answer is whether there is one."""


@dataclass(frozen=True)
class LookFurther:
    """Check whether another holder credibly claims more steps than this stage has. The answer is whether one
    does."""


@dataclass(frozen=True)
class NoteOwnState:
    """Prepare to try states of other holders. The answer describes this stage's own state, and only the
    driver reads it."""


@dataclass(frozen=True)
class TryState:
    """Take over the state of a holder at a likely step, except for the holders in `passed_over`. `own` is the
    answer to NoteOwnState. The answer is None, or NotTaken if no state was taken over."""

    own: Any
    passed_over: Collection[PeerId]


@dataclass(frozen=True)
class NotTaken:
    """The `reason` why a state was not taken over. If the state itself was unusable, `useless` are its
    holders."""

    reason: str
    useless: Collection[PeerId] = ()


@dataclass(frozen=True)
class RestoreOwnState:
    """Return to this stage's `own` state, the answer to NoteOwnState. No answer."""

    own: Any


@dataclass(frozen=True)
class ReportStage:
    """Report this stage's progress to the other holders. No answer."""


@dataclass(frozen=True)
class UseRound:
    """Apply the result of a finished round. The answer is whether the round failed here while it succeeded
    for others."""


@dataclass(frozen=True)
class BeginRound:
    """Begin a round in the background. No answer."""


@dataclass(frozen=True)
class HandOn:
    """Make a copy of the state for peers that wait for one. No answer."""


@dataclass(frozen=True)
class KeepState:
    """Save the state in the background. No answer."""


class StageCounts:
    """The numbers of steps and samples in a stage's parameters, in a run of `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.step = 0
        self.samples = 0
        self.is_waiting = False
        """Whether no step can be made here: the stage has no head, or its column lacks stages."""
        self.steps = steps

    @property
    def is_idle(self) -> bool:
        """Whether no step is made here now: all steps of the run are done, or stages are missing."""
        return self.step >= self.steps or self.is_waiting


class MemberStage:
    """One stage of one member."""

    def __init__(
        self,
        counts: StageCounts,
        rounds: RoundSchedule,
        ending: Ending,
        *,
        saves: CopySchedule,
        reports: Callable[[], Reports],
        now: Callable[[], float],
    ) -> None:
        """`saves` is the schedule by which the state is saved. `reports` returns the reports of the other
        holders of this stage."""
        self.counts = counts
        self.rounds = rounds
        self.has_state = False
        self.now = now
        self._ending = ending
        self._saves = saves
        self.reports = reports
        self._due = Due()

    @property
    def training(self) -> Sequence[PeerId]:
        """The other holders with a state."""
        return training(self.reports())

    @property
    def axes(self) -> int:
        """The number of rounds that average all holders: one for each axis of their grid."""
        return 1

    @property
    def step(self) -> int:
        """The number of steps in these parameters."""
        return self.counts.step

    @property
    def is_at_end(self) -> bool:
        """Whether the steps of the run are done, as far as others' claims count."""
        return is_at_end(self.reports(), self.step, self.counts.steps)

    def lacks_mean(self) -> bool:
        """Return whether a result made now would contain only this member's parameters."""
        return self.rounds.lacks_mean(self.step, len(self.training), self.axes)

    def note_end(self) -> None:
        """Note how long the run has been about to end."""
        is_ending = self.is_at_end or self._ending.series.has_converged
        self.rounds.ending_for = self._due.waited(self.now(), "an end", is_ending)

    # Resuming

    def begin(self) -> Course[None]:
        """Resume from the state of another member, or from the latest one on disk if no other member is
        further."""
        is_resumed: bool = yield Resume()
        if is_resumed:
            self._saves.step = self.step
        is_needed: bool = (yield LookFurther()) if is_resumed else is_begun(self.reports())
        if is_needed:
            yield from self.catch_up(is_needed=not is_resumed)
        self.has_state = True

    def catch_up(self, *, is_needed: bool = True) -> Course[None]:
        """Take over the state of another holder. Holders of unusable states are passed over. If no other
        holder is left, this stage keeps its own state. Raises StageLost if a new state `is_needed` and no
        holder hands one over."""
        reason, useless = "", set[PeerId]()
        own = yield NoteOwnState()
        for _ in range(CATCH_UPS_MAX):
            if not set(self.training) - useless:
                break
            failed: NotTaken | None = yield TryState(own, frozenset(useless))
            if failed is None:
                return
            reason = failed.reason
            useless.update(failed.useless)
            yield Sleep(AGAIN_SECONDS)
        else:
            if is_needed and not useless:
                raise StageLost(f"no member handed over its state: {reason}")
        if useless:
            yield RestoreOwnState(own)

    # Between two steps

    def between(self, *, is_still: bool, keeps: bool = True) -> Course[None]:
        """Apply a finished round, and begin the next round unless the parameters must stay fixed
        (`is_still`). Hand on the state, and save it if it is finite (`keeps`)."""
        yield ReportStage()
        if (yield UseRound()):
            yield from self.catch_up()
        self.note_end()
        counts, rounds = self.counts, self.rounds
        if not is_still and rounds.is_due(counts.step, is_idle=counts.is_idle):
            if self.training:
                yield BeginRound()
            else:
                rounds.skip(self.now(), counts.step, counts.samples)
        yield HandOn()
        if keeps and self._saves.is_due(self.now(), self.step):
            self._saves.step = self.step
            yield KeepState()
