"""Pending events in order: a priority queue that is as fast with a million events as with a few.

A calendar queue (Brown, CACM 31(10), 1988) with slots of a fixed width. An event of a later slot is only
appended to it, and a slot is sorted when its time comes. With one heap of all events, each operation would
access memory locations that are far apart.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

from crypto.identity import PeerId

SLOTS_PER_SECOND = 128
"""Number of slots per second. A slot is shorter than most latencies, so that few events fall into the current
one. It is long enough that there are many more events than slots."""

Entry = tuple[float, int, int, PeerId, int, Any]
"""An event: its time in seconds, followed by elements that order it within its instant."""


class Calendar:
    """Returns entries in order, whenever they were added. Equal entries come in any order."""

    def __init__(self) -> None:
        # Entries of the current slot: those that existed when it began, in reverse order, and a heap of those
        # added since.
        self._present: list[Entry] = []
        self._added: list[Entry] = []
        self._number = -1
        self._slots: dict[int, list[Entry]] = {}
        self._numbers: list[int] = []

    def __iter__(self) -> Iterator[Entry]:
        """Yield all pending entries, in no order."""
        for entries in (self._present, self._added, *self._slots.values()):
            yield from entries

    def add(self, entry: Entry) -> None:
        """Add an entry. Its time must be finite, and not before the time of the entry most recently taken."""
        number = int(entry[0] * SLOTS_PER_SECOND)
        slot = self._slots.get(number)
        if slot is not None:
            slot.append(entry)
        elif number > self._number:
            self._slots[number] = [entry]
            heappush(self._numbers, number)
        else:
            heappush(self._added, entry)

    def take(self, until: float) -> Entry | None:
        """Remove and return the first entry, unless its time is after `until`."""
        present, added = self._present, self._added
        if added and (not present or added[0] < present[-1]):
            return heappop(added) if added[0][0] <= until else None
        if not present:
            if not self._numbers or self._numbers[0] > until * SLOTS_PER_SECOND:
                return None
            self._number = heappop(self._numbers)
            present = self._present = self._slots.pop(self._number)
            present.sort(reverse=True)
        return present.pop() if present[-1][0] <= until else None
