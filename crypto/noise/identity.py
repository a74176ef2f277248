"""libp2p's identity payload: an Ed25519 key and its signature over an X25519 static key.

These are real `NoiseHandshakePayload` protobuf bytes, as in libp2p's noise specification; the signature
covers `noise-libp2p-static-key:` + the static key. Extensions are skipped. The pattern determines which
message carries the payload.
"""

from functools import lru_cache

from crypto.errors import RemoteProtocolError
from crypto.identity import PEER_ID_BYTES, SIGNATURE_BYTES, Identity, PeerId, verify

_SIGNATURE_PREFIX = b"noise-libp2p-static-key:"
_KEY_PREFIX = bytes.fromhex("08011220")
"""Start of libp2p's PublicKey protobuf: Type = Ed25519, Data = the 32 bytes that follow."""
_IDENTITY_KEY_FIELD = 1
_IDENTITY_SIGNATURE_FIELD = 2
PAYLOAD_BYTES_MAX = 1_024
"""Maximum size of a payload. Ours has 104 bytes; the rest is room for extensions, which we skip."""
CHECKED_MAX = 1_024
"""Number of payloads whose signature is remembered as valid, each with 0.3 to 1.5 kB. A peer sends the same
payload in every handshake, and verifying it costs as much as three X25519 exchanges."""


def identity_payload(identity: Identity, static_public: bytes) -> bytes:
    """Return the `NoiseHandshakePayload` bytes that bind `identity` to an X25519 public key."""
    key = _KEY_PREFIX + identity.peer
    signature = identity.sign(_SIGNATURE_PREFIX + static_public)
    return bytes((0x0A, len(key))) + key + bytes((0x12, len(signature))) + signature


@lru_cache(maxsize=CHECKED_MAX)
def check_identity_payload(payload: bytes, static_public: bytes) -> PeerId:
    """Return the peer that signed `static_public`. Raises RemoteProtocolError if the signature is not valid.
    Unknown fields are skipped."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise RemoteProtocolError(f"an identity payload of {len(payload)} bytes")
    fields = _parse_fields(payload)
    key = fields.get(_IDENTITY_KEY_FIELD, b"")
    signature = fields.get(_IDENTITY_SIGNATURE_FIELD, b"")
    if len(key) != len(_KEY_PREFIX) + PEER_ID_BYTES or not key.startswith(_KEY_PREFIX):
        raise RemoteProtocolError("an identity payload without an Ed25519 key")
    peer = PeerId(key[len(_KEY_PREFIX) :])
    if len(signature) != SIGNATURE_BYTES or not verify(peer, _SIGNATURE_PREFIX + static_public, signature):
        raise RemoteProtocolError("an identity payload with a wrong signature")
    return peer


def _parse_fields(data: bytes) -> dict[int, bytes]:
    """Return the length-delimited fields of a protobuf message. Varint fields are skipped; the last
    occurrence of a field wins."""
    fields: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        tag, at = _parse_varint(data, at)
        value, at = _parse_varint(data, at)
        if tag & 7 == 2:
            if value > len(data) - at:
                raise RemoteProtocolError("an identity payload that ends inside a field")
            fields[tag >> 3] = data[at : at + value]
            at += value
        elif tag & 7 != 0:
            raise RemoteProtocolError("an identity payload with a field of unknown kind")
    return fields


def _parse_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    # Valid tags and lengths here have at most five bytes.
    for shift, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise RemoteProtocolError("an identity payload with a malformed varint")
