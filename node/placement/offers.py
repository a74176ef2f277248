"""What live members say they offer to runs: placement's first look at a swarm."""

from collections.abc import Sequence

from gossip.member import Member
from node.placement.leases import Offer, cap_claims
from node.services.metadata import read_metadata


def offers_of(own: Offer, members: Sequence[Member]) -> list[Offer]:
    """Return the offers of all live members by peer, this node's `own` included; no claim counts for more
    than a multiple of the median."""
    offers = [own]
    for member in members:
        claim = read_metadata(member.metadata)
        if member.live and member.peer != own.peer and claim is not None:
            has_slot = claim.accepts_runs and claim.flops_per_second > 0
            offers.append(Offer(member.peer, claim.flops_per_second, claim.memory_free_bytes, has_slot))
    return sorted(cap_claims(offers), key=lambda offer: offer.peer)
