"""Adverts of what nodes offer, and the DHT keys under which adverts are found (classes and shards).

An advert is a record, signed by the node it describes and valid for minutes. Its key consists of a class
(kind of device, size of memory, optionally a region) and a shard of that class: the first bits of the node's
own key. The number of these bits grows with the number of adverts, so no key is queried by all nodes, and no
key holds more than a page or two. The first guess follows from the size of the network, which is estimated
from the density of ids near ours. This module has the code shared by the writer of adverts (`advertising`)
and their reader (`hunt`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from dht.keys import KEY_BITS, Key, record_key
from dht.messages import AddressTexts
from dht.records import VALUE_BYTES_MAX, Record
from dht.routing import Contact

ADVERT_VERSION = 1
PURPOSE = "capability"
DEVICES = ("cpu", "cuda", "mps")
"""The kinds of devices that have classes. A device of any other kind is not advertised."""
NAME_LENGTH_MAX = 32
COORDINATES_MAX = 9
"""Maximum number of elements of a network coordinate: its dimensions and its height."""
MEMORY_CLASSES_BYTES = (0, 4 * 10**9, 16 * 10**9, 64 * 10**9, 256 * 10**9)
"""The least memory of each class. Each value is about four times the previous one, so a search reads few
classes."""

SHARD_ADVERTS_MAX = 12
"""Maximum number of adverts under one key (three pages of replies). Beyond it, the class is split by one more
bit."""
SHARD_ADVERTS_MIN = 3
"""A shard with fewer adverts is merged with its neighbour. A split leaves six in each half, so classes do not
flip back and forth."""
DEPTH_MAX = 24

Name = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Span = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]


class Advert(msgspec.Struct, frozen=True, array_like=True):
    """A node's offer. `device` is a kind (`cuda`). `region` is its owner's name for its location.
    `coordinates` is its network coordinate, in seconds of round-trip time; empty if unknown."""

    version: int
    device: Name
    memory_bytes: Size
    flops_per_second: Rate
    has_slot: bool
    region: Name
    addresses: AddressTexts = ()
    coordinates: Annotated[tuple[Span, ...], msgspec.Meta(max_length=COORDINATES_MAX)] = ()


@dataclass(frozen=True)
class Query:
    """A search for `count` nodes with at least these resources, the nearest to us first. `near` is a region,
    or empty for all regions. `needs_slot` excludes nodes that have no free slot."""

    device: str = ""
    memory_bytes: int = 0
    near: str = ""
    count: int = 20
    needs_slot: bool = False
    flops_per_second: float = 0.0

    def fits(self, advert: Advert) -> bool:
        """Return whether an advert satisfies the query."""
        return (
            (not self.device or advert.device == self.device)
            and advert.memory_bytes >= self.memory_bytes
            and advert.flops_per_second >= self.flops_per_second
            and (not self.near or advert.region == self.near)
            and (advert.has_slot or not self.needs_slot)
        )

    @property
    def classes(self) -> list[str]:
        """Return the classes that may hold matching adverts, the one with the least memory first."""
        devices = (self.device,) if self.device else DEVICES
        first = memory_class(self.memory_bytes)
        return [
            class_name(device, memory, self.near)
            for memory in range(first, len(MEMORY_CLASSES_BYTES))
            for device in devices
        ]


@dataclass(frozen=True)
class CapabilityOffer:
    """A node that was found: its advert, and the round-trip time of its ping."""

    peer: PeerId
    advert: Advert
    seconds: float


def device_kind(device: str) -> str:
    """Return the kind of a torch device: `cuda` for `cuda:0`."""
    return device.partition(":")[0].lower()


def memory_class(memory_bytes: int) -> int:
    """Return the class for this amount of memory."""
    return max(place for place, least in enumerate(MEMORY_CLASSES_BYTES) if memory_bytes >= least)


def class_name(device: str, memory: int, region: str) -> str:
    """Return the name of a class; `region` is empty for the class of all regions."""
    return f"{device}/{memory}/{region}"


def classes_of(advert: Advert) -> list[str]:
    """Return the classes under which an advert is stored: one without a region, and one with its own
    region."""
    memory = memory_class(advert.memory_bytes)
    regions = ("", advert.region) if advert.region else ("",)
    return [class_name(advert.device, memory, region) for region in regions]


def shard_key(name: str, depth: int, prefix: int) -> Key:
    """Return the key of one shard of a class: the nodes whose keys begin with the `depth` bits `prefix`."""
    return record_key(PURPOSE, f"{name}/{depth}/{prefix:x}".encode())


def prefix_of(key: Key, depth: int) -> int:
    """Return the first `depth` bits of a key."""
    return int.from_bytes(key, "big") >> (KEY_BITS - depth)


def estimate_nodes(own: Key, nearest: Sequence[Contact], k: int) -> float:
    """Estimate the number of nodes in the network from the density of the nodes nearest to `own`.

    With m nodes the error is about 1/sqrt(m). A table with fewer than k contacts holds all nodes of its
    network.
    """
    if len(nearest) < k:
        return len(nearest) + 1.0
    place = int.from_bytes(own, "big")
    farthest = max(contact.long_id ^ place for contact in nearest)
    return (len(nearest) - 1) * 2.0**KEY_BITS / max(farthest, 1) + 1.0


def first_depth(nodes: float) -> int:
    """Return a depth at which no class needs a further split in a network with this many nodes."""
    return min(max(0, ceil(log2(max(nodes, 1.0) / SHARD_ADVERTS_MIN)) + 1), DEPTH_MAX)


def encode_advert(advert: Advert) -> bytes:
    """Return an advert as the value of a record."""
    return encode(advert)


def read_advert(record: Record) -> Advert | None:
    """Return the advert in a record; None if this version cannot read it."""
    try:
        advert: Advert = decode(record.value, Advert, bytes_max=VALUE_BYTES_MAX)
    except RemoteProtocolError:
        return None
    return advert if advert.version == ADVERT_VERSION else None


def newest(records: Iterable[Record]) -> dict[PeerId, Record]:
    """Return the newest record of each publisher among records found under several keys."""
    found: dict[PeerId, Record] = {}
    for record in records:
        if record.publisher not in found or found[record.publisher].rank < record.rank:
            found[record.publisher] = record
    return found
