"""The pace of a simulated process: usual, slow, or frozen. Pure."""

from sim.network.instants import after, ticks

HANDLING_SECONDS = 0.0005
"""The time to handle a datagram, of which a slow process takes `factor` times as much: the check of two
signatures, and the core. A process at its usual pace takes none: it would meet all deadlines anyway, at the
cost of an event a message."""


def handling_ticks(factor: float) -> int:
    """Return the time that each datagram takes, in whole microseconds."""
    return ticks(factor * HANDLING_SECONDS) if factor > 1 else 0


class PeerPace:
    """The pace of one peer. It stands still until `still_until`; what it computes takes `factor` times as
    long; `stood_seconds` is how long it has stood still, or will have by then."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.still_until = 0.0
        self.stood_seconds = 0.0

    def freeze(self, now: float, seconds: float) -> float:
        """Freeze it from `now` for this long, or until the end of an earlier freeze if that is later. Return
        the end."""
        until = max(self.still_until, after(now, seconds))
        self.stood_seconds += until - max(self.still_until, now)
        self.still_until = until
        return until
