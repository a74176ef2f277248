"""The encodings of an averaging attempt's values: one chunk of float32 or float64 to bytes and back.

Each chunk is coded separately, so that it can be checked, reduced and passed on separately. Coding is
deterministic. Decoding validates everything that an untrusted peer can send: it returns exactly `count`
finite values or raises RemoteProtocolError.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crypto.errors import RemoteProtocolError
from gossip.averaging.robust.reduction import Vector

BLOCK_ITEMS = 64
"""Number of values that share a scale. The scale's 4 bytes add 6.25 % to 64 values of int8."""
TOP_BLOCK_ITEMS = 4_096
TOPS = (64, 128, 256, 512, 1_024)
"""How many values of a block are sent: from 1.56 %, as in SparseLoCo, to 25 % for very small models."""
PLACE_BITS = 12
SAMPLE_ITEMS = 1 << 14
"""Number of values in the sample that estimates a codec's rounding error."""
CHUNK_ITEMS = 1 << 18
"""Number of values in one chunk: 1 MiB of float32. Its frame is negligible, and chunks to several peers
interleave."""


class Codec(Protocol):
    """One encoding of a chunk."""

    name: str
    is_exact: bool
    """Whether decoding restores the same bits."""

    def encode(self, values: Vector) -> memoryview:
        """Return the bytes of a flat chunk. Raises ValueError if a value is not finite."""

    def decode(self, data: memoryview, count: int) -> Vector:
        """Return exactly `count` finite values, as a view if the codec is exact. Raises
        RemoteProtocolError."""


class Exact:
    """The unchanged values, little-endian."""

    is_exact = True

    def __init__(self, dtype: str) -> None:
        self.name = dtype
        self._wire = np.dtype(dtype).newbyteorder("<")

    def encode(self, values: Vector) -> memoryview:
        _check_finite(values)
        return view_of(np.ascontiguousarray(values, self._wire))

    def decode(self, data: memoryview, count: int) -> Vector:
        _check_size(data, count * self._wire.itemsize)
        values: Vector = np.frombuffer(data, self._wire)
        if not np.isfinite(values).all():
            raise RemoteProtocolError("a chunk with numbers that are not finite")
        return values


class Bfloat16:
    """The upper half of each float32, rounded to nearest, ties to even."""

    name = "bfloat16"
    is_exact = False

    def encode(self, values: Vector) -> memoryview:
        bits = _narrow(values).view(np.uint32)
        halves = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
        # Rounding up would make the very largest values infinite.
        np.copyto(halves, (halves & 0x8000) | 0x7F7F, where=(halves & 0x7FFF) > 0x7F7F)
        return view_of(halves)

    def decode(self, data: memoryview, count: int) -> Vector:
        _check_size(data, 2 * count)
        halves = np.frombuffer(data, "<u2")
        if ((halves & 0x7FFF) > 0x7F7F).any():
            raise RemoteProtocolError("a chunk with numbers that are not finite")
        return (halves.astype(np.uint32) << 16).view(np.float32)


class Float16:
    """IEEE half precision, after scaling the chunk by a power of two, so that no chunk overflows or
    vanishes."""

    name = "float16"
    is_exact = False

    def encode(self, values: Vector) -> memoryview:
        wide = _narrow(values)
        largest = float(np.abs(wide).max(initial=0.0))
        shift = int(np.clip(14 - np.frexp(largest)[1], -120, 120)) if largest else 0
        with np.errstate(under="ignore"):
            halves = np.ldexp(wide, shift).astype("<f2")
        return memoryview(np.int16(shift).astype("<i2").tobytes() + halves.tobytes())

    def decode(self, data: memoryview, count: int) -> Vector:
        _check_size(data, 2 + 2 * count)
        shift = int(np.frombuffer(data[:2], "<i2")[0])
        halves = np.frombuffer(data[2:], "<f2")
        if abs(shift) > 120 or not np.isfinite(halves).all():
            raise RemoteProtocolError("a chunk with a scale or numbers that no encoder writes")
        with np.errstate(under="ignore"):
            values: Vector = np.ldexp(halves.astype(np.float32), -shift)
        return values


