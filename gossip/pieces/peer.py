"""One peer of an exchange: its pieces, the requests to it, and the pieces to send to it."""

from collections import deque
from math import ceil

import numpy as np

from crypto.identity import PeerId
from gossip.pieces.choice import Bits
from gossip.pieces.messages import PIECE_BYTES

WINDOW_MIN = 2
WINDOW_MAX = 16
"""Maximum number of open requests to one peer: 4 MiB, which cover 100 ms at 40 MB/s."""
WINDOW_SECONDS = 1.5
"""Maximum amount of open requests, in seconds at the peer's rate, so that a slow peer never owes much."""
UPLOADS_MAX = 2 * WINDOW_MAX
"""Maximum number of pieces that one peer may be waiting for."""
_SMOOTHING = 0.3


class SwarmPeer:
    """One peer. `retry_at` is the time from which a refused piece may be requested from it again."""

    def __init__(self, peer: PeerId, count: int, now: float) -> None:
        self.peer = peer
        self.has: Bits = np.zeros(count, np.bool_)
        self.is_complete = True
        self.asked: dict[int, float] = {}
        self.cancelled: set[int] = set()
        self.retry_at: dict[int, float] = {}
        self.paused_until = 0.0
        self.misses = 0
        self.delivered = 0
        self.uploads: deque[int] = deque()
        self.sending: int | None = None
        self.put_off: dict[int, int] = {}
        self.question_at = now
        self.answered = False
        self.moved_at = now
        """The time when the peer last sent or took a new piece."""
        self._rate = 0.0
        self._last_at = now

    @property
    def silent_since(self) -> float:
        """Implements `crypto.registers.PlaceHolder`: an exchange always waits for its peers."""
        return self.moved_at

    @property
    def window(self) -> int:
        """The number of pieces to have requested simultaneously."""
        return min(WINDOW_MAX, max(WINDOW_MIN, 1 + ceil(self._rate * WINDOW_SECONDS / PIECE_BYTES)))

    def ask(self, now: float, number: int) -> None:
        """Count a request."""
        if not self.asked:
            self._last_at = now
        self.asked[number] = now
        self.cancelled.discard(number)

    def arrived(self, now: float, number: int, size_bytes: int) -> None:
        """Count an answer, and use it to measure the peer's rate."""
        del self.asked[number]
        self.delivered += 1
        seconds = max(1e-3, now - self._last_at)
        self._last_at = now
        rate = size_bytes / seconds
        self._rate = rate if not self._rate else self._rate + _SMOOTHING * (rate - self._rate)

    def is_stuck(self, now: float, seconds: float) -> bool:
        """Return whether nothing arrived for `seconds` although requests were open."""
        return bool(self.asked) and now - max(self._last_at, min(self.asked.values())) > seconds
