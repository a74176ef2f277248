"""How long a suspicion lasts, and how healthy this peer thinks itself to be.

Lifeguard (Dadgar, Phillips and Currey 2018): section IV-B for the suspicion that independent
accusers shorten, IV-A for the local health multiplier.
"""

import math

from crypto.identity import PeerId


class Suspicion:
    """One running suspicion. It ends at `deadline` unless the suspect refutes it before.

    With c confirmations out of `wanted` it lasts
    max(shortest, longest - (longest - shortest) * log(c + 1) / log(wanted + 1)) seconds.
    """

    def __init__(
        self, now: float, accuser: PeerId, shortest_seconds: float, longest_seconds: float, wanted: int
    ) -> None:
        self._started_at = now
        self._shortest_seconds = shortest_seconds
        self._longest_seconds = longest_seconds
        self._wanted = wanted
        self.accuser = accuser
        self._accusers = [accuser]
        self._excused_seconds = 0.0

    @property
    def deadline(self) -> float:
        """When the suspect is given up, in monotonic seconds."""
        return self._started_at + self._lasts_seconds() + self._excused_seconds

    @property
    def confirmed_by(self) -> float:
        """When the suspect would have been given up if all had confirmed it."""
        return self._started_at + self._shortest_seconds

    def wants(self, accuser: PeerId) -> bool:
        """Whether a confirmation by `accuser` would still change anything."""
        return len(self._accusers) <= self._wanted and accuser not in self._accusers

    def confirm(self, accuser: PeerId) -> None:
        """Count one more independent accuser; only after `wants` said so."""
        self._accusers.append(accuser)

    def excuse(self, seconds: float) -> None:
        """Give back time in which this peer itself stalled; in all at most the longest suspicion."""
        self._excused_seconds = min(self._excused_seconds + seconds, self._longest_seconds)

    def _lasts_seconds(self) -> float:
        if self._wanted == 0:
            return self._shortest_seconds
        share = math.log(len(self._accusers)) / math.log(self._wanted + 1)
        lasts = self._longest_seconds - (self._longest_seconds - self._shortest_seconds) * share
        return max(self._shortest_seconds, lasts)


class LocalHealth:
    """0 is well; at `score` s this peer probes 1 + s times more slowly and patiently."""

    __slots__ = ("_score_max", "score")

    def __init__(self, score_max: int) -> None:
        self.score = 0
        self._score_max = score_max

    @property
    def multiplier(self) -> int:
        return self.score + 1

    def worsen(self, by: int = 1) -> None:
        """A probe failed, a relay stayed mute, or we had to refute: perhaps it is us."""
        self.score = min(self.score + by, self._score_max)

    def better(self) -> None:
        """A probe was answered."""
        if self.score:
            self.score -= 1
