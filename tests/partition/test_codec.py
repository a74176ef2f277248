"""Payloads: every tensor comes back as it was, and every lie in one ends in RemoteProtocolError."""

import contextlib

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.codec import Array, Codec, Payload, TensorHeader, Typed, pack, typed, unpack
from partition.model.graph import ITEM_BYTES, TENSORS_MAX, DataType

_LARGE = 1 << 20
_HELD_AS = {"bfloat16": "uint16"}
"""What numpy holds a type in, where it has none of that name."""


@st.composite
def tensors(draw: st.DrawFn) -> Typed:
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=8)))
    dtype: DataType = draw(st.sampled_from(sorted(ITEM_BYTES)))
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
def test_a_bundle_comes_back_bit_for_bit(bundle: list[Typed], codec: Codec, sizes: list[int]) -> None:
    payload: Payload = decode(encode(pack(bundle, codec, sizes)), Payload, bytes_max=_LARGE)
    back = unpack(payload, bytes_max=sum(array.nbytes for _, array in bundle))
    assert payload.sizes == tuple(sizes)
    assert [dtype for dtype, _ in back] == [dtype for dtype, _ in bundle]
    for (_, array), (_, other) in zip(bundle, back, strict=True):
        assert (other.shape, other.dtype) == (array.shape, array.dtype)
        assert other.tobytes() == array.tobytes()


@given(
    st.binary(max_size=200),
    st.sampled_from(["raw", "zstd"]),
    st.lists(
        st.builds(
            TensorHeader,
            st.sampled_from(sorted(ITEM_BYTES)),
            st.lists(st.integers(1, 9), max_size=8).map(tuple),
        ),
        max_size=4,
    ),
)
def test_random_data_is_refused_or_decoded_within_the_bound(
    data: bytes, codec: Codec, headers: list[TensorHeader]
) -> None:
    payload = Payload((), tuple(headers), codec, blake3(data).digest(), data)
    with contextlib.suppress(RemoteProtocolError):
        assert sum(array.nbytes for _, array in unpack(payload, bytes_max=64)) <= 64


@given(st.binary(max_size=300))
def test_random_bytes_are_no_payload(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data, Payload, bytes_max=_LARGE)


def floats(count: int) -> tuple[TensorHeader, ...]:
    return (TensorHeader("float32", (count,)),)


def test_a_changed_byte_is_noticed() -> None:
    payload = pack([typed(np.arange(6.0))], "raw")
    changed = msgspec.structs.replace(payload, data=b"\x01" + payload.data[1:])
    with pytest.raises(RemoteProtocolError, match="wrong digest"):
        unpack(changed, bytes_max=_LARGE)


def test_a_bundle_above_the_bound_is_refused_before_it_is_decompressed() -> None:
    payload = pack([typed(np.zeros(500_000)), typed(np.zeros(500_000))], "zstd")
    assert len(payload.data) < 2_000
    with pytest.raises(RemoteProtocolError, match="8000000 bytes, at most 7999999"):
        unpack(payload, bytes_max=7_999_999)


def test_a_frame_that_grows_beyond_its_shapes_is_refused() -> None:
    data = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    payload = Payload((), floats(2), "zstd", blake3(data).digest(), data)
    with pytest.raises(RemoteProtocolError, match="does not claim"):
        unpack(payload, bytes_max=_LARGE)


def test_a_frame_of_unknown_size_is_refused() -> None:
    data = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8))
    payload = Payload((), floats(2), "zstd", blake3(data).digest(), data)
    with pytest.raises(RemoteProtocolError, match="does not claim"):
        unpack(payload, bytes_max=_LARGE)


def test_a_bool_that_is_neither_is_refused() -> None:
    payload = Payload((), (TensorHeader("bool", (2,)),), "raw", blake3(b"\1\2").digest(), b"\1\2")
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
def test_what_cannot_be_sent_is_our_own_bug(tensor: Typed) -> None:
    with pytest.raises(LocalProtocolError):
        pack([tensor], "raw")


def test_a_type_that_is_never_sent_is_our_own_bug() -> None:
    with pytest.raises(LocalProtocolError):
        typed(np.zeros(2, np.complex64))
