"""This peer's beliefs about every member: facts in; member list, events and facts to pass on out.

The order of belief is SWIM's (section 4.2): a higher incarnation overrides a lower one, and at the same
incarnation alive < suspect < dead < left. Signed facts add two rules:

- An accuser must be a known member, or accuse us from outside our scope. That excludes unknown peers.
- An accusation is a hint (`gossip.hints`): we probe the accused, and suspect it or pass that on only if our
  own probe fails. Then other accusers shorten the suspicion, and a dead fact shortens it further, but never
  below the time to refute; at the end one more probe must fail. Any answer to our probes ends the suspicion.
  So a lying member cannot make others dead, however widely its facts are passed on.

An incarnation rises when a peer restarts (to Unix milliseconds), changes its profile, or refutes; one that
exceeds any clock error is refused. An alive fact is passed on if it changes what is held, so a refutation
reaches every peer that holds the suspicion.

A signature is checked only if the fact would change something, and only checked facts are kept or passed on.
Not here: timers and messages (`gossip.swim`).
"""

from collections.abc import Generator, Sequence
from math import inf
from random import Random

from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from gossip import dissemination as news
from gossip.broadcasts import Broadcasts, queue_key
from gossip.candidates import Candidate, Candidates
from gossip.displaced_lives import DisplacedLives
from gossip.hints import Hints
from gossip.intake import CHECK_COST, READ_COST, Intake, Job
from gossip.member import (
    BroadcastHeard,
    Event,
    FactsRefused,
    MemberDown,
    MemberForgotten,
    MemberLeft,
    MemberRefuted,
    MemberSuspected,
    Profile,
    SelfAccused,
    Status,
)
from gossip.messages import (
    AliveBody,
    AliveFact,
    Body,
    BroadcastBody,
    DeadBody,
    LeftBody,
    SuspectBody,
    check_jump,
    fact_bytes,
    incarnation_of,
    member_changed,
    member_up,
    milliseconds,
    read_alive,
    read_body,
    silence_of,
    subject_of,
)
from gossip.other_lives import OtherLives
from gossip.own_facts import OwnFacts
from gossip.refutations import Refutations
from gossip.settings import SwimSettings
from gossip.shares import Shares
from gossip.suspicion import LEAK_INTERVALS, Credit, LocalHealth, Suspicion, suspect
from gossip.table import MemberRow, MemberTable, MemberVerdict
from gossip.view import Scope


