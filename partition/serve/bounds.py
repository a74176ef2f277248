"""The owner's limits on what one door (the node that asks) may use at the stages here: sessions, tokens per
minute, and memory.

A running answer may exceed a minute's tokens, so that it is not cut off for a few tokens; a new answer must
wait. The count of spent tokens decays at the allowed rate.
"""

from dataclasses import dataclass

from crypto.identity import PeerId

SESSIONS_PER_DOOR_MAX = 16
"""Maximum number of sessions of one door at one node, that is, of prompts that are answered
simultaneously."""
SPENT_MAX = 1_024
"""Maximum number of doors whose tokens are counted. Beyond it, the door that has spent least is dropped."""
MINUTE = 60.0
MINUTES_MAX = 2.0
"""Number of minutes whose tokens a door may spend before its session is ended."""


@dataclass(frozen=True)
class PeerBounds:
    """The limits of one door: the number of sessions in use, tokens per minute (0: unlimited), and the share
    of a stage's room for keys and values."""

    sessions: int = SESSIONS_PER_DOOR_MAX
    tokens_per_minute: int = 0
    cache_part: float = 0.5


NO_BOUNDS = PeerBounds(cache_part=1.0)
"""The limits for the owner's own node."""


def counted(count: int, what: str) -> str:
    """Return a number followed by its noun in singular or plural."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


class TokensSpent:
    """The tokens that each door has spent recently."""

    def __init__(self) -> None:
        self._spent: dict[PeerId, tuple[float, float, int]] = {}
        """For each door, the number of tokens, the time of that count, and the tokens allowed per minute."""

    def spent(self, now: float, door: PeerId) -> float:
        """Return the number of spent tokens that still count."""
        count, at, rate = self._spent.get(door, (0.0, now, 0))
        return max(0.0, count - rate * (now - at) / MINUTE)

    def spend(self, now: float, door: PeerId, tokens: int, rate: int) -> None:
        """Count tokens for a door that may spend `rate` per minute (0: unlimited). A negative number of
        tokens is given back."""
        if not rate:
            self._spent.pop(door, None)
            return
        self._spent[door] = max(0.0, self.spent(now, door) + tokens), now, rate
        while len(self._spent) > SPENT_MAX:
            del self._spent[min(self._spent, key=lambda each: self.spent(now, each))]

    def refusal(self, now: float, door: PeerId, rate: int, minutes: float = 1.0) -> str:
        """Return why a door with `rate` tokens per minute gets no more tokens; empty if it may have more."""
        over = self.spent(now, door) - rate * minutes
        if not rate or over < 0:
            return ""
        wait = max(1.0, MINUTE * over / rate)
        return f"its owner allows {counted(rate, 'token')} a minute to each peer: more in {wait:.0f} s"
