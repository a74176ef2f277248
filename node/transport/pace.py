"""The rate limits of bulk transfers that a node's owner sets, each way, over all streams together.

Pure arithmetic; `node.transport.tcp` waits. Only long messages wait. A short one (a request, a probe) and
every datagram goes at once, but is counted, so that long messages wait correspondingly longer.
"""

from math import inf

BURST_SECONDS = 0.05
"""The most unused time that a pause saves up."""
PIECE_BYTES = 1 << 16
"""A long message is paced in pieces of this size."""


class Pace:
    """One way: `bytes_per_second`, 0 for no bound."""

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
    """Both ways of one node."""

    def __init__(self) -> None:
        self.up = Pace()
        self.down = Pace()
