"""How many steps lie between two checkpoints, so that making them takes a small share of a run's time.

A manifest says how often at most. What one checkpoint takes is what the slowest replica needed to copy, hash
and store its stage; steps are timed as they are committed.
"""

from math import ceil, isfinite

SHARE_MAX = 0.02
"""Of a run's time that checkpoints may take."""
INTERVAL_SECONDS_MAX = 300.0
"""However long a checkpoint takes: what a lost stage costs stays bounded, and a claim cannot turn saving
off."""
_NEWEST_WEIGHT = 0.2
"""Of the newest step in the mean: a slow one is soon forgotten."""


class SaveInterval:
    """One committer's. `steps` is the interval now, a multiple of `least`, which 0 turns off."""

    def __init__(self, least: int) -> None:
        self.steps = self._least = least
        self._step = -1
        self._cost_seconds = 0.0
        self._step_seconds = 0.0

    @property
    def seconds(self) -> float:
        """About how long the interval takes; 0 where no step was timed yet."""
        return self.steps * self._step_seconds

    def step_took(self, seconds: float) -> None:
        """Note the time of a committed step."""
        before = self._step_seconds or seconds
        self._step_seconds = (1 - _NEWEST_WEIGHT) * before + _NEWEST_WEIGHT * seconds
        self._adapt()

    def checkpoint_took(self, step: int, seconds: float) -> None:
        """Note what one stage needed for the checkpoint of a step; the slowest counts."""
        if not isfinite(seconds) or step < self._step:
            return
        slowest = self._cost_seconds if step == self._step else 0.0
        self._step, self._cost_seconds = step, max(slowest, seconds)
        self._adapt()

    def _adapt(self) -> None:
        if not self._least or self._step_seconds <= 0:
            return
        wanted = min(self._cost_seconds / SHARE_MAX, INTERVAL_SECONDS_MAX)
        self.steps = self._least * max(1, ceil(wanted / (self._least * self._step_seconds)))
