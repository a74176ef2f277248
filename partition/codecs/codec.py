"""Tensors on the wire: a bundle of numpy arrays to a self-describing, digested payload, and back.

Often several tensors cross a stage's boundary (a skip connection, a mask), with the sizes they depend on. So
a payload is a bundle: its tensors one after the other, little-endian, in C order. With the codec `raw` there
is nothing else. With any other codec, eight bytes before each tensor give its compression (zstd or not, the
payload's lossy codec or not) and its length. So every tensor is sent in the best form for it, and integers,
short tensors and tensors that are not finite stay exact. The codecs are in `partition.codecs`.

The digest covers `data` as sent, so a relay, or a sender that keeps frames, can check them without decoding.
bfloat16 has no numpy type and is represented as uint16.

Copies are rare. The payload of one raw tensor is that tensor's own memory, and raw tensors are unpacked to
views of `data`. Several tensors are joined by one copy, because they are digested and sent together.

One thread computes the digest. 16 MiB take 2.8 ms of CPU time with any number of threads, so more threads
help only if cores are idle, and even then save one millisecond of a pass that takes hundreds. Below 4 MiB
they do not help at all.

Everything in a payload is untrusted. `unpack` first checks the digest, then the claimed shapes against the
receiver's limit, then the exact length of each tensor. Only then does it allocate memory, at most a few times
that limit.
"""

import struct
from collections.abc import Sequence
from math import prod
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np
from blake3 import blake3

from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.codecs import base
from partition.codecs.base import ON_WIRE, Coder
from partition.codecs.base import Array as Array
from partition.codecs.base import Rounding as Rounding
from partition.codecs.block_quantization import Int4, Int8
from partition.codecs.error_feedback import Feedback
from partition.codecs.floats import Bfloat16Frames, Float16Frames
from partition.codecs.lossless import restore, shrink
from partition.model.graph import FLOATING, ITEM_BYTES, TENSORS_MAX, DataType, RealType

Codec = Literal[
    "raw",
    "zstd",
    "float16",
    "float16+zstd",
    "bfloat16",
    "bfloat16+zstd",
    "int8",
    "int8+zstd",
    "int4",
    "int4+zstd",
]
"""The codec that a sender is asked to use; the least lossy first. `raw` and `zstd` are exact."""
CODECS: tuple[Codec, ...] = get_args(Codec)
Typed = tuple[DataType, Array]
"""A tensor as numpy represents it, and its real type. The two differ only for bfloat16."""

DIMENSIONS_MAX = 8
SIDE_MAX = 2**31 - 1
SIZES_MAX = 8
DIGEST_BYTES = 32
THREADED_BYTES_MIN = 2**20
"""Minimum size for which a second thread pays: 16 MiB take 2.0 ms instead of 4.5, but half a MiB takes the
same time."""
CODED_ITEMS_MIN = 64
"""Minimum number of items for a codec. A shorter tensor is sent exactly, because a codec would gain
nothing."""

_CODERS: dict[str, Coder] = {
    "float16": Float16Frames(),
    "bfloat16": Bfloat16Frames(),
    "int8": Int8(),
    "int4": Int4(),
}
_WORD = struct.Struct("<II")
"""Before each tensor: marks, and the length in bytes."""
_CODED, _ZSTD, _APART = 1, 2, 4
_MARKS = {0, _CODED, _ZSTD, _ZSTD | _APART, _CODED | _ZSTD, _CODED | _ZSTD | _APART}

