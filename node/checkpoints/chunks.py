"""Cuts a stage's arenas into chunks, restores them from chunks, and reads any range of an arena from its
chunks.

Cutting, restoring and reading process a few chunks at a time, so that they never occupy a thread of the
executor for long. Each has an iterator (`cutting`, `restoring`), which `finish` drives from the event loop.
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
"""Stores a blob and returns its hash."""
Read = Callable[[bytes], bytes | None]
"""Returns a blob by its hash; None if it is not here."""

TURN_CHUNKS = 64
"""Number of chunks processed in one call of a thread: about 50 ms."""


def cut_state(parameters: memoryview, moments: memoryview, put: Put) -> StatePart:
    """Store two arenas in chunks; return the part that lists their hashes. The arenas must not change
    meanwhile."""
    return _last(cutting(parameters, moments, put))


def cutting(parameters: memoryview, moments: memoryview, put: Put) -> Iterator[StatePart | None]:
    """Run `cut_state` in steps: yields None between steps, and the part at the end."""
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
        RemoteProtocolError: the arenas' sizes or the parameters' digest differ from those in the part;
            bytes already written stay in the arenas.
        BlobsMissing: a chunk is not here.
    """
    _last(restoring(part, read, parameters, moments))


def restoring(
    part: StatePart, read: Read, parameters: memoryview, moments: memoryview
) -> Iterator[StatePart | None]:
    """Run `restore_state` in steps: yields None between steps, and the part at the end."""
    if (parameters.nbytes, moments.nbytes) != (part.parameters_bytes, part.moments_bytes):
        raise RemoteProtocolError(
            f"the state has {part.parameters_bytes} and {part.moments_bytes} bytes, but "
            f"the stage has {parameters.nbytes} and {moments.nbytes}"
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
        raise RemoteProtocolError("the parameters' digest differs from that in their checkpoint")
    yield part


def verifying(names: Iterable[bytes], read: Read) -> Iterator[int | None]:
    """Read blobs only to check them. Yields None between steps, and the number of missing or damaged ones at
    the end."""
    missing = 0
    for number, name in enumerate(names, 1):
        missing += read(name) is None
        if not number % TURN_CHUNKS:
            yield None
    yield missing


class ArenaReader:
    """Reads any range of one arena from its chunks: `hashes` in order, `size` bytes in total.

    This allows reading a checkpoint for a different cut of the model.
    """

    def __init__(self, hashes: bytes, size: int, read: Read) -> None:
        self.size = size
        self._hashes = hashes
        self._get = read

    def read(self, start: int, length: int) -> Iterator[memoryview]:
        """Yield `length` bytes from `start`, in pieces of at most one chunk. Raises BlobsMissing."""
        end = start + length
        if not 0 <= start <= end <= self.size:
            raise RemoteProtocolError(f"bytes {start} to {end} are outside an arena of {self.size} bytes")
        while start < end:
            number, offset = divmod(start, CHUNK_BYTES)
            name = self._hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]
            chunk = _read(self._get, name, min(CHUNK_BYTES, self.size - number * CHUNK_BYTES))
            piece = memoryview(chunk)[offset : offset + end - start]
            yield piece
            start += len(piece)


async def finish(executor: Executor, turns: Iterator[T | None]) -> T:
    """Drive an iterator to its result in the executor, one step at a time, so that other calls can run in
    between."""
    turn: Callable[[], T | None] = partial(next, turns, None)
    while True:
        result = await executor.run(turn)
        if result is not None:
            return result


def _last(turns: Iterator[T | None]) -> T:
    *_, result = turns
    assert result is not None, "an iterator of steps ends with its result"
    return result


def _read(read: Read, name: bytes, size: int) -> bytes:
    data = read(name)
    if data is None:
        raise BlobsMissing((name,), "it is not on this disk, or was damaged")
    if len(data) != size:
        raise RemoteProtocolError(f"a chunk has {len(data)} bytes in place of {size}")
    return data
