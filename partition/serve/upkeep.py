"""The upkeep of a service's number of replicas without a coordinator: one member's view, for one stage that
it holds. A sans-IO core.

Every member sends to all others its stage and the members that it knows. A leaving member announces it. A
member that was silent for some seconds, or whose stream broke, does not count until it reports again. If a
stage has fewer members than wished, the members act in an order given by a hash of the member and the stage.
The first acts immediately, and each further member some seconds later if the replica is still missing, so a
dead first member blocks nothing. If two members act simultaneously, there is a surplus replica, which serves
like any other. No member gives up its stage because of a surplus, because then one lying member could empty a
stage. If a stage has no holder and no other node takes it, a member takes it too, as a *stopgap*: it answers
but does not count as a replica, so the search for another node continues. Once a replica has answered in
addition to the stopgap for a while, the member gives the stage up. A member has a `ServiceUpkeep` for each of
its stages; the one of a stopgap does not look for other members.

A member is introduced by the publisher or by the member that recruited it, and then by members that know it.
Messages of unknown peers are ignored, so that they cannot make a service look complete.

The driver finds a node that takes the stage: it answers `Recruit` with `recruited`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from blake3 import blake3

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.serve.backoff import StageBackoff
from partition.serve.messages import ROLL_ROWS_MAX, Roll, ServiceRow

TELL_SECONDS = 1.0
FORGET_SECONDS = 5.0
"""How long a member may be silent before it no longer counts. Its sessions have left it long before."""
HEARSAY_SECONDS = 6.0
"""How long a peer that other members have named, but that has sent nothing itself, is still sent messages.
Meanwhile a new member does not look for another holder of that peer's stage: both may have started at the
same time, and a busy machine may take seconds to dial."""
SETTLE_SECONDS = 3.0
"""How long a new member waits before it considers any stage missing. It must hear from the others first."""
TURN_SECONDS = 2.0
"""How much later each further member acts if a replica is missing."""
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 1.0, 20.0
"""Minimum and maximum wait between two attempts if no node took the stage, so that a swarm without a free
slot is not asked constantly."""
RELIEF_SECONDS = 10.0
"""How long another member must answer for a stage before a stopgap gives the stage up. So the stopgap still
takes over if that member is about to leave, and no session moves twice if it comes and goes."""
STALL_SECONDS = 2.0
"""If this node was not called for this long, it was itself suspended, and the silence of others does not
count."""
FORMER_SECONDS, FORMER_TELL_SECONDS = 60.0, 5.0
"""How long, and how often, a lost member is still sent messages. A machine that was cut off has lost all
other members too, so without a message from either side it would build up the whole service anew."""
MEMBERS_MAX = ROLL_ROWS_MAX
STAGES_PER_PEER_MAX = 8
"""Maximum number of stages of one service that a peer may claim to hold, so that a liar cannot fill the
table. A model that is cut into more stages does not fit on one machine anyway."""


@dataclass(frozen=True)
class Recruit:
    """Find a node outside of `members` to hold this stage. If the stage `is_empty` and no such node takes it,
    let one of the members hold it as a stopgap. The `failed` peers must not be asked: they could not load the
    stage recently, or it keeps ending there."""

    service: bytes
    stage: int
    members: tuple[PeerId, ...]
    is_empty: bool = False
    failed: frozenset[PeerId] = frozenset()


@dataclass(frozen=True)
class RosterChanged:
    """The members of each stage of a service that answer now; `wished` is the wanted number for each
    stage."""

    service: bytes
    ready: tuple[tuple[PeerId, ...], ...]
    wished: int


@dataclass(frozen=True)
class Relieved:
    """Give up this stage: another member answers for it, and this member holds another stage."""

    service: bytes
    stage: int


Event = Recruit | RosterChanged | Relieved
Sends = list[tuple[PeerId, Roll]]


@dataclass
class _Member:
    stage: int
    is_ready: bool
    heard_at: float
    is_hearsay: bool = False
    is_stopgap: bool = False
    ready_since: float = inf


class ServiceUpkeep:
    """One service, as the member `me` that holds the stage `stage` sees it."""

    def __init__(
        self,
        now: float,
        me: PeerId,
        service: bytes,
        stages: int,
        wished: int,
        stage: int,
        known: Collection[ServiceRow],
        *,
        is_stopgap: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.is_ready = False
        self.is_stopgap = is_stopgap
        """Whether this member holds another stage permanently, and this one only as a stopgap."""
        self.deadline = now
        self._me = me
        self._service = service
        self._stages = stages
        self._wished = wished
        self._stage = stage
        self._members: dict[tuple[PeerId, int], _Member] = {}
        """Other members, and this member with its other stages."""
        self._relief_since = inf
        self._former: dict[PeerId, float] = {}
        """The time when each former member was lost."""
        self._former_told_at = now
        self._missing_since: dict[int, float] = {}
        self._recruiting: set[int] = set()
        self._pauses: dict[int, tuple[float, float]] = {}
        """For each stage that no node took: the time when it is offered again, and the wait after that."""
        self._backoff: StageBackoff[tuple[PeerId, int]] = StageBackoff(MEMBERS_MAX)
        self._told: tuple[tuple[PeerId, ...], ...] = ()
        self._began_at = self._seen_at = now
        self._learn(now, known)

    @property
    def stage(self) -> int:
        """The stage that this member holds."""
        return self._stage

    def rows(self) -> tuple[ServiceRow, ...]:
        """All members, this one first."""
        others = [
            ServiceRow(peer, stage, each.is_ready, each.is_stopgap)
            for (peer, stage), each in self._members.items()
            if not each.is_hearsay
        ]
        return (ServiceRow(self._me, self._stage, self.is_ready, self.is_stopgap), *others)[:ROLL_ROWS_MAX]

    def ready(self, now: float) -> Sends:
        """Note that this member's stage answers now. Missing stages are offered again immediately, because
        this member could take no other stage while it was loading."""
        self._note(now)
        self.is_ready = True
        self.offered(now)
        return self._tell(now)

    def leave(self) -> Sends:
        """Return the messages that tell all others that this member gives up the stage."""
        roll = Roll(self._service, self._stage, False, True)
        return [(peer, roll) for peer in self._peers()]

    def receive(self, now: float, sender: PeerId, message: Roll) -> Sends:
        """Handle a member's message. Raises RemoteProtocolError."""
        if message.service != self._service or message.stage >= self._stages:
            raise RemoteProtocolError("a roll is about another service, or about a stage that does not exist")
        key = sender, message.stage
        if key == (self._me, self._stage):
            return []
        self._note(now)
        known, held = self._members.get(key), self._stages_of(sender)
        if not held and sender not in self._former and sender != self._me:
            return []  # no member has named this peer
        if message.is_leaving:
            self._drop(now, key, is_said=True)
        elif known is not None or (
            len(held) < STAGES_PER_PEER_MAX and (len(self._members) < MEMBERS_MAX or self._make_room())
        ):
            since = min(now, known.ready_since if known is not None else inf) if message.is_ready else inf
            self._members[key] = _Member(
                message.stage, message.is_ready, now, is_stopgap=message.is_stopgap, ready_since=since
            )
            self._learn(now, message.rows)
            if known is None or known.is_hearsay:
                self.deadline = min(self.deadline, now + TELL_SECONDS / 4)
        self._look(now)
        return []

    def introduce(self, now: float, rows: Collection[ServiceRow]) -> None:
        """Add members that the publisher or another member has named."""
        self._note(now)
        self._learn(now, rows)
        self.deadline = min(self.deadline, now + TELL_SECONDS / 4)

    def has(self, peer: PeerId) -> bool:
        """Return whether a peer is a known member."""
        return any(not self._members[peer, stage].is_hearsay for stage in self._stages_of(peer))

    def lacks(self, stage: int, asker: PeerId) -> bool:
        """Return whether a stage has no known holder except `asker`, which may be about to leave."""
        return stage != self._stage and all(
            each.is_hearsay or of != stage or peer in (asker, self._me)
            for (peer, of), each in self._members.items()
        )

    def lost(self, now: float, peer: PeerId) -> Sends:
        """Note that the stream from a member broke. The member does not count until it reports again."""
        self._note(now)
        if held := self._stages_of(peer):
            for stage in held:
                self._drop(now, (peer, stage))
            self._remember(now, peer)
            self._look(now)
        return []

    def stay(self, now: float) -> None:
        """Make this stage permanent, because the member has given up its previous stage."""
        self.is_stopgap, self.deadline = False, min(self.deadline, now)

    def wake(self, now: float) -> Sends:
        """Report to the others, forget silent members, and check for missing stages."""
        self._note(now)
        if now < self.deadline:
            return []
        for key, each in list(self._members.items()):
            if now - each.heard_at >= (HEARSAY_SECONDS if each.is_hearsay else FORGET_SECONDS):
                self._drop(now, key)
                if not each.is_hearsay:
                    self._remember(now, key[0])
        self._look(now)
        return self._tell(now)

    def _note(self, now: float) -> None:
        """Note the time. Time in which this node itself did not run, for instance because the machine was
        frozen, does not count: others' messages from that time are still unread."""
        stall, self._seen_at = now - self._seen_at, now
        if stall < STALL_SECONDS:
            return
        self._began_at += stall
        self._relief_since = inf
        for each in self._members.values():
            each.heard_at += stall
        for stage in self._missing_since:
            self._missing_since[stage] += stall

    def recruited(self, now: float, stage: int, peer: PeerId | None) -> None:
        """Note the node that took a missing stage; None if none did."""
        self._note(now)
        self._recruiting.discard(stage)
        if peer is not None:
            self._pauses.pop(stage, None)
            if (peer, stage) != (self._me, self._stage):
                is_stopgap = peer == self._me or self.has(peer)
                known = self._members.get((peer, stage))
                if known is None or known.is_hearsay:
                    self._members[peer, stage] = _Member(stage, False, now, is_stopgap=is_stopgap)
            self._look(now)
            return
        _, pause = self._pauses.get(stage, (now, PAUSE_SECONDS_MIN))
        self._pauses[stage] = now + pause, min(PAUSE_SECONDS_MAX, 2 * pause)

    @property
    def is_paused(self) -> bool:
        """Whether a stage is missing that no node took when it was last offered."""
        return bool(self._pauses)

    def offered(self, now: float) -> None:
        """Offer missing stages again immediately, because there is a new free slot."""
        self._note(now)
        self._pauses.clear()
        self._look(now)

    def _tell(self, now: float) -> Sends:
        self.deadline = now + TELL_SECONDS
        roll = Roll(self._service, self._stage, self.is_ready, False, self.rows(), self.is_stopgap)
        peers = self._peers()
        if now - self._former_told_at >= FORMER_TELL_SECONDS:
            self._former_told_at = now
            recent = {peer for peer, lost_at in self._former.items() if now - lost_at < FORMER_SECONDS}
            peers += sorted(recent.difference(peers))
        return [(peer, roll) for peer in peers]

    def _peers(self) -> list[PeerId]:
        return sorted({peer for peer, _ in self._members})

    def _stages_of(self, peer: PeerId) -> list[int]:
        return [stage for who, stage in self._members if who == peer]

    def _learn(self, now: float, rows: Collection[ServiceRow]) -> None:
        for row in rows:
            peer = PeerId(row.peer)
            if peer == self._me or (peer, row.stage) in self._members or row.stage >= self._stages:
                continue
            # Each member reports its further stages itself.
            if len(self._members) < MEMBERS_MAX and not self._stages_of(peer):
                self._members[peer, row.stage] = _Member(row.stage, row.is_ready, now, is_hearsay=True)

    def _remember(self, now: float, peer: PeerId) -> None:
        """Remember a former member, so that its messages count again once it is back."""
        self._former.pop(peer, None)
        self._former[peer] = now
        while len(self._former) > MEMBERS_MAX:
            del self._former[next(iter(self._former))]

    def _drop(self, now: float, key: tuple[PeerId, int], *, is_said: bool = False) -> None:
        """No longer count a member. Note how its stage ended, if that counts as a failure: before it
        answered, or, if the member itself announced it, after it answered. The loss of a node whose stage
        answered does not count, because the node may be back soon; nor does a stopgap that was relieved by
        another replica."""
        gone = self._members.pop(key, None)
        if gone is None or gone.is_hearsay:
            return
        if not gone.is_ready:
            self._backoff.note_end(now, key, None)
            return
        self._backoff.note_sound(now, key, gone.ready_since)
        if is_said and not (gone.is_stopgap and self._is_answered(gone.stage)):
            self._backoff.note_end(now, key, gone.ready_since)

    def _is_answered(self, stage: int) -> bool:
        """Return whether a peer answers for a stage."""
        others = any(each.is_ready and each.stage == stage for each in self._members.values())
        return others or (self.is_ready and stage == self._stage)

    def _make_room(self) -> bool:
        """Forget one member that others have only named; return whether there was one."""
        found = next((key for key, each in self._members.items() if each.is_hearsay), None)
        if found is not None:
            del self._members[found]
        return found is not None

    def _look(self, now: float) -> None:
        """Check which members answer, and whether this member should look for another one."""
        held: list[list[PeerId]] = [[] for _ in range(self._stages)]
        ready: list[list[PeerId]] = [[] for _ in range(self._stages)]
        members: dict[PeerId, None] = {}
        covered: set[int] = set()
        named: set[int] = set()
        me = _Member(self._stage, self.is_ready, now, is_stopgap=self.is_stopgap)
        for (peer, stage), each in (*self._members.items(), ((self._me, self._stage), me)):
            if each.is_hearsay:
                named.add(stage)
                continue
            members[peer] = None
            if each.is_ready:
                ready[stage].append(peer)
            if each.is_stopgap:
                covered.add(stage)
            else:
                held[stage].append(peer)
        told = tuple(tuple(sorted(rows)) for rows in ready)
        if told != self._told:
            self._told = told
            self.events.append(RosterChanged(self._service, told, self._wished))
        if self.is_stopgap:
            self._look_for_relief(now)
            return
        for stage, rows in enumerate(held):
            if len(rows) >= self._wished:
                self._missing_since.pop(stage, None)
                continue
            since = self._missing_since.setdefault(stage, max(now, self._began_at + SETTLE_SECONDS))
            turn = sorted(members, key=lambda peer: self._rank(stage, peer)).index(self._me)
            again_at, _ = self._pauses.get(stage, (-inf, 0.0))
            if stage in self._recruiting or now < max(since + turn * TURN_SECONDS, again_at):
                continue
            if stage in named and now < self._began_at + HEARSAY_SECONDS:
                continue
            self._recruiting.add(stage)
            is_empty = not rows and stage not in covered
            failed = frozenset(peer for peer, of in self._backoff.resting(now) if of == stage)
            self.events.append(Recruit(self._service, stage, tuple(members), is_empty, failed))

    def _look_for_relief(self, now: float) -> None:
        """Check whether another permanent member has answered for this stopgap's stage for long enough."""
        is_answered = any(
            each.is_ready and each.stage == self._stage and not (each.is_stopgap or each.is_hearsay)
            for each in self._members.values()
        )
        self._relief_since = min(self._relief_since, now) if is_answered else inf
        if now - self._relief_since >= RELIEF_SECONDS:
            self._relief_since = inf
            self.events.append(Relieved(self._service, self._stage))

    def _rank(self, stage: int, peer: PeerId) -> bytes:
        return blake3(self._service + stage.to_bytes(2) + peer).digest(8)
