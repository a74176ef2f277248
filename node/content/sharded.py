"""Samples that are read from their shards on demand, so the data need not fit into memory.

The arrays only support picking samples by number, as numpy does, and return numpy arrays. Recently read
pieces are cached, up to `CACHE_BYTES`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from gossip.pieces.messages import PIECE_BYTES
from node.content.shards import Array, DataManifest, DataPart, PartName
from node.errors import PeerloomError

CACHE_BYTES = 128 << 20
"""Size of the cache of one data set. The micro-batches of a step may need as many pieces as they have
samples."""

Read = Callable[[bytes], bytes | None]


class DataMissing(PeerloomError):
    """A piece is missing or damaged, and must be fetched again."""


class ShardReader:
    """Reads samples of one data set, from any thread. `hashes` gives the hashes of a shard's pieces, for a
    part and a shard number; `read` returns a verified blob, or None if it is missing."""

    def __init__(
        self,
        manifest: DataManifest,
        hashes: Mapping[tuple[PartName, int], Sequence[bytes]],
        read: Read,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.manifest = manifest
        self.hashes = hashes
        self._read = read
        self._cached: OrderedDict[bytes, bytes] = OrderedDict()
        self._pieces_max = max(4, cache_bytes // PIECE_BYTES)
        self._lock = Lock()

    def records(self, part: DataPart, rows: Sequence[int]) -> Array:
        """Return these samples of a part as numpy records. Raises DataMissing."""
        size, count = self.manifest.sample_bytes, len(part.shards)
        found = bytearray(len(rows) * size)
        for place, row in enumerate(rows):
            if not 0 <= row < part.samples:
                raise IndexError(row)
            shard, begin = row % count, row // count * size
            hashes = self.hashes.get((part.name, shard))
            if hashes is None:
                raise DataMissing(f"shard {shard} of the {part.name} samples is not here")
            at = place * size
            for number in range(begin // PIECE_BYTES, (begin + size - 1) // PIECE_BYTES + 1):
                piece = self._piece(hashes[number])
                first = max(0, begin - number * PIECE_BYTES)
                chunk = piece[first : begin + size - number * PIECE_BYTES]
                found[at : at + len(chunk)] = chunk
                at += len(chunk)
        return np.frombuffer(bytes(found), self.manifest.dtype)

    def _piece(self, name: bytes) -> bytes:
        with self._lock:
            data = self._cached.get(name)
            if data is not None:
                self._cached.move_to_end(name)
                return data
        data = self._read(name)
        if data is None:
            raise DataMissing(f"a piece of the data is not here: {name.hex()[:16]}")
        with self._lock:
            self._cached[name] = data
            while len(self._cached) > self._pieces_max:
                self._cached.popitem(last=False)
        return data


class ShardedArray:
    """One array of a part, (N, ...)."""

    def __init__(
        self,
        reader: ShardReader,
        part: DataPart,
        column: str,
        kind: str,
        shape: tuple[int, ...],
        window: slice | None,
    ) -> None:
        """`window` selects the bytes of a text sample that belong to this array."""
        self._reader = reader
        self._part = part
        self._column = column
        self._window = window
        self.dtype = np.dtype(kind)
        self.shape = (part.samples, *shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        """Return the samples of a slice or of a list of numbers, or a single sample for one number. Raises
        DataMissing."""
        if isinstance(rows, int | np.integer):
            one: Array = self[[int(rows)]][0]
            return one
        wanted = range(*rows.indices(len(self))) if isinstance(rows, slice) else [int(row) for row in rows]
        found: Array = self._reader.records(self._part, wanted)[self._column]
        if self.dtype.kind == "b":
            found = found.view(np.uint8) != 0  # an untrusted peer's bytes may have values other than 0 and 1
        return found if self._window is None else found[:, self._window]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)

    def max(self) -> Any:
        """Return the largest value. The array is read in portions."""
        step = max(1, PIECE_BYTES // max(1, self._reader.manifest.sample_bytes)) * 16
        return max(self[first : first + step].max() for first in range(0, len(self), step))


class ShardedArrays(Mapping[str, ShardedArray]):
    """The arrays of a part by name."""

    def __init__(self, reader: ShardReader, part: DataPart) -> None:
        manifest = reader.manifest
        if manifest.window:
            shape, slices = (manifest.window,), {"x": slice(0, -1), "y": slice(1, None)}
            self._arrays = {
                name: ShardedArray(reader, part, "text", "|u1", shape, window)
                for name, window in slices.items()
            }
        else:
            self._arrays = {
                column.name: ShardedArray(reader, part, column.name, column.kind, column.shape, None)
                for column in manifest.columns
            }

    def __getitem__(self, name: str) -> ShardedArray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
