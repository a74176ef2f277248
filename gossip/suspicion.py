"""The duration of suspicions, and the local health of this peer.

This follows Lifeguard (Dadgar, Phillips and Currey 2018): section IV-B for the suspicion that independent
accusers shorten, IV-A for the local health multiplier.
"""

import math
from math import inf

from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.settings import SwimSettings

REFUTED_MAX = 3.0
"""Number of refuted accusations after which an accuser is no longer believed. At 10 % loss an honest accuser
is wrong once in about 3,500 probe intervals, and after every LEAK_INTERVALS one error is forgotten."""
LEAK_INTERVALS = 100.0
ACCUSERS_MAX = 256
"""Maximum number of accusers whose errors are counted: more than are wrong in one leak period among 2,000
members at 10 % loss."""
CLOSED_INTERVALS = 4.0
"""Minimum duration of a suspicion in probe intervals, even if the subject's host reports that its process is
gone: a process that has moved or restarted announces itself in this time."""
CHECK_FRESH_INTERVALS = 2.0
"""A member is given up only after a probe by this peer that began at most this many probe intervals ago."""


class Suspicion:
    """One running suspicion, which began with a failed probe of this peer. It ends at `deadline`, unless the
    suspect refutes it before, or answers one of the probes in between.

    With c confirmations out of `wanted` it lasts max(shortest, longest - (longest - shortest) * log(c + 1) /
    log(wanted + 1)) seconds.
    """

    def __init__(
        self,
        now: float,
        accuser: PeerId,
        shortest_seconds: float,
        longest_seconds: float,
        wanted: int,
        *,
        interval_seconds: float = 1.0,
    ) -> None:
        """`interval_seconds` is the pause before the suspect is probed again, doubled each time. A member
        that declares the suspect dead may end the suspicion at most this long before its shortest time."""
        self._interval_seconds = interval_seconds
        self._pause_seconds = interval_seconds
        self._started_at = now
        self._shortest_seconds = shortest_seconds
        self._longest_seconds = longest_seconds
        self._wanted = wanted
        self.accuser = accuser
        self._accusers = [accuser]
        self._excused_seconds = 0.0
        self._condemned_at = inf
        self.condemnation: Fact | None = None
        """The first dead fact received about the suspect."""
        self.is_probed = False
        """Whether a probe by this peer is in progress; the suspicion does not end before it."""
        self.is_silent = False
        """Whether this peer is an accuser that has not announced its accusation."""
        self._missed_at = -inf
        self._probe_at = now + interval_seconds
        self._closed_at = inf

    @property
    def accusers(self) -> tuple[PeerId, ...]:
        """The accusers, including the author of a dead fact."""
        condemned = () if self.condemnation is None else (PeerId(self.condemnation.author),)
        return tuple(dict.fromkeys((*self._accusers, *condemned)))

    @property
    def is_confirmed(self) -> bool:
        """Whether there are as many accusers as wanted."""
        return len(self._accusers) > self._wanted

    @property
    def deadline(self) -> float:
        """When the suspect is given up, in monotonic seconds, if a probe by this peer has failed by then."""
        told_at = max(self.confirmed_by - self._interval_seconds, self._condemned_at)
        lasts = min(self._started_at + self._lasts_seconds(), told_at) + self._excused_seconds
        return min(lasts, self._closed_at)

    @property
    def is_checked(self) -> bool:
        """Whether a probe has failed that began shortly before the end."""
        return self._missed_at >= self.deadline - CHECK_FRESH_INTERVALS * self._interval_seconds

    @property
    def due(self) -> float:
        """The time of the next event: the next probe, the last probe, or the end."""
        if self.is_probed:
            return inf
        deadline = self.deadline
        if self.is_checked:
            return deadline
        last_at = deadline - self._interval_seconds
        return max(min(self._probe_at, last_at), self._probe_at - self._pause_seconds)

    def is_over(self, now: float) -> bool:
        """Return whether to give the suspect up now: its time is over, and a last probe has failed."""
        return self.deadline <= now and self.is_checked

    @property
    def confirmed_by(self) -> float:
        """The time at which the suspicion would have ended if all wanted accusers had confirmed it."""
        return self._started_at + self._shortest_seconds

    def wants(self, accuser: PeerId) -> bool:
        """Return whether a confirmation by `accuser` would still change the deadline."""
        return not self.is_confirmed and accuser not in self._accusers

    def confirm(self, accuser: PeerId) -> None:
        """Count one more independent accuser. Call this only if `wants` returned True."""
        self._accusers.append(accuser)

    def condemn(self, now: float, fact: Fact) -> None:
        """Accept a member's fact that the suspect is dead. The suspicion ends as if all had confirmed it, or
        a little earlier, because that member learned of it before us."""
        self.condemnation = fact
        self._condemned_at = now

    def miss(self, now: float, sent_at: float) -> None:
        """Record that the suspect did not answer a probe by this peer that began at `sent_at`."""
        self._missed_at = max(self._missed_at, sent_at)
        self.wait(now)

    def wait(self, now: float) -> None:
        """Record that a probe by this peer has ended without an answer of the suspect itself."""
        self.is_probed = False
        self._pause_seconds *= 2
        self._probe_at = now + self._pause_seconds

    def close(self, now: float) -> None:
        """Record that nothing listens at the suspect's address, so no process is left there to refute."""
        least = self._started_at + CLOSED_INTERVALS * self._interval_seconds
        self._closed_at = min(self._closed_at, max(now, least))

    def excuse(self, seconds: float) -> None:
        """Extend the suspicion by the time for which this peer stalled, in total by at most the longest
        suspicion."""
        self._excused_seconds = min(self._excused_seconds + seconds, self._longest_seconds)

    def _lasts_seconds(self) -> float:
        if self._wanted == 0:
            return self._shortest_seconds
        share = math.log(len(self._accusers)) / math.log(self._wanted + 1)
        lasts = self._longest_seconds - (self._longest_seconds - self._shortest_seconds) * share
        return max(self._shortest_seconds, lasts)


