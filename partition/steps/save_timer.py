"""When a committer has the stages of its run saved: every so many steps, or because somebody asks for it."""


class SaveTimer:
    """`every` is in steps, 0 for never; `saved` is the step of the newest checkpoint. `is_due`: a save is
    wanted as soon as no commit is under way."""

    def __init__(self, every: int, saved: int) -> None:
        self.is_due = False
        self.every = every
        self._saved = saved

    def look(self, step: int) -> None:
        """Note that `step` steps are committed; a checkpoint that came to nothing is due again."""
        if self.every and step // self.every > self._saved // self.every:
            self._saved, self.is_due = step, True
