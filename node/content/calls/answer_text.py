"""The text of an answer as a reader goes over it: what is left to read, and what is held back.

Text comes in pieces, so a step of reading is a generator that waits (`yield`) where it needs more.
"""

from collections.abc import Callable, Generator, Sequence

Steps = Generator[None, None, None]
Found = Generator[None, None, str]
SPACE = " \t\r\n"


class AnswerText:
    """One answer's text. After `hold`, dropped text is held back until it is known whether a call begins."""

    def __init__(self) -> None:
        self.rest = ""
        """Text that has come and is not read yet."""
        self.is_last = False
        """No more text follows."""
        self.space = ""
        """White space before the newest mark, not reported yet."""
        self._held = ""
        self._is_holding = False

    def hold(self, text: str) -> None:
        """Hold back this text, and all that is dropped from here on."""
        self._held, self._is_holding = text, True

    def take_held(self) -> str:
        """Return the text that was held back, and hold back no more."""
        held, self._held, self._is_holding = self._held, "", False
        return held

    def drop(self, count: int) -> str:
        """Return the next letters, which are read now."""
        taken, self.rest = self.rest[:count], self.rest[count:]
        if self._is_holding:
            self._held += taken
        return taken

    def until(self, marks: Sequence[str], tell: Callable[[str], None], *, is_stripped: bool = True) -> Found:
        """Report the text before the first of some marks; drop and return the mark, "" if none comes. White
        space before a mark is dropped."""
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
        """Drop white space."""
        while True:
            self.drop(len(self.rest) - len(self.rest.lstrip(SPACE)))
            if self.rest or self.is_last:
                return
            yield

    def next_is(self, *marks: str) -> Found:
        """Drop and return the one of some marks that comes next; "" if none does."""
        while not self.is_last and any(mark.startswith(self.rest) and mark != self.rest for mark in marks):
            yield
        for mark in sorted(marks, key=len, reverse=True):
            if self.rest.startswith(mark):
                self.drop(len(mark))
                return mark
        return ""

    def taken_until(self, marks: Sequence[str]) -> Generator[None, None, tuple[str, str]]:
        """Return the text before the first of some marks, and the mark; drop both."""
        told: list[str] = []
        mark = yield from self.until(marks, told.append, is_stripped=False)
        return "".join(told), mark


def _overlap(text: str, mark: str) -> int:
    """Return how many letters at the end of a text may begin a mark."""
    return next(
        (size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0
    )
