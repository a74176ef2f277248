"""`/peerloom/relay/1`: the messages between nodes and their relays, as data.

A node that nobody can dial keeps a stream to a relay. It sends KeepPlace, again before the place (its
reservation) expires, and receives CircuitAnnounced for each peer that wants to reach it. That peer sends
AskCircuit, and the node sends TakeCircuit on a separate stream. After both have received CircuitReady, the
relay carries bytes between these two connections and can read none of them. The two ends shake hands through
it. The messages above carry the first two flights of that handshake, which saves a round trip.
"""

from typing import Annotated

import msgspec

from crypto.identity import PEER_ID_BYTES

PROTOCOL = "/peerloom/relay/1"
FLIGHT_BYTES_MAX = 1_600
"""Maximum size of a flight. The longest flight of a handshake has 1,400 bytes."""
MESSAGE_BYTES_MAX = FLIGHT_BYTES_MAX + 256
TOKEN_BYTES = 16

OFF, FULL, UNKNOWN, BUSY, SPENT = 0, 1, 2, 3, 4
"""Reasons for a refusal. OFF: this node is no relay. FULL: no place is left. UNKNOWN: that peer has no place.
BUSY: that peer does not answer, or has too many circuits. SPENT: the peer's hourly allowance is used up."""
REASONS = (
    "is no relay",
    "has no place left",
    "does not serve the peer",
    "cannot reach the peer now",
    "has used up the peer's allowance for this hour",
)

Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
RawPeer = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Flight = Annotated[bytes, msgspec.Meta(min_length=1, max_length=FLIGHT_BYTES_MAX)]
Seconds = Annotated[int, msgspec.Meta(ge=1, le=86_400)]
Rate = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class KeepPlace(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """A request to keep a place for the sender, or to renew it."""


class AskCircuit(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A request to connect the sender with this peer, which gets the sender's first flight of the
    handshake."""

    peer: RawPeer
    flight: Flight


class TakeCircuit(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """A request to connect the sender with the peer announced with this token. `flight` answers that peer's
    flight."""

    token: Token
    flight: Flight


Request = KeepPlace | AskCircuit | TakeCircuit


class PlaceKept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """The place is kept for `seconds`. All its circuits share `bytes_per_second`."""

    seconds: Seconds
    bytes_per_second: Rate


class RelayRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The request is refused; `code` is the reason."""

    code: Annotated[int, msgspec.Meta(ge=0, lt=len(REASONS))]


class CircuitReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """All further bytes on this connection are the other peer's. For the peer that asked, `flight` is the
    answer to its flight; for the other peer it is empty."""

    flight: Annotated[bytes, msgspec.Meta(max_length=FLIGHT_BYTES_MAX)] = b""


class CircuitAnnounced(msgspec.Struct, frozen=True, array_like=True, tag="announced"):
    """This peer wants to reach the recipient, and begins the handshake with this flight."""

    token: Token
    peer: RawPeer
    flight: Flight


Reply = PlaceKept | RelayRefused | CircuitReady | CircuitAnnounced
