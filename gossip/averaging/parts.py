"""Buffers of one averaging attempt: the sender's own vector, an owner's received parts, and a member's
reduced parts."""

from dataclasses import dataclass, field

from blake3 import blake3

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.averaging.codecs import CHUNK_ITEMS, Codec
from gossip.averaging.group import Owner
from gossip.averaging.messages import root_of
from gossip.averaging.robust.reduction import Vector


def chunk_count(owner: Owner) -> int:
    """Return the number of chunks of an owner's part."""
    return -(-(owner.end - owner.begin) // CHUNK_ITEMS)


def chunk_range(owner: Owner, number: int) -> tuple[int, int]:
    """Return the start and end of a chunk in the vector, in items. Raises RemoteProtocolError if the chunk
    does not exist."""
    begin = owner.begin + number * CHUNK_ITEMS
    if begin >= owner.end:
        raise RemoteProtocolError(f"chunk {number} of a part of {chunk_count(owner)} chunks")
    return begin, min(begin + CHUNK_ITEMS, owner.end)


class OutgoingParts:
    """The encoded parts of this member's own vector.

    Chunks are encoded when they are sent, and only their checksums are kept. In an exchange, where every
    member gets the same bytes, the chunks are kept too.
    """

    def __init__(self, vector: Vector, codec: Codec, owners: tuple[Owner, ...], is_exchange: bool) -> None:
        self._vector = vector
        self._codec = codec
        self._owners = owners
        self._kept: dict[int, memoryview] | None = {} if is_exchange else None
        self._checksums: dict[tuple[int, int], bytes] = {}

    def chunk(self, owner: Owner, number: int) -> tuple[memoryview, bytes]:
        """Return the encoded bytes of a chunk, and their checksum."""
        begin, end = chunk_range(owner, number)
        if self._kept is not None and number in self._kept:
            return self._kept[number], self._checksums[owner.begin, number]
        data = self._codec.encode(self._vector[begin:end])
        if self._kept is not None:
            self._kept[number] = data
        checksum = self._checksums.get((owner.begin, number))
        if checksum is None:
            checksum = self._checksums[owner.begin, number] = blake3(data).digest()
        return data, checksum

    def values(self, owner: Owner, number: int) -> Vector:
        """Return the values that a receiver of that chunk decodes."""
        begin, end = chunk_range(owner, number)
        if self._codec.is_exact:
            return self._vector[begin:end]
        return self._codec.decode(self.chunk(owner, number)[0], end - begin)

    def roots(self) -> tuple[bytes, ...]:
        """Return the root of each part, in the order of owners; in an exchange, a single root for all."""
        owners = self._owners if self._kept is None else self._owners[:1]
        return tuple(self._root(owner) for owner in owners)

    def _root(self, owner: Owner) -> bytes:
        checksums = []
        for number in range(chunk_count(owner)):
            if (owner.begin, number) not in self._checksums:
                self.chunk(owner, number)
            checksums.append(self._checksums[owner.begin, number])
        return root_of(checksums)


class Incoming:
    """The encoded chunks of an owner's part that one sender has sent."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._data: dict[int, memoryview] = {}
        self._checksums: dict[int, bytes] = {}

    @property
    def root(self) -> bytes | None:
        """The root of the received chunks; None while some are missing."""
        if len(self._checksums) < chunk_count(self._owner):
            return None
        return root_of([self._checksums[number] for number in range(len(self._checksums))])

    def put(self, number: int, data: memoryview, checksum: bytes, codec: Codec) -> bool:
        """Keep a chunk. Return False for a repeat. Raises RemoteProtocolError if it cannot be decoded."""
        begin, end = chunk_range(self._owner, number)
        if number in self._checksums:
            return False
        codec.decode(data, end - begin)
        self._data[number] = data
        self._checksums[number] = checksum
        return True

    def values(self, number: int, codec: Codec) -> Vector:
        begin, end = chunk_range(self._owner, number)
        return codec.decode(self._data[number], end - begin)

    def drop(self, number: int) -> None:
        """Release a chunk that has been reduced."""
        self._data.pop(number, None)


@dataclass
class ReducedPart:
    """One owner's reduced part, as far as this member has received it.

    `commit` is the commit of its chunks. Chunks that arrive before this member knows the commit wait in
    `early`.
    """

    owner: Owner
    commit: bytes = b""
    checksums: dict[int, bytes] = field(default_factory=dict)
    early: dict[int, memoryview] = field(default_factory=dict)
    coded: dict[int, memoryview] = field(default_factory=dict)
    """Chunks of a lossy codec, kept for other members: encoding the decoded values again may give different
    bytes."""
    root: bytes | None = None
    """The root that the owner has sealed."""
    is_whole: bool = False

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(number for number in range(chunk_count(self.owner)) if number not in self.checksums)

    @property
    def computed_root(self) -> bytes:
        """Return the root of the chunks, all of which must be present."""
        return root_of([self.checksums[number] for number in range(chunk_count(self.owner))])

    def check(self) -> None:
        """Set `is_whole` if all chunks are present. If they differ from what the owner sealed, discard them
        and raise RemoteProtocolError."""
        if self.is_whole or self.root is None or len(self.checksums) < chunk_count(self.owner):
            return
        if self.computed_root != self.root:
            self.forget()
            raise RemoteProtocolError("a reduced part that differs from what its owner sealed")
        self.is_whole = True

    def forget(self) -> None:
        self.checksums.clear()
        self.early.clear()
        self.coded.clear()
        self.is_whole = False


@dataclass(frozen=True)
class Contributed:
    """One member's part in a reduction; implements `gossip.averaging.robust.reduction.PartContribution`."""

    peer: PeerId
    weight: float
    chunk_count: int
    source: Incoming | OutgoingParts
    owner: Owner
    codec: Codec

    def chunk(self, number: int) -> Vector:
        if isinstance(self.source, OutgoingParts):
            values = self.source.values(self.owner, number)
        else:
            values = self.source.values(number, self.codec)
        values = values.view()
        values.flags.writeable = False
        return values
