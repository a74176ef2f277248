"""The member list: the state of every member, the round of probes, and random choice among members.

`gossip.state_table` decides what a fact *means*. All orders are defined by arrival and `rng`, so a trace can
be reproduced from its seed.
"""

from collections.abc import Callable, Iterable
from random import Random

import msgspec
from blake3 import blake3

from crypto.facts import Fact
from crypto.identity import PeerId, short_peer
from gossip.member import Profile, Status, SwarmMember
from gossip.messages import AliveFact
from gossip.punctuality import Punctuality
from gossip.round_trips import RoundTrips
from gossip.settings import SwimSettings

DIGEST_BYTES = 16


class MemberVerdict(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Why a member is not simply alive: the proving fact, with the member's `incarnation`."""

    status: Status
    incarnation: int
    fact: Fact
    reason: str
    accuser: PeerId | None = None


class MemberRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The state held about one member; when it changes, a new row replaces it. Rows are small because there
    are many, and a member's description is one object shared by all peers of a process. No row is part of a
    cycle, so the garbage collector need not track it."""

    said: AliveFact
    since: float
    found_through: PeerId | None
    verdict: MemberVerdict | None = None

    @property
    def peer(self) -> PeerId:
        return self.said.peer

    @property
    def profile(self) -> Profile:
        return self.said.profile

    @property
    def status(self) -> Status:
        return Status.ALIVE if self.verdict is None else self.verdict.status

    @property
    def incarnation(self) -> int:
        return self.said.incarnation if self.verdict is None else self.verdict.incarnation

    @property
    def live(self) -> bool:
        return self.verdict is None or self.verdict.status is Status.SUSPECT

    @property
    def facts(self) -> tuple[Fact, ...]:
        """The facts that prove the row, to be passed on."""
        return (self.said.fact,) if self.verdict is None else (self.said.fact, self.verdict.fact)

    def snapshot(self) -> SwarmMember:
        said, verdict = self.said, self.verdict
        return SwarmMember(
            peer=said.peer,
            name=said.profile.name,
            addresses=said.profile.addresses,
            metadata=said.profile.metadata,
            status=self.status,
            incarnation=self.incarnation,
            since=self.since,
            reason="" if verdict is None else verdict.reason,
            accuser=None if verdict is None else verdict.accuser,
            found_through=self.found_through,
        )


class MemberTable:
    """Rows by peer id, including this peer's own."""

    __slots__ = (
        "_cursor",
        "_dead",
        "_digest",
        "_me",
        "_ring",
        "_rng",
        "_unanswered",
        "live",
        "punctuality",
        "rows",
        "trips",
    )

    def __init__(self, me: MemberRow, rng: Random, settings: SwimSettings) -> None:
        self.rows: dict[PeerId, MemberRow] = {me.peer: me}
        self.live = 1
        self.punctuality = Punctuality()
        self.trips = RoundTrips(settings)
        self._me = me.peer
        self._rng = rng
        # All other members, in the order of this round of probes. It may still name members that were
        # forgotten.
        self._ring: list[PeerId] = []
        self._cursor = 0
        self._dead: list[PeerId] = []
        # When the first ping of a member's current silence was sent: a failed ping of ours, or of an accuser.
        self._unanswered: dict[PeerId, float] = {}
        self._digest = b""

    def insert(self, row: MemberRow) -> None:
        """Add a live member, at a random position in the round (SWIM section 4.3)."""
        self.rows[row.peer] = row
        self.live += 1
        self._digest = b""
        place = self._rng.randrange(len(self._ring) + 1)
        self._ring.insert(place, row.peer)
        if place < self._cursor:
            self._cursor += 1

    def renew(self, row: MemberRow, said: AliveFact) -> MemberRow:
        """Store a member's new description of itself. Return its new row."""
        self._unanswered.pop(said.peer, None)
        return self._put(MemberRow(said, row.since, row.found_through, row.verdict))

    def judge(
        self,
        row: MemberRow,
        now: float,
        verdict: MemberVerdict | None,
        *,
        found_through: PeerId | None = None,
    ) -> MemberRow:
        """Give a member a new status with its proof and reason (None is alive). Return its new row. A member
        that came back counts as newly found."""
        if verdict is not None and verdict.status is not Status.SUSPECT:
            self.punctuality.forget(row.peer)
            self.trips.forget(row.peer)
        return self._put(MemberRow(row.said, now, found_through or row.found_through, verdict))

    def _put(self, row: MemberRow) -> MemberRow:
        self.live += row.live - self.rows[row.peer].live
        self.rows[row.peer] = row
        self._digest = b""
        return row

    def unanswered(self, peer: PeerId, at: float) -> None:
        """Record that a ping sent to `peer` at this time got no answer. Earlier pings may be unanswered
        too."""
        self._unanswered.setdefault(peer, at)

    def answered(self, peer: PeerId) -> None:
        if self._unanswered:
            self._unanswered.pop(peer, None)

    def silence_seconds(self, row: MemberRow, now: float) -> float:
        return now - self._unanswered.get(row.peer, row.since)

    def next_target(self, busy: Callable[[PeerId], bool]) -> MemberRow | None:
        """Return the next live member of the round, skipping busy ones. Each round has a new random order."""
        for _ in range(len(self._ring) + 1):
            if self._cursor >= len(self._ring):
                self._ring = [peer for peer in self.rows if peer != self._me]
                self._rng.shuffle(self._ring)
                self._cursor = 0
                if not self._ring:
                    return None
            peer = self._ring[self._cursor]
            self._cursor += 1
            row = self.rows.get(peer)
            if row is not None and (row.verdict is None or row.live) and not busy(peer):
                return row
        return None

    def pick(self, count: int, fits: Callable[[MemberRow], bool]) -> list[PeerId]:
        """Return at most `count` different random members that fit, never this peer.

        In a large table this tries only a bounded number, so that the cost does not grow. If few members fit,
        it may then return fewer than exist.
        """
        if len(self._ring) <= 16 * count:
            candidates = [peer for peer in self._ring if peer in self.rows and fits(self.rows[peer])]
            return self._rng.sample(candidates, min(count, len(candidates)))
        chosen: list[PeerId] = []
        for _ in range(8 * count):
            peer = self._ring[self._rng.randrange(len(self._ring))]
            row = self.rows.get(peer)
            if row is not None and fits(row) and peer not in chosen:
                chosen.append(peer)
                if len(chosen) == count:
                    break
        return chosen

    def forget(self, peer: PeerId) -> None:
        """Remove a member that is not live."""
        del self.rows[peer]
        self._unanswered.pop(peer, None)
        self.punctuality.forget(peer)
        self.trips.forget(peer)
        # A member may come back, and must then be in the ring only once.
        place = self._ring.index(peer) if peer in self._ring else None
        if place is not None:
            del self._ring[place]
            if place < self._cursor:
                self._cursor -= 1

    def gone_before(self, moment: float) -> list[PeerId]:
        """Return the members that have been dead or gone since before `moment`."""
        return [row.peer for row in self.rows.values() if not row.live and row.since < moment]

    def may_have_room(self, most: int) -> bool:
        """Return whether one more member may be listed among at most `most`, if necessary in place of one
        that is gone."""
        return len(self.rows) < most or self.live < len(self.rows)

    def longest_gone(self) -> PeerId | None:
        """Return the member that has been dead or gone for longest."""
        gone = [row for row in self.rows.values() if not row.live]
        return min(gone, key=lambda row: row.since).peer if gone else None

    def next_dead(self) -> MemberRow | None:
        """Return a dead member, each in turn."""
        while self.live < len(self.rows):
            if not self._dead:
                # Nearly all rows have no verdict, so that is checked first: this scans the whole table.
                self._dead = [
                    peer
                    for peer, row in self.rows.items()
                    if row.verdict is not None and row.status is Status.DEAD
                ]
                self._rng.shuffle(self._dead)
                if not self._dead:
                    return None
            row = self.rows.get(self._dead.pop())
            if row is not None and row.status is Status.DEAD:
                return row
        return None

    def keep(self, fits: Callable[[PeerId], bool]) -> list[PeerId]:
        """Remove all members that do not fit, live or not, and return them. This peer always stays."""
        dropped = [peer for peer in self.rows if peer != self._me and not fits(peer)]
        for peer in dropped:
            self.live -= self.rows.pop(peer).live
            self._unanswered.pop(peer, None)
            self.punctuality.forget(peer)
            self.trips.forget(peer)
        self._digest = b""
        before = sum(peer in self.rows for peer in self._ring[: self._cursor])
        self._ring = [peer for peer in self._ring if peer in self.rows]
        self._cursor = before
        return dropped

    @property
    def others(self) -> int:
        """The number of other live members."""
        return self.live - self.rows[self._me].live

    def is_live(self, peer: PeerId) -> bool:
        row = self.rows.get(peer)
        return row is not None and (row.verdict is None or row.live)

    def status(self, peer: PeerId) -> Status | None:
        row = self.rows.get(peer)
        return None if row is None else row.status

    def live_peers(self) -> list[PeerId]:
        return [row.peer for row in self.rows.values() if row.live]

    def facts(self, peers: Iterable[PeerId] | None = None) -> tuple[Fact, ...]:
        """Return every fact that a newcomer needs, about all members or about the given ones."""
        return tuple(fact for row in self._of(peers) for fact in row.facts)

    def digest(self, peers: Iterable[PeerId] | None = None) -> bytes:
        """Return 16 bytes that are equal for two peers exactly if they list the same live members, of all or
        of the given ones.

        Dead members are left out, because each peer forgets them at a different time.
        """
        if peers is None and self._digest:
            return self._digest
        marks = [row.said.mark for row in self._of(peers) if row.verdict is None or row.live]
        marks.sort()
        digest = blake3(b"".join(marks)).digest(length=DIGEST_BYTES)
        if peers is None:
            self._digest = digest
        return digest

    def _of(self, peers: Iterable[PeerId] | None) -> Iterable[MemberRow]:
        return self.rows.values() if peers is None else map(self.rows.__getitem__, peers)

    def reason(self, accuser: PeerId, silence_milliseconds: int) -> str:
        """Return why `accuser` suspects a member or declares it dead, for people."""
        row = self.rows.get(accuser)
        name = (row.profile.name if row is not None else "") or short_peer(accuser)
        said = "" if accuser == self._me else f", says {name}"
        return f"no ack for {silence_milliseconds / 1000:.1f} s{said}"

    def snapshot(self) -> tuple[SwarmMember, ...]:
        return tuple(self.rows[peer].snapshot() for peer in sorted(self.rows))
