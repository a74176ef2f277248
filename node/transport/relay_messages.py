"""`/peerloom/relay/1`: the messages between nodes and their relays, as data.

A node that nobody can dial keeps a stream to a relay: it says KeepPlace, again before the place lapses, and
is told CircuitAnnounced for each peer that wants to reach it. That peer says AskCircuit, the node says
TakeCircuit on another stream. Once both were told CircuitReady, the relay carries bytes between these two
connections and can read none of them. The two ends shake hands through it, and these messages carry the first
two flights of that handshake, which saves a round trip.
"""

from typing import Annotated

import msgspec

from crypto.identity import PEER_ID_BYTES

PROTOCOL = "/peerloom/relay/1"
FLIGHT_BYTES_MAX = 1_600
"""The longest flight of a handshake has 1,400 bytes."""
MESSAGE_BYTES_MAX = FLIGHT_BYTES_MAX + 256
TOKEN_BYTES = 16

OFF, FULL, UNKNOWN, BUSY, SPENT = 0, 1, 2, 3, 4
"""Reasons: this node is no relay; no place is left; that peer has no place; it does not answer, or has too
many circuits; the peer's hourly allowance is used up."""
REASONS = (
    "is no relay",
    "has no place left",
    "has nobody of that name behind it",
    "cannot get through to it now",
    "has carried enough for it this hour",
)

Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
RawPeer = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Flight = Annotated[bytes, msgspec.Meta(min_length=1, max_length=FLIGHT_BYTES_MAX)]
Seconds = Annotated[int, msgspec.Meta(ge=1, le=86_400)]
Rate = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class KeepPlace(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """Keep a place for me, or renew it."""


class AskCircuit(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Connect me with this peer, which gets my first flight of the handshake."""

    peer: RawPeer
    flight: Flight


class TakeCircuit(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """Connect me with the peer for which I was told this token; `flight` answers its own."""

    token: Token
    flight: Flight


Request = KeepPlace | AskCircuit | TakeCircuit


class PlaceKept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """The place is kept for `seconds`. All circuits share `bytes_per_second`."""

    seconds: Seconds
    bytes_per_second: Rate


class RelayRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The place is not kept; `code` is the reason."""

    code: Annotated[int, msgspec.Meta(ge=0, lt=len(REASONS))]


class CircuitReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """All further bytes on this connection are the other peer's. `flight` is the answer to the flight of the
    peer that asked; for the other one it is empty."""

    flight: Annotated[bytes, msgspec.Meta(max_length=FLIGHT_BYTES_MAX)] = b""


class CircuitAnnounced(msgspec.Struct, frozen=True, array_like=True, tag="announced"):
    """This peer wants to reach you, and begins the handshake with this flight."""

    token: Token
    peer: RawPeer
    flight: Flight


Reply = PlaceKept | RelayRefused | CircuitReady | CircuitAnnounced
