"""Messages between the members of an averaging attempt.

Commitments, have-sets and seals are facts, signed by their author over the exact body. Other members pass
them on, and two different facts of one kind prove a lie. Chunks are not signed: a chunk counts only once the
hashes of all chunks of its part match the root in a signed fact.
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
"""Maximum size of a chunk's data: float64, or any codec with its scales."""
CHUNKS_ASKED_MAX = 1_024
"""Maximum number of chunks named in one request; a member that lacks more asks again."""
MESSAGE_BYTES_MAX = CHUNK_BYTES_MAX + 4_096
"""Maximum size of a message; the largest is a chunk. The have-set of a full group takes under 4 KiB."""
OPENING_BYTES_MAX = 256
"""Maximum size of an opening, including room for fields of later versions."""
COMMITMENT_PURPOSE = "averaging-commitment"
HAVE_PURPOSE = "averaging-have"
SEAL_PURPOSE = "averaging-seal"

Place = Annotated[int, msgspec.Meta(ge=0, lt=GROUP_MEMBERS_MAX)]
ChunkNumber = Annotated[int, msgspec.Meta(ge=0, lt=ITEMS_MAX // CHUNK_ITEMS + GROUP_MEMBERS_MAX)]
FACT_BODY_BYTES_MAX = 8_192


class CommitmentBody(msgspec.Struct, frozen=True, array_like=True, tag="commitment"):
    """Signed by a member with tensors: the roots of its parts for each owner, in the order of owners (a
    single root in an exchange), and its weight."""

    attempt: Hash
    weight: float
    roots: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=GROUP_MEMBERS_MAX)]


class HeldPart(msgspec.Struct, frozen=True, array_like=True):
    """The complete part of the member at `place`, under the commitment with this hash and weight."""

    place: Place
    weight: float
    commitment: Hash


class HaveBody(msgspec.Struct, frozen=True, array_like=True, tag="have"):
    """Signed by an owner: the members whose parts it holds and has checked, in the order of places."""

    attempt: Hash
    held: Annotated[tuple[HeldPart, ...], msgspec.Meta(max_length=GROUP_MEMBERS_MAX)]


class SealBody(msgspec.Struct, frozen=True, array_like=True, tag="seal"):
    """Signed by an owner: the root of its reduced part, under the commit with this hash."""

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

    In scatter it holds the sender's contribution, in gather the mean under `commit`. `checksum` is the BLAKE3
    of `data`. `data` is a view of the received message, whose bytes must not change afterwards.
    """

    attempt: Hash
    phase: Literal["scatter", "gather"]
    place: Place
    number: ChunkNumber
    commit: Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES)]
    checksum: Hash
    data: memoryview


class ChunkRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A request for missing data: the given gather chunks of the owner at `place`, and all known facts."""

    attempt: Hash
    place: Place
    chunks: Annotated[tuple[ChunkNumber, ...], msgspec.Meta(max_length=CHUNKS_ASKED_MAX)] = ()


class Holding(msgspec.Struct, frozen=True, array_like=True, tag="holding"):
    """A declaration that the sender holds all parts; the digest covers the commit and the bytes. The receiver
    succeeds once all reachable members have declared the same digest. If its own differs, it sends the facts
    behind its result."""

    attempt: Hash
    digest: Hash


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag="withdraw"):
    """The sender leaves this attempt; the others should not wait for it."""

    attempt: Hash


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """A report of how many bytes of the receiver's chunks arrived, and when the last one arrived since the
    sender's start."""

    attempt: Hash
    size_bytes: Count
    microseconds: Count


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="opening"):
    """The first message of every stream, without a payload: it names the attempt of all later messages.

    So a receiver that is not in the attempt only has to store a hash instead of a chunk. Also, a member shows
    immediately that it is present, even if its first chunk takes long.
    """

    attempt: Hash


AttemptMessage = Commitment | Have | Seal | Chunk | ChunkRequest | Holding | Withdraw | Arrived
Message = AttemptMessage | Opening


def checked_chunk(message: Chunk) -> memoryview:
    """Return the data of a chunk, after checking its size and checksum.

    Raises:
        RemoteProtocolError: the data is too long or does not match its checksum.
    """
    if message.data.nbytes > CHUNK_BYTES_MAX:
        raise RemoteProtocolError(f"a chunk of {message.data.nbytes} bytes")
    if blake3(message.data).digest() != message.checksum:
        raise RemoteProtocolError("a chunk that does not match its checksum")
    return message.data


def root_of(checksums: list[bytes]) -> bytes:
    """Return the hash that identifies a part: BLAKE3 over the checksums of its chunks, in order."""
    return blake3(b"".join(checksums)).digest()
