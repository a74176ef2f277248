"""How numbers of an averaging attempt are written down: one chunk of float32 or float64 to bytes and back.

A chunk is coded alone, so that it can be checked, reduced and handed on alone. Coding the same numbers gives
the same bytes. Decoding checks everything a stranger could have written: it returns exactly `count` finite
numbers or raises RemoteProtocolError. Error feedback is in `gossip.averaging.feedback`.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crypto.errors import RemoteProtocolError
from gossip.averaging.reduction import Vector

BLOCK_ITEMS = 64
"""Numbers that share a scale: 2 bytes over 64 are 3 % of int8."""
Bytes = NDArray[np.uint8]


class Codec(Protocol):
    """One way to write a chunk down."""

    name: str
    is_exact: bool
    """Whether decoding gives back the same bits."""

    def encode(self, values: Vector) -> memoryview:
        """The bytes of a flat chunk. Raises ValueError for numbers that are not finite."""

    def decode(self, data: memoryview, count: int) -> Vector:
        """Exactly `count` finite numbers; a view where the codec is exact. Raises RemoteProtocolError."""


class Exact:
    """The numbers as they are, little-endian."""

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
    """The upper half of a float32, rounded to the nearest, ties to even."""

    name = "bfloat16"
    is_exact = False

    def encode(self, values: Vector) -> memoryview:
        bits = _narrow(values).view(np.uint32)
        halves = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
        # Rounding up the very largest numbers would make them infinite.
        np.copyto(halves, (halves & 0x8000) | 0x7F7F, where=(halves & 0x7FFF) > 0x7F7F)
        return view_of(halves)

    def decode(self, data: memoryview, count: int) -> Vector:
        _check_size(data, 2 * count)
        halves = np.frombuffer(data, "<u2")
        if ((halves & 0x7FFF) > 0x7F7F).any():
            raise RemoteProtocolError("a chunk with numbers that are not finite")
        return (halves.astype(np.uint32) << 16).view(np.float32)


class Float16:
    """IEEE half precision after one power of two for the chunk, so that no chunk overflows or vanishes."""

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
    """Whole numbers from -top to top, times a float32 scale for each block of 64 (blockwise absmax)."""

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


def codec_of(name: str, dtype: str) -> Codec:
    """The codec of this name for vectors of float32 or float64.

    Raises:
        ValueError: an unknown name. Names that strangers send choose among these and load nothing.
    """
    if name in ("float32", "float64"):
        return Exact(dtype)
    codecs: dict[str, Any] = {
        "bfloat16": Bfloat16,
        "float16": Float16,
        "int8": lambda: Blocks("int8", 8),
        "int4": lambda: Blocks("int4", 4),
    }
    if name not in codecs:
        raise ValueError(f"no codec {name!r}: there are float32, {', '.join(codecs)}")
    codec: Codec = codecs[name]()
    return codec


def view_of(values: NDArray[Any]) -> memoryview:
    """The bytes of an array, without a copy."""
    return values.view(np.uint8).data


def _narrow(values: Vector) -> NDArray[np.float32]:
    _check_finite(values)
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.ascontiguousarray(values, np.float32)
    if values.dtype != np.float32 and not np.isfinite(narrow).all():
        raise ValueError("numbers beyond float32, and a codec of float32")
    return narrow


def _check_finite(values: Vector) -> None:
    if not np.isfinite(values).all():
        raise ValueError("numbers that are not finite are not averaged")


def _check_size(data: memoryview, size: int) -> None:
    if data.nbytes != size:
        raise RemoteProtocolError(f"a chunk of {data.nbytes} bytes, not {size}")
