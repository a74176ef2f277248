"""How many bytes a multiplexed path may have in flight: enough to keep it busy, without a long queue. A
sans-IO core, after FAST TCP (Jin et al. 2004): the path's delay bounds the bytes in flight, which fill at
most its shortest round trip plus QUEUE_SECONDS. `multiplexer` chooses what to send.
"""

from collections import deque

from crypto.errors import RemoteProtocolError

QUEUE_SECONDS = 0.02
"""Queueing delay that is allowed in addition to the shortest round trip."""
WINDOW_BYTES_MIN = 2**16
"""Number of bytes allowed in flight at any delay. The peer acknowledges each quarter of it."""
WINDOW_BYTES_MAX = 2**24
STARTING_TRIPS = 8
"""After this many round trips without a queue, the window doubles with each further one, as at the start."""
SHORTEST_SECONDS = 20.0
"""How long a measured shortest round trip stays valid. Routes change, so it must expire."""


class PathWindow:
    """The bytes in flight on one path, and their limit."""

    def __init__(self) -> None:
        self._sent = self._acknowledged = 0
        self._bytes_max = WINDOW_BYTES_MIN
        # For each frame in flight, oldest first: the total number of bytes sent, and the time.
        self._marks: deque[tuple[int, float]] = deque()
        # A round ends when all bytes sent before it began are acknowledged.
        self._round_end = 0
        self._round_trip = 0.0
        self._was_full = False
        self._trips_without_queue = STARTING_TRIPS
        self._shortest: deque[tuple[float, float]] = deque(maxlen=64)

    def is_full(self, more: int) -> bool:
        """Return whether there is no room for `more` bytes."""
        return self._sent - self._acknowledged + more > self._bytes_max

    def hold_back(self) -> None:
        """Note that the window is full, whether bytes now wait or are sent regardless."""
        self._was_full = True

    def send(self, now: float, count: int) -> None:
        """Note that bytes were sent."""
        self._sent += count
        self._marks.append((self._sent, now))

    def acknowledge(self, now: float, total: int) -> None:
        """Record the total number of bytes that the peer has received. Raises RemoteProtocolError if more
        than were sent."""
        if not self._acknowledged <= total <= self._sent:
            raise RemoteProtocolError("an acknowledgement of bytes that were not sent")
        self._acknowledged = total
        trip = 0.0
        while self._marks and self._marks[0][0] <= total:
            trip = now - self._marks.popleft()[1]
        if trip:
            self.measure(now, trip)
            self._round_trip = max(self._round_trip, trip)
        if total >= self._round_end and self._round_trip:
            fitting = self._fitting(self._round_trip)
            self._bytes_max = fitting if self._was_full else min(self._bytes_max, fitting)
            self._round_end, self._round_trip, self._was_full = self._sent, 0.0, False

    def measure(self, now: float, trip: float) -> None:
        """Record the duration of a round trip in seconds."""
        while self._shortest and self._shortest[0][0] < now - SHORTEST_SECONDS:
            self._shortest.popleft()
        while self._shortest and self._shortest[-1][1] >= trip:
            self._shortest.pop()
        self._shortest.append((now, trip))

    def _fitting(self, trip: float) -> int:
        """Return the bytes allowed in flight after a round trip of this length. The result moves half way to
        a queue of QUEUE_SECONDS, or doubles if there has been no queue for long."""
        shortest = min((each for _, each in self._shortest), default=0.0)
        self._trips_without_queue += 1
        if trip > shortest + QUEUE_SECONDS / 4:
            self._trips_without_queue = 0
        if self._trips_without_queue > STARTING_TRIPS:
            wanted = 2.0 * self._bytes_max
        else:
            wanted = self._bytes_max * (1 + (shortest + QUEUE_SECONDS) / trip) / 2
        return round(max(WINDOW_BYTES_MIN, min(WINDOW_BYTES_MAX, wanted)))
