"""Tensors on the wire: a numpy array to a self-describing, digested payload, and back.

Little-endian, C order, plain or as one zstd frame. The digest covers `data` as sent, so a relay or a
sender that keeps frames can check them without decompressing. bfloat16 and int8 blocks come later as
further codecs.

Everything in a payload is a stranger's claim. `unpack` checks the digest, then what the shape claims
against the receiver's bound, and only then decompresses, never to more than that claim.
"""

from math import prod
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from crypto.errors import LocalProtocolError, RemoteProtocolError

Codec = Literal["raw", "zstd"]
DataType = Literal["float32", "float64", "int64"]
Array = np.ndarray[Any, np.dtype[Any]]

DIMENSIONS_MAX = 8
SIDE_MAX = 2**31 - 1
DIGEST_BYTES = 32
ZSTD_LEVEL = 1
"""Level 3 gains little on activations and costs twice the time (measured on GPT activations)."""

ITEM_BYTES: dict[DataType, int] = {"float32": 4, "float64": 8, "int64": 8}
_ON_WIRE: dict[DataType, str] = {"float32": "<f4", "float64": "<f8", "int64": "<i8"}

Side = Annotated[int, msgspec.Meta(ge=1, le=SIDE_MAX)]
Shape = Annotated[tuple[Side, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. `digest` is blake3 of `data`, the bytes as sent. An empty tensor is never sent."""

    shape: Shape
    dtype: DataType
    codec: Codec
    digest: Digest
    data: bytes


def pack(array: Array, codec: Codec) -> Payload:
    """Encode `array`, float32, float64 or int64.

    Raises:
        LocalProtocolError: another type, no elements, or more than 8 dimensions.
    """
    dtype = _dtype_of(array)
    if array.size == 0 or array.ndim > DIMENSIONS_MAX:
        raise LocalProtocolError(f"a tensor of shape {array.shape} cannot be sent")
    data = array.astype(_ON_WIRE[dtype], order="C", copy=False).tobytes()
    if codec == "zstd":
        data = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)
    return Payload(tuple(array.shape), dtype, codec, blake3(data).digest(), data)


def unpack(payload: Payload, *, bytes_max: int) -> Array:
    """Decode a payload to a read-only array of at most `bytes_max` bytes.

    Raises:
        RemoteProtocolError: a wrong digest, a tensor larger than `bytes_max`, or data that is not
            exactly what shape and type claim.
    """
    if blake3(payload.data).digest() != payload.digest:
        raise RemoteProtocolError("a tensor with a wrong digest")
    size = prod(payload.shape) * ITEM_BYTES[payload.dtype]
    if size > bytes_max:
        raise RemoteProtocolError(f"a tensor of {size} bytes, at most {bytes_max} allowed")
    data = payload.data if payload.codec == "raw" else _decompress(payload.data, size)
    if len(data) != size:
        raise RemoteProtocolError(f"a tensor of {len(data)} bytes that claims {size}")
    return np.frombuffer(data, dtype=_ON_WIRE[payload.dtype]).reshape(payload.shape)


def _dtype_of(array: Array) -> DataType:
    for dtype in ITEM_BYTES:
        if array.dtype.name == dtype:
            return dtype
    raise LocalProtocolError(f"a tensor of type {array.dtype} cannot be sent")


def _decompress(data: bytes, size: int) -> bytes:
    try:
        # zstandard allocates what the frame's own header claims, so that claim is checked first.
        if zstandard.get_frame_parameters(data).content_size != size:
            raise RemoteProtocolError(f"a zstd frame that does not claim the {size} bytes of its tensor")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"broken zstd data: {error}") from None
