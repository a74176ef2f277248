"""The interval between checkpoints, chosen so that they take only a small share of a run's time.

A manifest sets the minimum interval. The cost of one checkpoint is the larger of two times: the time that the
slowest replica takes to copy, hash and store its stage, and the slowdown of steps while the checkpoint is
copied to its keepers. Steps are timed as they are committed.
"""

from math import ceil, isfinite

SHARE_MAX = 0.02
"""Maximum share of a run's time that checkpoints may take."""
INTERVAL_SECONDS_MAX = 300.0
"""Maximum interval, even if checkpoints are slow. So a lost stage costs a bounded time, and no claim can turn
saving off."""
_NEWEST_WEIGHT = 0.2
"""Weight of the newest step in the moving average. A single slow step is soon forgotten."""


class SaveInterval:
    """One committer's interval. `steps` is its present length, a multiple of `least`; if `least` is 0, no
    checkpoints are made."""

    def __init__(self, least: int) -> None:
        self.steps = self._least = least
        self._step = -1
        self._stored_seconds = 0.0
        self._step_seconds = 0.0
        self._slowdown_seconds: float | None = None
        self._delay_seconds = 0.0

    @property
    def seconds(self) -> float:
        """The approximate length of the interval in seconds; 0 if no step was timed yet."""
        return self.steps * self._step_seconds

    def step_took(self, seconds: float) -> None:
        """Note the time of a committed step."""
        if self._slowdown_seconds is not None and self._step_seconds:
            self._slowdown_seconds += seconds - self._step_seconds
            return  # a step during a checkpoint does not take the usual time
        before = self._step_seconds or seconds
        self._step_seconds = (1 - _NEWEST_WEIGHT) * before + _NEWEST_WEIGHT * seconds
        self._adapt()

    def began(self) -> None:
        """Note that stages will be saved after the step that was just committed."""
        self.ended()  # the previous checkpoint did not report its end: it failed, or is still in progress
        self._slowdown_seconds = 0.0

    def ended(self) -> None:
        """Note that the checkpoint is whole or has failed: steps are not slowed down from now on."""
        if self._slowdown_seconds is not None:
            newest = max(0.0, self._slowdown_seconds)
            # The newest value counts only half, because a slow step may have another cause.
            self._delay_seconds = (self._delay_seconds + newest) / 2
            self._slowdown_seconds = None
            self._adapt()

    def checkpoint_took(self, step: int, seconds: float) -> None:
        """Note how long one stage took for the checkpoint of a step. The slowest stage counts."""
        if not isfinite(seconds) or step < self._step:
            return
        slowest = self._stored_seconds if step == self._step else 0.0
        self._step, self._stored_seconds = step, max(slowest, seconds)
        self._adapt()

    def _adapt(self) -> None:
        if not self._least or self._step_seconds <= 0:
            return
        cost = max(self._stored_seconds, self._delay_seconds)
        wanted = min(cost / SHARE_MAX, INTERVAL_SECONDS_MAX)
        self.steps = self._least * max(1, ceil(wanted / (self._least * self._step_seconds)))
