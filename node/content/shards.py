"""The transfer format of a data set: a manifest, shards of samples, and pieces of 256 KiB, each identified by
its hash.

A shard is the concatenation of its samples. A sample is the numbers of all its columns in order,
little-endian. So nothing needs parsing, and any sample can be read alone. A shard is a hash tree with two
levels: its root is the hash of a list, and the list holds the hashes of the shard's pieces. The manifest
holds the roots, and its own hash identifies the data set. That hash is part of a run's manifest, which the
requester signs. Lists and pieces are blobs (`node.storage.blobs`), and are checked against their hash
whenever they are read.

Row r of a part is row r // S of shard r % S. Neighbouring rows of a user's file thus go to different shards,
so a file sorted by class does not make shards with a single class. S is a power of two that divides
`partition.plan.assignment.LANES`.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from gossip.pieces.messages import PIECE_BYTES, PIECES_MAX
from node.storage.blobs import BLOB_BYTES_MAX, HASH_BYTES
from partition.plan.assignment import LANES

Array = np.ndarray[Any, np.dtype[Any]]
PartName = Literal["train", "validation", "test"]
PARTS: tuple[PartName, ...] = get_args(PartName)
Kind = Literal[
    "|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The number types of data, by numpy's names."""

SHARD_BYTES_MIN = 1 << 20
"""A set smaller than twice this size is a single shard, and every trainer gets all of it."""
SHARD_PIECES_MAX = BLOB_BYTES_MAX // HASH_BYTES
"""Maximum number of pieces in a shard, because its list must fit into one blob."""
COLUMNS_MAX = 64
SAMPLE_BYTES_MAX = 1 << 30
MANIFEST_BYTES_MAX = 64 * 1024
_CHUNK_BYTES = 4 << 20

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Side = Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
Put = Callable[[bytes], bytes]
"""Stores a blob; returns its hash."""


