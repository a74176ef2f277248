"""The rate at which this peer takes a new incarnation to refute accusations.

Each new incarnation costs the others a fact to check, but costs an accuser nothing. Beyond these limits, a
peer refutes only by answering probes. Not here: which accusations are processed at all
(`gossip.state_table`).
"""

from crypto.token_buckets import TokenBucket

REFUTATIONS_MAX = 4.0
REFUTATION_INTERVALS = 30.0
"""Limit on refutations: the burst size, and the number of probe intervals after which one more is allowed."""
OUTSIDERS_REFUTED_MAX = 2
"""Number of refutations per probe interval for accusers that we do not list (but which may list us), and for
accusers that accuse falsely too often."""


class Refutations:
    """The limits, in probe intervals of `interval_seconds`."""

    __slots__ = ("_bucket", "_outsiders")

    def __init__(self, interval_seconds: float, now: float) -> None:
        rate = 1 / (REFUTATION_INTERVALS * interval_seconds)
        self._bucket = TokenBucket(rate, REFUTATIONS_MAX, REFUTATIONS_MAX, now)
        self._outsiders = 0

    def next_interval(self) -> None:
        """Begin a probe interval."""
        self._outsiders = 0

    def allow(self, now: float, *, is_trusted: bool) -> bool:
        """Return whether one more accusation may be refuted. `is_trusted` refers to its accuser."""
        is_usual = is_trusted or self._outsiders < OUTSIDERS_REFUTED_MAX
        return is_usual and self._bucket.left(now) >= 1.0

    def count(self, now: float, *, is_trusted: bool) -> None:
        """Count a refutation."""
        self._bucket.take(now)
        self._outsiders += not is_trusted
