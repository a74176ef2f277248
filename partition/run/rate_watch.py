"""The schedule by which a committer checks whether the borders between stages still fit the measured times.

A machine may be slow for some seconds, so two successive checks must agree. Each plan that moved borders
doubles the number of steps before the next check. So if a run's times do not match the model, checks soon
become rare and its borders stay where they are.
"""

LOOK_STEPS = 5
"""Number of steps before the first check under a plan, and between later checks. The moving average of a
replica's time covers about the same number of steps."""
DOUBLINGS_MAX = 6
EWMA_SHARE = 0.3
"""Weight of the newest step in the moving average of the step time."""


class RateWatch:
    """One member's watch, over all plans of a run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._moved = 0
        self._steps = 0
        self._looks = 0
        self._agreed: tuple[int, ...] = ()

    def begin(self, *, has_moved: bool) -> None:
        """Restart under a new plan. `has_moved`: the plan moved borders."""
        self._moved += has_moved
        self.seconds, self._steps, self._agreed = 0.0, 0, ()

    def stepped(self, seconds: float) -> bool:
        """Note the time of a step; return whether a check is due."""
        self._steps += 1
        self.seconds = seconds if self._steps <= 2 else self.seconds + EWMA_SHARE * (seconds - self.seconds)
        return self._steps % (LOOK_STEPS << min(self._moved, DOUBLINGS_MAX)) == 0

    def found(self, cuts: tuple[int, ...]) -> bool:
        """Record the better cuts that this check found, () if none. Return whether this check and the
        previous one both found that a border should move."""
        agrees = bool(self._agreed) and bool(cuts)
        self._agreed = cuts
        return agrees
