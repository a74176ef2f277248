"""Messages of `/peerloom/data/1`: the pieces of a data set, and their holders.

A data set is identified by the hash of its manifest; its pieces are numbered from 0 across all shards. Any
peer that knows the hash may have the data, as with blobs.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

DATA_PROTOCOL = "/peerloom/data/1"
HASH_BYTES = 32
PIECE_BYTES = 256 * 1024
"""Size of a piece, the unit of hashing, requests and transfers: a quarter of a second at 8 Mbit/s."""
PIECES_MAX = 1 << 18
"""Maximum number of pieces of one data set: 64 GiB. Their have-set takes 32 KiB."""
HAVE_BYTES_MAX = PIECES_MAX // 8
NUMBERS_MAX = 64
"""Maximum number of pieces named in one message."""
MESSAGE_BYTES_MAX = PIECE_BYTES + 4_096

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=PIECES_MAX)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=NUMBERS_MAX)]


class PiecesHeld(msgspec.Struct, frozen=True, tag="have", array_like=True):
    """The sender's pieces of a data set, one bit per piece; the first piece is the lowest bit of the first
    byte. If `is_question`, the receiver answers with its own PiecesHeld, or Unknown."""

    data: Hash
    pieces: Annotated[bytes, msgspec.Meta(max_length=HAVE_BYTES_MAX)]
    is_question: bool
    is_complete: bool = False
    """Whether the sender has all pieces that it wants, so that it requests none."""


class Unknown(msgspec.Struct, frozen=True, tag="unknown", array_like=True):
    """The sender has no piece of this data set and wants none."""

    data: Hash


class Got(msgspec.Struct, frozen=True, tag="got", array_like=True):
    """The sender has verified these pieces and now has them too."""

    data: Hash
    numbers: Numbers
    is_complete: bool = False


class PieceRequest(msgspec.Struct, frozen=True, tag="ask", array_like=True):
    """A request for these pieces. Each is answered by a Piece or a PieceRefused."""

    data: Hash
    numbers: Numbers


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """A request not to send these pieces, because the sender has them by now."""

    data: Hash
    numbers: Numbers


class PieceRefused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """A piece is not sent now. `elsewhere`: it was already sent to another peer, and pieces that nobody else
    has go first; `absent`: the sender does not have it; `busy`: too many requests are open."""

    data: Hash
    number: Number
    why: Literal["elsewhere", "absent", "busy"]


class Piece(msgspec.Struct, frozen=True, tag="piece", array_like=True):
    """The bytes of a piece; the receiver must verify them."""

    UNREAD: ClassVar = ("body",)

    data: Hash
    number: Number
    body: Annotated[bytes, msgspec.Meta(max_length=PIECE_BYTES)]


Message = PiecesHeld | Unknown | Got | PieceRequest | Cancel | PieceRefused | Piece
