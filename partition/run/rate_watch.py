"""The schedule by which a committer checks whether the borders between stages still fit the measured times.

A machine is slow for seconds at a time, so two looks must agree; and each plan that moved borders doubles the
steps until the next look, so that a run whose times the model does not explain soon stays as it is.
"""

LOOK_STEPS = 5
"""Steps under a plan before the first look, and from one look to the next: the average of a replica's times
remembers about as many."""
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
        """Start anew under another plan; `has_moved`: it moved borders."""
        self._moved += has_moved
        self.seconds, self._steps, self._agreed = 0.0, 0, ()

    def stepped(self, seconds: float) -> bool:
        """Note the time of a step; return whether it is time to look."""
        self._steps += 1
        self.seconds = seconds if self._steps <= 2 else self.seconds + EWMA_SHARE * (seconds - self.seconds)
        return self._steps % (LOOK_STEPS << min(self._moved, DOUBLINGS_MAX)) == 0

    def found(self, cuts: tuple[int, ...]) -> bool:
        """Note the better cuts that one look found, () for none; return whether the look before agrees that
        something should move."""
        agrees = bool(self._agreed) and bool(cuts)
        self._agreed = cuts
        return agrees
