"""The schedule of one member's evaluations and result in local mode: its turns, and what they wait for.

Not here: the agreement on a result (`partition.run.ending`), and the arithmetic.
"""

from collections.abc import Sequence

from crypto.identity import PeerId
from partition.run.ending import Ending
from partition.run.local.due import Due
from partition.run.local.round_schedule import RoundSchedule
from partition.run.local_settings import LocalSettings

LONG_AGO = -(2**53)


class EvaluationSchedule:
    """The schedule of one member's evaluations."""

    def __init__(self, settings: LocalSettings, ending: Ending) -> None:
        self.is_waiting = False
        """Whether the run is over for this member, and it waits for the others."""
        self.holds_still = False
        """Whether this member makes no steps, because the result will be made from this step once it is
        averaged."""
        self.evaluated_step = 0
        """This member's step at the latest evaluation, by this member or another."""
        self._apart = settings.evaluate_every * settings.local_steps
        self._patience = settings.patience
        self._ending = ending
        self._due = Due()
        self._passed_step = LONG_AGO
        """The step of the latest result of this member that was rejected."""
        self._held_step = LONG_AGO

    def look(
        self,
        now: float,
        step: int,
        rounds: RoundSchedule,
        training: Sequence[PeerId],
        *,
        axes: int,
        is_at_end: bool,
        is_idle: bool,
    ) -> bool:
        """Return whether this member evaluates now, after `step`. `training` are the other members with a
        state; `is_idle`: its column lacks stages."""
        ending = self._ending
        self.holds_still = False
        ending.set_end(now, self._due.waited(now, "the end of the steps", is_at_end))
        if ending.best is not None:
            return False
        if self.is_waiting:  # the proposal was given up: train on, and do not repeat it soon
            self.is_waiting, self._passed_step = False, step
        if not is_at_end and 0 <= step - self._passed_step < self._apart:
            return False
        is_due = step - self.evaluated_step >= self._apart
        waited = max(rounds.ending_for, self._due.waited(now, "an evaluation", is_due))
        ending.set_due(now, waited)
        is_mine = waited >= 0 and ending.turns.is_mine(training, waited)
        is_held = rounds.ending_for >= 0 and self._awaits_mean(step, rounds, training, axes, is_mine=is_mine)
        return is_mine and not is_held and not is_idle

    def _awaits_mean(
        self, step: int, rounds: RoundSchedule, training: Sequence[PeerId], axes: int, *, is_mine: bool
    ) -> bool:
        """Return whether the result waits for a last round, during which the parameters here stay fixed. If
        another member makes the result, this happens at most once per evaluation interval, because a member
        may claim any loss."""
        if not rounds.lacks_mean(step, len(training), axes):
            return False
        if not is_mine and 0 != step - self._held_step < self._apart:
            return False
        self._held_step, self.holds_still = step, True
        return True

    def evaluated(self, step: int) -> None:
        """Note an evaluation, by this member or another. The next one is due a full interval later."""
        self.evaluated_step = step

    def concludes(
        self, step: int, rounds: RoundSchedule, training: Sequence[PeerId], *, axes: int, is_at_end: bool
    ) -> str | None:
        """Return why this member, which has just evaluated, makes the result now ("" after the last step);
        None to train on."""
        if not (is_at_end or self._ending.series.has_converged):
            return None
        if self._awaits_mean(step, rounds, training, axes, is_mine=True):
            return None
        return "" if is_at_end else "its evaluations stopped improving"

    def may_judge(self, step: int, *, is_at_end: bool) -> bool:
        """Return whether the run may be over, so that a proposed result is tried. Otherwise training
        continues."""
        return is_at_end or (bool(self._patience) and step >= self._patience * self._apart)
