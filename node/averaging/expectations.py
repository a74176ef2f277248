"""Decides which peers a group of this node waits for, leaves out, and expects a proposal from.

It applies the experience of `gossip.averaging.attendance` to the wishes of one run. All of this is the node's
own experience, and is not sent to others.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from statistics import median

from crypto.identity import PeerId
from gossip.averaging.attempt import Attempt
from gossip.averaging.attendance import Attendance
from gossip.averaging.lateness import RoundWaits
from gossip.averaging.outcome import Averaged, NotAveraged
from gossip.claims import SLACK_STEPS
from gossip.matchmaking import CameLate, GroupWish
from gossip.roster import Roster
from node.averaging.rounds import RoundWish
from node.seams import Clock

INTERVALS_MAX = 5
"""Number of rounds whose median distance counts; a single round may have taken long for any reason."""
BRIEF_FACTOR = 2.0
"""Factor for how long a group waits for a peer that may never come, relative to what its contribution is
worth (`Attendance.attended`)."""
BRIEF_SECONDS_MIN = 0.25
"""Shortest wait for a peer that has not come in time yet, because the others may be busy for a moment."""
USUAL_SECONDS_MIN = 1.0
"""Shortest wait for a peer that usually comes, in addition to the median of all peers, because a machine may
be busy."""
GROWTH = 2
"""A peer's contribution counts for at most this many times this peer's own."""
DISPUTED_SECONDS = 1.0
"""Minimum length of an attempt after which peers may be blamed for having held it up, although this member
received everything that it waited for."""
JOINING_SECONDS = 2.0
"""How long the first round waits for a listed peer without state. The peer may have just joined and be ready;
a lost report is repeated after a second."""
ENDED_KEPT_MAX = 4
"""Number of finished wishes that are kept. They show which peers come late, so that these can be informed."""


class Expectations:
    """One participant's expectations of the other participants in one run."""

    def __init__(self, me: PeerId, roster: Roster, clock: Clock) -> None:
        self._me = me
        self._roster = roster
        self._clock = clock
        self.attendance = Attendance()
        self._unawaited: frozenset[PeerId] = frozenset()
        self._absent: frozenset[PeerId] = frozenset()
        self._is_strict = False
        self._ended: list[bytes] = []
        self._waited_until: float | None = None
        self._intervals: deque[float] = deque(maxlen=INTERVALS_MAX)

    @property
    def unawaited(self) -> frozenset[PeerId]:
        """The participants that no group waits for, as of the previous round; may be read in any thread."""
        return self._unawaited

    @property
    def absent(self) -> frozenset[PeerId]:
        """The participants that are listed but do not average here, as of the previous round; may be read in
        any thread."""
        return self._absent

    def missed_state(self) -> None:
        """Record that no state could be fetched. Until a round is completed here, rely only on peers that
        this peer has averaged with, because a peer that falsely claims a state could keep this one from the
        others' state."""
        self._is_strict = True
        self._refresh()

    def _refresh(self) -> None:
        listed = self._roster.reports
        step = self._roster.own.claimed_step
        abreast = {peer for peer, said in listed.items() if said.has_state and said.step.reaches(step)}
        self._absent = self.attendance.absent(listed, is_strict=self._is_strict, abreast=abreast)
        self._unawaited = frozenset(listed).difference(self.of(listed))

    # Decisions from experience

    def of(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Return which of these peers a group waits for."""
        now = self._clock.monotonic()
        return [peer for peer in peers if self.attendance.is_waited_for(now, peer)]

    def waits(self, begun_at: float, awaited: Collection[PeerId], wanted: RoundWish) -> RoundWaits:
        """Return how long a group that has been wanted since `begun_at` waits for each of these peers."""
        window, brief = wanted.window_seconds, self._brief_seconds(len(awaited))
        usual = [peer for peer in awaited if not self._is_brief(peer)]
        if wanted.round is None or not self.attendance.has_completed_any:
            # Nobody is blocked meanwhile, or nothing is known about the others yet.
            known = middle = window
        else:
            known = max(USUAL_SECONDS_MIN, *self._intervals, 0.0)
            middle = max(known, self.attendance.middle.likely_max_seconds)
        seconds = dict.fromkeys(awaited, brief)
        for peer in usual:
            seconds[peer] = min(window, max(known, self.attendance.likely_lateness_seconds(peer)))
        if wanted.round is not None and self._intervals:
            shortest = BRIEF_FACTOR * median(self._intervals) / max(1, len(awaited))
            late = (p for p in awaited if p not in usual and self.attendance.is_usually_late(p))
            seconds.update(dict.fromkeys(late, min(brief, shortest)))
        return RoundWaits(begun_at, seconds, usual=usual, middle_seconds=middle, others_seconds=brief)

    def _is_brief(self, peer: PeerId) -> bool:
        """Return whether a group waits for this peer only as long as its contribution is worth."""
        return self._is_joining(peer) or not self.attendance.is_reliable(peer)

    def _is_joining(self, peer: PeerId) -> bool:
        """Return whether this peer has no state yet although this node has one."""
        report = self._roster.reports.get(peer)
        return self._roster.own.has_state and report is not None and not report.has_state

    def _brief_seconds(self, awaited: int) -> float:
        """Return how long a group of this many waits for a peer that may never come."""
        if not self._intervals:  # meanwhile all but joining peers are awaited for the whole window
            return JOINING_SECONDS
        interval_seconds = median(self._intervals)
        return max(BRIEF_SECONDS_MIN, BRIEF_FACTOR * interval_seconds / max(1, awaited))

    def leaves_out(self, peer: PeerId) -> bool:
        """Return whether groups proposed here leave this peer out."""
        return self.attendance.is_left_out(self._clock.monotonic(), peer)

    def declines(self, peer: PeerId) -> bool:
        """Return whether this node declines a group that this peer proposes."""
        return self.attendance.declines(self._clock.monotonic(), peer)

    def rank(self, peer: PeerId) -> int:
        """Return the rank of a proposer: peers that have completed a round come first, peers that failed to
        propose last. A newcomer relies on the others' reports, so that it does not propose too early."""
        if self.attendance.is_passed_over(peer):
            return 2
        report = self._roster.reports.get(peer)
        has_rounds = report is not None and report.rounds.reaches(1)
        if not self.attendance.has_completed_any:
            return 0 if has_rounds else 1
        if peer == self._me:
            return 0
        # A peer that has come back has forgotten its rounds, and considers itself a newcomer.
        is_back = self._roster.own.claimed_rounds > 0 and not has_rounds
        return 0 if self.attendance.has_completed(peer) and not is_back else 1

    # Learning

    def begin(self) -> None:
        """Begin a round: measure the time between the peers' rounds, without the wait for a group."""
        if self._waited_until is not None:
            self._intervals.append(self._clock.monotonic() - self._waited_until)

    def ended(self, wish: GroupWish, *, is_kept: bool) -> Sequence[bytes]:
        """Learn from a finished wish which peers came in time, and which did not propose a group when it was
        up to them. Return the keys of the wishes to forget. If not `is_kept`, the wish was given up here."""
        self._ended = [key for key in self._ended if key != wish.key]
        if not is_kept:
            return [wish.key]
        now = self._waited_until = self._clock.monotonic()
        interval_seconds = median(self._intervals) if self._intervals else now - wish.begun_at
        worth = self._worth(wish.expected, interval_seconds) if wish.is_exclusive else None
        self.attendance.attended(
            now, wish.begun_at, wish.expected, wish.ready_at, interval_seconds, worth=worth
        )
        self.attendance.passed_over(wish.passed_over)
        if wish.convener is not None:
            self.attendance.proposed(wish.convener)
        self._refresh()
        self._ended.append(wish.key)
        forgotten, self._ended = self._ended[:-ENDED_KEPT_MAX], self._ended[-ENDED_KEPT_MAX:]
        return forgotten

    def _worth(self, awaited: Sequence[PeerId], interval_seconds: float) -> dict[PeerId, float]:
        """Return what each peer's contribution to this round is worth, as a part of the time between two
        rounds. Claimed samples are compared with this peer's own, and no claim is worth more than an equal
        share."""
        own, reports = self._roster.own.claimed_samples, self._roster.reports
        equal = 1 / max(1, len(awaited))
        if not own:
            return dict.fromkeys(awaited, equal * interval_seconds)
        brought = {p: reports[p].samples.at_most(GROWTH * own) if p in reports else 0 for p in awaited}
        total = own + sum(brought.values())
        return {peer: min(equal, count / total) * interval_seconds for peer, count in brought.items()}

    def came_late(self, event: CameLate) -> None:
        """Record a peer that wants a group under the key of a finished wish."""
        if event.key in self._ended and event.peer in self._roster.reports:
            self.attendance.came(event.peer)
            self._refresh()

    def gave_up(self, attempt: Attempt, seconds: float) -> None:
        """Record an attempt that was cancelled here after `seconds`, and which peers had sent nothing until
        then."""
        if not attempt.has_stood_still:
            self.attendance.failed(self._clock.monotonic(), attempt.unsent, seconds)
            self._refresh()

    def attempted(self, attempt: Attempt, result: Averaged | NotAveraged, seconds: float) -> bool:
        """Record a finished attempt. Return whether its length shows how much time the others need. It does
        not if the attempt was lengthened by members that sent nothing or are already left out. Otherwise a
        peer that sends one chunk and stops could make all later attempts wait longer."""
        now = self._clock.monotonic()
        # Data that is missing because this machine stalled says nothing about the others.
        unsent = () if attempt.has_stood_still else attempt.unsent
        others = [peer for peer in attempt.group.peers if peer != self._me]
        slow = {*unsent, *(attempt.excluded if isinstance(result, Averaged) else result.suspects)}
        slow.discard(self._me)
        needs_time = not slow or any(attempt.has_begun(p) and not self.leaves_out(p) for p in slow)
        if isinstance(result, Averaged):
            self._is_strict = False
            self.attendance.failed(now, unsent, seconds)
            self.attendance.completed(peer for peer in result.shares if peer != self._me)
            if seconds >= DISPUTED_SECONDS and not attempt.has_stood_still:
                self.attendance.disputed(now, set(attempt.excluded).difference(unsent, [self._me]), seconds)
            self._refresh()
            return needs_time
        if attempt.has_stood_still:
            return True
        suspects = dict.fromkeys((*result.suspects, *unsent))
        self.attendance.failed(now, suspects, seconds)
        is_disputed = any(map(self.attendance.is_known, result.withdrew)) and seconds >= DISPUTED_SECONDS
        strangers = [peer for peer in others if not self.attendance.is_known(peer)]
        if is_disputed and strangers and not suspects:
            self.attendance.disputed(now, strangers, seconds)
        elif not suspects:  # otherwise the suspects caused the withdrawals
            self.attendance.withdrew(now, result.withdrew, seconds)
        self._refresh()
        return needs_time


def expected_in(roster: Roster, round: int | None) -> tuple[PeerId, ...]:  # noqa: A002 - the field's word
    """Return the expected peers. In a numbered round these are all peers at this peer's step or one step
    before it, because reports travel no faster than wishes. A peer that claims to be far ahead would not come
    to the round."""
    # A peer without state only follows, unless no peer has a state, in which case all just average.
    trains = roster.own.has_state
    return tuple(
        peer
        for peer, report in roster.reports.items()
        if (round is None or (report.step.is_near(round, SLACK_STEPS) and report.step.reaches(round - 1)))
        and (report.has_state or not trains)
        # A script that has joined but not processed its first batch may load its data for minutes.
        and (round is None or not trains or report.step.reaches(1) or report.samples.reaches(1))
    )
