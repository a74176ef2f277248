"""The key space of nodes and records: 160 bits under the xor distance (Kademlia section 2.1).

The width is that of the `kademlia` package on which this DHT is built. A node does not choose its key, which
is a hash of its public key. To get a key near a record, an attacker must make about as many identities as the
network has nodes.
"""

import hashlib
from functools import lru_cache
from random import Random
from typing import NewType

from crypto.identity import PeerId

Key = NewType("Key", bytes)
"""A point of the key space, 20 bytes, big-endian."""

KEY_BYTES = 20
KEY_BITS = 8 * KEY_BYTES
KEYS_MAX = 32_768
"""Number of nodes whose keys are cached, because the same few nodes are named again and again. Takes 5 MB."""
KEY_MAX = 2**KEY_BITS - 1


@lru_cache(maxsize=KEYS_MAX)
def node_key(peer: PeerId) -> Key:
    """Return a node's key: SHA-256 of its public key, cut to 160 bits."""
    return Key(hashlib.sha256(peer).digest()[:KEY_BYTES])


@lru_cache(maxsize=KEYS_MAX)
def node_number(peer: PeerId) -> int:
    """Return a node's key as a number."""
    return int.from_bytes(node_key(peer), "big")


def record_key(purpose: str, name: bytes) -> Key:
    """Return a record's key: SHA-256 of `purpose`, a zero byte and `name`, cut to 160 bits.

    The zero byte separates two purposes if one is a prefix of the other. Raises ValueError for a purpose with
    a zero byte.
    """
    if "\0" in purpose:
        raise ValueError("a purpose must not hold a zero byte")
    return Key(hashlib.sha256(purpose.encode() + b"\0" + name).digest()[:KEY_BYTES])


def content_key(value: bytes) -> Key:
    """Return the key of an immutable value: a hash of the value."""
    return record_key("immutable", value)


def distance(one: bytes, other: bytes) -> int:
    """The xor distance of two keys, 0 to KEY_MAX."""
    return int.from_bytes(one, "big") ^ int.from_bytes(other, "big")


def random_key(rng: Random, lower: int, upper: int) -> Key:
    """Return a random key from `lower` to `upper`, both included: the target of a bucket's refresh."""
    return Key(rng.randint(lower, upper).to_bytes(KEY_BYTES, "big"))
