"""A peer's identity: an Ed25519 key pair and the peer id in libp2p's text form.

A `PeerId` is the raw 32-byte Ed25519 public key. Its text form is libp2p's: base58btc of `00 24 08 01 12 20`
+ key, an identity multihash of the protobuf-wrapped key (libp2p peer-ids specification), which always begins
with `12D3KooW`. The specification's second form, a CID of version 1 in base32, is parsed but never written:
`01 72` and the same multihash, `bafzaajaiaejc...`.
"""

import base64
from collections.abc import Callable
from typing import NewType

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PeerId = NewType("PeerId", bytes)
"""The raw Ed25519 public key, 32 bytes."""

PEER_ID_BYTES = 32
SEED_BYTES = 32
SIGNATURE_BYTES = 64

_MULTIHASH_PREFIX = bytes.fromhex("002408011220")
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_TEXT_LENGTH = 52
_CID_HEAD = bytes.fromhex("0172")
"""CID version 1, and the multicodec code of a libp2p key."""
_CID_LENGTH = 65


class Identity:
    """An Ed25519 key pair. The seed is the secret; `peer` is public."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"an identity seed has {SEED_BYTES} bytes, not {len(seed)}")
        self.seed = seed
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.peer = PeerId(self._private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls, entropy: Callable[[int], bytes]) -> "Identity":
        """Generate a new identity; `entropy(n)` returns n unpredictable bytes (the entropy seam)."""
        return cls(entropy(SEED_BYTES))

    def sign(self, data: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature (RFC 8032) of `data`."""
        return self._private.sign(data)

    def __repr__(self) -> str:
        return f"Identity({peer_text(self.peer)})"


def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Return whether `signature` over `data` was made by `peer`."""
    try:
        Ed25519PublicKey.from_public_bytes(peer).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_text(peer: PeerId) -> str:
    """Return libp2p's text form, `12D3KooW...`."""
    number = int.from_bytes(_MULTIHASH_PREFIX + peer, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    # base58btc writes each leading zero byte as "1"; the prefix has exactly one.
    return "1" + "".join(reversed(digits))


def parse_peer(text: str) -> PeerId:
    """Parse either of libp2p's text forms of an Ed25519 peer id.

    Raises:
        ValueError: with a reason that a person can read.
    """
    if len(text) == _CID_LENGTH and text.startswith("b"):
        return _parse_cid(text)
    if len(text) != _TEXT_LENGTH or not text.startswith("12D3KooW"):
        raise ValueError(
            f"'{text[:60]}' is not a peer id; one looks like 12D3KooW... ({_TEXT_LENGTH} characters)"
        )
    number = 0
    for letter in text:
        digit = _ALPHABET.find(letter)
        if digit < 0:
            raise ValueError(f"'{letter}' cannot occur in a peer id")
        number = number * 58 + digit
    raw = number.to_bytes(len(_MULTIHASH_PREFIX) + PEER_ID_BYTES, "big")
    if not raw.startswith(_MULTIHASH_PREFIX):
        raise ValueError(f"'{text}' is not an Ed25519 peer id")
    return PeerId(raw[len(_MULTIHASH_PREFIX) :])


def _parse_cid(text: str) -> PeerId:
    head = _CID_HEAD + _MULTIHASH_PREFIX
    # Multibase's "b" means lower case without padding. b32decode accepts only upper case. No padding is
    # needed, because the 40 bytes fill 64 characters exactly.
    raw = base64.b32decode(text[1:].upper()) if text.isascii() and text.islower() else b""
    if len(raw) != len(head) + PEER_ID_BYTES or not raw.startswith(head):
        raise ValueError(f"'{text}' is not the CID of an Ed25519 peer id")
    return PeerId(raw[len(head) :])


def short_peer(peer: PeerId) -> str:
    """Return the last six characters, `...kVa9Qz`, which screens show next to a name."""
    return "..." + peer_text(peer)[-6:]
