"""Finds nodes for the stages of services and asks them to hold these; also sends all other requests to
members.

It chooses the node on which a token takes the least time, given the node's speed and its measured links to
the members of the neighbouring stages. Machines of the same kind as the stage's present holders come before
all others.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.errors import Unreachable
from node.placement.leases import Offer
from node.protocols.calls import call
from node.protocols.services import (
    REPLY_BYTES_MAX,
    SERVICES_PROTOCOL,
    Declined,
    Done,
    Host,
    Reply,
    Request,
    Service,
)
from node.seams import Seams
from partition.plan.observed import Knowledge
from partition.serve.messages import ServiceRow

ASK_SECONDS_MAX = 5.0
"""Time limit for a node to accept or refuse a stage. It need not fetch anything before it answers."""
TOKEN_FLOPS = 1e9
"""Approximate work of a stage per token, for weighing the speed of nodes against their links."""

MachineKind = tuple[str, str]
"""A processor and a build of torch. Machines of the same kind with the same number of threads, which the
service sets, compute the same bits. The actual bit class is known only once a stage is loaded."""


class RecruiterOwner(Protocol):
    """The part of `node.serving.serving.Serving` that this file uses."""

    seams: Seams
    signer: Signer
    offers: Callable[[], Sequence[Offer]]
    knowledge: Callable[[], Knowledge]

    def link_seconds(self, peers: Collection[PeerId]) -> Mapping[tuple[PeerId, PeerId], float]: ...


Take = Callable[[Service, int, Sequence[ServiceRow], PeerId], str | None]
"""Makes this node itself hold a stage, like `ServiceHost.take`."""


class StageRecruiter:
    """Recruits nodes for the services of one node."""

    def __init__(self, owner: RecruiterOwner, take: Take) -> None:
        self._owner = owner
        self._take = take

    async def place(
        self,
        service: Service,
        number: int,
        rows: Sequence[ServiceRow],
        taken: Collection[bytes],
        first: PeerId | None = None,
        kind: MachineKind | None = None,
    ) -> tuple[PeerId | None, str]:
        """Place a stage on a node outside `taken`, preferably on `first`. Return the node, or why no node
        accepts it. Machines of the same kind come first, because they compute the same bits, so answers that
        move there stay the same. The kind is that of the stage's holders, otherwise of the service's members,
        otherwise `kind`."""
        owner = self._owner
        offers = [
            each
            for each in owner.offers()
            if each.has_slot and each.peer not in taken and service.manifest.may_hold(each.peer)
        ]
        near = [PeerId(row.peer) for row in rows if abs(row.stage - number) == 1]
        links = owner.link_seconds([*near, *(each.peer for each in offers)])

        def token_seconds(offer: Offer) -> float:
            ways = [links.get((peer, offer.peer), 0.0) for peer in near]
            return sum(ways) / max(1, len(ways)) + TOKEN_FLOPS / max(1.0, offer.flops_per_second)

        kinds = self._kinds()
        usual = usual_kind(rows, number, kinds) or kind

        def rank(offer: Offer) -> tuple[object, ...]:
            is_other = usual is not None and kinds.get(offer.peer) != usual
            # The time per token on this node and on its links; among equals, the node with the most memory.
            return (
                offer.peer != first,
                is_other,
                token_seconds(offer),
                -offer.memory_bytes,
                offer.peer,
            )

        offers.sort(key=rank)
        reasons = []
        for each in offers:
            reason = await self.ask_to_host(each.peer, service, number, rows)
            if reason is None:
                return each.peer, ""
            reasons.append(reason)
        return None, "; ".join(dict.fromkeys(reasons)) or "no node offers a free slot"

    def usual_kind(self, rows: Sequence[ServiceRow]) -> MachineKind | None:
        """Return the most frequent kind of machine among a stage's holders, or None if it is unknown."""
        return usual_kind(rows, -1, self._kinds())

    def _kinds(self) -> dict[PeerId, MachineKind]:
        knowledge = self._owner.knowledge()
        found = ((peer, kind_of(knowledge, peer)) for peer in knowledge.calibrations)
        return {peer: kind for peer, kind in found if kind is not None}

    async def ask_to_host(
        self, peer: PeerId, service: Service, number: int, rows: Sequence[ServiceRow]
    ) -> str | None:
        """Ask one node, which may be this one, to hold a stage. Return the reason for its refusal, if it
        refuses."""
        if peer == self._owner.signer.peer:
            return self._take(service, number, rows, peer)
        try:
            reply = await self.ask(peer, Host(service.fact, number, tuple(rows)))
        except Unreachable as error:
            return error.detail
        if isinstance(reply, Done):
            return None
        return reply.reason if isinstance(reply, Declined) else "its answer does not fit the request"

    async def ask(self, peer: PeerId, request: Request) -> Reply:
        """Send one request. Raises Unreachable."""
        try:
            reply: Reply = await call(
                self._owner.seams.network,
                peer,
                SERVICES_PROTOCOL,
                request,
                Reply,
                seconds=ASK_SECONDS_MAX,
                reply_bytes_max=REPLY_BYTES_MAX,
            )
        except RemoteProtocolError as error:
            raise Unreachable("refused", f"no answer: {error}") from None
        return reply

    async def double_up(
        self, service: Service, number: int, rows: Sequence[ServiceRow], members: Iterable[PeerId]
    ) -> PeerId | None:
        """Let one of these members hold another stage in addition to its own. Return the member, or None if
        none can."""
        free = {each.peer for each in self._owner.offers() if each.has_slot}
        for peer in sorted(dict.fromkeys(members), key=lambda peer: peer not in free):
            if await self.ask_to_host(peer, service, number, rows) is None:
                return peer
        return None


def kind_of(knowledge: Knowledge, peer: PeerId) -> MachineKind | None:
    """Return the kind of a peer's machine, or None if it was not calibrated."""
    row = knowledge.calibrations.get(peer)
    return None if row is None else (row.hardware, row.torch)


def usual_kind(
    rows: Sequence[ServiceRow], number: int, kinds: Mapping[PeerId, MachineKind]
) -> MachineKind | None:
    """Return the most frequent kind of machine among a stage's holders. If none of their kinds is known,
    return the most frequent kind among the service's members, or None if that is unknown too."""
    for among in ([row for row in rows if row.stage == number], rows):
        known = Counter(kinds[PeerId(row.peer)] for row in among if row.peer in kinds)
        if known:
            return min(known, key=lambda kind: (-known[kind], kind))
    return None
