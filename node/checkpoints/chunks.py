"""A stage's arenas to chunks and back, and reading any range of one from its chunks.

Cutting, restoring and reading go a few chunks at a time, so that a thread of the executor is never taken for
long: each has an iterator (`cutting`, `restoring`), which `finish` drives from the event loop.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from blake3 import blake3

from crypto.errors import RemoteProtocolError
from node.content.blobs import BlobsMissing
from node.protocols.checkpoint import CHUNK_BYTES, StatePart, chunk_sizes
from node.seams import Executor
from node.storage.blobs import HASH_BYTES

T = TypeVar("T")

Put = Callable[[memoryview], bytes]
"""Keeps a blob; its hash."""
Read = Callable[[bytes], bytes | None]
"""A blob by its hash, None where it is not here."""

TURN_CHUNKS = 64
"""How many are done in one turn of a thread: some 50 ms."""


def cut_state(parameters: memoryview, moments: memoryview, put: Put) -> StatePart:
    """Store two arenas in chunks; return their hashes. The arenas must not change meanwhile."""
    return _last(cutting(parameters, moments, put))


def cutting(parameters: memoryview, moments: memoryview, put: Put) -> Iterator[StatePart | None]:
    """`cut_state` in turns: yields None while there is more to do, lastly the part."""
    digest = blake3()
    hashes = [bytearray(), bytearray()]
    done = 0
    for kind, arena in enumerate((parameters.cast("B"), moments.cast("B"))):
        for start in range(0, len(arena), CHUNK_BYTES):
            chunk = arena[start : start + CHUNK_BYTES]
            if kind == 0:
                digest.update(chunk)
            hashes[kind] += put(chunk)
            done += 1
            if not done % TURN_CHUNKS:
                yield None
    yield StatePart(parameters.nbytes, moments.nbytes, digest.digest(), bytes(hashes[0]), bytes(hashes[1]))


def restore_state(part: StatePart, read: Read, parameters: memoryview, moments: memoryview) -> None:
    """Restore two arenas from a part's chunks.

    Raises:
        RemoteProtocolError: the arenas have another size, or the parameters another digest, than the part
            says; written bytes stay in the arenas.
        BlobsMissing: a chunk is not here.
    """
    _last(restoring(part, read, parameters, moments))


def restoring(
    part: StatePart, read: Read, parameters: memoryview, moments: memoryview
) -> Iterator[StatePart | None]:
    """`restore_state` in turns: yields None while there is more to do, lastly the part."""
    if (parameters.nbytes, moments.nbytes) != (part.parameters_bytes, part.moments_bytes):
        raise RemoteProtocolError(
            f"a state of {part.parameters_bytes} and {part.moments_bytes} bytes for a stage of "
            f"{parameters.nbytes} and {moments.nbytes}"
        )
    digest = blake3()
    done = 0
    for kind, (arena, hashes) in enumerate(((parameters, part.parameters), (moments, part.moments))):
        view, start = arena.cast("B"), 0
        for name, size in chunk_sizes(hashes, arena.nbytes):
            data = _read(read, name, size)
            view[start : start + size] = data
            if kind == 0:
                digest.update(data)
            start += size
            done += 1
            if not done % TURN_CHUNKS:
                yield None
    if digest.digest() != part.digest:
        raise RemoteProtocolError("parameters with another digest than their checkpoint says")
    yield part


def verifying(names: Iterable[bytes], read: Read) -> Iterator[int | None]:
    """Read blobs only to find out whether they are whole: yields None between, lastly how many are not."""
    missing = 0
    for number, name in enumerate(names, 1):
        missing += read(name) is None
        if not number % TURN_CHUNKS:
            yield None
    yield missing


class ArenaReader:
    """Reads any range of one arena from its chunks: `hashes` in order, `size` bytes in all.

    So a checkpoint can be read for other cuts of the model.
    """

    def __init__(self, hashes: bytes, size: int, read: Read) -> None:
        self.size = size
        self._hashes = hashes
        self._get = read

    def read(self, start: int, length: int) -> Iterator[memoryview]:
        """`length` bytes from `start`, in pieces of at most a chunk. Raises BlobsMissing."""
        end = start + length
        if not 0 <= start <= end <= self.size:
            raise RemoteProtocolError(f"bytes {start} to {end} of an arena of {self.size}")
        while start < end:
            number, offset = divmod(start, CHUNK_BYTES)
            name = self._hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]
            chunk = _read(self._get, name, min(CHUNK_BYTES, self.size - number * CHUNK_BYTES))
            piece = memoryview(chunk)[offset : offset + end - start]
            yield piece
            start += len(piece)


async def finish(executor: Executor, turns: Iterator[T | None]) -> T:
    """Drive an iterator to its result in the executor, a turn at a time, so that others get theirs."""
    turn: Callable[[], T | None] = partial(next, turns, None)
    while True:
        result = await executor.run(turn)
        if result is not None:
            return result


def _last(turns: Iterator[T | None]) -> T:
    *_, result = turns
    assert result is not None, "an iterator of turns ends with its result"
    return result


def _read(read: Read, name: bytes, size: int) -> bytes:
    data = read(name)
    if data is None:
        raise BlobsMissing((name,), "it is not on this disk, or was damaged")
    if len(data) != size:
        raise RemoteProtocolError(f"a chunk of {len(data)} bytes where {size} belong")
    return data