def suspect(now: float, accuser: PeerId, settings: SwimSettings, live: int) -> Suspicion:
    """Begin a suspicion in a swarm with `live` members."""
    # With too few others to confirm, waiting for them is useless (memberlist does the same).
    wanted = settings.confirmations if live - 2 >= settings.confirmations else 0
    shortest, longest = settings.suspicion_bounds_seconds(live)
    interval_seconds = settings.probe_interval_seconds
    return Suspicion(now, accuser, shortest, longest, wanted, interval_seconds=interval_seconds)


class Credit:
    """Counts false accusations by accuser: one that is wrong too often is ignored for a while. It keeps a
    leaking count for each of the ACCUSERS_MAX accusers that were wrong most recently."""

    __slots__ = ("_counts", "_leak_seconds")

    def __init__(self, leak_seconds: float) -> None:
        self._leak_seconds = leak_seconds
        # Keyed by accuser: its count, and the time of that count.
        self._counts: dict[PeerId, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def refuted(self, accuser: PeerId, now: float) -> None:
        """Record that a member accused by `accuser` is alive."""
        count = self._count(accuser, now) + 1
        self._counts.pop(accuser, None)
        self._counts[accuser] = (min(count, REFUTED_MAX), now)
        if len(self._counts) > ACCUSERS_MAX:
            del self._counts[next(iter(self._counts))]

    def is_spent(self, accuser: PeerId, now: float, pending: int = 0) -> bool:
        """Return whether the accuser has recently been wrong too often, assuming that `pending` more of its
        accusations are false as well."""
        return self._count(accuser, now) + pending > REFUTED_MAX - 1

    def is_doubted(self, accuser: PeerId, now: float) -> bool:
        """Return whether the accuser has recently been wrong at all."""
        return bool(self._counts) and self._count(accuser, now) > 0.0

    def _count(self, accuser: PeerId, now: float) -> float:
        count, at = self._counts.get(accuser, (0.0, now))
        return max(0.0, count - (now - at) / self._leak_seconds)


class LocalHealth:
    """Lifeguard's local health. 0 is healthy; with a `score` of s this peer probes 1 + s times more slowly
    and patiently."""

    __slots__ = ("_score_max", "score")

    def __init__(self, score_max: int) -> None:
        self.score = 0
        self._score_max = score_max

    @property
    def multiplier(self) -> int:
        return self.score + 1

    def worsen(self, by: int = 1) -> None:
        """Raise the score, because a probe failed, a relay stayed silent, or we had to refute. The fault may
        be ours."""
        self.score = min(self.score + by, self._score_max)

    def better(self) -> None:
        """Lower the score, because a probe was answered."""
        if self.score:
            self.score -= 1
