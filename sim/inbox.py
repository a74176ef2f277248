"""The Inbox seam of the simulation: datagrams in flight to one peer, delivered when they are due."""

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush

import trio

from crypto.identity import PeerId
from sim.network.instants import TICKS_PER_SECOND, nearest_instant
from sim.network.pace import PeerPace, handling_ticks
from sim.wakeup import SimAlarm

INBOX_MAX = 65_536
"""Maximum number of datagrams in flight to one inbox. If it is reached, no code reads the inbox."""

Datagrams = list[tuple[float, PeerId, int, bytes]]


class SimInbox:
    """Datagrams of one protocol in flight to one peer, a heap by (due, sender, number).

    A peer frozen by `pace` takes none, and a slow peer lets time pass after each datagram. `admit(sender,
    due)` decides about each datagram when it is taken.
    """

    def __init__(self, pace: PeerPace, admit: Callable[[PeerId, float], bool]) -> None:
        self.ties = 0
        self.is_open = False
        self._pace = pace
        self._admit = admit
        self._busy_until = 0.0
        self._heap: Datagrams = []
        self._alarm = SimAlarm()

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, due: float, sender: PeerId, number: int, data: bytes) -> bool:
        """Add a message that arrives at `due`. Return False if the inbox is full."""
        if len(self._heap) >= INBOX_MAX:
            return False
        heappush(self._heap, (due, sender, number, data))
        self._alarm.no_later_than(due)
        return True

    def drop_before(self, time: float) -> int:
        """Drop the messages that arrived before `time`, when the peer was not running; return how many."""
        late = [entry for entry in self._heap if entry[0] >= time]
        dropped = len(self._heap) - len(late)
        self._heap = late
        heapify(late)
        return dropped

    def empty(self) -> Datagrams:
        """Remove and return all datagrams."""
        heap, self._heap = self._heap, []
        return heap

    async def take(self, until: float) -> list[tuple[PeerId, bytes]]:
        """Return all datagrams of the first instant that has any; an empty list if `until` comes first."""
        while True:
            due = self._heap[0][0] if self._heap else math.inf
            ready_at = max(self._pace.still_until, self._busy_until)
            await self._alarm.sleep_until(max(min(due, until), ready_at))
            now = nearest_instant(trio.current_time())
            ready_at = max(self._pace.still_until, self._busy_until)
            if now >= ready_at:
                break
            # A message or a new deadline may wake this task while the peer is frozen, so check again at the
            # thaw.
            until = min(until, ready_at)
        taken = []
        while self._heap and self._heap[0][0] <= now:
            due, sender, _, data = heappop(self._heap)
            if self._admit(sender, due):
                taken.append((sender, data))
        if self._pace.factor > 1:
            busy_ticks = len(taken) * handling_ticks(self._pace.factor)
            self._busy_until = (round(now * TICKS_PER_SECOND) + busy_ticks) / TICKS_PER_SECOND
        # Counted so that a test can show that simultaneous datagrams were put in order.
        self.ties += max(0, len(taken) - 1) + (1 if taken and until <= now else 0)
        return taken

    def notify(self) -> None:
        self._alarm.ring()
