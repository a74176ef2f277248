"""The waiting times of an averaging attempt, computed from the durations of earlier attempts.

The method is that of a retransmission timer (RFC 6298, after Jacobson 1988): the mean of the seconds per byte
plus four deviations, with a minimum. A failure doubles the time, a success restores it.
"""

from gossip.averaging.outcome import Patience

GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
DEVIATIONS = 4
FLOOR_SECONDS = 2.0
"""Minimum waiting time. For shorter transfers, the time until the others start dominates."""
BACKOFF_MAX = 8.0
UNHEARD_SECONDS = 3.5
"""Minimum wait for a member's first message. A member opens its streams when its group is formed. The first
message arrives half a second later if a datagram is lost, and after four round trips on a slow link. The wait
must be shorter than the minimum time for a scatter; otherwise silent members would be noticed only when the
scatter fails, and other members would be blamed with them."""
AGREE_SECONDS = 2.0
"""Twice the maximum one-way delay up to which two honest members never hold different bytes."""


class AttemptPace:
    """The measured pace of this peer's attempts. `bytes_per_second` is the initial guess."""

    def __init__(self, bytes_per_second: float = 1e6, floor_seconds: float = FLOOR_SECONDS) -> None:
        self._mean = 1 / bytes_per_second
        self._deviation = self._mean / 2
        self._backoff = 1.0
        self._is_measured = False
        self._floor_seconds = floor_seconds

    def succeeded(self, size_bytes: int, seconds: float) -> None:
        """Record an attempt on `size_bytes` that took `seconds` from its start to its result."""
        sample = seconds / max(size_bytes, 1)
        if not self._is_measured:
            # The first measurement replaces the guess.
            self._is_measured = True
            self._mean, self._deviation = sample, sample / 2
        self._deviation += DEVIATION_GAIN * (abs(sample - self._mean) - self._deviation)
        self._mean += GAIN * (sample - self._mean)
        self._backoff = 1.0

    def failed(self) -> None:
        """Record an attempt that failed by a time limit."""
        self._backoff = min(2 * self._backoff, BACKOFF_MAX)

    def patience(self, size_bytes: int) -> Patience:
        """Return the waiting times for an attempt on vectors of this encoded size."""
        expected = size_bytes * (self._mean + DEVIATIONS * self._deviation)
        seconds = self._backoff * max(expected, self._floor_seconds)
        stall = max(seconds / 2, self._floor_seconds)
        return Patience(
            scatter_seconds=seconds,
            commit_seconds=max(seconds / 2, self._floor_seconds),
            gather_seconds=seconds,
            stall_seconds=stall,
            ask_seconds=max(seconds / 20, self._floor_seconds / 10),
            linger_seconds=seconds,
            unheard_seconds=UNHEARD_SECONDS,
            agree_seconds=AGREE_SECONDS,
        )
