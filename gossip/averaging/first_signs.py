"""The time of the first message of each member of an attempt, and the wait for the others."""

from collections.abc import Collection, Sequence
from math import inf

UNHEARD_FACTOR = 4.0
"""On a slow machine or network, a member may take this many times as long as most did."""


class FirstSigns:
    """`others` are the places of the other members; each has `seconds_min` at least."""

    def __init__(self, others: Sequence[int], seconds_min: float, begun_at: float) -> None:
        self._others = others
        self._seconds_min = seconds_min
        self._heard: dict[int, float] = {}
        self.begun_at = begun_at

    def note(self, place: int, now: float) -> None:
        """Note that a member was heard."""
        self._heard.setdefault(place, now)

    def missing(self, lost: Collection[int]) -> list[int]:
        """Return the members, without the lost ones, that were not heard yet."""
        return [place for place in self._others if place not in self._heard and place not in lost]

    def until(self, lost: Collection[int]) -> float:
        """Return the deadline for those members; inf if there are none."""
        if not self.missing(lost):
            return inf
        return self.begun_at + self._seconds

    def overdue(self, lost: Collection[int], now: float) -> list[int]:
        """Return those members once half of their time is over."""
        return self.missing(lost) if now >= self.begun_at + self._seconds / 2 else []

    @property
    def _seconds(self) -> float:
        delays = sorted(self._heard.values())[: len(self._others) // 2 + 1]
        usual = delays[-1] - self.begun_at if delays else 0.0
        return max(self._seconds_min, UNHEARD_FACTOR * usual)
