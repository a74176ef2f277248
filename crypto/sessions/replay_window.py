"""The packet counters that one session has received: a sliding window (RFC 6479)."""

WINDOW_BITS = 1_024
"""How far packets may overtake each other; RFC 6479 recommends a window of at least this order."""

_MASK = (1 << WINDOW_BITS) - 1


class Window:
    """A replay window. Ask `is_new` before a packet is opened and call `mark` after: a forger must not be
    able to move it."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        # Bit i of `_seen` is the counter `_highest - i`.
        self._highest = -1
        self._seen = 0

    def is_new(self, counter: int) -> bool:
        """Return whether a counter is neither seen nor too old to tell."""
        age = self._highest - counter
        return age < 0 or (age < WINDOW_BITS and not self._seen >> age & 1)

    def mark(self, counter: int) -> bool:
        """Mark a counter that `is_new`; return whether it is the newest."""
        age = self._highest - counter
        if age >= 0:
            self._seen |= 1 << age
            return False
        self._seen = (self._seen << min(-age, WINDOW_BITS) | 1) & _MASK
        self._highest = counter
        return True
