"""A status as one sentence: what a peer does or waits for, for how long, and what ends that."""

import re
import time

LASTING = (
    (re.compile("alone in run"), "it trains by itself until another peer joins"),
    (re.compile("alone"), "it trains as the plain optimizer"),
    (re.compile(r"step \d+: \d+ of \d+ samples"), "the step is made once they are there"),
    (re.compile("a round is under way"), "training goes on, and takes its mean in once it is over"),
    (re.compile("behind the run"), "it asks again at a later step"),
    (re.compile("nothing was averaged"), "the next round tries again"),
    (re.compile(r"step \d+: this step has no gradients"), "the next backward() ends that"),
)
"""Lasting states, recognized by the beginning of their text, and what ends each."""


class StatusLine:
    """One peer's status. The text of a lasting state may change, for example in its numbers."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._kind: int | None = None
        self._since = time.monotonic()

    def say(self, text: str) -> None:
        """Set the status."""
        kind = next((at for at, (begin, _) in enumerate(LASTING) if begin.match(text)), None)
        if kind is None or kind != self._kind:
            self._since = time.monotonic()
        self._kind, self.text = kind, text

    def sentence(self) -> str:
        """Return the text, with its duration and what ends it."""
        if self._kind is None:
            return self.text
        return f"{self.text}, for {time.monotonic() - self._since:.0f} s; {LASTING[self._kind][1]}"
