"""The common part of all lossy codecs: tensors go through them as float32, tile by tile, in the cache.

A coder turns `count` values into exactly `coded_bytes(count)` bytes. It accepts only finite values that are
not huge; a tensor with any other value (such as the minus infinity of an attention mask, or a NaN gradient)
is sent exactly. So the results of `decode` are finite, no matter which peer sent them.
"""

from math import sqrt
from typing import Any, Protocol

import msgspec
import numpy as np

from crypto.errors import RemoteProtocolError
from partition.model.graph import DataType

Array = np.ndarray[Any, np.dtype[Any]]

TILE = 1 << 16
"""Number of items processed together. As float32 they take 256 KiB: one tile and one scratch buffer of that
size stay in a core's cache across all passes, and the interpreter takes less than a hundredth of the time."""
SAMPLE = TILE // 16
"""Number of items of each tile that are decoded again to measure the rounding. Decoding all would take as
long as the encoding itself."""
LARGEST_LOG2 = 126
"""The largest value that a coder accepts is 2^126: rounded up, it is still far from infinity."""
_HALF_LARGEST_LOG2 = 15

ON_WIRE: dict[DataType, str] = {
    "float64": "<f8",
    "float32": "<f4",
    "bfloat16": "<u2",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint8": "u1",
    "bool": "?",
}


class Rounding(msgspec.Struct, frozen=True, array_like=True):
    """The rounding of lossy codecs: |x - x'|^2 and |x|^2, summed over the items that were coded with loss.

    They are sums, so that those of many tensors, micro-batches and stages can be added. Gradients are summed
    separately from activations, which are so much larger that they would hide them. For long tensors the sums
    are estimated from one item in sixteen.
    """

    squared_error: float = 0.0
    squared_norm: float = 0.0

    def __add__(self, other: "Rounding") -> "Rounding":
        return Rounding(self.squared_error + other.squared_error, self.squared_norm + other.squared_norm)

    @property
    def relative(self) -> float:
        """|x - x'| / |x|; 0 if nothing was rounded."""
        return sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


class Coder(Protocol):
    """One encoding of float32 values. It gets tiles at multiples of TILE; the last tile is filled up with
    zeros to a multiple of `granule`."""

    granule: int
    item_bytes: int
    """Number of bytes in `coded` that belong together; zstd compresses them in separate planes."""

    def coded_bytes(self, count: int) -> int:
        """Return exactly how many bytes `count` items take."""

    def encode_tile(self, tile: Array, scratch: Array, coded: Array, count: int, start: int) -> None:
        """Write a tile, whose values are all between -2^126 and 2^126, to its position in the `coded` bytes
        of `count` items.

        `scratch` has the same length and initially holds the tile's `magnitudes`; it may be overwritten.
        """

    def check(self, coded: Array, count: int) -> None:
        """Check coded bytes. Raises RemoteProtocolError if `encode_tile` cannot have written them."""

    def decode_tile(self, coded: Array, count: int, start: int, target: Array) -> None:
        """Decode items, beginning with item `start` (a multiple of `granule`), into `target`."""


def encode(coder: Coder, values: Array, dtype: DataType) -> tuple[Array, Rounding] | None:
    """Encode a flat array of a floating type. Return None if it has items that a coder does not accept."""
    count = len(values)
    coded = np.empty(coder.coded_bytes(count), np.uint8)
    buffers = np.empty((2, _up(min(count, TILE), coder.granule)), np.float32)
    largest = _bits(_HALF_LARGEST_LOG2 if dtype == "float16" else LARGEST_LOG2)
    error = norm = 0.0
    seen = 0
    for number, start in enumerate(range(0, count, TILE)):
        tile = _load(values[start : start + TILE], dtype, buffers[0], coder.granule)
        scratch = buffers[1, : len(tile)]
        if magnitudes(tile, scratch).max() > largest:
            return None
        coder.encode_tile(tile, scratch, coded, count, start)
        # Sample a different part of each tile, because the tile length may be a multiple of a period in the
        # tensor.
        offset = (7 * number % 16) * SAMPLE if len(tile) == TILE else 0
        sample = tile[offset : offset + SAMPLE].astype(np.float64)
        coder.decode_tile(coded, count, start + offset, scratch[: len(sample)])
        norm += float(sample @ sample)
        sample -= scratch[: len(sample)]
        error += float(sample @ sample)
        seen += len(sample)
    factor = max(1.0, count / seen)
    return coded, Rounding(error * factor, norm * factor)


def decode(coder: Coder, coded: Array, count: int, dtype: DataType) -> Array:
    """Return a new flat array of finite values.

    Raises:
        RemoteProtocolError: no encoder writes these bytes, or a value is too large for the type.
    """
    coder.check(coded, count)
    values = np.empty(count, ON_WIRE[dtype])
    scratch = np.empty(_up(min(count, TILE), coder.granule), np.float32)
    for start in range(0, count, TILE):
        part = values[start : start + TILE]
        is_direct = dtype == "float32" and len(part) % coder.granule == 0
        target = part if is_direct else scratch[: _up(len(part), coder.granule)]
        coder.decode_tile(coded, count, start, target)
        if not is_direct:
            _store(target[: len(part)], dtype, part)
    if dtype == "float16" and not np.isfinite(values).all():
        raise RemoteProtocolError("a coded tensor with values beyond float16")
    return values


def widen(values: Array, dtype: DataType) -> Array:
    """Return a float32 copy of a flat array of a floating type."""
    wide = np.empty(len(values), np.float32)
    wide[:] = _load(values, dtype, wide, 1)
    return wide


def squared_norm(values: Array) -> float:
    """Return the squared norm of a flat float32 array, in float64, because the sum may exceed the range of
    float32."""
    total = 0.0
    for start in range(0, len(values), TILE):
        tile = values[start : start + TILE].astype(np.float64)
        total += float(tile @ tile)
    return total


def magnitudes(tile: Array, scratch: Array) -> Array:
    """Return the bits of |x| as int32, in `scratch`. Such integers have the same order and compare much
    faster than float32, and infinity and NaN are largest."""
    bits = scratch.view(np.int32)
    np.bitwise_and(tile.view(np.int32), 0x7FFFFFFF, out=bits)
    return bits


def round_bfloat16(tile: Array, scratch: Array, target: Array) -> None:
    """Round each float32 to the nearest bfloat16, ties to even, as uint16. Not for infinity or values close
    to it."""
    bits, rounded = tile.view(np.uint32), scratch.view(np.uint32)
    np.right_shift(bits, 16, out=rounded)
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    target[:] = rounded.view(np.uint16)[1::2]


def widen_bfloat16(halves: Array, target: Array) -> None:
    """Convert bfloat16, as uint16, to float32."""
    bits = target.view(np.uint32)
    bits[:] = halves
    bits <<= 16


def _bits(log2: int) -> int:
    """Return 2^log2 as float32's bits."""
    return (127 + log2) << 23


def _up(count: int, granule: int) -> int:
    return -(-count // granule) * granule


def _load(part: Array, dtype: DataType, buffer: Array, granule: int) -> Array:
    length = _up(len(part), granule)
    if dtype == "float32" and length == len(part):
        return part
    tile = buffer[:length]
    if dtype == "bfloat16":
        widen_bfloat16(part, tile[: len(part)])
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            tile[: len(part)] = part
    tile[len(part) :] = 0
    return tile


def _store(tile: Array, dtype: DataType, part: Array) -> None:
    if dtype == "bfloat16":
        round_bfloat16(tile, np.empty_like(tile), part)
    else:
        with np.errstate(over="ignore", under="ignore"):
            part[:] = tile
