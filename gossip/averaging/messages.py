"""Messages between the members of an averaging attempt.

Commitments, have-sets and seals are facts, signed by their author over the exact body. Others pass them on,
and two of one kind that differ prove a lie. Chunks are not signed: a chunk counts only once the hashes of all
chunks of its part make up the root in a signed fact.
"""

from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from gossip.averaging.codecs import CHUNK_ITEMS
from gossip.averaging.group import (
    GROUP_MEMBERS_MAX,
    HASH_BYTES,
    ITEMS_MAX,
    Hash,
)
from gossip.claims import Count

PROTOCOL = "/peerloom/averaging/3"
CHUNK_BYTES_MAX = CHUNK_ITEMS * 8 + 4_096
"""Size limit of a chunk's data: float64, or any codec with its scales."""
CHUNKS_ASKED_MAX = 1_024
"""Chunks named in one Ask; a member that misses more asks again."""
MESSAGE_BYTES_MAX = CHUNK_BYTES_MAX + 4_096
"""The largest message: a chunk. A have-set of a full group takes under 4 KiB."""
OPENING_BYTES_MAX = 256
"""An opening, with room for fields of later versions."""
COMMITMENT_PURPOSE = "averaging-commitment"
HAVE_PURPOSE = "averaging-have"
SEAL_PURPOSE = "averaging-seal"

Place = Annotated[int, msgspec.Meta(ge=0, lt=GROUP_MEMBERS_MAX)]
ChunkNumber = Annotated[int, msgspec.Meta(ge=0, lt=ITEMS_MAX // CHUNK_ITEMS + GROUP_MEMBERS_MAX)]
FACT_BODY_BYTES_MAX = 8_192


class CommitmentBody(msgspec.Struct, frozen=True, array_like=True, tag="commitment"):
    """By a member with tensors: the roots of its parts for each owner, in the order of owners (one root in an
    exchange), and its weight."""

    attempt: Hash
    weight: float
    roots: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=GROUP_MEMBERS_MAX)]


class HeldPart(msgspec.Struct, frozen=True, array_like=True):
    """The whole part of the member at `place`, under the commitment of this hash and weight."""

    place: Place
    weight: float
    commitment: Hash


class HaveBody(msgspec.Struct, frozen=True, array_like=True, tag="have"):
    """By an owner: the members whose parts it holds and has checked, in the order of places."""

    attempt: Hash
    held: Annotated[tuple[HeldPart, ...], msgspec.Meta(max_length=GROUP_MEMBERS_MAX)]


class SealBody(msgspec.Struct, frozen=True, array_like=True, tag="seal"):
    """By an owner: the root of its reduced part, under the commit of this hash."""

    attempt: Hash
    commit: Hash
    root: Hash


class Commitment(msgspec.Struct, frozen=True, array_like=True, tag="commitment"):
    attempt: Hash
    fact: Fact


class Have(msgspec.Struct, frozen=True, array_like=True, tag="have"):
    attempt: Hash
    fact: Fact


class Seal(msgspec.Struct, frozen=True, array_like=True, tag="seal"):
    attempt: Hash
    fact: Fact


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """Chunk `number` of the part of the owner at `place`.

    Scatter carries the sender's contribution, gather the mean under `commit`. `checksum` is the BLAKE3 of
    `data`, which is a view of the received message: those bytes must not change afterwards.
    """

    attempt: Hash
    phase: Literal["scatter", "gather"]
    place: Place
    number: ChunkNumber
    commit: Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES)]
    checksum: Hash
    data: memoryview


class ChunkRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A request for missing chunks: these gather chunks of the owner at `place`, and all known facts."""

    attempt: Hash
    place: Place
    chunks: Annotated[tuple[ChunkNumber, ...], msgspec.Meta(max_length=CHUNKS_ASKED_MAX)] = ()


class Holding(msgspec.Struct, frozen=True, array_like=True, tag="holding"):
    """The sender holds all parts, with this digest of the commit and their bytes. The receiver succeeds once
    all reachable members hold the same. If it holds something else, it sends the facts behind that."""

    attempt: Hash
    digest: Hash


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag="withdraw"):
    """The sender leaves this attempt; do not wait for it."""

    attempt: Hash


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """The bytes of the receiver's chunks that arrived, and the time of the last one since the sender's
    start."""

    attempt: Hash
    size_bytes: Count
    microseconds: Count


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="opening"):
    """The first message of every stream, without a payload: it names the attempt of all that follows.

    So a receiver outside of the attempt stores a hash rather than a chunk, and a member shows at once that it
    is present, however long its first chunk takes.
    """

    attempt: Hash


AttemptMessage = Commitment | Have | Seal | Chunk | ChunkRequest | Holding | Withdraw | Arrived
Message = AttemptMessage | Opening


def checked_chunk(message: Chunk) -> memoryview:
    """Return the data of a chunk, bounded and equal to its checksum.

    Raises:
        RemoteProtocolError: it is not.
    """
    if message.data.nbytes > CHUNK_BYTES_MAX:
        raise RemoteProtocolError(f"a chunk of {message.data.nbytes} bytes")
    if blake3(message.data).digest() != message.checksum:
        raise RemoteProtocolError("a chunk that does not match its checksum")
    return message.data


def root_of(checksums: list[bytes]) -> bytes:
    """Return the hash that names a part: BLAKE3 over the checksums of its chunks, in order."""
    return blake3(b"".join(checksums)).digest()
