"""The second half of an attempt: this owner's reduced part, and the reduced parts of the others."""

from collections.abc import Iterator

import numpy as np
from blake3 import blake3

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from gossip.averaging.codecs import Codec, view_of
from gossip.averaging.group import Group, Owner
from gossip.averaging.messages import Chunk, SealBody, checked_chunk
from gossip.averaging.parts import Contributed, Incoming, ReducedPart, chunk_count, chunk_range
from gossip.averaging.robust.reduction import Reduction, Vector


class Gather:
    """The partial result: `vector`, and a `ReducedPart` for each owner. An exchange has no parts."""

    def __init__(self, group: Group, owners: dict[int, Owner], place: int, codec: Codec) -> None:
        self._attempt = group.id
        self._place = place
        self._codec = codec
        self._is_exchange = group.terms.mode == "exchange"
        self._sources: list[Contributed] = []
        self._chunks: Iterator[Vector] = iter(())
        self._reduced_count = 0
        self.parts = {} if self._is_exchange else {p: ReducedPart(owner) for p, owner in owners.items()}
        self.vector: Vector = np.empty(group.terms.items, group.terms.dtype)
        self.commit = b""
        """Hash of the commit; empty until the commit is known."""

    @property
    def is_whole(self) -> bool:
        return all(part.is_whole for part in self.parts.values())

    @property
    def incomplete(self) -> tuple[int, ...]:
        return tuple(place for place, part in self.parts.items() if not part.is_whole)

    def begin(self, commit: bytes, mine: Owner | None, sources: list[Contributed], reduce: Reduction) -> None:
        """Begin to gather, now that the commit is known, and thereby the parts that this member reduces."""
        self.commit = commit
        if mine is not None:
            self._sources, self._chunks = sources, reduce(sources)
        if self._is_exchange and mine is not None:
            for number, values in enumerate(self._chunks):
                begin, end = chunk_range(mine, number)
                self.vector[begin:end] = values
            self._sources.clear()
        for part in self.parts.values():
            if part.commit not in (b"", commit):
                part.forget()
                part.root = None
            for number, data in part.early.items():
                begin, end = chunk_range(part.owner, number)
                self._put(part, number, data, self._codec.decode(data, end - begin))
            part.early.clear()
            part.commit = commit

    def reduce_to(self, number: int) -> bool:
        """Reduce this member's part up to and including a chunk. Return False if the mean is not finite."""
        part = self.parts[self._place]
        while self._reduced_count <= number:
            begin, end = chunk_range(part.owner, self._reduced_count)
            values = next(self._chunks)
            if not np.isfinite(values).all():
                return False
            data = self._codec.encode(values)
            if not self._codec.is_exact:
                values = self._codec.decode(data, end - begin)
            self._put(part, self._reduced_count, data, values)
            part.checksums[self._reduced_count] = blake3(data).digest()
            for source in self._sources:
                if isinstance(source.source, Incoming):
                    source.source.drop(self._reduced_count)
            self._reduced_count += 1
        return True

    def seal(self) -> bytes | None:
        """Finish this member's part. Return the body to sign, or None if the mean is not finite."""
        part = self.parts[self._place]
        if not self.reduce_to(chunk_count(part.owner) - 1):
            return None
        part.root = part.computed_root
        part.is_whole = True
        self._sources.clear()
        return encode(SealBody(self._attempt, self.commit, part.root))

    def chunk(self, place: int, number: int) -> Chunk:
        """Return a reduced chunk that this member holds, for another member."""
        part = self.parts[place]
        begin, end = chunk_range(part.owner, number)
        data = self._codec.encode(self.vector[begin:end]) if self._codec.is_exact else part.coded[number]
        return Chunk(self._attempt, "gather", place, number, self.commit, part.checksums[number], data)

    def take_chunk(self, message: Chunk) -> int:
        """Keep a reduced chunk. Return its size in bytes, or 0 for a repeat. Raises RemoteProtocolError."""
        part = self.parts[message.place]
        begin, end = chunk_range(part.owner, message.number)
        if part.is_whole or message.number in part.checksums:
            return 0
        if message.commit != (self.commit or part.commit or message.commit):
            raise RemoteProtocolError("a reduced chunk under a different commit")
        data = checked_chunk(message)
        values = self._codec.decode(data, end - begin)
        part.commit = message.commit
        if self.commit:
            self._put(part, message.number, data, values)
        else:
            part.early[message.number] = data
        part.checksums[message.number] = message.checksum
        return data.nbytes

    def check(self, body: SealBody, place: int) -> None:
        """Check that the member at `place` may send this seal. Raises RemoteProtocolError otherwise."""
        part = self.parts.get(place)
        if part is None or place == self._place or body.attempt != self._attempt:
            raise RemoteProtocolError("a seal of a member that reduces nothing, or of another attempt")

    def take_seal(self, body: SealBody, place: int) -> None:
        """Keep a checked seal. Raises RemoteProtocolError if it belongs to a different commit."""
        part = self.parts[place]
        if body.commit != (self.commit or part.commit or body.commit):
            raise RemoteProtocolError("a seal under a different commit")
        part.commit, part.root = body.commit, body.root

    def digest(self) -> bytes:
        """The hash that names the commit and the bytes of the result."""
        if self._is_exchange:
            return blake3(self.commit + blake3(view_of(self.vector)).digest()).digest()
        return blake3(self.commit + b"".join(part.root or b"" for part in self.parts.values())).digest()

    def close(self) -> None:
        """Release all memory except the result."""
        self._sources.clear()
        self.parts.clear()

    def _put(self, part: ReducedPart, number: int, data: memoryview, values: Vector) -> None:
        begin, end = chunk_range(part.owner, number)
        self.vector[begin:end] = values
        if not self._codec.is_exact:
            part.coded[number] = data