class Blocks:
    """Integers from -top to top, times a float32 scale for each block of 64 values (blockwise absmax)."""

    is_exact = False

    def __init__(self, name: str, bits: int) -> None:
        self.name = name
        self._bits = bits
        self._top = (1 << (bits - 1)) - 1

    def encode(self, values: Vector) -> memoryview:
        wide = _narrow(values)
        count = len(wide)
        blocks = np.zeros((-(-count // BLOCK_ITEMS), BLOCK_ITEMS), np.float32)
        blocks.reshape(-1)[:count] = wide
        scales = (np.abs(blocks).max(axis=1) / np.float32(self._top)).astype(np.float32)
        safe = np.where(scales > 0, scales, np.float32(1))
        levels = np.rint(blocks / safe[:, None])
        levels = np.clip(levels, -self._top, self._top).astype(np.int8).reshape(-1)
        if self._bits == 4:
            nibbles = (levels + 8).astype(np.uint8)
            coded = (nibbles[0::2] | (nibbles[1::2] << 4)).tobytes()
        else:
            coded = levels[:count].tobytes()
        return memoryview(scales.astype("<f4").tobytes() + coded)

    def decode(self, data: memoryview, count: int) -> Vector:
        blocks = -(-count // BLOCK_ITEMS)
        coded_bytes = blocks * BLOCK_ITEMS // 2 if self._bits == 4 else count
        _check_size(data, 4 * blocks + coded_bytes)
        scales = np.frombuffer(data[: 4 * blocks], "<f4")
        coded = np.frombuffer(data[4 * blocks :], np.uint8)
        levels = np.zeros(blocks * BLOCK_ITEMS, np.int8)
        if self._bits == 4:
            levels[0::2] = (coded & 15).astype(np.int8) - 8
            levels[1::2] = (coded >> 4).astype(np.int8) - 8
        else:
            levels[:count] = coded.view(np.int8)
        if (levels < -self._top).any() or not (scales >= 0).all() or not np.isfinite(scales).all():
            raise RemoteProtocolError("a chunk with a scale or a level that no encoder writes")
        if scales.max(initial=0.0) > np.finfo(np.float32).max / self._top:
            raise RemoteProtocolError("a chunk with numbers that are not finite")
        values: Vector = (levels.reshape(blocks, BLOCK_ITEMS) * scales[:, None]).reshape(-1)[:count]
        return values


class TopK:
    """The `top` largest values of each block of 4,096, with a 12-bit position and a 2-bit value each.

    The 2-bit value is a sign, and whether the original is nearer to the mean of the larger or of the smaller
    magnitudes of its block. Both means are float32. With 64 values sent, the 16,384 bytes of a block
    become 120 (SparseLoCo, Sarfi et al. 2025: 1.56 % and 2 bits). If many values are sent, a
    bitmap of the block replaces the positions. Without error feedback, the other values are lost.
    """

    is_exact = False

    def __init__(self, top: int) -> None:
        self.name = f"topk{top}"
        self._top = top

    def encode(self, values: Vector) -> memoryview:
        wide = _narrow(values)
        whole = len(wide) // TOP_BLOCK_ITEMS * TOP_BLOCK_ITEMS
        coded = [self._encode_blocks(wide[:whole].reshape(-1, TOP_BLOCK_ITEMS), self._top)] if whole else []
        if whole < len(wide):
            rest = wide[None, whole:]
            coded.append(self._encode_blocks(rest, self._top_of(rest.shape[1])))
        return memoryview(b"".join(coded))

    def decode(self, data: memoryview, count: int) -> Vector:
        whole, rest = divmod(count, TOP_BLOCK_ITEMS)
        shapes = [(whole, TOP_BLOCK_ITEMS)] if whole else []
        shapes += [(1, rest)] if rest else []
        _check_size(data, sum(blocks * _block_bytes(self._top_of(size), size) for blocks, size in shapes))
        decoded = []
        for blocks, size in shapes:
            part_bytes = blocks * _block_bytes(self._top_of(size), size)
            decoded.append(self._decode_blocks(data[:part_bytes], blocks, size))
            data = data[part_bytes:]
        return decoded[0] if len(decoded) == 1 else np.concatenate(decoded)

    def _top_of(self, size: int) -> int:
        """Return how many values of a block of this size are sent."""
        return -(-size * self._top // TOP_BLOCK_ITEMS)

    def _encode_blocks(self, blocks: NDArray[np.float32], top: int) -> bytes:
        sizes = np.abs(blocks)
        # Positions are sorted, so that the same values always give the same bytes.
        places = np.sort(
            np.argpartition(sizes, blocks.shape[1] - top, axis=1)[:, blocks.shape[1] - top :], axis=1
        )
        chosen = np.take_along_axis(blocks, places, axis=1)
        large = np.abs(chosen)
        is_upper = large > large.mean(axis=1, dtype=np.float64)[:, None]
        count = is_upper.sum(axis=1)
        upper = np.where(is_upper, large, 0).sum(axis=1, dtype=np.float64) / np.maximum(count, 1)
        lower = np.where(is_upper, 0, large).sum(axis=1, dtype=np.float64) / np.maximum(top - count, 1)
        scales = np.stack([lower, upper], axis=1).astype("<f4")
        if _is_dense(top, blocks.shape[1]):
            bits: NDArray[np.bool_] = np.zeros(blocks.shape, bool)
            np.put_along_axis(bits, places, values=True, axis=1)
        else:
            bits = ((places[:, :, None] >> np.arange(PLACE_BITS)) & 1).astype(bool).reshape(len(blocks), -1)
        packed = np.packbits(np.concatenate([chosen < 0, is_upper, bits], axis=1), axis=1)
        return np.concatenate([scales.view(np.uint8).reshape(len(blocks), -1), packed], axis=1).tobytes()

    def _decode_blocks(self, data: memoryview, blocks: int, size: int) -> Vector:
        top = self._top_of(size)
        rows = np.frombuffer(data, np.uint8).reshape(blocks, -1)
        scales = np.ascontiguousarray(rows[:, :8]).view("<f4")
        # The scales must not be NaN, negative, infinite, or too large to add up.
        if not ((scales >= 0) & (scales < 1e38)).all():
            raise RemoteProtocolError("a chunk with a scale that no encoder writes")
        bits = np.unpackbits(rows[:, 8:], axis=1)
        is_negative, is_upper, bits = bits[:, :top], bits[:, top : 2 * top], bits[:, 2 * top :]
        if _is_dense(top, size):
            if (bits[:, :size].sum(axis=1, dtype=np.int64) != top).any():
                raise RemoteProtocolError("a chunk with a wrong number of positions")
            places = np.nonzero(bits[:, :size])[1].reshape(blocks, top)
        else:
            bits = bits[:, : top * PLACE_BITS].reshape(blocks, top, PLACE_BITS)
            places = (bits.astype(np.int64) << np.arange(PLACE_BITS)).sum(axis=2)
            if (places >= size).any() or (np.diff(places, axis=1) <= 0).any():
                raise RemoteProtocolError("a chunk with positions out of order")
        magnitudes = np.where(is_upper == 1, scales[:, 1:], scales[:, :1])
        values = np.zeros((blocks, size), np.float32)
        np.put_along_axis(values, places, np.where(is_negative == 1, -magnitudes, magnitudes), axis=1)
        flat: Vector = values.reshape(-1)
        return flat


def _is_dense(top: int, size: int) -> bool:
    return size < top * PLACE_BITS


def _block_bytes(top: int, size: int) -> int:
    return 8 + -(-(2 * top + (size if _is_dense(top, size) else top * PLACE_BITS)) // 8)


def roundtrip(codec: Codec, vector: Vector) -> Vector:
    """Return the vector that receivers would decode, chunk by chunk."""
    if codec.is_exact:
        return vector
    decoded = np.empty_like(vector)
    for begin in range(0, len(vector), CHUNK_ITEMS):
        values = vector[begin : begin + CHUNK_ITEMS]
        decoded[begin : begin + CHUNK_ITEMS] = codec.decode(codec.encode(values), len(values))
    return decoded


def rounding_of(codec: Codec, vector: Vector) -> float:
    """Return the relative error that a codec adds to a vector, estimated from the vector's first values."""
    if codec.is_exact or not vector.size:
        return 0.0
    sample = vector[:SAMPLE_ITEMS]
    coded = roundtrip(codec, sample)
    return float(np.linalg.norm(coded - sample) / max(float(np.linalg.norm(sample)), 1e-30))


def coded_bytes(codec: Codec, items: int) -> int:
    """Return the size in bytes of an encoded vector of `items` values."""
    whole, rest = divmod(items, CHUNK_ITEMS)
    sizes = [(whole, CHUNK_ITEMS), (1, rest)]
    return sum(
        count * codec.encode(np.zeros(size, np.float32)).nbytes for count, size in sizes if count and size
    )


def codec_of(name: str, dtype: str, own: Mapping[str, Codec] | None = None) -> Codec:
    """Return the codec with this name for vectors of float32 or float64. `own` are the caller's codecs, by
    name.

    Raises:
        ValueError: the name is unknown. A name received from a peer selects one of these and loads no code.
    """
    if own and name in own:
        return own[name]
    if name in ("float32", "float64"):
        return Exact(dtype)
    codecs: dict[str, Any] = {
        "bfloat16": Bfloat16,
        "float16": Float16,
        "int8": lambda: Blocks("int8", 8),
        "int4": lambda: Blocks("int4", 4),
        **{f"topk{top}": partial(TopK, top) for top in TOPS},
    }
    if name not in codecs:
        raise ValueError(f"unknown codec {name!r}; use float32 or one of {', '.join(codecs)}")
    codec: Codec = codecs[name]()
    return codec


def view_of(values: NDArray[Any]) -> memoryview:
    """Return the bytes of an array, without a copy."""
    return values.view(np.uint8).data


def _narrow(values: Vector) -> NDArray[np.float32]:
    _check_finite(values)
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.ascontiguousarray(values, np.float32)
    if values.dtype != np.float32 and not np.isfinite(narrow).all():
        raise ValueError("values beyond the range of float32, which the codec needs")
    return narrow


def _check_finite(values: Vector) -> None:
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite cannot be averaged")


def _check_size(data: memoryview, size: int) -> None:
    if data.nbytes != size:
        raise RemoteProtocolError(f"a chunk of {data.nbytes} bytes instead of {size}")
