"""Providers beyond the listed members, found by their adverts in the DHT."""

from collections.abc import Sequence

from dht.capabilities import Query
from node.placement.leases import Offer, cap_claims
from node.services.discovery import Discovery
from node.services.membership import Membership

SEARCHED_MAX = 64
"""Providers looked for where those that membership lists do not do."""
INTRODUCED_MAX = 8
"""How many of these are asked for the members that they know."""


async def search_providers(discovery: Discovery, membership: Membership) -> list[Offer]:
    """Return providers that say they have a free slot, and make their acquaintance."""
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
    """Return the offers of listed and found peers, one for each peer; claims are capped."""
    known = {offer.peer for offer in listed}
    return cap_claims([*listed, *(offer for offer in found if offer.peer not in known)])