class MembershipState:
    """The member list of one peer, derived from received facts.

    Long because it is one table of beliefs: every kind of fact is compared with the effects of all others.
    """

    __slots__ = (
        "_changes", "_credit", "_events", "_farewell", "_own",
        "_settings", "broadcasts", "candidates", "displaced", "health", "hints", "intake", "lives", "misled",
        "peer", "queue", "refutations", "scope", "shares", "suspicion_deadline", "suspicions", "table"
    )  # fmt: skip

    def __init__(
        self,
        signer: Signer,
        profile: Profile,
        settings: SwimSettings,
        rng: Random,
        incarnation: int,
        now: float,
        events: list[Event],
        scope: Scope,
        life: bytes,
    ) -> None:
        self.scope = scope
        self._own = OwnFacts(signer, life)
        self.lives = OtherLives(life, events, announce=self._announce_beside, check=self._own.check)
        self.displaced = DisplacedLives(settings.probe_interval_seconds, now)
        self._settings = settings
        self._events = events
        self.peer = signer.peer
        self.table = MemberTable(
            MemberRow(self._own.alive(profile, incarnation), now, found_through=None), rng, settings
        )
        self.health = LocalHealth(settings.health_max)
        self.queue = news.Dissemination()
        self.candidates = Candidates(settings.members_max)
        self.intake = Intake(self._steps)
        self.queue.put(self.peer, self.me.said.fact)
        self.suspicions: dict[PeerId, Suspicion] = {}
        self._credit = Credit(LEAK_INTERVALS * settings.probe_interval_seconds)
        self.hints = Hints(self._credit, settings.probe_interval_seconds)
        self.refutations = Refutations(settings.probe_interval_seconds, now)
        self.shares = Shares(settings.members_max)
        self.broadcasts = Broadcasts(settings, incarnation, now)
        # The rate at which we pass on changes of members: joins, departures and profiles.
        self._changes = news.Changes(settings.probe_interval_seconds, settings.members_max, now)
        # The latest peer that sent us an already refuted accusation of us.
        self.misled: PeerId | None = None
        # Our own fact that we have left.
        self._farewell: Fact | None = None
        self.suspicion_deadline = inf

    @property
    def me(self) -> MemberRow:
        """Our own row."""
        return self.table.rows[self.peer]

    @property
    def _retransmits(self) -> int:
        return self._settings.retransmits(self.table.live)

    # Facts about this peer

    def announce(
        self, profile: Profile, *, above: int = 0, refutes: bool = False, rival: bytes = b""
    ) -> None:
        """Announce this peer under a new incarnation, higher than the current one and `above`. With `refutes`
        nothing else changes; the fact names the newest `rival`, a different life of this key."""
        if self.lives.is_silent:
            return
        self._own.rival = rival or self._own.rival
        said = self._own.alive(profile, max(self.me.incarnation, above) + 1)
        self.table.renew(self.me, said)
        sends = news.REFUTATION_SENDS if refutes else news.SENDS_MAX
        self.queue.put(said.peer, said.fact, sends=sends)

    def _announce_beside(self, above: int, rival: bytes) -> None:
        self.announce(self.me.profile, above=above, rival=rival)

    def leave(self, now: float) -> Fact:
        """Mark this peer as gone. Return the fact that announces it."""
        left = self._own.left(self.me.incarnation)
        self.table.judge(self.me, now, MemberVerdict(Status.LEFT, self.me.incarnation, left, "left"))
        self.queue.put(self.peer, left)
        self._farewell = left
        self.lives.again_at = inf
        self.suspicions.clear()
        self._reckon()
        return left

    # Conclusions about others

    def accuse(self, now: float, row: MemberRow, *, sent_at: float) -> None:
        """Suspect a live member after our failed probe, begun at `sent_at`, or confirm a suspicion."""
        hints = self.hints.confirm(row.peer)
        if self.lives.is_silent:
            return  # the elder life gets the answers to probes of this key
        suspicion = self.suspicions.get(row.peer)
        if suspicion is None:
            suspicion = self._begin_suspicion(now, row, hints)
        elif suspicion.is_silent and not suspicion.is_confirmed:
            # No other peer has announced this suspicion in the meantime. If all peers announced theirs, most
            # announcements would be wasted.
            suspicion.is_silent = False
            self.queue.put(row.peer, self._accusation(now, row), beside=True)
        suspicion.miss(now, sent_at)
        if suspicion.wants(self.peer):
            suspicion.is_silent = True
            suspicion.confirm(self.peer)
        self._reckon()

    def clear(self, now: float, peer: PeerId, *, is_direct: bool) -> list[tuple[PeerId, Fact]]:
        """Clear a member that has answered a probe. An answer through a relay is doubted if enough others
        accuse. Return the facts to send to each accuser, which may itself lack a path to the member."""
        row = self.table.rows.get(peer)
        hints = self.hints.refute(now, peer)
        if row is None:
            return []
        told = [
            (PeerId(fact.author), row.said.fact) for fact in hints if incarnation_of(fact) < row.incarnation
        ]
        suspicion = self.suspicions.get(peer)
        if suspicion is not None and not is_direct and suspicion.is_confirmed:
            suspicion.wait(now)
            self._reckon()
        elif suspicion is not None:
            for accuser in suspicion.accusers:
                self._credit.refuted(accuser, now)
            self._end_suspicion(peer)
            self.queue.drop(peer)
            self.table.judge(row, now, None)
            self._events.append(MemberRefuted(peer, row.incarnation))
        return told

    def revive(self, now: float, peer: PeerId) -> None:
        """Revive a dead member that has answered our probe: the network has healed, or we were wrong."""
        row = self.table.rows.get(peer)
        if row is not None and row.status is Status.DEAD:
            self.table.judge(row, now, None, found_through=peer)
            self.queue.drop(peer)
            self.hints.refute(now, peer)
            self._events.append(member_up(row.said, peer))

    def close(self, now: float, peer: PeerId) -> None:
        """Record that a suspect's machine reports that its process is gone."""
        suspicion = self.suspicions.get(peer)
        if suspicion is not None:
            suspicion.close(now)
            self._reckon()

    def bury_expired(self, now: float) -> list[tuple[MemberRow, bool]]:
        """Declare every suspect dead whose time to refute is over. Return those that must be probed once
        more, and whether that is the last probe."""
        if self.lives.is_silent:
            self.suspicions.clear()
        probed = []
        for peer in [peer for peer, suspicion in self.suspicions.items() if suspicion.due <= now]:
            row, suspicion = self.table.rows[peer], self.suspicions[peer]
            if suspicion.is_over(now):
                self._bury(now, row, suspicion.condemnation)
            else:
                suspicion.is_probed = True
                probed.append((row, now >= suspicion.deadline - self._settings.probe_interval_seconds))
        self._reckon()
        return probed

    def excuse(self, seconds: float) -> None:
        """Extend every suspicion by the time for which this peer stalled."""
        for suspicion in self.suspicions.values():
            suspicion.excuse(seconds)
        self._reckon()

    def broadcast(self, now: float, topic: bytes, data: bytes) -> None:
        """Queue a user's broadcast for all members. Raises LocalProtocolError."""
        self.broadcasts.put(topic, data)
        self.tell_due(now)

    def tell_due(self, now: float) -> None:
        """Send the broadcasts that are due."""
        for body in self.broadcasts.take(now, self.me.incarnation):
            self.queue.put(queue_key(self.peer, body.topic), self._own.broadcast(body), is_later=True)

    def forget_gone(self, now: float) -> None:
        """Remove members that have been dead or gone for `dead_kept_seconds`."""
        for peer in self.table.gone_before(now - self._settings.dead_kept_seconds):
            self._forget(peer)

    # Facts in and out

    def facts_for(self, peer: PeerId) -> tuple[Fact, ...]:
        """Return facts for a message to `peer`, the most urgent first.

        Our own departure comes first, once we have left. A peer with an outdated accusation of us gets our
        alive fact, because the refutation may have been lost on every path to it. Next come the accusations
        of the receiver, so that it can refute them (Lifeguard's buddy system), and facts of its other lives.
        """
        row = self.table.rows.get(peer)
        accusation = None if row is None or row.verdict is None else row.verdict.fact
        if accusation is None and self.hints.rows:
            accusation = next(iter(self.hints.about(peer)), None)
        is_misled = self.misled is not None and peer == self.misled
        life = self.displaced.next(row.said) if self.displaced.waits and row is not None else None
        is_quiet = accusation is None and life is None and self._farewell is None and not is_misled
        if is_quiet and not self.queue.waits:
            return ()
        refutation = self.me.said.fact if is_misled else None
        proofs = [fact for fact in (self._farewell, refutation, accusation, life) if fact is not None]
        first: list[Fact] = []
        room = self._settings.facts_bytes_max
        for fact in proofs:
            if fact_bytes(fact) <= room:
                room -= fact_bytes(fact)
                first.append(fact)
        return self.queue.take(self._retransmits, self._settings.facts_bytes_max, first)

    def learn(
        self,
        now: float,
        sender: PeerId,
        facts: Sequence[Fact],
        *,
        synced: bool = False,
        passed_on: bool = True,
    ) -> None:
        """Learn facts that `sender` passed on. Raises RemoteProtocolError if one is malformed or forged.

        In a Sync (`synced`) a dead fact may be old, from the other side of a split, so it is a hint like any
        accusation. Facts beyond one slice are left to `learn_on`.
        """
        self.misled = None
        if facts:
            self.intake.do(Job(sender, facts, synced, passed_on, now))

    def learn_on(self, now: float) -> None:
        """Learn the next slice of waiting facts."""
        job, error = self.intake.go_on(now)
        if error is not None and job is not None:
            self._events.append(FactsRefused(job.sender, str(error)))

    def _steps(self, job: Job) -> Generator[int]:
        """Read all facts, then apply them. Yield the cost of each step."""
        claims: list[tuple[Fact, Body]] = []
        rows, limit = self.table.rows, self._retransmits
        for fact in job.facts:
            if self.queue.waits:
                self.queue.heard(fact, limit)
            # Most facts that arrive are already known byte for byte, and change nothing.
            known = rows.get(PeerId(fact.author))
            if known is None or known.said.fact != fact:
                claims.append((fact, read_body(fact)))
                yield READ_COST
        if not claims:
            return
        accused = (body for _, body in claims if isinstance(body, SuspectBody | DeadBody))
        if any(body.subject == self.peer and body.incarnation < self.me.incarnation for body in accused):
            self.misled = job.sender
        over = ((subject_of(fact, body), body) for fact, body in claims)
        buried = {peer: body.incarnation for peer, body in over if isinstance(body, DeadBody | LeftBody)}
        # Alive facts come first: they make accusers known, and set the incarnation of the accused.
        for fact, body in claims:
            if isinstance(body, AliveBody):
                subject, before = PeerId(fact.author), self._own.checks
                # A member dead before we joined is not news. A false claim only hurts its sender's own facts.
                if subject in rows or body.incarnation > buried.get(subject, -1):
                    self._hear_alive(job.now, job.sender, fact, body, job.passed_on)
                    yield READ_COST + CHECK_COST * (self._own.checks - before)
        for fact, body in claims:
            before = self._own.checks
            self._hear(job, fact, body)
            yield READ_COST + CHECK_COST * (self._own.checks - before)

    def _hear(self, job: Job, fact: Fact, body: Body) -> None:
        """Process a fact that is not about a life."""
        match body:
            case LeftBody():
                self._hear_left(job.now, fact, body)
            case SuspectBody() | DeadBody():
                self._hear_accusation(job.now, job.sender, fact, body, synced=job.synced)
            case BroadcastBody():
                self._hear_broadcast(job.now, fact, body)

    def acquaint(self, now: float, teller: PeerId, facts: Sequence[Fact]) -> None:
        """List all subjects of these facts immediately, because local code vouches for them. The facts are
        not passed on as news."""
        for fact in facts:
            body = read_body(fact)
            if isinstance(body, AliveBody) and fact.author not in self.table.rows:
                self._own.check(fact, body)
                self._list(now, Candidate(read_alive(fact, body), teller, passed_on=False))

    def admit(self, now: float, peer: PeerId) -> None:
        """List a candidate that has answered."""
        candidate = self.candidates.pop(peer)
        if candidate is not None and peer not in self.table.rows and self.scope.holds(peer):
            self._list(now, candidate)

    def _list(self, now: float, candidate: Candidate) -> None:
        said, introducer, rows = candidate.said, candidate.introducer, self.table.rows
        has_room = self.table.may_have_room(self._settings.members_max)
        if not (has_room and self.shares.allow(rows.values(), len(rows), said, introducer)):
            return
        self._make_room()
        self.table.insert(MemberRow(said, now, introducer))
        self._events.append(member_up(said, introducer))
        if candidate.passed_on:
            self.queue.put(said.peer, said.fact)

    def _hear_alive(self, now: float, sender: PeerId, fact: Fact, body: AliveBody, passed_on: bool) -> None:
        peer = PeerId(fact.author)
        row = self.table.rows.get(peer)
        if peer == self.peer:
            self._hear_of_other_self(now, fact, body)
        elif row is None:
            self._hear_of_stranger(now, sender, fact, body, passed_on)
        elif body.incarnation > row.incarnation:
            check_jump(body, row.incarnation)
            said = read_alive(fact, body)
            self._own.check(fact, body)
            is_news = self._hear_again(now, sender, row, said)
            if is_news and passed_on and (sends := self._changes.sends(peer, now)):
                self.queue.put(peer, fact, sends=sends)

    def _hear_of_stranger(
        self, now: float, sender: PeerId, fact: Fact, body: AliveBody, passed_on: bool
    ) -> None:
        """List an unknown peer that sends its own fact. An unknown peer that is named by another must answer
        a ping first."""
        peer = PeerId(fact.author)
        known = self.candidates.get(peer)
        if known is not None and body.incarnation <= known.said.incarnation:
            return
        if not (self.scope.holds(peer) and self.table.may_have_room(self._settings.members_max)):
            return
        speaks = sender == peer
        if not (speaks or known is not None or self.candidates.takes(sender)):
            return
        check_jump(body, 0 if known is None else known.said.incarnation)
        said = read_alive(fact, body)
        self._own.check(fact, body)
        if speaks:
            self.candidates.pop(peer)
            self._list(now, Candidate(said, sender, passed_on))
        elif known is not None:
            known.said = said
        else:
            self.candidates.put(Candidate(said, sender, passed_on))

    def _hear_again(self, now: float, sender: PeerId, row: MemberRow, said: AliveFact) -> bool:
        """Process a listed member's own fact. Return whether more than the incarnation is new."""
        changed = said.profile != row.profile
        status = row.status
        if status is not Status.LEFT:
            self.displaced.note(row.said, said, speaks=sender == said.peer)
        row = self.table.renew(row, said)
        back = status in (Status.DEAD, Status.LEFT)
        if status is not Status.ALIVE:
            self.table.judge(row, now, None, found_through=sender if back else None)
            suspicion = self.suspicions.get(said.peer)
            for accuser in suspicion.accusers if suspicion is not None else ():
                self._credit.refuted(accuser, now)
            self._end_suspicion(said.peer)
        if back:
            self._events.append(member_up(said, sender))
            return True
        if status is Status.SUSPECT:
            self._events.append(MemberRefuted(said.peer, said.incarnation))
        if changed:
            self._events.append(member_changed(said))
        return changed or status is not Status.ALIVE

    def _hear_left(self, now: float, fact: Fact, body: LeftBody) -> None:
        row = self.table.rows.get(PeerId(fact.author))
        candidate = self.candidates.get(PeerId(fact.author)) if row is None else None
        if candidate is not None and body.incarnation >= candidate.said.incarnation:
            self._own.check(fact, body)
            self.candidates.pop(candidate.peer)
        if row is None or body.incarnation < row.incarnation:
            return
        if row.peer == self.peer:
            self._hear_of_other_self(now, fact, body)
            return
        if row.status is Status.LEFT and body.incarnation == row.incarnation:
            return
        self._own.check(fact, body)
        if row.status is not Status.LEFT:
            self._events.append(MemberLeft(row.peer))
        self.table.judge(row, now, MemberVerdict(Status.LEFT, body.incarnation, fact, "left"))
        self._end_suspicion(row.peer)
        if self._changes.sends(row.peer, now):
            self.queue.put(row.peer, fact)

    def _hear_accusation(
        self, now: float, sender: PeerId, fact: Fact, body: SuspectBody | DeadBody, *, synced: bool
    ) -> None:
        accuser = PeerId(fact.author)
        row = self.table.rows.get(PeerId(body.subject))
        if row is None or accuser == row.peer or not row.live:
            return
        # An accuser with a wider scope may list us although we do not list it, and could declare us dead.
        known = accuser in self.table.rows
        is_outside = not self.scope.holds(accuser) and self.scope.may_list(accuser)
        if not (known or (row.peer == self.peer and is_outside)):
            return
        if row.peer == self.peer:
            if body.incarnation == row.incarnation:
                self.misled = sender
                self._hear_of_me(now, fact, body)
        elif accuser != self.peer:
            if row.peer not in self.suspicions:
                self._hear_hint(now, sender, row, fact, body)
            elif not self._credit.is_spent(accuser, now):
                self._hear_of_suspect(now, row, fact, body, synced=synced)

    def _hear_of_me(self, now: float, fact: Fact, body: SuspectBody | DeadBody) -> None:
        """Refute an accusation of us. An accuser that is wrong too often gets as few refutations as one
        outside our scope."""
        accuser = PeerId(fact.author)
        is_trusted = accuser in self.table.rows and not self._credit.is_spent(accuser, now)
        if not self.refutations.allow(now, is_trusted=is_trusted):
            return
        self._own.check(fact, body)
        self.refutations.count(now, is_trusted=is_trusted)
        if is_trusted:
            self.health.worsen()
        self._credit.refuted(accuser, now)
        self.announce(self.me.profile, refutes=True)
        reason = self.table.reason(accuser, body.silence_milliseconds)
        self._events.append(SelfAccused(accuser, reason, self.me.incarnation))

    def _hear_hint(
        self, now: float, sender: PeerId, row: MemberRow, fact: Fact, body: SuspectBody | DeadBody
    ) -> None:
        """Have the accused probed. An accusation for an incarnation other than the held one may be correct
        but old, so its sender loses credit if the accused answers."""
        accuser = PeerId(fact.author)
        culprit = accuser if body.incarnation == row.incarnation else sender
        if self.hints.takes(now, row.peer, accuser, culprit):
            self._own.check(fact, body)
            self.hints.put(now, row.peer, accuser, culprit, fact)

    def _hear_of_suspect(
        self, now: float, row: MemberRow, fact: Fact, body: SuspectBody | DeadBody, *, synced: bool
    ) -> None:
        """Confirm a suspicion, or end it as early as allowed."""
        suspicion = self.suspicions[row.peer]
        accuser = PeerId(fact.author)
        is_confirmed = suspicion.wants(accuser)
        is_condemned = isinstance(body, DeadBody) and suspicion.condemnation is None and not synced
        if not (is_confirmed or is_condemned):
            return
        self._own.check(fact, body)
        if is_confirmed:
            self._confirm(row.peer, fact)
        if is_condemned:
            suspicion.condemn(now, fact)
            self.queue.put(row.peer, fact, beside=True)
            self._reckon()

    def _hear_broadcast(self, now: float, fact: Fact, body: BroadcastBody) -> None:
        """Publish a broadcast of a live member's user, if it is new."""
        author = PeerId(fact.author)
        row = self.table.rows.get(author)
        if row is None or author == self.peer or not row.live or body.sequence < row.incarnation:
            return
        if self.broadcasts.is_news(now, author, body):
            self._own.check(fact, body)
            self._events.append(BroadcastHeard(author, body.topic, body.sequence, body.data))
            if self.broadcasts.hear(now, author, body):
                self.queue.put(queue_key(author, body.topic), fact, is_later=True)

    def _hear_of_other_self(self, now: float, fact: Fact, body: AliveBody | LeftBody) -> None:
        if self.me.status is not Status.LEFT and fact != self.me.said.fact:
            self.lives.hear(now, fact, body, self.me.incarnation)

    def _begin_suspicion(self, now: float, row: MemberRow, hints: Sequence[Fact]) -> Suspicion:
        """Begin a suspicion, because our probe and those of the authors of `hints` have failed."""
        first = next((fact for fact in hints if incarnation_of(fact) == row.incarnation), None)
        fact = first or self._accusation(now, row)
        accuser, silence = PeerId(fact.author), silence_of(fact)
        suspicion = self.suspicions[row.peer] = suspect(now, accuser, self._settings, self.table.live)
        self.table.unanswered(row.peer, now - silence / 1000)
        reason = self.table.reason(accuser, silence)
        verdict = MemberVerdict(Status.SUSPECT, row.incarnation, fact, reason, accuser)
        self.table.judge(row, now, verdict)
        self._events.append(MemberSuspected(row.peer, accuser, reason))
        self.queue.put(row.peer, fact)
        for other in hints:
            if suspicion.wants(PeerId(other.author)):
                self._confirm(row.peer, other)
            if isinstance(read_body(other), DeadBody) and suspicion.condemnation is None:
                suspicion.condemn(now, other)
        return suspicion

    def _accusation(self, now: float, row: MemberRow) -> Fact:
        return self._own.suspect(row.peer, row.incarnation, self.table.silence_seconds(row, now))

    def _confirm(self, peer: PeerId, fact: Fact) -> None:
        self.suspicions[peer].confirm(PeerId(fact.author))
        self._reckon()
        self.queue.put(peer, fact, beside=True)

    def _bury(self, now: float, row: MemberRow, told: Fact | None) -> None:
        """Declare a suspect dead, using another member's fact `told`, or our own."""
        silence = milliseconds(self.table.silence_seconds(row, now))
        if told is not None and incarnation_of(told) == row.incarnation:
            fact, silence = told, silence_of(told)
        else:
            fact = self._own.dead(row.peer, row.incarnation, silence)
        accuser = PeerId(fact.author)
        reason = self.table.reason(accuser, silence)
        self._end_suspicion(row.peer)
        self.table.judge(row, now, MemberVerdict(Status.DEAD, row.incarnation, fact, reason, accuser))
        self._events.append(MemberDown(row.peer, accuser, reason))
        self.queue.put(row.peer, fact, sends=news.DEAD_SENDS)

    def _end_suspicion(self, peer: PeerId) -> None:
        self.hints.drop(peer)
        if self.suspicions.pop(peer, None) is not None:
            self._reckon()

    def _reckon(self) -> None:
        dues = (suspicion.due for suspicion in self.suspicions.values())
        self.suspicion_deadline = min(dues, default=inf)

    def _make_room(self) -> None:
        is_full = len(self.table.rows) >= self._settings.members_max
        if is_full and (longest := self.table.longest_gone()) is not None:
            self._forget(longest)

    def forget_outside(self) -> None:
        """Remove members outside our scope, which has become narrower."""
        for peer in self.table.keep(self.scope.holds):
            self.suspicions.pop(peer, None)
            self.hints.drop(peer)
            self._forgotten(peer)
        self._reckon()

    def _forget(self, peer: PeerId) -> None:
        self.table.forget(peer)
        self._forgotten(peer)

    def _forgotten(self, peer: PeerId) -> None:
        self.queue.drop(peer)
        self.displaced.forget(peer)
        self.broadcasts.forget(peer)
        self._events.append(MemberForgotten(peer))
