"""The offers that live members announce to runs, as placement first sees them."""

from collections.abc import Sequence
from dataclasses import replace

from crypto.identity import PeerId
from dht.capabilities import device_kind
from gossip.member import SwarmMember
from node.offering import SENDS_LESS
from node.placement.leases import Offer, cap_claims
from node.placement.permission import RESTING
from node.protocols.runs import RUNS_WORD
from node.services.capacity import Capacity
from node.services.metadata import (
    FENCED,
    OBSERVER,
    STAGES,
    UNREACHABLE_WORD,
    Metadata,
    read_metadata,
)
from partition.plan.observed import FLOPS_PER_SECOND_MAX, NOTHING, Knowledge

SENDS_LESS_SHARE = 0.25
"""Factor for the rate of a member with a slow uplink. Such a member is used last if others have room,
and otherwise gets few micro-batches."""


def understands_runs(claim: Metadata) -> bool:
    """Return whether a stage of this version can be placed on a member with this claim. A member that claims
    nothing is asked."""
    return claim.standing is None or RUNS_WORD in claim.standing.capabilities


def why_no_slot(claim: Metadata) -> str:
    """Return why a member has no slot for others, as one of `LACKS`; "" if it has one.

    Whether a slot is free for this requester is only known when the member is asked.
    """
    if not understands_runs(claim):
        return "version"
    if claim.accepts_runs:
        return "" if claim.flops_per_second > 0 else "device"
    words = () if claim.standing is None else claim.standing.capabilities
    if STAGES not in words:
        return "not said" if claim.standing is None else ("observer" if OBSERVER in words else "never")
    if UNREACHABLE_WORD in words:
        return "unreachable"
    resting = next((word for word in words if word in RESTING), None)
    return resting or ("not said" if FENCED in words else "unfenced")


def own_offer(peer: PeerId, capacity: Capacity, *, has_slot: bool, sends_less: bool = False) -> Offer:
    """Return this node's offer; `capacity` is that of one slot."""
    capacity = replace(capacity, flops_per_second=_asked(capacity.flops_per_second, sends_less=sends_less))
    rate, memory = capacity.flops_per_second, capacity.memory_free_bytes
    return Offer(peer, rate, memory, has_slot and rate > 0, device_kind(capacity.device))


def sends_less(claim: Metadata) -> bool:
    """Return whether a member wants to send less. The claim is trusted, because it can only lower the
    member's load."""
    return claim.standing is not None and SENDS_LESS in claim.standing.capabilities


def _asked(rate: float, *, sends_less: bool) -> float:
    return rate * SENDS_LESS_SHARE if sends_less else rate


def offers_of(own: Offer, members: Sequence[SwarmMember], knowledge: Knowledge = NOTHING) -> list[Offer]:
    """Return the offers of all live members ordered by peer, including this node's `own`. No claim counts for
    more than others measured for its peer, or than a multiple of the median."""
    offers = [own]
    for member in members:
        claim = read_metadata(member.metadata)
        if member.live and member.peer != own.peer and claim is not None:
            lacks = why_no_slot(claim)
            rate = _asked(claim.flops_per_second, sends_less=sends_less(claim))
            found = knowledge.flops_per_second(member.peer, FLOPS_PER_SECOND_MAX)
            memory, device = claim.memory_free_bytes, device_kind(claim.device)
            offers.append(Offer(member.peer, min(rate, float(found)), memory, not lacks, device, lacks))
    return sorted(cap_claims(offers), key=lambda offer: offer.peer)
