"""The questions of a member of an attempt to others, and how often it answers theirs."""

from collections.abc import Sequence
from math import inf

ANSWER_SECONDS_MIN = 0.05
"""Between two answers to one member's questions for facts."""
RELAYS_MAX = 4
"""How often a member may ask for the whole vector again, chunk by chunk."""


class Questions:
    """Questions among members, who are known by their places. `chunks` counts those of the whole vector."""

    def __init__(self, chunks: int) -> None:
        self._relays_max = RELAYS_MAX * chunks
        self._asked: set[tuple[int, int]] = set()
        self._turn = 0
        self._relayed: dict[int, int] = {}
        self._answered: dict[int, float] = {}

    def begin(self) -> None:
        """Begin another turn of questions, which goes to the next members."""
        self._turn += 1

    def choose(self, place: int, candidates: Sequence[int]) -> int:
        """Return the member to ask for the part of the owner at `place` in this turn."""
        asked = candidates[self._turn % len(candidates)]
        self._asked.add((place, asked))
        return asked

    def has_asked(self, place: int, asked: int) -> bool:
        """Return whether this member was asked for that part."""
        return (place, asked) in self._asked

    def may_relay(self, asker: int) -> bool:
        """Return whether another chunk is handed on to this member."""
        count = self._relayed.get(asker, 0)
        self._relayed[asker] = min(count + 1, self._relays_max)
        return count < self._relays_max

    def may_answer(self, asker: int, now: float) -> bool:
        """Return whether this member's question for facts is answered now."""
        if now < self._answered.get(asker, -inf) + ANSWER_SECONDS_MIN:
            return False
        self._answered[asker] = now
        return True
