"""Turns of requests: a limit of concurrent requests for each key and for all, and a queue that is fair by
key.

Pure. A request enters under its key and gets its turn at once, or when others leave; waiting keys take turns.
If a key's queue is full, the request is refused with the seconds after which to retry.
"""

from collections import deque
from dataclasses import dataclass, field

TOTAL_MAX = 64
"""Requests of all keys that are answered at once: the door has 256 generations, and a request takes up to
eight."""
IN_FLIGHT_USUAL = 16
"""For one key, unless it was made with another limit."""
IN_FLIGHT_MAX = TOTAL_MAX
SECONDS_FIRST = 5.0
"""The assumed seconds of a request before one has ended."""
RETRY_SECONDS_MAX = 60.0
_WEIGHT = 0.2
"""How much the newest request counts in the mean."""


@dataclass(eq=False)
class RequestTurn:
    """One request; `at` is when its turn came."""

    key: str
    at: float | None = None


@dataclass
class _Line:
    going: int = 0
    waiting: deque[RequestTurn] = field(default_factory=deque)


class QueueFull(Exception):
    """A key's queue is full. `seconds` is the time until a retry."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"ask again in {seconds:.0f} s")
        self.seconds = seconds


class RequestQueue:
    """All requests of one node."""

    def __init__(self, waiting_max: int, total_max: int = TOTAL_MAX) -> None:
        """At most `waiting_max` requests of one key wait."""
        self.waiting_max = waiting_max
        self._total_max = total_max
        self._going = 0
        self._lines: dict[str, _Line] = {}
        self._limits: dict[str, int] = {}
        self._seconds = SECONDS_FIRST

    @property
    def going(self) -> int:
        """The number of requests that have their turn."""
        return self._going

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return sum(len(line.waiting) for line in self._lines.values())

    def enter(self, now: float, key: str, in_flight_max: int = IN_FLIGHT_USUAL) -> RequestTurn:
        """Return the turn of a request; it has come if `at` is set. Raises QueueFull."""
        line = self._lines.setdefault(key, _Line())
        self._limits[key] = in_flight_max
        turn = RequestTurn(key)
        if len(line.waiting) >= self.waiting_max:
            ahead = len(line.waiting) / max(1, in_flight_max)
            raise QueueFull(min(max(1.0, ahead * self._seconds), RETRY_SECONDS_MAX))
        line.waiting.append(turn)
        self._admit(now)
        return turn

    def leave(self, now: float, turn: RequestTurn) -> list[RequestTurn]:
        """Remove a request, whether its turn had come or not; return the requests whose turn comes now."""
        line = self._lines.get(turn.key)
        if line is None:
            return []
        if turn.at is None:
            line.waiting.remove(turn)
        else:
            self._seconds += _WEIGHT * (now - turn.at - self._seconds)
            line.going -= 1
            self._going -= 1
        if not line.going and not line.waiting:
            del self._lines[turn.key], self._limits[turn.key]
        return self._admit(now)

    def _admit(self, now: float) -> list[RequestTurn]:
        admitted: list[RequestTurn] = []
        while self._going < self._total_max:
            key = next((name for name, line in self._lines.items() if self._may(name, line)), None)
            if key is None:
                break
            line = self._lines.pop(key)
            self._lines[key] = line  # the next turn is another key's
            turn = line.waiting.popleft()
            turn.at = now
            line.going += 1
            self._going += 1
            admitted.append(turn)
        return admitted

    def _may(self, key: str, line: _Line) -> bool:
        return bool(line.waiting) and line.going < self._limits[key]
