"""Conversion of arriving tokens into pieces of text: only complete characters, and nothing of a stop text.

`decode` is called with a window of tokens, from the first one whose text was not returned yet to the newest.
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""The character that decoders return for bytes that are not a complete character."""
LETTER_BYTES_MAX = 4
"""Maximum number of bytes of a UTF-8 character. Bytes that are incomplete for longer are not a character."""
STOPS_MAX = 8
STOP_LENGTH_MAX = 200


def decode_bytes(tokens: Sequence[int]) -> str:
    """Return the text of tokens that are single bytes."""
    return bytes(tokens).decode("utf-8", "replace")


class TextStream:
    """The text of one answer. With `stops`, it ends (`is_stopped`) before the first of these texts."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.is_stopped = False
        self.stopped_by = ""
        """The stop text that ended the answer; empty if none did."""
        self._decode = decode
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._told = 0
        """The number of kept tokens whose text was already returned."""
        self._held = ""
        """Text that is held back because it may be the beginning of a stop."""

    def push(self, token: int) -> str:
        """Add the next token; return the text that may be shown now, possibly empty."""
        if self.is_stopped:
            return ""
        self._tokens.append(token)
        before, whole = self._decode(self._tokens[: self._told]), self._decode(self._tokens)
        waits = len(self._tokens) - self._told
        if whole.endswith(UNFINISHED) and waits < LETTER_BYTES_MAX:
            return ""
        piece = whole[len(before) :]
        # Keep the tokens returned last, because some tokenizers write a token differently at the beginning of
        # a text.
        del self._tokens[: self._told]
        self._told = len(self._tokens)
        return self._release(self._held + piece)

    def finish(self) -> str:
        """Return the text that was held back, because no token follows."""
        if self.is_stopped:
            return ""
        before, whole = self._decode(self._tokens[: self._told]), self._decode(self._tokens)
        held, self._held = self._held, ""
        text = held + whole[len(before) :]
        return text if (place := self._stop(text)) < 0 else text[:place]

    def _release(self, text: str) -> str:
        if (place := self._stop(text)) >= 0:
            self._held = ""
            return text[:place]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _stop(self, text: str) -> int:
        """End the answer at the first stop in a text, and return its index; -1 if there is none."""
        place = min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=-1)
        if place >= 0:
            self.is_stopped = True
            self.stopped_by = next(stop for stop in self._stops if text.startswith(stop, place))
        return place


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of a text that may be the beginning of a stop."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )
