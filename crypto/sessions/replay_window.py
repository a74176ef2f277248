"""The packet counters that one session has received: a sliding window (RFC 6479)."""

WINDOW_BITS = 1_024
"""How far packets may overtake each other. RFC 6479 recommends a window of at least this order of
magnitude."""

_MASK = (1 << WINDOW_BITS) - 1


class Window:
    """A replay window. Call `is_new` before opening a packet and `mark` after it, because a forged packet
    must not move the window."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        # Bit i of `_seen` stands for the counter `_highest - i`.
        self._highest = -1
        self._seen = 0

    def is_new(self, counter: int) -> bool:
        """Return True if a counter has not been seen yet and is recent enough to be sure of that."""
        age = self._highest - counter
        return age < 0 or (age < WINDOW_BITS and not self._seen >> age & 1)

    def mark(self, counter: int) -> bool:
        """Mark a counter that `is_new`. Return whether it is the highest so far."""
        age = self._highest - counter
        if age >= 0:
            self._seen |= 1 << age
            return False
        self._seen = (self._seen << min(-age, WINDOW_BITS) | 1) & _MASK
        self._highest = counter
        return True
