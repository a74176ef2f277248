"""The time of the first message of each member of an attempt, and how long to wait for the other members."""

from collections.abc import Collection, Sequence
from math import inf

UNHEARD_FACTOR = 4.0
"""A member may take this many times as long as most others did, so a slow machine or network extends the
deadline for all."""


class FirstSigns:
    """First messages of the other members. `others` are their positions; each member is given at least
    `seconds_min`."""

    def __init__(self, others: Sequence[int], seconds_min: float, begun_at: float) -> None:
        self._others = others
        self._seconds_min = seconds_min
        self._heard: dict[int, float] = {}
        self.begun_at = begun_at

    def note(self, place: int, now: float) -> None:
        """Record that a message came from a member."""
        self._heard.setdefault(place, now)

    def missing(self, lost: Collection[int]) -> list[int]:
        """Return the members, except lost ones, from which no message has come yet."""
        return [place for place in self._others if place not in self._heard and place not in lost]

    def until(self, lost: Collection[int]) -> float:
        """Return the deadline for the `missing` members; inf if there are none."""
        if not self.missing(lost):
            return inf
        return self.begun_at + self._seconds

    def overdue(self, lost: Collection[int], now: float) -> list[int]:
        """Return the `missing` members once half of their time is over."""
        return self.missing(lost) if now >= self.begun_at + self._seconds / 2 else []

    @property
    def _seconds(self) -> float:
        delays = sorted(self._heard.values())[: len(self._others) // 2 + 1]
        usual = delays[-1] - self.begun_at if delays else 0.0
        return max(self._seconds_min, UNHEARD_FACTOR * usual)
