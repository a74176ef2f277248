"""The queue of requests: it limits the concurrent requests for each key and for all, and is fair among keys.

No I/O. A request enters under its key and is served immediately, or when others leave; waiting keys take
turns. If a key's queue is full, the request is refused, with the number of seconds after which to retry.
"""

from collections import deque
from dataclasses import dataclass, field

TOTAL_MAX = 64
"""Maximum number of requests of all keys that are served simultaneously. The door has 256 generations, and a
request takes up to eight."""
IN_FLIGHT_USUAL = 16
"""The usual maximum for one key, unless the key was made with a different limit."""
IN_FLIGHT_MAX = TOTAL_MAX
SECONDS_FIRST = 5.0
"""Assumed duration of a request before any has ended."""
RETRY_SECONDS_MAX = 60.0
_WEIGHT = 0.2
"""Weight of the newest request in the mean duration."""


@dataclass(eq=False)
class RequestTurn:
    """One request in the queue; `at` is when it started being served."""

    key: str
    at: float | None = None


@dataclass
class _Line:
    going: int = 0
    waiting: deque[RequestTurn] = field(default_factory=deque)


class QueueFull(Exception):
    """A key's queue is full. `seconds` is the time after which to retry."""

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
        """The number of requests that are being served."""
        return self._going

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return sum(len(line.waiting) for line in self._lines.values())

    def enter(self, now: float, key: str, in_flight_max: int = IN_FLIGHT_USUAL) -> RequestTurn:
        """Add a request. It is served immediately if its `at` is set. Raises QueueFull."""
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
        """Remove a request, whether it was being served or not; return the requests that are served from now
        on."""
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
            self._lines[key] = line  # the next request comes from a different key
            turn = line.waiting.popleft()
            turn.at = now
            line.going += 1
            self._going += 1
            admitted.append(turn)
        return admitted

    def _may(self, key: str, line: _Line) -> bool:
        return bool(line.waiting) and line.going < self._limits[key]
