"""The packets of datagram sessions on the wire, and the room they leave for a message.

    initiation   4 | sender index 4 | Noise message 1 | mac1 16 | mac2 16        at least INITIATION_BYTES_MIN
      its payload: peer 32 | stamp 8 | anew 1 | the request's stamp 8 | name length 1 | message length 2
                   | name | message | zeros; a name length of 0: no request
    response     5 | sender index 4 | receiver index 4 | Noise message 2 | mac1 16
      its payload: stamp 8; initiations of its sender up to this one are void
    cookie       6 | receiver index 4 | nonce 16 | sealed cookie 32
    transport    7 | receiver index 4 | counter 8 | sealed: nothing, a message or a control
      message: name length 1 (128 more: with a stamp) | stamp 8, if any | name | message
      control: 0 | kind 1 | token 8

All numbers are big-endian. No other protocol that may share a UDP port has packets that begin with 4 to 15
(RFC 7983), so STUN, DTLS, TURN and QUIC can be distinguished from ours. A response has no mac2: it is
processed only if it names the index of a handshake that we began, and each handshake is tried with only one
response.
"""

import struct
from dataclasses import dataclass

from crypto.errors import RemoteProtocolError
from crypto.identity import PEER_ID_BYTES, PeerId
from crypto.noise import KEY_BYTES, TAG_BYTES
from crypto.protocols import PROTOCOL_BYTES_MAX, protocol_bytes, read_protocol

DATAGRAM_BYTES_MAX = 1_232
"""Maximum packet size: IPv6's minimum MTU of 1,280 less the IPv6 and UDP headers, so no link fragments it."""
INITIATION_BYTES_MIN = 411
"""Minimum size of an initiation: a third of the largest packet, so any single packet sent in answer is at
most three times as long."""
COUNTER_MAX = 2**48
"""Maximum counter. No session reaches it within its 180 s. It keeps a counter chosen by an outsider away from
a cipher's last nonces."""

INITIATION, RESPONSE, COOKIE, TRANSPORT = 4, 5, 6, 7
CHALLENGE, ANSWER = 1, 2
MAC_BYTES = 16
TOKEN_BYTES = 8
INDEX_BYTES = 4
COOKIE_NONCE_BYTES = 16

INITIATION_HEAD = struct.Struct(">BI")
RESPONSE_HEAD = struct.Struct(">BII")
COOKIE_HEAD = struct.Struct(f">BI{COOKIE_NONCE_BYTES}s")
TRANSPORT_HEAD = struct.Struct(">BIQ")
_OFFER = struct.Struct(f">{PEER_ID_BYTES}sQBQBH")
_STAMP = struct.Struct(">Q")
_STAMPED = 128

MACS_BYTES = 2 * MAC_BYTES
_SEALED_STATIC_BYTES = KEY_BYTES + TAG_BYTES
_INITIATION_EXTRA_BYTES = INITIATION_HEAD.size + KEY_BYTES + _SEALED_STATIC_BYTES + TAG_BYTES + MACS_BYTES
RESPONSE_BYTES = RESPONSE_HEAD.size + KEY_BYTES + _STAMP.size + TAG_BYTES + MAC_BYTES
COOKIE_BYTES = COOKIE_HEAD.size + MAC_BYTES + TAG_BYTES
TRANSPORT_BYTES_MIN = TRANSPORT_HEAD.size + TAG_BYTES
_OFFER_BYTES_MIN = INITIATION_BYTES_MIN - _INITIATION_EXTRA_BYTES


