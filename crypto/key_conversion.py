"""The X25519 key pair derived from an Ed25519 identity, so that a peer id also determines the peer's X25519
key.

The public key is the Montgomery form of the same point, u = (1 + y) / (1 - y) modulo 2^255 - 19 (RFC 7748,
section 4.1). The private key is the scalar from which RFC 8032 derives the Ed25519 key: the first half of
SHA-512(seed). libsodium's `crypto_sign_ed25519_pk_to_curve25519` and `..._sk_to_curve25519` do the same. One
key pair may serve both purposes: Thormarker, "On using the same key pair for Ed25519 and an X25519 based
KEM", 2021.

Two points, y and its mirror image, share one u; their ids differ in one bit. This is harmless: the private
scalar of the mirror image is the negative of the original, so the owner of one id also owns the other, and
nobody else does. The same is true of a point plus one of small order. No check tests whether y is on the
curve. If y is not, u is on the curve's twist, where X25519 is equally strong, and such an id cannot sign
anything.
"""

import hashlib
from functools import lru_cache

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId

CONVERTED_MAX = 4_096
"""Number of peer ids whose key is cached, the same as the address book's limit. Computing a key takes about
30 us."""

_P = 2**255 - 19
_EIGHTH = 325606250916557431795983626356110631294008115727848805560023387167927233504
_SMALL = (0, 1, _P - 1, _EIGHTH, pow(_EIGHTH, -1, _P))
"""All u of small order. A secret agreed with such a key is publicly known."""


def agreement_private(seed: bytes) -> bytes:
    """Return the 32-byte X25519 private key of the identity with this seed."""
    return hashlib.sha512(seed).digest()[:32]


def agreement_public(peer: PeerId) -> bytes:
    """Return the 32-byte X25519 public key of a peer. Raises RemoteProtocolError if the id is a key of small
    order."""
    converted = _convert(peer)
    if converted is None:
        raise RemoteProtocolError(
            "a peer id whose key has small order, so that any secret agreed with it is public"
        )
    return converted


@lru_cache(maxsize=CONVERTED_MAX)
def _convert(peer: PeerId) -> bytes | None:
    y = int.from_bytes(peer, "little") & (1 << 255) - 1
    if y >= _P or y == 1:
        return None
    u = (1 + y) * pow(1 - y, -1, _P) % _P
    return None if u in _SMALL else u.to_bytes(32, "little")
