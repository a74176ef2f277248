"""The rate limits of bulk transfers that a node's owner sets, for each direction, over all streams together.

Pure arithmetic; `node.transport.tcp` does the waiting. Only long messages wait. A short message (a request, a
probe) and every datagram are sent immediately but are counted, so that long messages wait correspondingly
longer.
"""

from math import inf

BURST_SECONDS = 0.05
"""Maximum unused time that a pause saves up for a burst."""
PIECE_BYTES = 1 << 16
"""Size of the pieces in which a long message is paced."""


class Pace:
    """The limit for one direction: `bytes_per_second`, or 0 for no limit."""

    def __init__(self) -> None:
        self.bytes_per_second = 0
        self._due = -inf

    def limit(self, bytes_per_second: int) -> None:
        """Change the rate."""
        self.bytes_per_second, self._due = bytes_per_second, -inf

    def take(self, now: float, count: int) -> float:
        """Count bytes; return the seconds to wait."""
        if not self.bytes_per_second:
            return 0.0
        self._due = max(self._due, now - BURST_SECONDS) + count / self.bytes_per_second
        return max(0.0, self._due - now)


class Paces:
    """The limits for both directions of one node."""

    def __init__(self) -> None:
        self.up = Pace()
        self.down = Pace()
