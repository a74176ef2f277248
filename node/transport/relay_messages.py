"""`/peerloom/relay/1`: what nodes and their relays say to each other, as data.

A node that nobody can dial keeps a stream to a relay: it says KeepPlace, again before the place lapses, and
is told CircuitAnnounced for each peer that wants to reach it. That peer says AskCircuit, the node says
TakeCircuit on another stream. Once both were told CircuitReady, the relay carries bytes between these two
connections and can read none of them: the two ends shake hands inside.
"""

from typing import Annotated

import msgspec

from crypto.identity import PEER_ID_BYTES

PROTOCOL = "/peerloom/relay/1"
MESSAGE_BYTES_MAX = 256
TOKEN_BYTES = 16

OFF, FULL, UNKNOWN, BUSY, SPENT = 0, 1, 2, 3, 4
"""Reasons: it is no relay; it has no place left; nobody of that name has one; that one does not answer, or
has too many circuits; what it carries for such a peer within an hour is used up."""
REASONS = (
    "is no relay",
    "has no place left",
    "has nobody of that name behind it",
    "cannot get through to it now",
    "has carried enough for it this hour",
)

Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
RawPeer = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Seconds = Annotated[int, msgspec.Meta(ge=1, le=86_400)]
Rate = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class KeepPlace(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """Keep a place for me, or keep it on."""


class AskCircuit(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """AskCircuit me with this peer."""

    peer: RawPeer


class TakeCircuit(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """AskCircuit me with the one for whom I was told this token."""

    token: Token


Request = KeepPlace | AskCircuit | TakeCircuit


class PlaceKept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """It is kept for so many seconds. `bytes_per_second` is what all circuits share."""

    seconds: Seconds
    bytes_per_second: Rate


class RelayRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """It is not; `code` says why."""

    code: Annotated[int, msgspec.Meta(ge=0, lt=len(REASONS))]


class CircuitReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """What follows on this connection is the other's."""


class CircuitAnnounced(msgspec.Struct, frozen=True, array_like=True, tag="announced"):
    """This peer wants to reach you."""

    token: Token
    peer: RawPeer


Reply = PlaceKept | RelayRefused | CircuitReady | CircuitAnnounced
