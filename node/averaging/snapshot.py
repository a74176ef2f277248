"""A participant's whole state as named arrays: its format, its chunks, and its checks.

It is for peers that join late. It consists of bytes and a table: nothing in it is executed or unpickled, and
the size of an unknown peer's state is limited to what this peer expects of its own model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.claims import Count
from node.averaging.signature import TENSORS_MAX

CHUNK_BYTES = 1 << 20
STATE_BYTES_MAX = 1 << 36
"""64 GiB: parameters and moments of a model that one machine trains."""
CHUNKS_MAX = STATE_BYTES_MAX // CHUNK_BYTES
NAME_LENGTH_MAX = 512
DIMENSIONS_MAX = 16
SAMPLE_CHUNKS_MAX = 8
"""Number of chunks of each state that are compared with others': 8 MiB, two million values. If a larger state
has false values in a share p of its chunks, it passes with a probability of (1 - p)^8."""

BFLOAT16_EXPONENT = np.uint16(0x7F80)
"""A bfloat16 with all these bits set is an infinity or not a number."""

Array = NDArray[Any]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Size = Annotated[int, msgspec.Meta(ge=0, le=STATE_BYTES_MAX)]
Kind = Literal["float16", "bfloat16", "float32", "float64", "int64", "int32", "uint8", "bool"]
ITEM_BYTES: dict[str, int] = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "bool": 1,
}  # fmt: skip


class ArrayRow(msgspec.Struct, frozen=True, array_like=True):
    """One array; its bytes follow those of the array before it."""

    name: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
    dtype: Kind
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class SnapshotTable(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a snapshot: the global step, the number of rounds averaged, the arrays, and the hash of
    each chunk of their bytes. `lineage` identifies the history: it is equal at peers that made the same
    steps."""

    step: Count
    rounds: Count
    lineage: Hash
    rows: Annotated[tuple[ArrayRow, ...], msgspec.Meta(max_length=TENSORS_MAX)]
    chunks: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=CHUNKS_MAX)]

    @property
    def size_bytes(self) -> int:
        return sum(row.size_bytes for row in self.rows)

    @property
    def digest(self) -> bytes:
        """The digest of the bytes. Snapshots with equal digests can be fetched from all their holders
        together."""
        return blake3(msgspec.msgpack.encode((self.rows, self.chunks))).digest()


@dataclass(frozen=True)
class Snapshot:
    """A table with its bytes, and the peers from which they were fetched."""

    table: SnapshotTable
    data: NDArray[np.uint8] = field(repr=False)
    holders: tuple[PeerId, ...] = ()

    def chunk(self, number: int) -> memoryview:
        """Return the bytes of a chunk."""
        return self.data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES].data

    def arrays(self) -> dict[str, tuple[ArrayRow, NDArray[np.uint8]]]:
        """Return each array's row and bytes, by name."""
        found: dict[str, tuple[ArrayRow, NDArray[np.uint8]]] = {}
        at = 0
        for row in self.table.rows:
            found[row.name] = (row, self.data[at : at + row.size_bytes])
            at += row.size_bytes
        return found


def make_snapshot(
    step: int, rounds: int, lineage: bytes, arrays: Mapping[str, tuple[str, tuple[int, ...], Array]]
) -> Snapshot:
    """Join named arrays, each given as (type, shape, bytes as uint8), and hash their chunks. This takes about
    0.3 ms per MB, so do not call it on the event loop."""
    rows = tuple(ArrayRow(name, dtype, shape) for name, (dtype, shape, _) in arrays.items())  # type: ignore[arg-type]  # checked when it is decoded
    parts = [data.reshape(-1).view(np.uint8) for _, _, data in arrays.values()]
    data = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    chunks = tuple(
        blake3(data[at : at + CHUNK_BYTES].data).digest() for at in range(0, data.size, CHUNK_BYTES)
    )
    return Snapshot(SnapshotTable(step, rounds, lineage, rows, chunks), data)


def is_finite(dtype: str, data: Array) -> bool:
    """Return whether all values of an array, given as its bytes, are finite. They are checked piece by piece,
    to use little memory. This takes about 0.5 ms per MB, so do not call it on the event loop."""
    for at in range(0, data.size, CHUNK_BYTES):
        piece = data[at : at + CHUNK_BYTES]
        if dtype == "bfloat16":
            exponents = piece.view(np.uint16) & BFLOAT16_EXPONENT
            if (exponents == BFLOAT16_EXPONENT).any():
                return False
        elif dtype.startswith("float") and not np.isfinite(piece.view(dtype)).all():
            return False
    return True


def check_finite(snapshot: Snapshot) -> str:
    """Return an error that names an array with a non-finite value, for people; empty if there is none."""
    for name, (row, data) in snapshot.arrays().items():
        if not is_finite(row.dtype, data):
            return f"the state of others is not finite in {name[:80]}"
    return ""


def sampled_chunks(count: int, rng: Random) -> list[int]:
    """Return which of `count` chunks of a state are compared: SAMPLE_CHUNKS_MAX random chunks, spread over
    the state."""
    if count <= SAMPLE_CHUNKS_MAX:
        return list(range(count))
    edges = [count * part // SAMPLE_CHUNKS_MAX for part in range(SAMPLE_CHUNKS_MAX + 1)]
    return [rng.randrange(first, end) for first, end in pairwise(edges)]


def numbers_of(table: SnapshotTable, chunks: Mapping[int, Array]) -> dict[str, NDArray[np.float32]]:
    """Return the values of a state in these chunks by kind: parameters, and each quantity that an optimizer
    or a strategy remembers. Do not call it on the event loop."""
    found: dict[str, list[NDArray[np.float32]]] = {}
    end = 0
    for row in table.rows:
        begin, end, item = end, end + row.size_bytes, ITEM_BYTES[row.dtype]
        for number in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            if (chunk := chunks.get(number)) is None:
                continue
            edge = number * CHUNK_BYTES
            first = begin + -(-max(0, edge - begin) // item) * item - edge
            count = (min(end - edge, CHUNK_BYTES) - first) // item
            if count > 0:
                data = chunk[first : first + count * item]
                found.setdefault(_kind_of(row.name), []).append(_as_float32(row.dtype, data))
    return {kind: np.concatenate(parts) for kind, parts in found.items()}


def _kind_of(name: str) -> str:
    """Return the kind of an array in its state: `tensor/NAME`, `memory/NAME/KEY` and `outer/NAME` of
    `node.optimizer.state`, or `parameters`, `moments` and `outer/NAME` of `node.local.trainer`."""
    first, _, rest = name.partition("/")
    if first == "memory":
        return f"{first}/{rest.rpartition('/')[2]}"
    return name if first == "outer" else first


def _as_float32(dtype: str, data: Array) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return data.view(dtype).astype(np.float32)


def check_table(table: SnapshotTable, bytes_max: int) -> None:
    """Raise RemoteProtocolError if another peer's table is inconsistent, or larger than this peer expects."""
    size = 0
    for row in table.rows:
        size += row.size_bytes
        if size > bytes_max:
            raise RemoteProtocolError(f"a state of more than {bytes_max} bytes")
    if len({row.name for row in table.rows}) != len(table.rows):
        raise RemoteProtocolError("a state has two arrays with the same name")
    if len(table.chunks) != -(-size // CHUNK_BYTES):
        raise RemoteProtocolError("a state's chunks do not match its arrays")
