"""Turns incoming tokens into pieces of text: only complete characters, and nothing of a stop text.

`decode` is called with a window of tokens, from the first one whose text was not returned yet to the newest.
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""The character that decoders write for bytes that are no letter yet."""
LETTER_BYTES_MAX = 4
"""Bytes of a letter in UTF-8; what is unfinished for longer is no letter."""
STOPS_MAX = 8
STOP_LENGTH_MAX = 200


def decode_bytes(tokens: Sequence[int]) -> str:
    """Return the text of tokens that are bytes."""
    return bytes(tokens).decode("utf-8", "replace")


class TextStream:
    """The text of one answer. With `stops` it is over (`is_stopped`) before the first of these texts."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.is_stopped = False
        self.stopped_by = ""
        """Which of the stops it was."""
        self._decode = decode
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._told = 0
        """How many of the tokens kept are in the text by now."""
        self._held = ""
        """Text that may be the beginning of a stop."""

    def push(self, token: int) -> str:
        """Take the next token; return the text that may be shown now, possibly empty."""
        if self.is_stopped:
            return ""
        self._tokens.append(token)
        before, whole = self._decode(self._tokens[: self._told]), self._decode(self._tokens)
        waits = len(self._tokens) - self._told
        if whole.endswith(UNFINISHED) and waits < LETTER_BYTES_MAX:
            return ""
        piece = whole[len(before) :]
        # The tokens told last stay: some tokenizers write a token otherwise at the beginning of a text.
        del self._tokens[: self._told]
        self._told = len(self._tokens)
        return self._release(self._held + piece)

    def finish(self) -> str:
        """Return the held-back text; no token follows."""
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
    """Return how many letters at the end of a text may begin a stop."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )
