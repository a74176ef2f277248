"""Payloads: every tensor is decoded unchanged, and every inconsistency ends in RemoteProtocolError."""

import contextlib
import struct
import tracemalloc
from random import Random

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.codecs.base import ON_WIRE
from partition.codecs.codec import (
    CODECS,
    Array,
    Codec,
    Payload,
    TensorHeader,
    Typed,
    check_length,
    pack,
    typed,
    unpack,
)
from partition.model.graph import TENSORS_MAX, DataType

_LARGE = 1 << 20
_HELD_AS = {"bfloat16": "uint16"}
"""Return the numpy type that holds values of a type that numpy lacks."""


@st.composite
def tensors(draw: st.DrawFn) -> Typed:
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=8)))
    dtype: DataType = draw(st.sampled_from(sorted(ON_WIRE)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = np.dtype(_HELD_AS.get(dtype, dtype))
    count = int(np.prod(shape))
    is_bool = dtype == "bool"
    data = rng.integers(0, 2, count, np.uint8).tobytes() if is_bool else rng.bytes(count * kind.itemsize)
    array: Array = np.frombuffer(data, dtype=kind).reshape(shape)
    return dtype, array.T if draw(st.booleans()) else array


@given(
    st.lists(tensors(), max_size=5), st.sampled_from(["raw", "zstd"]), st.lists(st.integers(1, 9), max_size=8)
)
def test_a_bundle_survives_bit_for_bit(bundle: list[Typed], codec: Codec, sizes: list[int]) -> None:
    payload: Payload = decode(encode(pack(bundle, codec, sizes)), Payload, bytes_max=_LARGE)
    back = unpack(payload, bytes_max=sum(array.nbytes for _, array in bundle))
    assert payload.sizes == tuple(sizes)
    assert [dtype for dtype, _ in back] == [dtype for dtype, _ in bundle]
    for (_, array), (_, other) in zip(bundle, back, strict=True):
        assert (other.shape, other.dtype) == (array.shape, array.dtype)
        assert other.tobytes() == array.tobytes()


@given(
    st.binary(max_size=200),
    st.sampled_from(CODECS),
    st.lists(
        st.builds(
            TensorHeader,
            st.sampled_from(sorted(ON_WIRE)),
            st.lists(st.integers(1, 9), max_size=8).map(tuple),
        ),
        max_size=4,
    ),
)
def test_random_data_is_refused_or_decoded_within_the_bound(
    data: bytes, codec: Codec, headers: list[TensorHeader]
) -> None:
    payload = Payload((), tuple(headers), codec, blake3(data).digest(), memoryview(data))
    with contextlib.suppress(RemoteProtocolError):
        assert sum(array.nbytes for _, array in unpack(payload, bytes_max=64)) <= 64


@given(st.binary(max_size=300))
def test_random_bytes_are_not_a_payload(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data, Payload, bytes_max=_LARGE)


def floats(count: int) -> tuple[TensorHeader, ...]:
    return (TensorHeader("float32", (count,)),)


def test_a_changed_byte_is_detected() -> None:
    payload = pack([typed(np.arange(6.0))], "raw")
    changed = msgspec.structs.replace(payload, data=b"\x01" + payload.data[1:])
    with pytest.raises(RemoteProtocolError, match="wrong digest"):
        unpack(changed, bytes_max=_LARGE)


def test_a_bundle_above_the_bound_is_refused_before_it_is_decompressed() -> None:
    payload = pack([typed(np.zeros(500_000)), typed(np.zeros(500_000))], "zstd")
    assert len(payload.data) < 2_000
    with pytest.raises(RemoteProtocolError, match="8000000 bytes, at most 7999999"):
        unpack(payload, bytes_max=7_999_999)


def claimed(codec: Codec, *tensors: tuple[TensorHeader, int, bytes]) -> Payload:
    """Return a payload of tensors with these marks and bytes, valid or not."""
    data = b"".join(struct.pack("<II", marks, len(part)) + part for _, marks, part in tensors)
    return Payload(
        (), tuple(header for header, _, _ in tensors), codec, blake3(data).digest(), memoryview(data)
    )


CODED, ZSTD, APART = 1, 2, 4
EIGHT, MANY = TensorHeader("float32", (2,)), TensorHeader("float32", (1_000,))
BLOCKS = bytes(16 * 2 + 16 * 64)
"""1,000 zeros as int8."""


def test_a_tensor_of_zeros_is_accepted() -> None:
    (found,) = unpack(claimed("int8", (MANY, CODED, BLOCKS)), bytes_max=4_000)
    assert not found[1].any()


@pytest.mark.parametrize(
    ("codec", "header", "marks", "part", "reason"),
    [
        ("zstd", EIGHT, ZSTD, zstandard.ZstdCompressor().compress(bytes(1 << 24)), "claims 8"),
        ("zstd", MANY, ZSTD, zstandard.ZstdCompressor().compress(bytes(1 << 24)), "does not claim"),
        (
            "zstd",
            MANY,
            ZSTD,
            zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4_000)),
            "does not claim",
        ),
        ("zstd", MANY, ZSTD, zstandard.ZstdCompressor().compress(bytes(4_000))[:-1], "broken"),
        ("zstd", MANY, ZSTD, zstandard.ZstdCompressor().compress(bytes(4_000)) + b"1", "broken"),
        ("zstd", MANY, ZSTD, b"", "broken"),
        ("zstd", EIGHT, 0, bytes(7), "7 bytes that claims 8"),
        ("zstd", EIGHT, 0, bytes(9), "9 bytes that claims 8"),
        ("zstd", MANY, CODED, BLOCKS, "marked 1"),
        ("zstd", EIGHT, APART, bytes(8), "marked 4"),
        ("int8", EIGHT, 8, bytes(8), "marked 8"),
        ("int8", MANY, ZSTD, zstandard.ZstdCompressor().compress(bytes(4_000)), "marked 2"),
        ("int8", EIGHT, CODED, bytes(66), "marked 1"),
        ("int8", TensorHeader("int64", (1_000,)), CODED, BLOCKS, "marked 1"),
        ("int8", MANY, CODED, BLOCKS[1:], "claims 1056"),
        ("int8", MANY, CODED, BLOCKS + b"1", "claims 1056"),
        ("int8", MANY, CODED, b"\xff\x7f" + BLOCKS[2:], "a scale"),
        ("int8", MANY, CODED, b"\0\x80" + BLOCKS[2:], "a scale"),
        ("int8", MANY, CODED, b"\x81\x7b" + BLOCKS[2:], "a scale"),
        ("int8", MANY, CODED, BLOCKS[:-1] + b"\x80", "a code"),
        ("int4", MANY, CODED, bytes(16 * 2 + 16 * 32), "a code"),
        ("int4", MANY, CODED, bytes(16 * 2) + b"\x88" * 511 + b"\x08", "a code"),
        ("bfloat16", MANY, CODED, bytes(1_998) + b"\x80\x7f", "not finite"),
        ("float16", MANY, CODED, bytes(1_998) + b"\0\x7c" + bytes(2), "not finite"),
        ("float16", MANY, CODED, bytes(2_000) + b"\0\x7f", "a scale"),
        ("float16", MANY, CODED, bytes(2_000) + b"\x80\xff", "a scale"),
    ],
)  # fmt: skip
def test_a_tensor_that_no_encoder_writes_is_refused(
    codec: Codec, header: TensorHeader, marks: int, part: bytes, reason: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        unpack(claimed(codec, (header, marks, part)), bytes_max=_LARGE)


def test_values_beyond_the_range_of_the_type_are_refused() -> None:
    scale = b"\0\x47"  # 2^15, times 127: too large for float16
    part = scale * 16 + b"\x7f" * 1_024
    with pytest.raises(RemoteProtocolError, match="beyond float16"):
        unpack(claimed("int8", (TensorHeader("float16", (1_000,)), CODED, part)), bytes_max=_LARGE)


def resealed(payload: Payload, data: bytes) -> Payload:
    return msgspec.structs.replace(payload, data=memoryview(data), digest=blake3(data).digest())


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_longer_or_shorter_than_its_tensors_is_refused(codec: Codec) -> None:
    payload = pack([typed(np.arange(1_000.0)), typed(np.arange(3))], codec)
    whole = bytes(payload.data)
    for data in (whole + b"\0", whole[:-1], whole[:4], b""):
        with pytest.raises(RemoteProtocolError):
            unpack(resealed(payload, data), bytes_max=_LARGE)


def test_a_single_raw_tensor_is_never_copied() -> None:
    array = np.arange(1_000.0).reshape(10, 100)
    payload = pack([typed(array)], "raw")
    assert np.shares_memory(np.frombuffer(payload.data), array)
    assert payload.data.readonly
    ((_, out),) = unpack(payload, bytes_max=_LARGE)
    assert np.shares_memory(out, array)
    ((_, out),) = unpack(decode(encode(payload), Payload, bytes_max=_LARGE), bytes_max=_LARGE)
    assert np.array_equal(out, array)


@given(st.sampled_from(CODECS), st.lists(st.integers(1, 3_000), max_size=3), st.randoms())
def test_every_payload_length_is_one_that_its_tensors_can_have(
    codec: Codec, sizes: list[int], random: Random
) -> None:
    arrays = [np.frombuffer(random.randbytes(4 * size), np.uint32).astype(np.float32) for size in sizes]
    payload = pack([*map(typed, arrays)], codec)
    check_length(payload.tensors, codec, len(payload.data))
    longest = payload.size_bytes + (0 if codec == "raw" else 8 * len(sizes))
    for length in (longest + 1, longest - 1 if codec == "raw" else 8 * len(sizes) - 1):
        with pytest.raises(RemoteProtocolError, match="bytes for tensors"):
            check_length(payload.tensors, codec, length)


@given(st.sampled_from(CODECS), st.data())
def test_changed_bytes_are_refused_or_decoded_to_the_same_shapes(codec: Codec, draw: st.DataObject) -> None:
    array = np.arange(-100, 100, dtype=np.float32)
    payload = pack([typed(array), typed(np.arange(20) % 2 == 0)], codec)
    data = bytearray(payload.data)
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        (_, floating), (_, boolean) = unpack(resealed(payload, bytes(data)), bytes_max=820)
        assert (floating.shape, floating.dtype.name, boolean.dtype.name) == ((200,), "float32", "bool")


@pytest.mark.parametrize("codec", CODECS)
def test_decoding_takes_at_most_a_few_times_the_size_limit(codec: Codec) -> None:
    array = np.zeros(1 << 20, np.float32)
    payload = pack([typed(array)], codec)
    tracemalloc.start()
    unpack(payload, bytes_max=array.nbytes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.6 * array.nbytes


@pytest.mark.parametrize("codec", CODECS)
def test_special_floats_stay_exact(codec: Codec) -> None:
    mask = np.triu(np.full((80, 80), -np.inf, np.float32), 1)
    gradient = np.full(300, 1e-3)
    gradient[7] = np.nan
    bundle = [
        typed(mask),
        typed(gradient),
        typed(np.full(300, np.finfo(np.float32).min)),
        typed(np.full(300, 60_000, np.float16)),
        typed(np.arange(300)),
        typed(np.arange(300) % 2 == 0),
        typed(np.array(1.1)),
    ]  # fmt: skip
    for (_, array), (_, back) in zip(bundle, unpack(pack(bundle, codec), bytes_max=_LARGE), strict=True):
        assert (back.shape, back.dtype) == (array.shape, array.dtype)
        assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_no_codec_adds_more_than_a_word_per_tensor(codec: Codec) -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 5, 16, 17, 63, 64, 65, 200):
        bundle = [typed(rng.standard_normal(count, np.float32)), typed(rng.integers(0, 9, count))]
        assert len(pack(bundle, codec).data) <= 12 * count + 16


@pytest.mark.parametrize("codec", CODECS)
def test_equal_tensors_have_equal_bytes(codec: Codec) -> None:
    array = np.random.default_rng(5).standard_normal((300, 257), np.float32)
    # The tensor lies elsewhere in memory and is not contiguous, like a view of a larger tensor.
    other = np.asfortranarray(np.concatenate((array, array)))[:300]
    assert pack([typed(array)], codec) == pack([typed(other)], codec)


def test_a_bool_that_is_neither_true_nor_false_is_refused() -> None:
    payload = Payload((), (TensorHeader("bool", (2,)),), "raw", blake3(b"\1\2").digest(), memoryview(b"\1\2"))
    with pytest.raises(RemoteProtocolError, match="0 and 1"):
        unpack(payload, bytes_max=_LARGE)


@pytest.mark.parametrize(
    "fields",
    [
        [[], [["float32", [1] * 9]], "raw", bytes(32), b""],
        [[], [["float32", [0]]], "raw", bytes(32), b""],
        [[], [["float32", [-1]]], "raw", bytes(32), b""],
        [[], [["float32", [2**31]]], "raw", bytes(32), b""],
        [[], [["complex64", [1]]], "raw", bytes(32), b""],
        [[], [["float32", [1]]] * (TENSORS_MAX + 1), "raw", bytes(32), b""],
        [[0], [["float32", [1]]], "raw", bytes(32), b""],
        [[1] * 9, [["float32", [1]]], "raw", bytes(32), b""],
        [[], [["float32", [1]]], "gzip", bytes(32), b""],
        [[], [["float32", [1]]], "raw", bytes(31), b""],
        [[], [["float32", [1]]], "raw", bytes(32)],
    ],
)
def test_a_payload_out_of_bounds_is_not_decoded(fields: list[object]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(encode(fields), Payload, bytes_max=_LARGE)


@pytest.mark.parametrize(
    "tensor",
    [("float64", np.zeros(0)), ("float32", np.zeros(3)), ("float64", np.zeros((1,) * 9))],
    ids=["empty", "of another type", "of nine dimensions"],
)
def test_packing_an_unsendable_tensor_is_a_programming_error(tensor: Typed) -> None:
    with pytest.raises(LocalProtocolError):
        pack([tensor], "raw")


def test_an_unsendable_type_is_a_programming_error() -> None:
    with pytest.raises(LocalProtocolError):
        typed(np.zeros(2, np.complex64))
