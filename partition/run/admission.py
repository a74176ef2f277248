"""Admission of members to a run in local mode or to a named averaging run: a sans-IO core, one for each run.

The requester (of a named averaging run: its owner) is a member. A member that asks a node to take part signs
a `Ticket` for that node, and sends it together with the member's own tickets. The tickets form a *chain*: the
requester signs the first one, and the subject of each ticket signs the next. A peer is admitted once it has
shown its chain (`Present`). Before that, its messages about the run are ignored, even if it knows the run's
id. Every signature binds the chain to the run, and the session binds the chain to the peer that shows it. A
request to join is valid only once, and only while its ticket is fresh (`Joins`), so a replayed request has no
effect.

Tickets expire, and the requester can revoke a member's tickets (`partition.run.tickets`). Each member checks
both by itself, and passes revocations on. A member without a valid chain is expelled, and so are the members
whose chains pass through it.

Chains stay short: a member that receives a chain more than one ticket longer than its own signs a shorter one
(`Vouch`). So a chain grows only if all members of a generation are gone.

Not here: whether a member computes honestly. Any peer with a free slot that is asked becomes a member.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated

import msgspec
from blake3 import blake3

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from partition.run.tickets import (
    CHAIN_MAX,
    TICKET_BYTES_MAX,
    Chain,
    Hash,
    Revocations,
    Ticket,
    TicketStanding,
    check_chain,
    fact_name,
    make_revocation,
    make_ticket,
)

PROTOCOL = "/peerloom/admission/1"
"""The protocol of named averaging runs; in local mode `partition.run.conclusions` carries these messages."""
MESSAGE_BYTES_MAX = 16_384
"""Limit on the size of a message. A full chain of tickets takes about 7 KiB."""
FRESH_SECONDS = 600.0
"""Maximum difference between the time in a ticket that asks a node to join and the node's own clock. It
allows for clock skew."""
USED_MAX = 1_024
ADMITTED_MAX = 1_024
"""Maximum number of members of one run that a member remembers. A roster holds as many."""
VERIFIED_MAX = 4_096
"""Number of tickets whose checked signatures are cached. Chains have their first tickets in common."""
PRESENT_SECONDS = 1.0
PRESENTS_MAX = 8
"""How often this member's chain is shown to a peer that shows none: up to PRESENTS_MAX times, PRESENT_SECONDS
apart, and afterwards once every SELDOM_SECONDS."""
SELDOM_SECONDS = 30.0
REVOKED_AT_ONCE = 16
"""Number of revocations in one message, which then takes about 3 KiB."""
PASSED_ON_MAX = 64
"""Number of members to which a member passes on a revocation. It reaches 1,024 members in two rounds."""

EXPIRED = "its invitation has expired"
REVOKED = "its invitation was revoked"


class Present(msgspec.Struct, frozen=True, array_like=True, tag="present"):
    """The sender is a member, as this chain proves; the requester's chain is empty. `asks`: the receiver
    should answer with its own chain."""

    run: Hash
    chain: Chain
    asks: bool = False


class Vouch(msgspec.Struct, frozen=True, array_like=True, tag="vouch"):
    """A shorter chain for the receiver, which ends with a ticket of the sender."""

    run: Hash
    chain: Chain


class Revoke(msgspec.Struct, frozen=True, array_like=True, tag="revoke"):
    """The requester has revoked the tickets of these members. Each fact is a `Revocation`."""

    run: Hash
    facts: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=REVOKED_AT_ONCE)]


Message = Present | Vouch | Revoke
Sends = list[tuple[PeerId, Message]]


@dataclass(frozen=True)
class PeerAdmitted:
    """This peer has become a member of the run."""

    run: bytes
    peer: PeerId


@dataclass(frozen=True)
class Expelled:
    """This peer, possibly this node itself, is no longer a member. `reason` is for display."""

    run: bytes
    peer: PeerId
    reason: str


Event = PeerAdmitted | Expelled


class Joins:
    """The requests to join that this node accepts. Each ticket is accepted once, while it is fresh."""

    def __init__(self) -> None:
        self._used: dict[bytes, float] = {}

    def check(
        self,
        signer: Signer,
        run: bytes,
        requester: PeerId,
        chain: Sequence[Fact],
        asker: PeerId,
        wall: float,
    ) -> None:
        """Accept a request by `asker` at `wall` seconds. Raises RemoteProtocolError if the author is not a
        member, or if the request is old or was made before."""
        if not chain:
            raise RemoteProtocolError("a request to join has no ticket")
        tickets = check_chain(signer, run, requester, chain, signer.peer)
        author, ticket = tickets[-1]
        if author != asker:
            raise RemoteProtocolError("a request to join has a ticket that another peer signed")
        if abs(ticket.at_milliseconds / 1000 - wall) > FRESH_SECONDS:
            raise RemoteProtocolError("a request to join has a ticket that is not fresh")
        if TicketStanding(tuple(tickets)).until <= wall:
            raise RemoteProtocolError("a request to join has an expired ticket")
        self._used = {name: until for name, until in self._used.items() if until > wall}
        name = fact_name(chain[-1])
        if name in self._used:
            raise RemoteProtocolError("a request to join was repeated")
        if len(self._used) >= USED_MAX:
            raise RemoteProtocolError("too many requests to join")
        self._used[name] = ticket.at_milliseconds / 1000 + FRESH_SECONDS


class Admission:
    """The members of one run, as one member sees them.

    It has no clock: call `expire` with the time before you rely on an answer.
    """

    def __init__(
        self,
        signer: Signer,
        run: bytes,
        requester: PeerId,
        chain: Sequence[Fact],
        *,
        wall: float = 0.0,
        chain_max: int = CHAIN_MAX,
        revocations: Sequence[Fact] = (),
    ) -> None:
        """`chain` is this member's own chain, already checked. Chains of more than `chain_max` tickets are
        rejected: if it is 1, only peers that the requester itself asked are members. `revocations` are the
        ones stored before a restart."""
        self.run = run
        self.chain = tuple(chain)
        self.admitted: dict[PeerId, TicketStanding] = {}
        self.events: list[Event] = []
        self.ended = ""
        """The reason why this node is no longer a member; empty while it is one."""
        self.revocations = Revocations(signer, run, requester)
        self._signer = signer
        self._requester = requester
        self.chain_max = chain_max
        self._wall = wall
        self._expires_at = inf
        self._own = TicketStanding()
        self._verified: dict[bytes, None] = {}
        self._shown: dict[PeerId, tuple[int, float]] = {}
        self._reminded_at = -inf
        self._use(chain)
        # The authors of this member's own chain are members.
        for number, (author, _) in enumerate(self._own.tickets):
            self._admit(author, TicketStanding(self._own.tickets[:number]))
        self._admit(requester, TicketStanding())
        self.revocations.learn(revocations)
        self._expel_invalid()

    def admits(self, peer: PeerId) -> bool:
        """Return whether a peer is known to be a member."""
        return peer in self.admitted

    @property
    def requester(self) -> PeerId:
        """The peer that asked for the run."""
        return self._requester

    @property
    def is_requester(self) -> bool:
        """Whether this member asked for the run, and may revoke tickets."""
        return self._signer.peer == self._requester

    @property
    def can_vouch(self) -> bool:
        """Whether this member may ask others to take part."""
        return len(self.chain) < self.chain_max and not self.ended

    def extended(self, member: PeerId, wall: float, until: float | None = None) -> tuple[Fact, ...]:
        """Return a chain for `member`, which is asked to take part."""
        assert self.can_vouch, "this member's chain is full, or the member was expelled"
        return (*self.chain, make_ticket(self._signer, self.run, member, wall, until))

    def expire(self, wall: float) -> None:
        """Expel members whose tickets have expired at `wall` seconds."""
        self._wall = wall
        if wall >= self._expires_at:
            self._expel_invalid()

    def show(self, now: float, peers: Collection[PeerId]) -> Sends:
        """Show this member's chain to those of `peers` that are not known to be members, and ask for their
        chains. Every SELDOM_SECONDS, also repeat the revocations to some members."""
        found: Sends = []
        for peer in peers:
            times, at = self._shown.get(peer, (0, -inf))
            pause = PRESENT_SECONDS if times < PRESENTS_MAX else SELDOM_SECONDS
            if peer not in self.admitted and now - at >= pause:
                self._shown[peer] = times + 1, now
                found.append((peer, Present(self.run, self.chain, asks=True)))
        while len(self._shown) > ADMITTED_MAX:
            del self._shown[next(iter(self._shown))]
        if now - self._reminded_at >= SELDOM_SECONDS:
            self._reminded_at = now
            found += self._told(self._some(self.admitted), self.revocations.facts)
        return found

    def greet(self, peers: Collection[PeerId]) -> Sends:
        """Announce to members known before a restart that this member is back."""
        return [(peer, Present(self.run, self.chain, asks=True)) for peer in peers]

    def revoke(self, member: PeerId, wall: float) -> Sends:
        """Revoke the tickets of `member`, as the requester. Return the messages to that member and to all
        others."""
        assert self.is_requester, "only the requester may revoke tickets"
        told = {**dict.fromkeys(self.admitted), member: None}
        self._wall = wall
        new = self.revocations.learn([make_revocation(self._signer, self.run, member, wall)])
        self._expel_invalid()
        return self._told(told, new)

    def receive(self, sender: PeerId, message: Message) -> Sends:
        """Handle one message. Raises RemoteProtocolError for a chain that does not prove membership."""
        match message:
            case Vouch(chain=chain):
                self._take(sender, chain)
                return []
            case Revoke(facts=facts):
                told = self._some(self.admitted)
                new = self.revocations.learn(facts)
                if new:
                    self._expel_invalid()
                return self._told([peer for peer in told if peer != sender], new)
            case Present(chain=chain, asks=asks):
                return self._presented(sender, chain, asks=asks)

    def _presented(self, sender: PeerId, chain: Sequence[Fact], *, asks: bool) -> Sends:
        standing = TicketStanding()
        if sender != self._requester or chain:
            standing = self._check(chain, sender)
        revoked = self.revocations.against(standing)
        if revoked is not None:
            return self._told([sender], [revoked])
        if standing.until <= self._wall:
            return []
        is_new = self._admit(sender, standing)
        sends: Sends = []
        if asks and sender in self.admitted:
            sends.append((sender, Present(self.run, self.chain)))
            if len(chain) > len(self.chain) + 1 and self.can_vouch:
                # This ticket's time is 0, so it cannot be used to join, nor to extend the chain's validity.
                sends.append((sender, Vouch(self.run, self.extended(sender, 0.0, standing.until))))
        if is_new:
            sends += self._told([sender], self.revocations.facts)
        return sends

    def _take(self, sender: PeerId, chain: Sequence[Fact]) -> None:
        """Adopt a chain for this member, if it is shorter."""
        if len(chain) < len(self.chain) and sender in self.admitted and chain:
            standing = self._check(chain, self._signer.peer)
            is_valid = self.revocations.against(standing) is None and standing.until > self._wall
            if is_valid:
                self._use(chain)

    def _use(self, chain: Sequence[Fact]) -> None:
        """Adopt this checked chain for this member."""
        self.chain = tuple(chain)
        found: list[tuple[PeerId, Ticket]] = [
            (PeerId(fact.author), decode(fact.body, Ticket, bytes_max=TICKET_BYTES_MAX)) for fact in chain
        ]
        self._own = TicketStanding(tuple(found))
        self._expires_at = min(self._expires_at, self._own.until)
        for fact in chain:
            self._verified[fact_name(fact)] = None

    def _check(self, chain: Sequence[Fact], member: PeerId) -> TicketStanding:
        if len(chain) > self.chain_max:
            raise RemoteProtocolError("a chain has more tickets than this run accepts")
        tickets = check_chain(self._signer, self.run, self._requester, chain, member, self._verified)
        for fact in chain:
            self._verified[fact_name(fact)] = None
        while len(self._verified) > VERIFIED_MAX:
            del self._verified[next(iter(self._verified))]
        return TicketStanding(tuple(tickets))

    def _admit(self, peer: PeerId, standing: TicketStanding) -> bool:
        """Admit a peer; return whether it was not known to be a member before."""
        if peer == self._signer.peer:
            return False
        known = self.admitted.get(peer)
        if known is None and len(self.admitted) >= ADMITTED_MAX:
            return False
        if known is None or standing.until >= known.until:
            self.admitted[peer] = standing
            self._expires_at = min(self._expires_at, standing.until)
        if known is None:
            self.events.append(PeerAdmitted(self.run, peer))
        return known is None

    def _fault_of(self, standing: TicketStanding) -> str:
        if self.revocations.against(standing) is not None:
            return REVOKED
        return EXPIRED if standing.until <= self._wall else ""

    def _expel_invalid(self) -> None:
        """Expel members, and this one, whose tickets have expired or were revoked."""
        for peer, standing in list(self.admitted.items()):
            if fault := self._fault_of(standing):
                del self.admitted[peer]
                self._shown.pop(peer, None)  # the peer may yet show another chain
                self.events.append(Expelled(self.run, peer, fault))
        if not self.ended and (fault := self._fault_of(self._own)):
            self.ended = fault
            self.events.append(Expelled(self.run, self._signer.peer, fault))
        own = inf if self.ended else self._own.until
        self._expires_at = min((each.until for each in self.admitted.values()), default=inf)
        self._expires_at = min(self._expires_at, own)

    def _some(self, peers: Collection[PeerId]) -> list[PeerId]:
        """Return a pseudorandom part of `peers` to pass a message on to. It differs from member to member."""
        own = self._signer.peer
        return sorted(peers, key=lambda peer: blake3(own + peer).digest())[:PASSED_ON_MAX]

    def _told(self, peers: Collection[PeerId], facts: Sequence[Fact]) -> Sends:
        parts = [tuple(facts[at : at + REVOKED_AT_ONCE]) for at in range(0, len(facts), REVOKED_AT_ONCE)]
        return [(peer, Revoke(self.run, part)) for part in parts for peer in peers]


class Admissions:
    """The admissions of all named averaging runs of one node, behind one protocol."""

    def __init__(self) -> None:
        self._admissions: dict[bytes, Admission] = {}
        self.events: list[Event] = []

    @property
    def deadline(self) -> float:
        return inf

    def open(self, admission: Admission) -> None:
        """Handle messages about this run from now on."""
        self._admissions[admission.run] = admission

    def close(self, run: bytes) -> None:
        """Handle no more messages about this run."""
        self._admissions.pop(run, None)

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:  # noqa: ARG002 - the shape of a core
        """Handle one message; ignore messages of runs that are unknown here."""
        admission = self._admissions.get(message.run)
        return [] if admission is None else self.drained(admission, admission.receive(sender, message))

    def wake(self, now: float) -> Sends:  # noqa: ARG002 - the shape of a core
        """Do nothing, because there is no timer."""
        return []

    def drained(self, admission: Admission, sends: Sends) -> Sends:
        """Move the admission's events to the node's events; return `sends`."""
        self.events += admission.events
        admission.events.clear()
        return sends
