"""The text of an answer during reading: the unread text, and the text that is held back.

Text arrives in pieces, so a step of reading is a generator that waits (`yield`) if it needs more.
"""

from collections.abc import Callable, Generator, Sequence

Steps = Generator[None, None, None]
Found = Generator[None, None, str]
SPACE = " \t\r\n"


class AnswerText:
    """The text of one answer. After `hold`, consumed text is also saved until it is clear whether a tool call
    begins there."""

    def __init__(self) -> None:
        self.rest = ""
        """Text that has arrived but was not read yet."""
        self.is_last = False
        """Whether no more text follows."""
        self.space = ""
        """White space before the newest mark that was not reported yet."""
        self._held = ""
        self._is_holding = False

    def hold(self, text: str) -> None:
        """Save this text, and all text that is consumed from now on."""
        self._held, self._is_holding = text, True

    def take_held(self) -> str:
        """Return the saved text, and save no more."""
        held, self._held, self._is_holding = self._held, "", False
        return held

    def drop(self, count: int) -> str:
        """Consume and return the next `count` characters."""
        taken, self.rest = self.rest[:count], self.rest[count:]
        if self._is_holding:
            self._held += taken
        return taken

    def until(self, marks: Sequence[str], tell: Callable[[str], None], *, is_stripped: bool = True) -> Found:
        """Report the text before the first of some marks; consume and return the mark, or "" if none comes.
        White space before a mark is not reported."""
        while True:
            places = [(place, mark) for mark in marks if (place := self.rest.find(mark)) >= 0]
            if places:
                place, mark = min(places, key=lambda each: (each[0], -len(each[1])))
                told = self.drop(place)
                self.drop(len(mark))
                kept = told.rstrip() if is_stripped else told
                self.space = told[len(kept) :]
                tell(kept)
                return mark
            if self.is_last:
                tell(self.drop(len(self.rest)))
                return ""
            keep = max((_overlap(self.rest, mark) for mark in marks), default=0)
            free = self.rest[: len(self.rest) - keep]
            tell(self.drop(len(free.rstrip()) if is_stripped else len(free)))
            yield

    def skip_space(self) -> Steps:
        """Consume white space."""
        while True:
            self.drop(len(self.rest) - len(self.rest.lstrip(SPACE)))
            if self.rest or self.is_last:
                return
            yield

    def next_is(self, *marks: str) -> Found:
        """If one of the marks comes next, consume and return it; otherwise return ""."""
        while not self.is_last and any(mark.startswith(self.rest) and mark != self.rest for mark in marks):
            yield
        for mark in sorted(marks, key=len, reverse=True):
            if self.rest.startswith(mark):
                self.drop(len(mark))
                return mark
        return ""

    def taken_until(self, marks: Sequence[str]) -> Generator[None, None, tuple[str, str]]:
        """Consume and return the text before the first of some marks, and the mark."""
        told: list[str] = []
        mark = yield from self.until(marks, told.append, is_stripped=False)
        return "".join(told), mark


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    return next(
        (size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0
    )
