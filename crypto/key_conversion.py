"""The X25519 key pair derived from an Ed25519 identity, so that a peer id also gives the peer's X25519 key.

The public key is the Montgomery form of the same point, u = (1 + y) / (1 - y) modulo 2^255 - 19 (RFC 7748,
section 4.1); the private one is the scalar of which RFC 8032 makes the Ed25519 key, the first half of
SHA-512(seed). libsodium's `crypto_sign_ed25519_pk_to_curve25519` and `..._sk_to_curve25519` do the same. One
key pair may serve both purposes: Thormarker, "On using the same key pair for Ed25519 and an X25519 based
KEM", 2021.

Two points, y and its mirror, share a u; their ids differ in one bit. This is harmless: the mirror's private
scalar is the negative of the other, so the owner of one id owns both, and nobody else owns either. The same
holds for a point plus one of small order. No check asks whether y is on the curve at all: if not, u is on the
curve's twist, where X25519 is as strong, and such an id can sign nothing.
"""

import hashlib
from functools import lru_cache

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId

CONVERTED_MAX = 4_096
"""Peer ids whose key is remembered; computing one costs some 30 us. As many as the address book holds."""

_P = 2**255 - 19
_EIGHTH = 325606250916557431795983626356110631294008115727848805560023387167927233504
_SMALL = (0, 1, _P - 1, _EIGHTH, pow(_EIGHTH, -1, _P))
"""All u of small order: a secret agreed with them is public."""


def agreement_private(seed: bytes) -> bytes:
    """Return the X25519 private key of the identity with this seed, 32 bytes."""
    return hashlib.sha512(seed).digest()[:32]


def agreement_public(peer: PeerId) -> bytes:
    """Return the X25519 public key of a peer, 32 bytes; RemoteProtocolError for an id that is a worthless
    key."""
    converted = _convert(peer)
    if converted is None:
        raise RemoteProtocolError("a peer id that is a worthless key")
    return converted


@lru_cache(maxsize=CONVERTED_MAX)
def _convert(peer: PeerId) -> bytes | None:
    y = int.from_bytes(peer, "little") & (1 << 255) - 1
    if y >= _P or y == 1:
        return None
    u = (1 + y) * pow(1 - y, -1, _P) % _P
    return None if u in _SMALL else u.to_bytes(32, "little")
