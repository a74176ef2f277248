"""Proof of work on node ids, which makes it expensive to create many (S/Kademlia section 4.1, static puzzle).

Without it, an attacker that wants 20 ids next to a key generates 20 times as many key pairs as the network
has nodes. With d bits of work, each of these attempts costs 2^d key pairs. An honest node pays this once, for
its only id. `docs/dht.md` has the measured table.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache

from crypto.identity import SEED_BYTES, Identity, PeerId
from dht.keys import KEYS_MAX

WORK_BITS_MAX = 32
"""Maximum bits of work: four billion key pairs, which take days of one core."""

_PURPOSE = b"peerloom/id-work/1"


@lru_cache(maxsize=KEYS_MAX)
def work_of(peer: PeerId) -> int:
    """Return the bits of work in an id: the leading zero bits of a hash of it. This hash differs from the one
    that is its key."""
    digest = hashlib.blake2b(peer, digest_size=16, person=_PURPOSE[:16]).digest()
    return 128 - int.from_bytes(digest, "big").bit_length()


def has_work(peer: PeerId, bits: int) -> bool:
    """Return whether an id has at least `bits` of work."""
    return not bits or work_of(peer) >= bits


def find_seed(entropy: Callable[[int], bytes], bits: int) -> bytes:
    """Return the seed of an identity with `bits` of work. This takes 2^bits tries on average, some 50 us
    each."""
    while not has_work(Identity(seed := entropy(SEED_BYTES)).peer, bits):
        pass
    return seed
