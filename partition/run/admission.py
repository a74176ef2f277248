"""Admission of members to a run in local mode: a sans-IO core, one for each run.

The requester is a member. A member that asks a node to take part signs a `Ticket` for it, and sends it along
with its own: a *chain* of tickets, the first by the requester, each by the one that the last was made for. A
peer counts once it has shown its chain (`Present`); before that nothing it says of the run is used, however
it came to know the run's id. A chain is bound to the run by every signature, and to the peer that shows it
by the session it comes on. A request to join counts only while its ticket is fresh, and once (`Joins`), so
that an old one starts nothing.

Chains stay short: a member that hears a longer chain than its own allows for signs a shorter one (`Vouch`).
So chains grow only where all members of a generation are gone.

Not here: whether a member computes honestly. Whoever has a free slot and is asked is a member.
"""

from collections.abc import Collection, Sequence
from math import inf
from typing import Annotated

import msgspec
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PEER_ID_BYTES, PeerId

TICKET_PURPOSE = "local-run-ticket"
TICKET_BYTES_MAX = 128
CHAIN_MAX = 32
"""Tickets in a chain: generations of members that were all replaced by the next."""
FRESH_SECONDS = 600.0
"""How far a ticket's time may be from this node's clock for a request to join: what clocks are allowed."""
USED_MAX = 1_024
ADMITTED_MAX = 1_024
"""Members of one run that a member knows; as many as a roster holds."""
VERIFIED_MAX = 4_096
"""Tickets whose signature was checked: chains share their beginnings."""
PRESENT_SECONDS = 1.0
PRESENTS_MAX = 8
"""A peer that shows no chain of its own is shown this one so often, and then once in `SELDOM_SECONDS`."""
SELDOM_SECONDS = 30.0

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Chain = Annotated[tuple[Fact, ...], msgspec.Meta(max_length=CHAIN_MAX)]


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Its author asks `member` to take part in `run`, at this time by the author's clock."""

    run: Hash
    member: Subject
    at_milliseconds: Count


class Present(msgspec.Struct, frozen=True, array_like=True, tag="present"):
    """I am a member by this chain, which is empty for the requester. `asks`: show me yours."""

    run: Hash
    chain: Chain
    asks: bool = False


class Vouch(msgspec.Struct, frozen=True, array_like=True, tag="vouch"):
    """A shorter chain for you, which ends with a ticket of mine."""

    run: Hash
    chain: Chain


Message = Present | Vouch
Sends = list[tuple[PeerId, Message]]


def make_ticket(signer: Signer, run: bytes, member: PeerId, wall: float) -> Fact:
    """Return a ticket for `member`, `wall` being the wall clock in seconds."""
    return signer.sign(TICKET_PURPOSE, encode(Ticket(run, member, int(wall * 1000))))


def check_chain(
    signer: Signer,
    run: bytes,
    requester: PeerId,
    chain: Sequence[Fact],
    member: PeerId,
    verified: Collection[bytes] = (),
) -> list[tuple[PeerId, Ticket]]:
    """Return the tickets of a chain for `member`, each with its author. Raises RemoteProtocolError.

    All but the signatures is checked first; those of `verified` facts are not checked again.
    """
    author, found = requester, []
    for fact in chain:
        ticket: Ticket = decode(fact.body, Ticket, bytes_max=TICKET_BYTES_MAX)
        if ticket.run != run or fact.author != author:
            raise RemoteProtocolError("a chain of tickets of another run, or with a gap")
        found.append((author, ticket))
        author = PeerId(ticket.member)
    if author != member:
        raise RemoteProtocolError("a chain of tickets for somebody else")
    for fact in chain:
        if fact_name(fact) not in verified:
            signer.check(TICKET_PURPOSE, fact)
    return found


def fact_name(fact: Fact) -> bytes:
    """Return the hash of all of a fact."""
    return blake3(fact.author + fact.signature + fact.body).digest()


