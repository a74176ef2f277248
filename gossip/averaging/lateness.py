"""The lateness of peers at rounds, and how long a round waits for each: pure.

Lateness is measured relative to the median of the awaited peers. So equally fast peers have an average
lateness of zero no matter how their steps interleave, and a slower peer is above zero. The wait for a peer
follows its measurements like a retransmission timer (RFC 6298): the mean plus four deviations.

Not here: the choice of awaited peers (`gossip.averaging.attendance`).
"""

from collections import deque
from collections.abc import Collection, Mapping
from math import inf
from statistics import fmean

from crypto.identity import PeerId

ROUNDS_MIN, ROUNDS_MAX = 3, 8
"""Number of rounds that establish a habit (each of them may cost a round's time if the habit is wrong), and
number of rounds that are remembered."""
DEVIATIONS = 4.0


class Lateness:
    """One peer's lateness at its latest rounds, in seconds; negative if it was early."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=ROUNDS_MAX)

    def note(self, seconds: float) -> None:
        """Record the lateness at one more round."""
        self._recent.append(seconds)

    @property
    def has_habit(self) -> bool:
        """Whether enough rounds were measured to show a habit."""
        return len(self._recent) >= ROUNDS_MIN

    @property
    def usual_seconds(self) -> float:
        """The mean, leaving out the single latest arrival, because one stall of a busy machine is not a
        habit."""
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
    """Return when the median of these peers and a peer ready at `begun_at` was ready; inf if the median peer
    is not ready yet."""
    times = sorted([begun_at, *(ready_at.get(peer, inf) for peer in awaited)])
    return times[(len(times) - 1) // 2]


class RoundWaits:
    """How long one round waits for each expected peer. Waiting is counted from the time at which the median
    of the `usual` peers is ready, but at the latest from `middle_seconds` after the beginning.

    `seconds` has the wait for each peer; `others_seconds` is the wait for peers that become known later.
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
        """Record that this peer is ready."""
        if peer in self._usual and peer not in self._ready_at:
            self._ready_at[peer] = now
            self._base = min(self._latest, middle_of(self._begun_at, self._ready_at, self._usual))

    def until(self, peer: PeerId) -> float:
        """Return the current deadline for this peer; a later call may return an earlier one."""
        return self._base + self._seconds.get(peer, self._others_seconds)
