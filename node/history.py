"""The latest events of this node, each with a number: what `events --since`, the page and a bug report read.

In memory and bounded. A reader keeps the number it has seen and asks for what came after it, so a slow reader
holds nothing and misses only what has been dropped. `Node.watch` is for those that wait for each event.
"""

from collections import deque
from itertools import islice

from node.events import Event

EVENTS_KEPT_MAX = 10_000
"""An event is some 300 bytes, so these are a few MiB: an hour of a busy run, days of a quiet swarm."""


class EventHistory:
    """The newest events, numbered from 1 in the order in which they happened."""

    def __init__(self, kept_max: int = EVENTS_KEPT_MAX) -> None:
        self._events: deque[Event] = deque(maxlen=kept_max)
        self.last = 0

    def append(self, event: Event) -> None:
        """Keep `event`, if need be in place of the oldest."""
        self._events.append(event)
        self.last += 1

    @property
    def dropped(self) -> int:
        """How many events are no longer here."""
        return self.last - len(self._events)

    def after(self, number: int) -> list[tuple[int, Event]]:
        """All events above `number` that are still here, oldest first, with their numbers."""
        dropped = self.dropped
        start = min(max(0, number - dropped), len(self._events))
        if start > len(self._events) // 2:  # from the near end: a reader that keeps up asks for the newest
            newest = list(islice(reversed(self._events), len(self._events) - start))
            return list(enumerate(reversed(newest), dropped + start + 1))
        return list(enumerate(islice(self._events, start, None), dropped + start + 1))

    def since(self, at: float) -> list[tuple[int, Event]]:
        """All events that are still here and not older than `at` (unix seconds), oldest first."""
        return [(number, event) for number, event in self.after(0) if event.at >= at]
