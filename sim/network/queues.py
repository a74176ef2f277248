"""Bandwidth: the queues at both ends of the network, and their contents. No I/O.

Each peer with limited access has one queue up and one down for all its protocols. The order in a queue is the
same under every driver. Up: by the instant of sending; within one instant by the name of the protocol, then
in the order in which the protocol's core sent. Down: by the instant of arrival; within one instant by
protocol, sender and the sender's order. So the queue accepts the messages of an instant one microsecond
later, when all of them are known.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from crypto.identity import PeerId
from sim.network.instants import TICKS_PER_SECOND, instant


class Fifo:
    """A first-in, first-out queue that is emptied at a rate."""

    __slots__ = ("bytes_per_second", "free_at", "seconds_max")

    def __init__(self, bytes_per_second: float, seconds_max: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.seconds_max = seconds_max
        self.free_at = 0.0

    def enter(self, now: float, size_bytes: int, *, waits: bool = False) -> float:
        """Return when the last byte has passed, an instant after `now`; inf if the queue is too long for it,
        unless it `waits`. `now` must never decrease."""
        begin = max(self.free_at, now)
        if begin - now > self.seconds_max and not waits:
            return math.inf
        self.free_at = begin + size_bytes / self.bytes_per_second
        return max(instant(self.free_at), _next(now))


class Parcel:
    """A message or segment on its way through the queues of its sender and its receiver.

    `trips` is how long each copy travels between the two queues, in ticks; it is empty if the parcel is lost
    there. `land(due, parcel)` is called with the arrival instant of a copy, before that instant.
    """

    __slots__ = ("down", "item", "land", "number", "protocol", "sender", "size_bytes", "trips", "waits")

    def __init__(
        self,
        sender: PeerId,
        protocol: str,
        down: Fifo | None,
        size_bytes: int,
        trips: tuple[int, ...],
        land: "Callable[[float, Parcel], None]",
        item: Any,
        *,
        waits: bool = False,
    ) -> None:
        self.sender = sender
        self.protocol = protocol
        self.down = down
        self.size_bytes = size_bytes
        self.trips = trips
        self.land = land
        self.item = item
        self.waits = waits
        self.number = 0


class Uplink:
    """The queue up of one peer, and what the peer sent at the current instant."""

    __slots__ = ("fifo", "sent", "sent_at")

    def __init__(self, bytes_per_second: float, seconds_max: float) -> None:
        self.fifo = Fifo(bytes_per_second, seconds_max)
        self.sent: list[Parcel] = []
        self.sent_at = 0.0


class LinkQueue:
    """Carries parcels through queues. A driver passes them to `send` and calls `advance` at `deadline` or
    later, but before a later instant begins. `overflowed` counts copies that did not fit into a queue.
    """

    def __init__(self) -> None:
        self.overflowed = 0
        self.under_way = 0
        self._heap: list[tuple[float, str, bytes, int, Any]] = []
        self._number = 0

    @property
    def deadline(self) -> float:
        """When `advance` must be called; inf for never."""
        return self._heap[0][0] if self._heap else math.inf

    def send(self, now: float, up: Uplink | None, parcel: Parcel) -> None:
        """Send a `parcel` from its sender, whose queue is `up`, at the instant `now`."""
        self._number += 1
        parcel.number = self._number
        self.under_way += len(parcel.trips)
        if up is None:
            self._fly(now, parcel)
            return
        self._take_up(up, now)
        if not up.sent:
            up.sent_at = now
            heappush(self._heap, (_next(now), "", b"", self._number, up))
        up.sent.append(parcel)

    def later(self, at: float, action: Callable[[], None]) -> None:
        """Run `action` at the instant `at`."""
        self._number += 1
        heappush(self._heap, (at, "", b"", self._number, action))

    def advance(self, now: float) -> None:
        """Process all queue events until `now`."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, _, _, _, what = heappop(heap)
            if isinstance(what, Parcel):
                assert what.down is not None
                self._land(what.down.enter(at, what.size_bytes, waits=what.waits), what)
            elif isinstance(what, Uplink):
                self._take_up(what, at)
            else:
                what()

    def _take_up(self, up: Uplink, now: float) -> None:
        """Move the parcels that were sent before `now` into the queue."""
        if not up.sent or up.sent_at >= now:
            return
        sent, up.sent = up.sent, []
        for parcel in sorted(sent, key=lambda parcel: parcel.protocol):
            left_at = up.fifo.enter(up.sent_at, parcel.size_bytes, waits=parcel.waits)
            if left_at == math.inf:
                self.overflowed += len(parcel.trips)
                self.under_way -= len(parcel.trips)
            else:
                self._fly(left_at, parcel)

    def _fly(self, left_at: float, parcel: Parcel) -> None:
        for trip in parcel.trips:
            arrives_at = (round(left_at * TICKS_PER_SECOND) + trip) / TICKS_PER_SECOND
            if parcel.down is None:
                self._land(arrives_at, parcel)
            else:
                place = (arrives_at, parcel.protocol, parcel.sender, parcel.number, parcel)
                heappush(self._heap, place)

    def _land(self, due: float, parcel: Parcel) -> None:
        self.under_way -= 1
        if due == math.inf:
            self.overflowed += 1
        else:
            parcel.land(due, parcel)


def _next(now: float) -> float:
    return (round(now * TICKS_PER_SECOND) + 1) / TICKS_PER_SECOND
