"""Tickets of a run. A ticket is signed by the member that asks a peer to take part; it expires, and the
requester can revoke it.

The requester signs the first ticket of a chain, and the member named in each ticket signs the next one. A
chain expires as soon as one of its tickets expires. Only the requester signs revocations, and each names a
member. A chain with a ticket for a revoked member is invalid, unless the requester itself signed that ticket
after the revocation.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated

import msgspec
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PEER_ID_BYTES, PeerId

TICKET_PURPOSE = "run-ticket"
REVOCATION_PURPOSE = "run-ticket-revocation"
TICKET_BYTES_MAX = 128
CHAIN_MAX = 32
"""Maximum number of tickets in a chain. A member that asks a new peer appends one ticket to its own chain, so
this limits how often the members can be completely replaced by peers that they asked."""
TICKET_SECONDS = 90 * 24 * 3600.0
"""How long a ticket of a run in local mode is valid. A run can continue while its requester is offline and
cannot sign new tickets, so this is longer than any run should take."""
REVOKED_MAX = 256
"""Maximum number of revocations that a member keeps for one run; beyond that it drops the oldest. Only the
requester can sign revocations, so nobody else can push out older ones."""

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Chain = Annotated[tuple[Fact, ...], msgspec.Meta(max_length=CHAIN_MAX)]


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The author asks `member` to take part in `run`. Both times are by the author's clock."""

    run: Hash
    member: Subject
    at_milliseconds: Count
    until_milliseconds: Count


class Revocation(msgspec.Struct, frozen=True, array_like=True):
    """The requester revokes every ticket for `member` in `run` that was signed at `at_milliseconds` or
    earlier."""

    run: Hash
    member: Subject
    at_milliseconds: Count


@dataclass(frozen=True)
class TicketStanding:
    """The tickets that prove a peer's membership, each with its author; none for the requester."""

    tickets: tuple[tuple[PeerId, Ticket], ...] = ()

    @property
    def until(self) -> float:
        """The earliest expiry of the tickets, in wall seconds."""
        return min((ticket.until_milliseconds / 1000 for _, ticket in self.tickets), default=inf)


def make_ticket(signer: Signer, run: bytes, member: PeerId, wall: float, until: float | None = None) -> Fact:
    """Return a ticket for `member`. `wall` is the wall clock in seconds. `until` is the time when the ticket
    expires, by default TICKET_SECONDS later."""
    until = wall + TICKET_SECONDS if until is None else until
    return signer.sign(TICKET_PURPOSE, encode(Ticket(run, member, int(wall * 1000), int(until * 1000))))


def make_revocation(signer: Signer, run: bytes, member: PeerId, wall: float) -> Fact:
    """Return the requester's revocation of all tickets for `member` that were signed at `wall` or earlier.
    `wall` is the wall clock in seconds."""
    return signer.sign(REVOCATION_PURPOSE, encode(Revocation(run, member, int(wall * 1000))))


def check_chain(
    signer: Signer,
    run: bytes,
    requester: PeerId,
    chain: Sequence[Fact],
    member: PeerId,
    verified: Collection[bytes] = (),
) -> list[tuple[PeerId, Ticket]]:
    """Return the tickets of a chain for `member`, each with its author. Raises RemoteProtocolError.

    Signatures are checked after everything else. Facts in `verified` (named by `fact_name`) had their
    signatures checked earlier, so these are skipped. The caller checks expiry and revocation.
    """
    author, found = requester, []
    for fact in chain:
        ticket: Ticket = decode(fact.body, Ticket, bytes_max=TICKET_BYTES_MAX)
        if ticket.run != run or fact.author != author:
            raise RemoteProtocolError("a chain of tickets is for another run, or has a gap")
        found.append((author, ticket))
        author = PeerId(ticket.member)
    if author != member:
        raise RemoteProtocolError("a chain of tickets is for another peer")
    for fact in chain:
        if fact_name(fact) not in verified:
            signer.check(TICKET_PURPOSE, fact)
    return found


def fact_name(fact: Fact) -> bytes:
    """Return the hash of a whole fact."""
    return blake3(fact.author + fact.signature + fact.body).digest()


class Revocations:
    """The known revocations of one run: the newest for each member."""

    def __init__(self, signer: Signer, run: bytes, requester: PeerId) -> None:
        self._signer = signer
        self._run = run
        self._requester = requester
        self._facts: dict[PeerId, tuple[Revocation, Fact]] = {}

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All revocations, the oldest first."""
        return tuple(fact for _, fact in self._facts.values())

    def fact_of(self, peer: PeerId) -> Fact | None:
        """Return the revocation of a member's tickets, or None."""
        found = self._facts.get(peer)
        return None if found is None else found[1]

    def learn(self, facts: Sequence[Fact]) -> list[Fact]:
        """Add revocations; return the new ones. Raises RemoteProtocolError if any of them is not signed by
        the requester."""
        new = []
        for fact in facts:
            body: Revocation = decode(fact.body, Revocation, bytes_max=TICKET_BYTES_MAX)
            if fact.author != self._requester or body.run != self._run or body.member == self._requester:
                raise RemoteProtocolError("a revocation is not signed by the requester of this run")
            known = self._facts.get(PeerId(body.member))
            if known is not None and known[0].at_milliseconds >= body.at_milliseconds:
                continue
            self._signer.check(REVOCATION_PURPOSE, fact)
            self._facts.pop(PeerId(body.member), None)
            self._facts[PeerId(body.member)] = body, fact
            new.append(fact)
        while len(self._facts) > REVOKED_MAX:
            del self._facts[next(iter(self._facts))]
        return new

    def against(self, standing: TicketStanding) -> Fact | None:
        """Return the revocation that makes these tickets invalid, or None."""
        known: Mapping[PeerId, tuple[Revocation, Fact]] = self._facts
        for author, ticket in standing.tickets:
            found = known.get(PeerId(ticket.member))
            if found is None:
                continue
            is_later = ticket.at_milliseconds > found[0].at_milliseconds
            if author != self._requester or not is_later:
                return found[1]
        return None
