"""Events to come, in their order: what a heap is for, but as fast among a million events as among a few.

A calendar queue (Brown, CACM 31(10), 1988) with slots of a fixed width: what lies in a later slot is only
appended to it, and a slot is sorted when its time has come. A heap of all events is walked with every one of
them, from one end of the memory to the other.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

from crypto.identity import PeerId

SLOTS_PER_SECOND = 128
"""A slot is shorter than most latencies, so that few events fall into the present one; and holds enough that
there are many times more events than slots."""

Entry = tuple[float, int, int, PeerId, int, Any]
"""An event begins with its time, in seconds; the rest gives it a place among those of its instant."""


class Calendar:
    """Entries in their order, whenever they were added. Of equal ones, any comes first."""

    def __init__(self) -> None:
        # Of the present slot: those that were there when it began, the last first; and a heap of the others.
        self._present: list[Entry] = []
        self._added: list[Entry] = []
        self._number = -1
        self._slots: dict[int, list[Entry]] = {}
        self._numbers: list[int] = []

    def __iter__(self) -> Iterator[Entry]:
        """All that is to come, in no order."""
        for entries in (self._present, self._added, *self._slots.values()):
            yield from entries

    def add(self, entry: Entry) -> None:
        """Its time is finite, and not before that of the last entry taken."""
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
        """The first entry, unless it comes after `until`."""
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
