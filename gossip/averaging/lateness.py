"""The lateness of peers at rounds, and how long a round waits for each: pure.

Lateness is measured against the median of the awaited peers. So peers of one speed average zero however their
steps interleave, and a slower one is above it. The wait for a peer follows its measurements, as a
retransmission timer does (RFC 6298): mean and four deviations.

Not here: the choice of awaited peers (`gossip.averaging.attendance`).
"""

from collections import deque
from collections.abc import Collection, Mapping
from math import inf
from statistics import fmean

from crypto.identity import PeerId

ROUNDS_MIN, ROUNDS_MAX = 3, 8
"""Rounds that establish a habit (a wrong one costs a round's time for each), and rounds that are
remembered."""
DEVIATIONS = 4.0


class Lateness:
    """One peer's lateness at its last rounds, in seconds; negative if it is early."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=ROUNDS_MAX)

    def note(self, seconds: float) -> None:
        """Record the lateness at another round."""
        self._recent.append(seconds)

    @property
    def has_habit(self) -> bool:
        """Whether enough rounds were measured to show a habit."""
        return len(self._recent) >= ROUNDS_MIN

    @property
    def usual_seconds(self) -> float:
        """The mean without the latest time, since one stall of a busy machine is no habit."""
        usual = sorted(self._recent)[: max(1, len(self._recent) - 1)]
        return fmean(usual) if usual else 0.0

    @property
    def likely_max_seconds(self) -> float:
        """The largest lateness, except in rare cases."""
        if not self._recent:
            return 0.0
        mean = fmean(self._recent)
        return mean + DEVIATIONS * fmean(abs(seconds - mean) for seconds in self._recent)


def middle_of(begun_at: float, ready_at: Mapping[PeerId, float], awaited: Collection[PeerId]) -> float:
    """Return when the median of these and a peer ready at `begun_at` was ready; inf: not yet."""
    times = sorted([begun_at, *(ready_at.get(peer, inf) for peer in awaited)])
    return times[(len(times) - 1) // 2]


class RoundWaits:
    """How long one round waits for each expected peer, from the time at which the median of the `usual` ones
    is ready, or from `middle_seconds` after its beginning if that is earlier.

    `seconds` has the wait for each, `others_seconds` the wait for peers that become known later.
    """

    def __init__(
        self,
        begun_at: float,
        seconds: Mapping[PeerId, float],
        *,
        usual: Collection[PeerId],
        middle_seconds: float,
        others_seconds: float,
    ) -> None:
        self._seconds = seconds
        self._usual = usual
        self._others_seconds = others_seconds
        self._begun_at = begun_at
        self._ready_at: dict[PeerId, float] = {}
        self._latest = begun_at + middle_seconds
        self._base = min(self._latest, middle_of(begun_at, {}, usual))

    def came(self, now: float, peer: PeerId) -> None:
        """Note that this peer is ready."""
        if peer in self._usual and peer not in self._ready_at:
            self._ready_at[peer] = now
            self._base = min(self._latest, middle_of(self._begun_at, self._ready_at, self._usual))

    def until(self, peer: PeerId) -> float:
        """Return the present deadline for this peer, which may become earlier."""
        return self._base + self._seconds.get(peer, self._others_seconds)
