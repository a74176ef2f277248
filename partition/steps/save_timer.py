"""The timer of a run's saves: every `every` steps, or on request."""


class SaveTimer:
    """The timer of one committer. `every` is in steps, 0 for never; `saved` is the step of the newest
    checkpoint. `is_due`: a save is wanted as soon as no commit is in progress."""

    def __init__(self, every: int, saved: int) -> None:
        self.is_due = False
        self.every = every
        self._saved = saved

    def look(self, step: int) -> None:
        """Note that `step` steps are committed, and whether a save is due. A failed save is not repeated
        before the next one is due."""
        if self.every and step // self.every > self._saved // self.every:
            self._saved, self.is_due = step, True
