"""Actions that a core performs later: a heap by due time, from which a timer can be cancelled.

It has no clock; its owner passes the time.
"""

import heapq
from collections.abc import Callable
from math import inf

Action = Callable[[float], None]
"""An action is called with the current time."""


class Timer:
    """One future action. A cancelled timer stays in the heap, without its action, until it reaches the
    top."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def call_off(self) -> None:
        self.action = None


class Timers:
    """All future actions, sorted by due time and then by the order in which they were added."""

    __slots__ = ("_heap", "_made")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._made = 0

    def at(self, due: float, action: Action) -> Timer:
        """Schedule `action` for `due`, in monotonic seconds."""
        timer = Timer(action)
        self._made += 1
        heapq.heappush(self._heap, (due, self._made, timer))
        return timer

    @property
    def due(self) -> float:
        """Return when the first action is due; inf if there is none."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else inf

    def run(self, now: float) -> None:
        """Call every action that is due."""
        while self.due <= now:
            timer = heapq.heappop(self._heap)[2]
            if timer.action is not None:
                timer.action(now)