Side = Annotated[int, msgspec.Meta(ge=1, le=SIDE_MAX)]
Shape = Annotated[tuple[Side, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """The type and shape of one tensor of a bundle. An empty tensor is never sent."""

    dtype: RealType
    shape: Shape

    @property
    def size_bytes(self) -> int:
        """Return the uncompressed size of the tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """A bundle of tensors. `sizes` are the values of the graph's symbols, in order; `digest` is blake3 of
    `data` as sent.

    `data` must not be changed, because it may be shared memory: a buffer that is reused once no view of it is
    left, or the message from which the payload was decoded.
    """

    sizes: Annotated[tuple[Side, ...], msgspec.Meta(max_length=SIZES_MAX)]
    tensors: Annotated[tuple[TensorHeader, ...], msgspec.Meta(max_length=TENSORS_MAX)]
    codec: Codec
    digest: Digest
    data: memoryview

    @property
    def size_bytes(self) -> int:
        """Return the uncompressed size of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def pack(tensors: Sequence[Typed], codec: Codec, sizes: Sequence[int] = (), *, threads: int = 1) -> Payload:
    """Encode a bundle. A single tensor that is sent raw is not copied, so its array must not change any more.
    Up to `threads` threads compute the digest.

    Raises:
        LocalProtocolError: an array has a type other than declared, no elements, or more than 8
            dimensions.
    """
    return pack_measured(tensors, codec, sizes, threads=threads)[0]


def pack_measured(
    tensors: Sequence[Typed],
    codec: Codec,
    sizes: Sequence[int] = (),
    feedback: Feedback | None = None,
    *,
    threads: int = 1,
) -> tuple[Payload, Rounding]:
    """Encode a bundle. Return the payload and the codec's rounding. With `feedback`, int4's rounding errors
    are added to the next bundle; its keys are the tensors' positions in the bundle.

    Shares memory and raises like `pack`.
    """
    headers: list[TensorHeader] = []
    parts: list[bytes | memoryview] = []
    rounding = Rounding()
    for place, (dtype, array) in enumerate(tensors):
        headers.append(_header(dtype, array))
        flat = np.ascontiguousarray(array).reshape(-1)
        if codec == "raw":
            parts.append(flat.view(np.uint8).data)
            continue
        if feedback is not None and codec.startswith("int4"):
            marks, part, rounded = _pack_owing(dtype, flat, codec, feedback, place)
        else:
            marks, part, rounded = _pack_one(dtype, flat, codec)
        parts += [_WORD.pack(marks, len(part)), part]
        rounding += rounded
    data = memoryview(parts[0] if len(parts) == 1 else b"".join(parts)).toreadonly()
    return Payload(tuple(sizes), tuple(headers), codec, _digest(data, threads), data), rounding


def typed(array: Array) -> Typed:
    """Return an array with the type that its numpy type names. Raises LocalProtocolError if the type cannot
    be sent."""
    for dtype in ON_WIRE:
        if array.dtype.name == dtype:
            return dtype, array
    raise LocalProtocolError(f"a tensor of type {array.dtype} cannot be sent")


def unpack(payload: Payload, *, bytes_max: int, threads: int = 1) -> list[Typed]:
    """Decode a payload to arrays with a total size of at most `bytes_max`.

    Arrays that share the memory of `payload.data` are read-only; the others have their own memory.

    Raises:
        RemoteProtocolError: the digest is wrong, the tensors are larger than `bytes_max`, or the data is
            not exactly what shapes, types and codec claim. Coded tensors are finite, exact ones need not be.
    """
    if _digest(payload.data, threads) != payload.digest:
        raise RemoteProtocolError("a tensor with a wrong digest")
    size = payload.size_bytes
    if size > bytes_max:
        raise RemoteProtocolError(f"a tensor of {size} bytes, at most {bytes_max} allowed")
    segments = _segments(payload)
    arrays: list[Typed] = []
    for header, (marks, part) in zip(payload.tensors, segments, strict=True):
        flat = _unpack_one(header, payload.codec, marks, part)
        if header.dtype == "bool" and flat.view(np.uint8).max() > 1:
            raise RemoteProtocolError("a bool tensor with bytes other than 0 and 1")
        arrays.append((header.dtype, flat.reshape(header.shape)))
    return arrays


def _digest(data: memoryview, threads: int) -> bytes:
    """Return the digest. For little data it uses one thread, because it is done before a second thread could
    start."""
    return blake3(data, max_threads=threads if len(data) >= THREADED_BYTES_MIN else 1).digest()


def check_length(tensors: Sequence[TensorHeader], codec: Codec, length: int) -> None:
    """Check whether `length` bytes can hold these tensors: exactly for `raw`, at most for other codecs. This
    is cheap, so it comes before a signature is checked or anything is decoded.

    Raises:
        RemoteProtocolError: the length is wrong.
    """
    words = 0 if codec == "raw" else _WORD.size * len(tensors)
    longest = words + sum(tensor.size_bytes for tensor in tensors)
    if not (longest if codec == "raw" else words) <= length <= longest:
        raise RemoteProtocolError(f"{length} bytes for tensors that take {longest} with codec {codec}")


def coded_bytes(dtype: DataType, count: int, codec: Codec) -> int:
    """Return the number of bytes into which `codec` encodes a tensor of ordinary values, without its marks
    and length, and before zstd."""
    coder = _coder(dtype, codec, count)
    return count * ITEM_BYTES[dtype] if coder is None else coder.coded_bytes(count)


def _header(dtype: DataType, array: Array) -> TensorHeader:
    if array.size == 0 or array.ndim > DIMENSIONS_MAX:
        raise LocalProtocolError(f"a tensor of shape {array.shape} cannot be sent")
    if dtype == "complex64" or dtype == "complex128" or array.dtype != np.dtype(ON_WIRE[dtype]):
        raise LocalProtocolError(f"a tensor of type {array.dtype} cannot be sent as {dtype}")
    return TensorHeader(dtype, tuple(array.shape))


def _coder(dtype: DataType, codec: Codec, count: int) -> Coder | None:
    """Return the coder for `count` items of this type; None if no coder applies."""
    if dtype not in FLOATING or count < CODED_ITEMS_MIN:
        return None
    coder = _CODERS.get(codec.removesuffix("+zstd"))
    return None if coder is None or coder.coded_bytes(count) >= count * ITEM_BYTES[dtype] else coder


def _pack_one(dtype: DataType, flat: Array, codec: Codec) -> tuple[int, bytes | memoryview, Rounding]:
    """Return the marks, bytes and rounding of one tensor."""
    plain = flat.view(np.uint8)
    coder = _coder(dtype, codec, len(flat))
    found = None if coder is None else base.encode(coder, flat, dtype)
    if coder is None or found is None:
        return *_shrunk(0, plain, ITEM_BYTES[dtype], codec), Rounding()
    coded, rounding = found
    return *_shrunk(_CODED, coded, coder.item_bytes, codec), rounding


def _shrunk(marks: int, data: Array, item_bytes: int, codec: Codec) -> tuple[int, bytes | memoryview]:
    found = shrink(data, item_bytes) if codec.endswith("zstd") else None
    if found is None:
        return marks, data.data
    frame, is_apart = found
    return marks | _ZSTD | (_APART if is_apart else 0), frame


def _pack_owing(
    dtype: DataType, flat: Array, codec: Codec, feedback: Feedback, place: int
) -> tuple[int, bytes | memoryview, Rounding]:
    """Do the same as `_pack_one`, but add earlier rounding errors and remember the new ones."""
    coder = _coder(dtype, codec, len(flat))
    if coder is None:
        return _pack_one(dtype, flat, codec)
    wanted = base.widen(flat, dtype)
    feedback.add_to(place, wanted)
    found = base.encode(coder, wanted, "float32")
    if found is None:
        return _pack_one(dtype, flat, codec)
    coded, _ = found
    rounding = feedback.keep(place, wanted, base.decode(coder, coded, len(flat), "float32"))
    return *_shrunk(_CODED, coded, coder.item_bytes, codec), rounding


def _segments(payload: Payload) -> list[tuple[int, memoryview]]:
    """Return the marks and bytes of every tensor. The lengths come from `data` and are only checked against
    its size."""
    data = payload.data
    segments = []
    offset = 0
    for header in payload.tensors:
        marks, length = 0, header.size_bytes
        if payload.codec != "raw":
            if len(data) - offset < _WORD.size:
                raise RemoteProtocolError("a payload that ends before its tensors do")
            marks, length = _WORD.unpack_from(data, offset)
            offset += _WORD.size
        segments.append((marks, data[offset : offset + length]))
        offset += length
    if offset != len(data):
        raise RemoteProtocolError(f"a payload of {len(data)} bytes whose tensors claim {offset}")
    return segments


def _unpack_one(header: TensorHeader, codec: Codec, marks: int, part: memoryview) -> Array:
    """Return a flat array of the header's type."""
    count = prod(header.shape)
    coder = _coder(header.dtype, codec, count) if marks & _CODED else None
    size = header.size_bytes if coder is None else coder.coded_bytes(count)
    item_bytes = ITEM_BYTES[header.dtype] if coder is None else coder.item_bytes
    is_zstd = bool(marks & _ZSTD)
    if marks not in _MARKS or (marks & _CODED and coder is None) or (is_zstd and not codec.endswith("zstd")):
        raise RemoteProtocolError(f"a tensor marked {marks} in a payload with codec {codec}")
    if len(part) >= size if is_zstd else len(part) != size:
        raise RemoteProtocolError(f"a tensor of {len(part)} bytes that claims {size}")
    data = np.frombuffer(part, np.uint8)
    if is_zstd:
        data = restore(part, size, item_bytes, is_apart=bool(marks & _APART))
    if coder is not None:
        return base.decode(coder, data, count, header.dtype)
    return data.view(ON_WIRE[header.dtype])