class DatagramRefused(RemoteProtocolError):
    """A packet was refused; `reason` is one word for a counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Datagram:
    """An authentic message. `newest`: no message sent later by this peer was received before this one."""

    sender: PeerId
    protocol: str
    payload: bytes
    newest: bool


@dataclass(slots=True, eq=False)
class SessionRequest:
    """An outgoing message. `stamp` is above 0 once an initiation has carried the message, which may therefore
    have arrived."""

    name: bytes
    payload: bytes
    expires_at: float = 0.0
    stamp: int = 0

    @property
    def size_bytes(self) -> int:
        return len(self.name) + len(self.payload)


@dataclass(frozen=True, slots=True)
class InitiationOffer:
    """The payload of an initiation. `anew`: the sender trusts no session that it has with us."""

    peer: PeerId
    stamp: int
    anew: bool
    request: SessionRequest | None


def payload_bytes_max(protocol: str) -> int:
    """Return how many bytes one datagram of `protocol` can carry."""
    return DATAGRAM_BYTES_MAX - TRANSPORT_BYTES_MIN - 1 - len(protocol_bytes(protocol))


def fits_initiation(request: SessionRequest) -> bool:
    """Return whether a request fits into an initiation."""
    size_bytes = _INITIATION_EXTRA_BYTES + _OFFER.size + request.size_bytes
    return size_bytes <= DATAGRAM_BYTES_MAX


def write_offer(offer: InitiationOffer) -> bytes:
    """Return the payload of an initiation, padded."""
    request = offer.request or SessionRequest(b"", b"")
    head = _OFFER.pack(
        offer.peer, offer.stamp, offer.anew, request.stamp, len(request.name), len(request.payload)
    )
    return (head + request.name + request.payload).ljust(_OFFER_BYTES_MIN, b"\0")


def read_offer(data: bytes) -> InitiationOffer:
    """Read the payload of an initiation. Raises DatagramRefused."""
    if len(data) < _OFFER.size:
        raise DatagramRefused("malformed", "an initiation whose payload ends too early")
    peer, stamp, anew, request_stamp, name_bytes, payload_bytes = _OFFER.unpack_from(data)
    name, end = data[_OFFER.size : _OFFER.size + name_bytes], _OFFER.size + name_bytes + payload_bytes
    if anew > 1 or name_bytes > PROTOCOL_BYTES_MAX or end > len(data) or any(data[end:]):
        raise DatagramRefused("malformed", "an initiation whose lengths are wrong")
    request = None
    if name_bytes:
        if read_protocol(name) is None or not 0 < request_stamp <= stamp:
            raise DatagramRefused("malformed", "an initiation with an empty or nameless request")
        request = SessionRequest(name, data[_OFFER.size + name_bytes : end], stamp=request_stamp)
    elif payload_bytes or request_stamp:
        raise DatagramRefused("malformed", "an initiation with a request for no protocol")
    return InitiationOffer(PeerId(peer), stamp, bool(anew), request)


def write_stamp(stamp: int) -> bytes:
    """Return the payload of a response."""
    return _STAMP.pack(stamp)


def read_stamp(data: bytes) -> int:
    """Read the payload of a response. Raises DatagramRefused."""
    if len(data) != _STAMP.size:
        raise DatagramRefused("malformed", "a response without a stamp")
    stamp: int = _STAMP.unpack(data)[0]
    return stamp


def write_message(request: SessionRequest) -> bytes:
    """Return the unencrypted content of a transport packet."""
    if request.stamp:
        head = bytes((_STAMPED | len(request.name),)) + _STAMP.pack(request.stamp)
        return head + request.name + request.payload
    return bytes((len(request.name),)) + request.name + request.payload


def read_message(plain: bytes) -> tuple[int, str, bytes]:
    """Return (stamp or 0, protocol, message); raises DatagramRefused."""
    stamp, start, name_bytes = 0, 1, plain[0]
    if name_bytes & _STAMPED:
        if len(plain) < 1 + _STAMP.size:
            raise DatagramRefused("malformed", "a message that ends too early")
        (stamp,) = _STAMP.unpack_from(plain, 1)
        start, name_bytes = 1 + _STAMP.size, name_bytes ^ _STAMPED
    end = start + name_bytes
    name = plain[start:end]
    protocol = read_protocol(name)
    if protocol is None or len(name) != name_bytes:
        raise DatagramRefused("malformed", "a message without a protocol")
    return stamp, protocol, plain[end:]


def write_control(kind: int, token: bytes) -> bytes:
    """Return the content of a challenge, or of the answer to one."""
    return bytes((0, kind)) + token


def read_control(plain: bytes) -> tuple[int, bytes]:
    """Return (kind, token); raises DatagramRefused."""
    if len(plain) != 2 + TOKEN_BYTES or plain[1] not in (CHALLENGE, ANSWER):
        raise DatagramRefused("malformed", "a control message of an unknown kind")
    return plain[1], plain[2:]
