"""The pace of a simulated process: normal, slow, or frozen. Pure."""

from sim.network.instants import after, ticks

HANDLING_SECONDS = 0.0005
"""The time to handle a datagram (to verify two signatures, and run the core); a slow process takes `factor`
times as much. A process at its normal pace takes none, because it would meet all deadlines anyway, and
modelling it would cost one event per message."""


def handling_ticks(factor: float) -> int:
    """Return the time that a slowed process takes for each datagram, in whole microseconds."""
    return ticks(factor * HANDLING_SECONDS) if factor > 1 else 0


class PeerPace:
    """The pace of one peer. The peer is frozen until `still_until`; its computations take `factor` times as
    long; `stood_seconds` is the total time for which it has been frozen, counted to the end of the current
    freeze."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.still_until = 0.0
        self.stood_seconds = 0.0

    def freeze(self, now: float, seconds: float) -> float:
        """Freeze the peer from `now` for this long, or until the end of an earlier freeze if that is later.
        Return the end."""
        until = max(self.still_until, after(now, seconds))
        self.stood_seconds += until - max(self.still_until, now)
        self.still_until = until
        return until
