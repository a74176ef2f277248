"""What this node offers, as the advert that searches by capability find (`dht.capabilities`)."""

from collections.abc import Callable, Sequence

import trio

from crypto.contact import Address
from dht.capabilities import ADVERT_VERSION, NAME_LENGTH_MAX, Advert, device_kind
from dht.messages import address_texts
from node.seams import Network
from node.services.capacity import Capacity
from node.services.discovery import Discovery
from node.services.membership import FLOPS_PER_SECOND_MAX

ADVERT_LOOK_SECONDS = 30.0
"""How often a node looks whether it still offers what it told."""


def make_advert(capacity: Capacity, addresses: Sequence[Address], *, has_slot: bool) -> Advert:
    """Return the advert of a node with this capacity at these addresses."""
    return Advert(
        ADVERT_VERSION,
        device_kind(capacity.device),
        capacity.memory_free_bytes,
        min(capacity.flops_per_second, FLOPS_PER_SECOND_MAX),
        has_slot and capacity.flops_per_second > 0,
        capacity.location[:NAME_LENGTH_MAX],
        address_texts(addresses),
    )


async def keep_advertised(
    discovery: Discovery, capacity: Capacity, network: Network, has_slot: Callable[[], bool]
) -> None:
    """Tell the swarm what this node offers, and whenever that has changed, until cancelled."""
    told: Advert | None = None
    while True:
        advert = make_advert(capacity, network.addresses, has_slot=has_slot())
        if advert != told:
            told = advert
            discovery.advertise(advert)
        await trio.sleep(ADVERT_LOOK_SECONDS)