class SampleColumn(msgspec.Struct, frozen=True, array_like=True):
    """An array of samples: its name, numpy's name of its type, and the shape of one sample."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=120)]
    kind: Kind
    shape: Annotated[tuple[Side, ...], msgspec.Meta(max_length=16)]

    @property
    def size_bytes(self) -> int:
        """Return the size of one sample."""
        return prod(self.shape) * np.dtype(self.kind).itemsize


class DataPart(msgspec.Struct, frozen=True, array_like=True):
    """Training, validation or test samples: their number, and the root of each shard."""

    name: PartName
    samples: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    shards: Annotated[tuple[Hash, ...], msgspec.Meta(min_length=1, max_length=LANES)]

    def rows(self, shard: int) -> int:
        """Return how many samples a shard has."""
        count = len(self.shards)
        return (self.samples - shard + count - 1) // count


class DataManifest(msgspec.Struct, frozen=True, array_like=True):
    """A data set. `window` is the number of bytes in a sample of text, or 0 for other data; text has one
    column, which holds a window and the byte after it. `label_values` is the number of different labels, if
    the form of the data gives it."""

    columns: Annotated[tuple[SampleColumn, ...], msgspec.Meta(min_length=1, max_length=COLUMNS_MAX)]
    parts: Annotated[tuple[DataPart, ...], msgspec.Meta(min_length=2, max_length=len(PARTS))]
    window: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    label_values: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if names != [name for name in PARTS if name in names] or {"train", "test"} - set(names):
            raise ValueError("parts are train, optionally validation, and test")
        if len({column.name for column in self.columns}) != len(self.columns):
            raise ValueError("two columns have the same name")
        if not 0 < self.sample_bytes <= SAMPLE_BYTES_MAX:
            raise ValueError("samples of an impossible size")
        for part in self.parts:
            if LANES % len(part.shards) or len(part.shards) > part.samples:
                raise ValueError("the shards cannot be dealt to lanes evenly")
            if self.pieces_of(part, 0) > SHARD_PIECES_MAX:
                raise ValueError("a shard with too many pieces")
        if self.window and (len(self.columns) != 1 or self.columns[0].shape != (self.window + 1,)):
            raise ValueError("text must be one column of bytes")
        if self.pieces > PIECES_MAX:
            raise ValueError(f"more than {PIECES_MAX * PIECE_BYTES >> 30} GiB of samples")

    @property
    def sample_bytes(self) -> int:
        return sum(column.size_bytes for column in self.columns)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of a sample in a shard."""
        return np.dtype([(column.name, column.kind, column.shape) for column in self.columns])

    @property
    def pieces(self) -> int:
        """Return the number of pieces of all shards of all parts. The pieces are numbered in this order."""
        return sum(self.pieces_of(part, shard) for part in self.parts for shard in range(len(part.shards)))

    @property
    def size_bytes(self) -> int:
        """Return the size of all samples."""
        return self.sample_bytes * sum(part.samples for part in self.parts)

    def pieces_of(self, part: DataPart, shard: int) -> int:
        """Return how many pieces a shard has."""
        return -(-part.rows(shard) * self.sample_bytes // PIECE_BYTES)

    def part(self, name: PartName) -> DataPart | None:
        return next((part for part in self.parts if part.name == name), None)

    def shards(self) -> Iterator[tuple[DataPart, int, int]]:
        """Yield for every shard: its part, its number within the part, and the number of its first piece."""
        first = 0
        for part in self.parts:
            for shard in range(len(part.shards)):
                yield part, shard, first
                first += self.pieces_of(part, shard)

    def piece_sizes(self, part: DataPart, shard: int) -> list[int]:
        """Return the size of each piece of a shard."""
        size = part.rows(shard) * self.sample_bytes
        count = self.pieces_of(part, shard)
        return [PIECE_BYTES] * (count - 1) + [size - PIECE_BYTES * (count - 1)]


def shard_count(samples: int, size_bytes: int) -> int:
    """Return the number of shards for a part with this many samples and bytes."""
    most = min(LANES, samples, max(1, size_bytes // SHARD_BYTES_MIN))
    return int(2 ** (most.bit_length() - 1))


def hashes_of(listed: bytes, count: int) -> list[bytes]:
    """Return the hashes in a shard's list, which must have `count` entries. Raises RemoteProtocolError."""
    if len(listed) != count * HASH_BYTES:
        raise RemoteProtocolError("a list with a different number of pieces than in the manifest")
    return [listed[start : start + HASH_BYTES] for start in range(0, len(listed), HASH_BYTES)]


def kind_of(dtype: "np.dtype[Any]") -> Kind | None:
    """Return the transfer type for numbers of this type, or None if they cannot be sent."""
    little = dtype.newbyteorder("<") if dtype.itemsize > 1 else dtype
    return next((kind for kind in KINDS if kind == little.str), None)


def pack(
    parts: Mapping[PartName, Mapping[str, Array]], put: Put, *, window: int = 0, label_values: int = 0
) -> tuple[DataManifest, bytes]:
    """Cut arrays by name, each (N, ...), into shards and store their blobs with `put`. Return the manifest
    and its hash.

    Only a few MiB are in memory at a time, so the arrays may be mapped files. For text, `parts` have x and y,
    which differ by y's last byte.

    Raises:
        ValueError: numbers of a type that cannot be sent, or too many of them.
        OSError: as raised by `put`.
    """
    first = parts["train"]
    if window:
        columns: tuple[SampleColumn, ...] = (SampleColumn("text", "|u1", (window + 1,)),)
    else:
        columns = tuple(_column(name, array) for name, array in first.items())
    sample_bytes = sum(column.size_bytes for column in columns)
    dtype = np.dtype([(column.name, column.kind, column.shape) for column in columns])
    made = []
    for name in PARTS:
        if (arrays := parts.get(name)) is None:
            continue
        samples = len(next(iter(arrays.values())))
        count = shard_count(samples, samples * sample_bytes)
        roots = []
        for shard in range(count):
            records = _records(arrays, dtype, shard, count, max(1, _CHUNK_BYTES // sample_bytes), window)
            roots.append(put(b"".join(put(piece) for piece in _pieces(records))))
        made.append(DataPart(name, samples, tuple(roots)))
    manifest = DataManifest(columns, tuple(made), window, label_values)
    return manifest, put(encode(manifest))


def _column(name: str, array: Array) -> SampleColumn:
    kind = kind_of(array.dtype)
    if kind is None:
        raise ValueError(f"{name}: numbers of type {array.dtype} cannot be sent")
    return SampleColumn(name, kind, tuple(map(int, array.shape[1:])))


def _records(
    arrays: Mapping[str, Array], dtype: "np.dtype[Any]", shard: int, count: int, step: int, window: int
) -> Iterator[bytes]:
    samples = len(next(iter(arrays.values())))
    for first in range(shard, samples, step * count):
        rows = slice(first, min(samples, first + step * count), count)
        records = np.zeros(len(range(*rows.indices(samples))), dtype)
        if window:
            records["text"][:, :window] = arrays["x"][rows]
            records["text"][:, window] = arrays["y"][rows][:, -1]
        else:
            for name in dtype.names or ():
                records[name] = arrays[name][rows]
        yield records.tobytes()


def _pieces(chunks: Iterator[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for chunk in chunks:
        held += chunk
        whole = len(held) // PIECE_BYTES * PIECE_BYTES
        for start in range(0, whole, PIECE_BYTES):
            yield bytes(held[start : start + PIECE_BYTES])
        del held[:whole]
    if held:
        yield bytes(held)
