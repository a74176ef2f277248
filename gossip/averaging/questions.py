"""A member's requests to the others of an attempt, and the limits of its answers."""

from collections.abc import Sequence
from math import inf

ANSWER_SECONDS_MIN = 0.05
"""Minimum interval between two answers to one member's requests for facts."""
RELAYS_MAX = 4
"""How many times a member may request the equivalent of the whole vector again."""


class Questions:
    """Requests among members, which are identified by their places. `chunks` is the number of chunks of the
    whole vector."""

    def __init__(self, chunks: int) -> None:
        self._relays_max = RELAYS_MAX * chunks
        self._asked: set[tuple[int, int]] = set()
        self._turn = 0
        self._relayed: dict[int, int] = {}
        self._answered: dict[int, float] = {}

    def begin(self) -> None:
        """Begin a new round of requests, which go to the next members in turn."""
        self._turn += 1

    def choose(self, place: int, candidates: Sequence[int]) -> int:
        """Return the member to ask, in this round of requests, for the part of the owner at `place`."""
        asked = candidates[self._turn % len(candidates)]
        self._asked.add((place, asked))
        return asked

    def has_asked(self, place: int, asked: int) -> bool:
        """Return whether this member was asked for that part."""
        return (place, asked) in self._asked

    def may_relay(self, asker: int) -> bool:
        """Return whether one more chunk may be passed on to this member."""
        count = self._relayed.get(asker, 0)
        self._relayed[asker] = min(count + 1, self._relays_max)
        return count < self._relays_max

    def may_answer(self, asker: int, now: float) -> bool:
        """Return whether to answer this member's request for facts now."""
        if now < self._answered.get(asker, -inf) + ANSWER_SECONDS_MIN:
            return False
        self._answered[asker] = now
        return True
