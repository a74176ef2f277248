"""Tensors on the wire: a bundle of numpy arrays to a self-describing, digested payload, and back.

What crosses a stage's boundary is often more than one tensor (a skip connection, a mask) and the sizes they
depend on, so a payload is a bundle: its tensors one after the other, little-endian, in C order, plain or as
one zstd frame. The digest covers `data` as sent, so a relay or a sender that keeps frames can check them
without decompressing. bfloat16 has no numpy type and travels as uint16. int8 blocks come later as a codec.

Everything in a payload is a stranger's claim. `unpack` checks the digest, then what the shapes claim against
the receiver's bound, and only then decompresses, never to more than that claim.
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.model.graph import ITEM_BYTES, TENSORS_MAX, DataType

Codec = Literal["raw", "zstd"]
Array = np.ndarray[Any, np.dtype[Any]]
Typed = tuple[DataType, Array]
"""A tensor as numpy holds it, and its real type: they differ for bfloat16 only."""

DIMENSIONS_MAX = 8
SIDE_MAX = 2**31 - 1
SIZES_MAX = 8
DIGEST_BYTES = 32
ZSTD_LEVEL = 1
"""Level 3 gains little on activations and costs twice the time (measured on GPT activations)."""

_ON_WIRE: dict[DataType, str] = {
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

Side = Annotated[int, msgspec.Meta(ge=1, le=SIDE_MAX)]
Shape = Annotated[tuple[Side, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """What one tensor of a bundle is. An empty tensor is never sent."""

    dtype: DataType
    shape: Shape

    @property
    def size_bytes(self) -> int:
        """Of the tensor when it is not compressed."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """A bundle. `sizes` are the graph's symbols, in their order; `digest` is blake3 of `data` as sent."""

    sizes: Annotated[tuple[Side, ...], msgspec.Meta(max_length=SIZES_MAX)]
    tensors: Annotated[tuple[TensorHeader, ...], msgspec.Meta(max_length=TENSORS_MAX)]
    codec: Codec
    digest: Digest
    data: bytes

    @property
    def size_bytes(self) -> int:
        """Of all tensors when they are not compressed."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def pack(tensors: Sequence[Typed], codec: Codec, sizes: Sequence[int] = ()) -> Payload:
    """Encode a bundle.

    Raises: LocalProtocolError: an array of another type than said, without elements, or of more than 8
    dimensions.
    """
    headers, parts = [], []
    for dtype, array in tensors:
        if array.size == 0 or array.ndim > DIMENSIONS_MAX:
            raise LocalProtocolError(f"a tensor of shape {array.shape} cannot be sent")
        on_wire = np.dtype(_ON_WIRE[dtype])
        if array.dtype != on_wire:
            raise LocalProtocolError(f"a tensor of type {array.dtype} cannot be sent as {dtype}")
        headers.append(TensorHeader(dtype, tuple(array.shape)))
        parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    data = b"".join(parts)
    if codec == "zstd":
        data = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)
    return Payload(tuple(sizes), tuple(headers), codec, blake3(data).digest(), data)


def typed(array: Array) -> Typed:
    """An array with the type that its numpy type names. Raises LocalProtocolError: a type that is not
    sent."""
    for dtype in ITEM_BYTES:
        if array.dtype.name == dtype:
            return dtype, array
    raise LocalProtocolError(f"a tensor of type {array.dtype} cannot be sent")


def unpack(payload: Payload, *, bytes_max: int) -> list[Typed]:
    """Decode a payload to read-only arrays of together at most `bytes_max` bytes.

    Raises:
        RemoteProtocolError: a wrong digest, tensors larger than `bytes_max`, or data that is not
            exactly what shapes and types claim.
    """
    if blake3(payload.data).digest() != payload.digest:
        raise RemoteProtocolError("a tensor with a wrong digest")
    size = payload.size_bytes
    if size > bytes_max:
        raise RemoteProtocolError(f"a tensor of {size} bytes, at most {bytes_max} allowed")
    data = payload.data if payload.codec == "raw" else _decompress(payload.data, size)
    if len(data) != size:
        raise RemoteProtocolError(f"a tensor of {len(data)} bytes that claims {size}")
    arrays: list[Typed] = []
    offset = 0
    for tensor in payload.tensors:
        count = prod(tensor.shape)
        if tensor.dtype == "bool" and np.frombuffer(data, np.uint8, count, offset).max() > 1:
            raise RemoteProtocolError("a tensor of bool with other bytes than 0 and 1")
        array = np.frombuffer(data, dtype=_ON_WIRE[tensor.dtype], count=count, offset=offset)
        arrays.append((tensor.dtype, array.reshape(tensor.shape)))
        offset += tensor.size_bytes
    return arrays


def _decompress(data: bytes, size: int) -> bytes:
    try:
        # zstandard allocates what the frame's own header claims, so that claim is checked first.
        if zstandard.get_frame_parameters(data).content_size != size:
            raise RemoteProtocolError(f"a zstd frame that does not claim the {size} bytes of its tensor")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"broken zstd data: {error}") from None
