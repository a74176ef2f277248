"""The timer of a run's saves: every so many steps, or on request."""


class SaveTimer:
    """`every` is in steps, 0 for never; `saved` is the step of the newest checkpoint. `is_due`: a save is
    wanted as soon as no commit is under way."""

    def __init__(self, every: int, saved: int) -> None:
        self.is_due = False
        self.every = every
        self._saved = saved

    def look(self, step: int) -> None:
        """Note that `step` steps are committed; a failed checkpoint is due again."""
        if self.every and step // self.every > self._saved // self.every:
            self._saved, self.is_due = step, True
