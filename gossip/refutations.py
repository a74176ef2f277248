"""The rate at which this peer takes a new incarnation to refute accusations.

Each new incarnation costs others a fact to check, and an accuser nothing. Beyond these bounds a peer refutes
by its answers to probes alone. Not here: which accusations are heard at all (`gossip.state_table`).
"""

from crypto.token_buckets import TokenBucket

REFUTATIONS_MAX = 4.0
REFUTATION_INTERVALS = 30.0
"""A burst of refutations, then one in this many probe intervals."""
OUTSIDERS_REFUTED_MAX = 2
"""Refutations in one probe interval for accusers that we do not list, but which may list us; and for those
that accuse too often."""


class Refutations:
    """The bounds, in probe intervals of `interval_seconds`."""

    __slots__ = ("_bucket", "_outsiders")

    def __init__(self, interval_seconds: float, now: float) -> None:
        rate = 1 / (REFUTATION_INTERVALS * interval_seconds)
        self._bucket = TokenBucket(rate, REFUTATIONS_MAX, REFUTATIONS_MAX, now)
        self._outsiders = 0

    def next_interval(self) -> None:
        """Begin a probe interval."""
        self._outsiders = 0

    def allow(self, now: float, *, is_trusted: bool) -> bool:
        """Return whether another accusation may be refuted, by a trusted accuser or another."""
        is_usual = is_trusted or self._outsiders < OUTSIDERS_REFUTED_MAX
        return is_usual and self._bucket.left(now) >= 1.0

    def count(self, now: float, *, is_trusted: bool) -> None:
        """Count a refutation."""
        self._bucket.take(now)
        self._outsiders += not is_trusted
