"""The latest events of this node, numbered, as read by `events --since`, the page and bug reports.

They are in memory, and their number is bounded. A reader remembers the last number it has seen and asks for
later events. So a slow reader uses no memory here, and misses only events that were dropped. `Node.watch` is
for readers that wait for each event.
"""

from collections import deque
from itertools import islice

from node.events import Event

EVENTS_KEPT_MAX = 10_000
"""Maximum number of events kept. At about 300 bytes each they take a few MiB: an hour of a busy run, or days
of a quiet swarm."""


class EventHistory:
    """The newest events, numbered from 1 in the order in which they happened."""

    def __init__(self, kept_max: int = EVENTS_KEPT_MAX) -> None:
        self._events: deque[Event] = deque(maxlen=kept_max)
        self.last = 0

    def append(self, event: Event) -> None:
        """Keep `event`, replacing the oldest if necessary."""
        self._events.append(event)
        self.last += 1

    @property
    def dropped(self) -> int:
        """The number of events that are no longer kept."""
        return self.last - len(self._events)

    def after(self, number: int) -> list[tuple[int, Event]]:
        """Return all kept events above `number`, oldest first, with their numbers."""
        dropped = self.dropped
        start = min(max(0, number - dropped), len(self._events))
        # iterate from the end, since a reader that keeps up asks for the newest events
        if start > len(self._events) // 2:
            newest = list(islice(reversed(self._events), len(self._events) - start))
            return list(enumerate(reversed(newest), dropped + start + 1))
        return list(enumerate(islice(self._events, start, None), dropped + start + 1))

    def since(self, at: float) -> list[tuple[int, Event]]:
        """Return all kept events not older than `at` (Unix seconds), oldest first, with their numbers."""
        return [(number, event) for number, event in self.after(0) if event.at >= at]
