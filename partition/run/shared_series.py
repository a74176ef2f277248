"""The series of evaluations of a run in local mode. Each member adds its own evaluations and those of other
members."""

from math import isfinite

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.run.conclusions import ModelEvaluated
from partition.run.convergence import SeriesProgress, advance, has_converged
from partition.run.local_settings import LocalSettings
from partition.run.turns import Turns


class SharedSeries:
    """The series of one run at one member. `steps` is the run's number of steps, an upper bound for all
    members."""

    def __init__(self, run: bytes, settings: LocalSettings, steps: int, turns: Turns) -> None:
        self.progress = SeriesProgress()
        self._run = run
        self._settings = settings
        self._steps = steps
        self._turns = turns

    @property
    def has_converged(self) -> bool:
        """Whether the series has stopped improving, according to the manifest's rule."""
        return has_converged(self.progress, self._settings.patience)

    def add(self, step: int, samples: int, loss: float, metrics: tuple[float, ...]) -> ModelEvaluated:
        """Add an evaluation of this member; return the message for the others."""
        self.progress = advance(self.progress, step, loss, self._settings.improvement)
        best, since = self.progress.best, self.progress.since
        return ModelEvaluated(self._run, step, samples, loss, metrics, best, since)

    def check(self, message: ModelEvaluated) -> None:
        """Check another member's evaluation. Raises RemoteProtocolError if it is impossible."""
        if not all(isfinite(number) for number in (message.loss, message.best, *message.metrics)):
            raise RemoteProtocolError("an evaluation has a value that is not finite")
        if message.step > self._steps:
            raise RemoteProtocolError("an evaluation names a step beyond the run's last one")

    def take(self, now: float, sender: PeerId, message: ModelEvaluated) -> bool:
        """Add another member's evaluation to the series; return whether it counts."""
        if message.step < self.progress.step or not self._turns.may_be(now, sender):
            return False
        if self.progress.step < 0:  # a latecomer adopts the series as reported to it
            self.progress = SeriesProgress(message.step, min(message.best, message.loss), message.since)
        else:
            self.progress = advance(self.progress, message.step, message.loss, self._settings.improvement)
        return True
