"""Finds providers beyond the listed members, from their adverts in the DHT."""

from collections.abc import Sequence

from dht.capabilities import Query
from node.placement.leases import Offer, cap_claims
from node.services.discovery import Discovery
from node.services.membership import Membership

SEARCHED_MAX = 64
"""Maximum number of providers to search for if those in the membership list are not enough."""
INTRODUCED_MAX = 8
"""Number of found providers that are asked for the members they know."""


async def search_providers(discovery: Discovery, membership: Membership) -> list[Offer]:
    """Return providers that advertise a free slot, and exchange member lists with some of them."""
    found = await discovery.hunt(Query(count=SEARCHED_MAX, needs_slot=True))
    membership.join([offer.peer for offer in found[:INTRODUCED_MAX]])
    return [
        Offer(
            each.peer,
            each.advert.flops_per_second,
            each.advert.memory_bytes,
            has_slot=True,
            device=each.advert.device,
        )
        for each in found
    ]


def merge_offers(listed: Sequence[Offer], found: Sequence[Offer]) -> list[Offer]:
    """Return the offers of listed and found peers, one per peer, with capped claims."""
    known = {offer.peer for offer in listed}
    return cap_claims([*listed, *(offer for offer in found if offer.peer not in known)])
