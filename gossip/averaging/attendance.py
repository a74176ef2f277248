"""The record of which peers come to this peer's rounds in time, and which delay them: pure.

Everything here is this peer's own experience. It is never sent, so no peer can be excluded by what others
say. It decides three things:

- Which peers this peer leaves out of the groups that it proposes: those whose silence made an attempt fail.
- Which peers are waited for. Peers that came in time when last awaited are waited for as long as they usually
  take (`gossip.averaging.lateness`). Newcomers and peers that get a new chance are waited for as long as
  their contribution is worth. Other peers still enter a group if they are ready when it forms.
- Which peer should propose a group: first the peers that have completed a round, last those that failed to
  propose.

After each delay that a peer causes, this peer does without it for `COST_FACTOR` times as long, doubled with
each repetition. So a silent or slow peer costs a bounded share of the time. A completed round forgives
failures, and coming in time forgives lateness. A peer that has completed a round before is excused
occasionally, because an honest machine stalls now and then, and two members that exclude each other train
apart.

Not here: which peers may take part (`gossip.roster`), and the agreement on a group (`gossip.matchmaking`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from crypto.identity import PeerId
from gossip.averaging.lateness import ROUNDS_MIN, Lateness, middle_of
from gossip.claims import VOICES_MIN

COST_FACTOR = 8.0
"""A peer is left out, or not waited for, for this many times as long as the delay that it caused."""
DOUBLINGS_MAX = 6
BACKOFF_SECONDS_MAX = 600.0
"""Maximum length of an exclusion: a recovered peer takes part again after ten minutes, regardless of the
delays it caused before."""
LEFT_OUT_SECONDS_MIN = 10.0
"""Minimum cost of a first failure, so that an attempt that ends at once because a stream broke is not retried
at once."""
TRIAL_SHARE = 0.25
"""After this share of an exclusion, a peer that failed again is tried. A peer may propose groups as often as
it likes, so without this limit the next trial would follow each failed one immediately."""
EXCUSE_SECONDS = 600.0
"""Time between two excused failures of a peer that has completed a round before. So a malicious peer can cost
one additional attempt in ten minutes."""
WITHDRAWALS_MAX = 3
"""Number of consecutive withdrawals, without a completed round in between, that count as a failure. A
member withdraws if another member's silence made its attempt fail, and declines if it is already in
another group."""
LATE_SECONDS_MIN = 0.25
"""Minimum delay that counts as lateness. Rounds of equally fast peers drift apart by this much, and a busy
machine takes this long."""
HABIT_SECONDS_MIN = 0.03
"""A peer that is usually late by less than this counts as punctual, because its message takes this long to
arrive."""
SHORT_SECONDS = 0.05
"""A wait for a peer that did not come may end this much before the peer counts as late, and is still a miss.
A group waits about that long for a newcomer, counted from slightly before the others were ready."""
COST_SECONDS_MIN = 0.05
"""If a round begins this much later than the last awaited peer was ready, its convener waited for a different
peer."""
ABSENT_ROUNDS_MIN = 10
"""A peer that is missing from this many consecutive completed rounds counts as away; a slow peer misses only
a few."""
RECORDS_MAX = 2_048
"""Maximum number of peers remembered: twice as many as a roster lists."""


@dataclass
class _Record:
    """One peer's record. `misses` counts since the peer last came in time while awaited; `rounds_without`
    counts the rounds completed here since the peer contributed to one."""

    has_completed: bool = False
    is_known: bool = False
    excused_at: float = -inf
    failures: int = 0
    rounds_without: float = inf
    withdrawals: int = 0
    left_out_until: float = -inf
    try_from: float = -inf
    is_tried: bool = False
    misses: int = 0
    is_back: bool = True
    wait_again_at: float = -inf
    is_passed_over: bool = False
    lateness: Lateness = field(default_factory=Lateness)

    def missed(self, now: float, seconds: float) -> None:
        """Record that the peer was awaited in vain for `seconds`, or delayed the others by that time."""
        self.misses += 1
        self.is_back = False
        # After the first miss, the peer is awaited again as soon as it returns, because any peer is late
        # once.
        again = 0.0 if self.misses == 1 else backoff_seconds(seconds, self.misses - 1)
        self.wait_again_at = now + again

    def is_slow(self, worth_seconds: float) -> bool:
        """Return whether the peer usually delays the others by more than its contribution is worth."""
        worth_seconds = max(HABIT_SECONDS_MIN, worth_seconds)
        return self.lateness.has_habit and self.lateness.usual_seconds > worth_seconds

    def cost(self, now: float, seconds: float) -> None:
        """Record that the peer delayed the others by `seconds`, as it usually does."""
        self.misses += 1
        # the number of rounds that showed the lateness
        seconds = ROUNDS_MIN * max(HABIT_SECONDS_MIN, seconds)
        self.wait_again_at = max(self.wait_again_at, now + backoff_seconds(seconds, self.misses))

    def is_waited_for(self, now: float) -> bool:
        return not self.misses or (self.is_back and now >= self.wait_again_at)


def backoff_seconds(cost_seconds: float, times: int) -> float:
    """Return how long to do without a peer after it has caused a delay of `cost_seconds` for the `times`-th
    consecutive time."""
    return float(min(BACKOFF_SECONDS_MAX, COST_FACTOR * cost_seconds * 2 ** min(times - 1, DOUBLINGS_MAX)))


def _left_out_seconds(cost_seconds: float, times: int) -> float:
    return backoff_seconds(max(LEFT_OUT_SECONDS_MIN / COST_FACTOR, cost_seconds), times)


class Attendance:
    """One peer's experience with the others in one run."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}
        self._newcomers = _Record()
        """Peers that have never come share one back-off, because a new id costs nothing."""
        self._rounds = 0
        """Number of rounds completed here."""
        self.middle = Lateness()
        """The lateness of the median of the awaited peers, relative to this peer."""

    # Input

    def completed(self, peers: Iterable[PeerId]) -> None:
        """Record a completed round to which these peers contributed."""
        self._rounds += 1
        for record in self._records.values():
            record.rounds_without += 1
        for peer in peers:
            record = self._record(peer)
            record.rounds_without = 0
            record.has_completed = record.is_known = True
            record.failures = record.withdrawals = 0
            record.left_out_until = -inf
            record.is_tried = False

    def failed(self, now: float, peers: Iterable[PeerId], seconds: float) -> None:
        """Record an attempt of `seconds` that failed, or took longer, because these peers did not send their
        data."""
        for peer in peers:
            record = self._record(peer)
            record.withdrawals = 0
            record.misses, record.is_back = max(1, record.misses), False
            if record.is_known and now >= record.excused_at + EXCUSE_SECONDS:
                record.excused_at = now
                continue
            record.failures += 1
            record.has_completed = record.is_tried = False
            left_out_seconds = _left_out_seconds(seconds, record.failures)
            record.left_out_until = now + left_out_seconds
            record.try_from = now + (TRIAL_SHARE * left_out_seconds if record.failures > 1 else 0.0)

    def disputed(self, now: float, peers: Iterable[PeerId], seconds: float) -> None:
        """Record an attempt of `seconds` that failed, or took longer, because of a dispute between one of
        these peers and another member. This peer cannot tell which of the two is at fault. Only those that
        have never completed a round are left out, each time as long as after a first failure."""
        for peer in peers:
            record = self._record(peer)
            if not record.is_known:
                record.left_out_until = max(record.left_out_until, now + _left_out_seconds(seconds, 1))

    def withdrew(self, now: float, peers: Iterable[PeerId], seconds: float) -> None:
        """Record an attempt of `seconds` that failed because these peers withdrew from it."""
        for peer in peers:
            record = self._record(peer)
            record.withdrawals += 1
            if record.withdrawals >= WITHDRAWALS_MAX:
                self.failed(now, [peer], seconds)

    def attended(
        self,
        now: float,
        begun_at: float,
        awaited: Collection[PeerId],
        ready_at: Mapping[PeerId, float],
        interval_seconds: float,
        worth: Mapping[PeerId, float] | None = None,
    ) -> None:
        """Record which peers came while this peer, ready since `begun_at`, waited for a group. `ready_at` has
        the times at which others were ready.

        Rounds are about `interval_seconds` apart. In a numbered round members stand still while they wait. In
        that case `worth` is the value of each peer's contribution, in seconds of all members, and a peer that
        is usually later than its worth is not awaited.
        """
        for peer in ready_at:
            self.came(peer)
        if not awaited:
            return
        middle = middle_of(begun_at, ready_at, awaited)
        base = begun_at if middle == inf else max(begun_at, middle)
        if worth is not None:
            self.middle.note(base - begun_at if middle < inf else now - begun_at)
            self._measure(base, {**dict.fromkeys(awaited, now), **ready_at})
            self._postpone(now, awaited, ready_at)
        # Without one of n members a round does 1 / (n - 1) less work. This bounds how long waiting for it is
        # worthwhile.
        late = max(LATE_SECONDS_MIN, interval_seconds / len(awaited))
        was_new = missed_new = False
        for peer in awaited:
            lateness = ready_at.get(peer, now) - base
            is_new = peer not in self._records or not self._records[peer].has_completed
            was_new = was_new or (is_new and peer in ready_at)
            record = self._record(peer)
            if lateness > (late if peer in ready_at else late - SHORT_SECONDS):
                record.missed(now, lateness)
                missed_new = missed_new or is_new
            elif worth is not None and record.is_slow(worth.get(peer, late)):
                record.cost(now, lateness)
            elif peer in ready_at:
                record.misses = 0
        if missed_new:
            self._newcomers.missed(now, max(0.0, now - base))
            # the back-off ends by itself, because the next newcomers are different peers
            self._newcomers.is_back = True
        elif was_new:
            self._newcomers.misses = max(0, self._newcomers.misses - 1)

    def _postpone(self, now: float, awaited: Collection[PeerId], ready_at: Mapping[PeerId, float]) -> None:
        """Postpone the next trial of a peer if the round began later although all awaited peers were ready.
        Its convener was then waiting for a peer that has missed other rounds, so this peer need not try that
        one."""
        seconds = now - max((ready_at.get(peer, now) for peer in awaited), default=now)
        if seconds <= COST_SECONDS_MIN:
            return
        for peer, record in self._records.items():
            if record.misses and peer not in awaited and ready_at.get(peer, now) > now - seconds:
                record.cost(now, seconds)

    def _measure(self, base: float, ready_at: Mapping[PeerId, float]) -> None:
        for peer, at in ready_at.items():
            self._record(peer).lateness.note(at - base)

    def came(self, peer: PeerId) -> None:
        """Record that this peer reported to be ready for a group, in time or late."""
        self._record(peer).is_back = True

    def passed_over(self, peers: Iterable[PeerId]) -> None:
        """Record that these peers did not propose a group when it was their turn."""
        for peer in peers:
            self._record(peer).is_passed_over = True

    def proposed(self, peer: PeerId) -> None:
        """Record that this peer proposed a group."""
        self._record(peer).is_passed_over = False

    # Decisions

    @property
    def has_completed_any(self) -> bool:
        """Whether any peer has completed a round with this one and not failed since."""
        return any(record.has_completed for record in self._records.values())

    def has_completed(self, peer: PeerId) -> bool:
        """Return whether this peer took part in a round completed here, and has not failed since."""
        record = self._records.get(peer)
        return record is not None and record.has_completed

    def is_known(self, peer: PeerId) -> bool:
        """Return whether this peer ever took part in a round completed here."""
        record = self._records.get(peer)
        return record is not None and record.is_known

    def absent(
        self, peers: Collection[PeerId], *, is_strict: bool, abreast: Collection[PeerId] = ()
    ) -> frozenset[PeerId]:
        """Return which of these peers are listed but do not average with this one. Once enough rounds have
        been completed, or if `is_strict`, these are all peers that have not recently contributed to a round.
        Before that, and if no peer has contributed recently, they are the peers whose silence made an attempt
        fail.

        `abreast` are the peers that claim to be at least as far as this one. If several of them contributed
        to a round earlier, they may be the other half of a run that was split, so they are not absent; a
        single one may just be silent. With `is_strict` they are absent too."""
        records = {peer: self._records[peer] for peer in peers if peer in self._records}
        partners = {p for p, record in records.items() if record.rounds_without < ABSENT_ROUNDS_MIN}
        if partners and (is_strict or self._rounds >= ROUNDS_MIN):
            parted = {p for p in records.keys() - partners if records[p].is_known and p in abreast}
            if not is_strict and len(parted) >= VOICES_MIN:
                partners |= parted
            return frozenset(peers) - partners
        return frozenset(p for p, record in records.items() if record.failures and not record.is_known)

    def is_passed_over(self, peer: PeerId) -> bool:
        """Return whether this peer failed to propose a group when it last had the turn."""
        record = self._records.get(peer)
        return record is not None and record.is_passed_over

    def is_left_out(self, now: float, peer: PeerId) -> bool:
        """Return whether this peer is to be left out of all groups that are proposed here."""
        record = self._records.get(peer)
        return record is not None and now < record.left_out_until

    def declines(self, now: float, peer: PeerId) -> bool:
        """Return whether to decline a group that this peer proposes. A left-out peer's group is accepted
        occasionally, because the peer is alive and may not be at fault. Otherwise two peers that leave each
        other out would never average together again."""
        if not self.is_left_out(now, peer):
            return False
        record = self._record(peer)
        if now < record.try_from:
            return True
        was_tried, record.is_tried = record.is_tried, True
        return was_tried

    def is_waited_for(self, now: float, peer: PeerId) -> bool:
        """Return whether a group waits for this peer."""
        record = self._records.get(peer)
        if record is None:
            return self._newcomers.is_waited_for(now)
        return now >= record.left_out_until and record.is_waited_for(now)

    def is_reliable(self, peer: PeerId) -> bool:
        """Return whether this peer has completed a round and came in time when it was last waited for. If no
        peer has completed a round, all count as reliable. Once some peers have come to several rounds, the
        others must have come to several too."""
        if not self.has_completed_any:
            return True
        record = self._records.get(peer)
        if record is None or not record.has_completed or record.misses:
            return False
        return record.lateness.has_habit or not any(
            other.lateness.has_habit for other in self._records.values()
        )

    def is_usually_late(self, peer: PeerId) -> bool:
        """Return whether this peer usually comes so long after the others that waiting for it is useless."""
        record = self._records.get(peer)
        return record is not None and record.is_slow(0.0)

    def likely_lateness_seconds(self, peer: PeerId) -> float:
        """Return how long after the median of the others this peer comes at most, except in rare cases; 0 if
        unknown."""
        record = self._records.get(peer)
        if record is None or not record.lateness.has_habit:
            return 0.0
        return max(0.0, record.lateness.likely_max_seconds)

    def _record(self, peer: PeerId) -> _Record:
        record = self._records.pop(peer, None) or _Record()
        self._records[peer] = record  # keep the most recent last
        if len(self._records) > RECORDS_MAX:
            usual = (each for each, kept in self._records.items() if not kept.has_completed)
            del self._records[next(usual, next(iter(self._records)))]
        return record
