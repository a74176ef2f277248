"""`/peerloom/relay/1`: what nodes and their relays say to each other, as data.

A node that nobody can dial keeps a stream to a relay: it says Reserve, again before the place lapses, and
is told Incoming for each peer that wants to reach it. That peer says Connect, the node says Accept on another
stream. Once both were told Ready, the relay carries bytes between these two connections and can read none of
them: the two ends shake hands inside.
"""

from typing import Annotated

import msgspec

from crypto.identity import PEER_ID_BYTES, PeerId

PROTOCOL = "/peerloom/relay/1"
MESSAGE_BYTES_MAX = 256
TOKEN_BYTES = 16

OFF, FULL, UNKNOWN, BUSY, SPENT = 0, 1, 2, 3, 4
"""Why not: it is no relay; it has no place left; nobody of that name has one; that one does not answer, or
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


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag="reserve"):
    """Keep a place for me, or keep it on."""


class Connect(msgspec.Struct, frozen=True, array_like=True, tag="connect"):
    """Connect me with this peer."""

    peer: RawPeer


class Accept(msgspec.Struct, frozen=True, array_like=True, tag="accept"):
    """Connect me with the one for whom I was told this token."""

    token: Token


Request = Reserve | Connect | Accept


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag="reserved"):
    """It is kept for so many seconds. `bytes_per_second` is what all circuits share."""

    seconds: Seconds
    bytes_per_second: Rate


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """It is not; `code` says why."""

    code: Annotated[int, msgspec.Meta(ge=0, lt=len(REASONS))]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """What follows on this connection is the other's."""


class Incoming(msgspec.Struct, frozen=True, array_like=True, tag="incoming"):
    """This peer wants to reach you."""

    token: Token
    peer: RawPeer


Reply = Reserved | Refused | Ready | Incoming


def peer_of(raw: bytes) -> PeerId:
    """Return the peer that a message names."""
    return PeerId(raw)