class Joins:
    """The requests to join that this node takes: each ticket once, while it is fresh."""

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
        """Take a request by `asker` at `wall` seconds. Raises RemoteProtocolError: by whoever is no member,
        or an old one."""
        if not chain:
            raise RemoteProtocolError("a request to join without a ticket")
        author, ticket = check_chain(signer, run, requester, chain, signer.peer)[-1]
        if author != asker:
            raise RemoteProtocolError("a request to join by a ticket of somebody else")
        if abs(ticket.at_milliseconds / 1000 - wall) > FRESH_SECONDS:
            raise RemoteProtocolError("a request to join by a ticket that is not fresh")
        self._used = {name: until for name, until in self._used.items() if until > wall}
        name = fact_name(chain[-1])
        if name in self._used:
            raise RemoteProtocolError("a request to join that was made before")
        if len(self._used) >= USED_MAX:
            raise RemoteProtocolError("too many requests to join")
        self._used[name] = ticket.at_milliseconds / 1000 + FRESH_SECONDS


class Admission:
    """One run, as one member sees it: who else is one."""

    def __init__(self, signer: Signer, run: bytes, requester: PeerId, chain: Sequence[Fact]) -> None:
        """`chain` is this member's own, checked before."""
        self.run = run
        self.chain = tuple(chain)
        self.admitted: dict[PeerId, None] = {}
        self.events: list[PeerId] = []
        """Peers that were found to be members since this was drained."""
        self._signer = signer
        self._requester = requester
        self._verified: dict[bytes, None] = {}
        self._shown: dict[PeerId, tuple[int, float]] = {}
        # Those by whose tickets this member is one are members.
        for fact in chain:
            self._verified[fact_name(fact)] = None
            self._admit(PeerId(fact.author))
        self._admit(requester)

    def admits(self, peer: PeerId) -> bool:
        """Return whether a peer is known to be a member."""
        return peer in self.admitted

    @property
    def can_vouch(self) -> bool:
        """Whether this member may ask others to take part."""
        return len(self.chain) < CHAIN_MAX

    def extended(self, member: PeerId, wall: float) -> tuple[Fact, ...]:
        """Return a chain for `member`, who is asked to take part."""
        assert self.can_vouch, "a chain is not full"
        return (*self.chain, make_ticket(self._signer, self.run, member, wall))

    def show(self, now: float, peers: Collection[PeerId]) -> Sends:
        """Show this member's chain to those of `peers` that are not known to be members, and ask for
        theirs."""
        found: Sends = []
        for peer in peers:
            times, at = self._shown.get(peer, (0, -inf))
            pause = PRESENT_SECONDS if times < PRESENTS_MAX else SELDOM_SECONDS
            if peer not in self.admitted and now - at >= pause:
                self._shown[peer] = times + 1, now
                found.append((peer, Present(self.run, self.chain, asks=True)))
        while len(self._shown) > ADMITTED_MAX:
            del self._shown[next(iter(self._shown))]
        return found

    def greet(self, peers: Collection[PeerId]) -> Sends:
        """Tell members of an earlier life that this one is back."""
        return [(peer, Present(self.run, self.chain, asks=True)) for peer in peers]

    def receive(self, sender: PeerId, message: Message) -> Sends:
        """Take one message. Raises RemoteProtocolError: a chain that proves nothing."""
        if isinstance(message, Vouch):
            self._take(sender, message.chain)
            return []
        if sender != self._requester or message.chain:
            self._check(message.chain, sender)
        self._admit(sender)
        if not message.asks or sender not in self.admitted:
            return []
        sends: Sends = [(sender, Present(self.run, self.chain))]
        if len(message.chain) > len(self.chain) + 1:
            # Its time is that of no request to join.
            sends.append((sender, Vouch(self.run, self.extended(sender, 0.0))))
        return sends

    def _take(self, sender: PeerId, chain: Sequence[Fact]) -> None:
        """Use a shorter chain."""
        if len(chain) < len(self.chain) and sender in self.admitted and chain:
            self._check(chain, self._signer.peer)
            self.chain = tuple(chain)

    def _check(self, chain: Sequence[Fact], member: PeerId) -> None:
        check_chain(self._signer, self.run, self._requester, chain, member, self._verified)
        for fact in chain:
            self._verified[fact_name(fact)] = None
        while len(self._verified) > VERIFIED_MAX:
            del self._verified[next(iter(self._verified))]

    def _admit(self, peer: PeerId) -> None:
        if peer != self._signer.peer and peer not in self.admitted and len(self.admitted) < ADMITTED_MAX:
            self.admitted[peer] = None
            self.events.append(peer)
