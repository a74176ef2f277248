"""Proof of work on node ids: the cost of making many of them (S/Kademlia section 4.1, static puzzle).

Ids are free, so an attacker that wants 20 next to a key tries as many key pairs as the network has nodes, 20
times. With d bits of work each of these tries costs 2^d key pairs, and so does an honest node's one id, once
in its life. `docs/dht.md` has the measured table.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache

from crypto.identity import SEED_BYTES, Identity, PeerId
from dht.keys import KEYS_MAX

WORK_BITS_MAX = 32
"""Four thousand million key pairs: days of a core."""

_PURPOSE = b"peerloom/id-work/1"


@lru_cache(maxsize=KEYS_MAX)
def work_of(peer: PeerId) -> int:
    """Return the bits of work in an id: leading zero bits of a hash of it, other than the hash that is its
    place."""
    digest = hashlib.blake2b(peer, digest_size=16, person=_PURPOSE[:16]).digest()
    return 128 - int.from_bytes(digest, "big").bit_length()


def has_work(peer: PeerId, bits: int) -> bool:
    """Return whether an id has enough work."""
    return not bits or work_of(peer) >= bits


def find_seed(entropy: Callable[[int], bytes], bits: int) -> bytes:
    """Return the seed of an identity with `bits` of work: 2^bits tries on average, some 50 us each."""
    while not has_work(Identity(seed := entropy(SEED_BYTES)).peer, bits):
        pass
    return seed
