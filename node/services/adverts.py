"""Publishes this node's offer as an advert, which searches by capability can find (`dht.capabilities`)."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import trio

from crypto.contact import Address
from dht.capabilities import ADVERT_VERSION, NAME_LENGTH_MAX, Advert, device_kind
from dht.kademlia import Kademlia, Sends
from dht.messages import address_texts
from gossip.coordinates import DIMENSIONS, FARTHEST, UNIT_SECONDS, Coordinate, Coordinates
from node.seams import Network
from node.services.capacity import Capacity
from node.services.discovery import Discovery
from node.services.metadata import FLOPS_PER_SECOND_MAX

MOVED_SECONDS_MIN = 0.01
"""Least change of a node's coordinates that is announced, as round-trip time in seconds."""
ERROR_TOLD_MAX = 75
"""The largest relative error that is published, in hundredths. A node with less accurate coordinates
publishes no new ones."""
ADVERT_LOOK_SECONDS = 30.0
"""How often a node checks whether its advert is still true."""


def make_advert(
    capacity: Capacity, addresses: Sequence[Address], *, has_slot: bool, coordinates: tuple[float, ...] = ()
) -> Advert:
    """Return the advert of a node with this capacity at these addresses and coordinates."""
    return Advert(
        ADVERT_VERSION,
        device_kind(capacity.device),
        capacity.memory_free_bytes,
        min(capacity.flops_per_second, FLOPS_PER_SECOND_MAX),
        has_slot and capacity.flops_per_second > 0,
        capacity.location[:NAME_LENGTH_MAX],
        address_texts(addresses),
        coordinates,
    )


async def keep_advertised(
    discovery: Discovery,
    capacity: Callable[[], Capacity],
    network: Network,
    has_slot: Callable[[], bool],
    where: Coordinates,
) -> None:
    """Publish this node's offer and its coordinates `where`, and each change of them, until cancelled. The
    coordinates of other nodes determine the order of this node's search results."""
    discovery.command(lambda core, _now: _estimate_by(core, where))
    told: Advert | None = None
    while True:
        place = settled(() if told is None else told.coordinates, where.here)
        advert = make_advert(capacity(), network.addresses, has_slot=has_slot(), coordinates=place)
        if advert != told:
            told = advert
            discovery.advertise(advert)
        await trio.sleep(ADVERT_LOOK_SECONDS)


def _estimate_by(core: Kademlia, where: Coordinates) -> Sends:
    core.estimate = partial(estimate_seconds, where)
    return []


def settled(told: tuple[float, ...], here: Coordinate) -> tuple[float, ...]:
    """Return the coordinates to publish, in seconds. The previous ones (none at first) stay while they are
    near enough, because each change is stored at a dozen nodes. They also stay while this peer has hardly any
    measurements."""
    if here.error > ERROR_TOLD_MAX:
        return told
    now = tuple(value * UNIT_SECONDS for value in (*here.point, here.height))
    moved = math.dist(told, now) if len(told) == len(now) else math.inf
    return told if moved <= MOVED_SECONDS_MIN else now


def estimate_seconds(where: Coordinates, there: Sequence[float]) -> float | None:
    """Return the estimated round trip to a node with the coordinates `there`; None if they are impossible."""
    if len(there) != DIMENSIONS + 1 or not all(map(math.isfinite, there)):
        return None
    units = [round(max(-FARTHEST, min(FARTHEST, value / UNIT_SECONDS))) for value in there]
    point = (units[0], units[1], units[2], units[3])
    return where.round_trip_seconds(Coordinate(point, max(0, units[-1]), 0))
