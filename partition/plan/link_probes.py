"""Link probes: their schedule, their evaluation, and limits on probes by other peers.

A probe is a burst of known length in each direction. A single probe may meet other traffic or a busy
processor, so the median of the latest ones counts. The times of a run's frames correct this median. Frames
never seem slower than the link for long, so their rate may lower the estimate. It may raise the estimate only
if the link was saturated, because the kernel accepts short data immediately. Sans-IO: the driver sends the
bursts.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from crypto.identity import PeerId
from crypto.token_buckets import Buckets, TokenBucket
from partition.plan.observed import BYTES_PER_SECOND_MAX, LINKS_MAX, NANOSECONDS_MAX, LinkRow

PROBE_BYTES = (1 << 17, 1 << 20)
"""The sizes of a probe's bursts in each direction. The second burst follows only if the first was fast."""
FAST_SECONDS = 0.1
"""Maximum time of the first burst for a second one to follow, so that a link with 10 Mbit/s is busy only
briefly."""
PARTNERS_MAX = LINKS_MAX
NEAREST_SHARE = 0.6
"""Share of the partners that are the nearest by round trip. The others are farther away, and cover the range
of distances."""
FIRST_SECONDS = 2.0
"""Minimum seconds between two probes."""
IDLE_SECONDS = 30.0
"""Seconds between two checks for new members while no probe is due. If there is no peer to probe at all, the
interval is ALONE_SECONDS."""
ALONE_SECONDS = 5.0
AGAIN_SECONDS = 600.0
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 5.0, 300.0
SAMPLES_MAX = 5
FRAMES_SECONDS = 1_800.0
"""How long the times of frames correct an estimate."""

PEER_PROBES_PER_SECOND, PEER_PROBES_MAX = 1 / 30, 8
"""Rate and burst limit of one peer's bursts in each direction. The burst limit covers the two bursts of a
first probe, the two of a second probe soon after, and the same again over a second network."""
PROBES_PER_SECOND, PROBES_MAX = 1.0, 8
"""Rate and burst limit of all peers' bursts together: at most 1.1 MiB/s in each direction on average."""
SOURCES_MAX = 1_024
BUSY_SECONDS = 30.0
"""How long a peer must wait if it asks while a stage computes here."""


@dataclass
class _Partner:
    """Samples in bytes per second for each direction, the newest last."""

    sent: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    taken: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    nanoseconds: int = 0
    due: float = 0.0
    failures: int = 0
    frames: tuple[int, bool, float] | None = None


