"""The schedule by which a committer checks whether the borders between stages still fit the measured times.

A machine may be slow for some seconds, so two looks must agree. Each plan that moved borders doubles the
steps until the next look, so a run whose times do not follow the model soon stays as it is.
"""

LOOK_STEPS = 5
"""Steps before the first look under a plan, and between looks; a replica's average time covers about as
many."""
DOUBLINGS_MAX = 6
EWMA_SHARE = 0.3
"""The weight of the newest step in the mean duration of a step."""


class RateWatch:
    """One member's watch, over all plans of a run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._moved = 0
        self._steps = 0
        self._looks = 0
        self._agreed: tuple[int, ...] = ()

    def begin(self, *, has_moved: bool) -> None:
        """Restart under another plan; `has_moved`: it moved borders."""
        self._moved += has_moved
        self.seconds, self._steps, self._agreed = 0.0, 0, ()

    def stepped(self, seconds: float) -> bool:
        """Note the time of a step; return whether a look is due."""
        self._steps += 1
        self.seconds = seconds if self._steps <= 2 else self.seconds + EWMA_SHARE * (seconds - self.seconds)
        return self._steps % (LOOK_STEPS << min(self._moved, DOUBLINGS_MAX)) == 0

    def found(self, cuts: tuple[int, ...]) -> bool:
        """Note the better cuts that a look found, () for none; return whether the last look agrees that
        something should move."""
        agrees = bool(self._agreed) and bool(cuts)
        self._agreed = cuts
        return agrees
