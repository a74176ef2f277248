"""The owner's bounds of one door at the stages here: sessions, tokens a minute, memory.

A running answer may exceed a minute's tokens, so that it is not cut off for a few; a new one waits. Spent
tokens decay at the allowed rate.
"""

from dataclasses import dataclass

from crypto.identity import PeerId

SESSIONS_PER_DOOR_MAX = 16
"""Sessions of one door at one node: the prompts that a machine answers at once."""
SPENT_MAX = 1_024
"""Doors whose tokens are counted; beyond this limit the one that has spent least is dropped."""
MINUTE = 60.0
MINUTES_MAX = 2.0
"""A session ends once its door has spent the tokens of this many minutes."""


@dataclass(frozen=True)
class PeerBounds:
    """The bounds of one door: sessions that are in use, tokens a minute (0: any number), and the part of
    a stage's room for keys and values."""

    sessions: int = SESSIONS_PER_DOOR_MAX
    tokens_per_minute: int = 0
    cache_part: float = 0.5


NO_BOUNDS = PeerBounds(cache_part=1.0)
"""For the owner's own node."""


def counted(count: int, what: str) -> str:
    """Return a number with its noun."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


class TokensSpent:
    """The recent tokens of each door."""

    def __init__(self) -> None:
        self._spent: dict[PeerId, tuple[float, float, int]] = {}
        """For each door its tokens, the time of that count, and its tokens per minute."""

    def spent(self, now: float, door: PeerId) -> float:
        """Return how many are not forgotten."""
        count, at, rate = self._spent.get(door, (0.0, now, 0))
        return max(0.0, count - rate * (now - at) / MINUTE)

    def spend(self, now: float, door: PeerId, tokens: int, rate: int) -> None:
        """Count tokens for a door that may have `rate` a minute; 0 is no bound. Fewer than none are given
        back."""
        if not rate:
            self._spent.pop(door, None)
            return
        self._spent[door] = max(0.0, self.spent(now, door) + tokens), now, rate
        while len(self._spent) > SPENT_MAX:
            del self._spent[min(self._spent, key=lambda each: self.spent(now, each))]

    def refusal(self, now: float, door: PeerId, rate: int, minutes: float = 1.0) -> str:
        """Return why a door with `rate` tokens a minute gets no more tokens; empty if it may have more."""
        over = self.spent(now, door) - rate * minutes
        if not rate or over < 0:
            return ""
        wait = max(1.0, MINUTE * over / rate)
        return f"its owner allows {counted(rate, 'token')} a minute to each peer: more in {wait:.0f} s"
