"""The time since when something has been due."""


class Due:
    """The things that are due, by name."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def waited(self, now: float, name: str, is_due: bool) -> float:
        """Return for how many seconds something has been due; -1 if it is not due."""
        if not is_due:
            self._since.pop(name, None)
            return -1.0
        return now - self._since.setdefault(name, now)