class LinkProbes:
    """One peer's own probes. `deadline` is the time of the next call of `next`."""

    def __init__(self, rng: Random, now: float) -> None:
        self._rng = rng
        self._partners: OrderedDict[PeerId, _Partner] = OrderedDict()
        self.deadline = now + FIRST_SECONDS * (1 + rng.random())

    def next(self, now: float, candidates: Sequence[PeerId]) -> PeerId | None:
        """Return the peer to probe now, if any; `candidates` are ordered by round trip, the nearest first."""
        chosen = self._choose(candidates)
        for peer in [peer for peer in self._partners if peer not in chosen]:
            if self._partners[peer].frames is None or peer not in candidates:
                del self._partners[peer]
        for peer in chosen:
            self._partners.setdefault(peer, _Partner(due=now))
        due = [peer for peer in chosen if self._partners[peer].due <= now]
        later = min((self._partners[peer].due for peer in chosen), default=inf)
        self.deadline = now + FIRST_SECONDS * (1 + self._rng.random())
        if not due:
            self.deadline = max(self.deadline, min(later, now + (IDLE_SECONDS if chosen else ALONE_SECONDS)))
            return None
        # Unmeasured partners come first, then the one that has been due longest.
        return min(due, key=lambda peer: (bool(self._partners[peer].sent), self._partners[peer].due))

    def _choose(self, candidates: Sequence[PeerId]) -> list[PeerId]:
        if len(candidates) <= PARTNERS_MAX:
            return list(candidates)
        near = round(PARTNERS_MAX * NEAREST_SHARE)
        rest = list(candidates[near:])
        # Choose evenly among the farther peers, and always the same ones.
        far = PARTNERS_MAX - near
        return [*candidates[:near], *(rest[(len(rest) - 1) * place // (far - 1)] for place in range(far))]

    def probed(
        self, now: float, peer: PeerId, sent: float, taken: float, round_trip_seconds: float | None
    ) -> None:
        """Note the result of a probe: bytes per second in each direction, and the round-trip time."""
        partner = self._partners.get(peer)
        if partner is None:
            return
        partner.sent.append(_whole(sent))
        partner.taken.append(_whole(taken))
        if round_trip_seconds is not None:
            partner.nanoseconds = max(1, min(NANOSECONDS_MAX, int(round_trip_seconds * 5e8)))
        partner.failures = 0
        # Probe again soon until there are three samples: the median of fewer may reflect other traffic.
        soon = len(partner.sent) < (SAMPLES_MAX + 1) // 2
        partner.due = now + (RETRY_SECONDS_MIN if soon else AGAIN_SECONDS) * (1 + self._rng.random())

    def rerouted(self, now: float, peer: PeerId) -> None:
        """Note that the path to a peer has changed, for example from relayed to direct. Older measurements no
        longer count."""
        partner = self._partners.get(peer)
        if partner is not None:
            partner.sent.clear()
            partner.taken.clear()
            partner.frames = None
            partner.due = now
            self.deadline = min(self.deadline, now + FIRST_SECONDS)

    def failed(self, now: float, peer: PeerId, retry_seconds: float = 0.0) -> None:
        """Note that a probe was refused or lost."""
        partner = self._partners.get(peer)
        if partner is None:
            return
        partner.failures += 1
        pause = min(RETRY_SECONDS_MAX, RETRY_SECONDS_MIN * 2.0 ** min(partner.failures, 10))
        partner.due = now + max(pause, min(retry_seconds, RETRY_SECONDS_MAX)) * (1 + self._rng.random())

    def framed(self, now: float, peer: PeerId, bytes_per_second: float, *, is_saturated: bool) -> None:
        """Note the rate at which a run's frames were sent to `peer`."""
        if bytes_per_second > 0:
            partner = self._partners.setdefault(peer, _Partner(due=now))
            partner.frames = _whole(bytes_per_second), is_saturated, now

    def sent_rate(self, peer: PeerId) -> int:
        """Return the bytes per second that probes to `peer` measured; 0 if unknown."""
        partner = self._partners.get(peer)
        return 0 if partner is None else _median(partner.sent)

    def rows(self, now: float) -> tuple[LinkRow, ...]:
        """Return the known links, sorted by peer. If there are more than LINKS_MAX, links that carried frames
        are kept first."""
        found = []
        for peer, partner in self._partners.items():
            sent = _median(partner.sent)
            if partner.frames is not None and now - partner.frames[2] <= FRAMES_SECONDS:
                rate, is_saturated, _ = partner.frames
                # If the link was not saturated, it waited for its sender, so the rate of frames can only
                # lower the estimate.
                sent = rate if is_saturated else min(sent, rate)
            if sent or partner.taken:
                row = LinkRow(peer, sent, _median(partner.taken), partner.nanoseconds)
                found.append((partner.frames is None, row))
        kept = sorted(found, key=lambda pair: pair[0])[:LINKS_MAX]
        return tuple(sorted((row for _, row in kept), key=lambda row: row.peer))


class ProbeLimits:
    """Limits on measurements by other peers: one at a time, a budget for each peer and one for all, and none
    while this peer computes."""

    def __init__(self, now: float) -> None:
        self._peers: Buckets[PeerId] = Buckets(PEER_PROBES_PER_SECOND, PEER_PROBES_MAX, SOURCES_MAX)
        self._all = TokenBucket(PROBES_PER_SECOND, PROBES_MAX, PROBES_MAX, now)
        self.is_serving = False

    def refusal_seconds(self, now: float, peer: PeerId, *, is_busy: bool) -> float:
        """Return 0 if `peer` may send a burst now, and count the burst; otherwise return how many seconds it
        should wait."""
        if is_busy:
            return BUSY_SECONDS
        if self._peers.left(peer, now) < 1.0:
            return 1 / PEER_PROBES_PER_SECOND
        if self.is_serving or not self._all.take(now):
            return RETRY_SECONDS_MIN
        self._peers.of(peer, now).take(now)
        return 0.0


def _whole(rate: float) -> int:
    """Return the rate as an integer of at least 1."""
    return int(max(1.0, min(rate, float(BYTES_PER_SECOND_MAX))))


def _median(samples: Sequence[int]) -> int:
    return sorted(samples)[len(samples) // 2] if samples else 0
