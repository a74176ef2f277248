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
from partition.codec import Array, Codec, Payload, pack, unpack

_LARGE = 1 << 20


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=8)))
    dtype = draw(st.sampled_from(["float32", "float64", "int64"]))
    seed = draw(st.integers(0, 2**32 - 1))
    data = np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    array: Array = np.frombuffer(data, dtype=dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


@given(arrays(), st.sampled_from(["raw", "zstd"]))
def test_a_tensor_comes_back_bit_for_bit(array: Array, codec: Codec) -> None:
    payload: Payload = decode(encode(pack(array, codec)), Payload, bytes_max=_LARGE)
    back = unpack(payload, bytes_max=array.nbytes)
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    assert back.tobytes() == array.tobytes()


@given(st.binary(max_size=200), st.sampled_from(["raw", "zstd"]), st.lists(st.integers(1, 9), max_size=8))
def test_random_data_is_refused_or_decoded_within_the_bound(
    data: bytes, codec: Codec, shape: list[int]
) -> None:
    payload = Payload(tuple(shape), "float32", codec, blake3(data).digest(), data)
    with contextlib.suppress(RemoteProtocolError):
        assert unpack(payload, bytes_max=64).nbytes <= 64


@given(st.binary(max_size=300))
def test_random_bytes_are_no_payload(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data, Payload, bytes_max=_LARGE)


def test_a_changed_byte_is_noticed() -> None:
    payload = pack(np.arange(6.0), "raw")
    changed = msgspec.structs.replace(payload, data=b"\x01" + payload.data[1:])
    with pytest.raises(RemoteProtocolError, match="wrong digest"):
        unpack(changed, bytes_max=_LARGE)


def test_a_tensor_above_the_bound_is_refused_before_it_is_decompressed() -> None:
    payload = pack(np.zeros(1_000_000), "zstd")
    assert len(payload.data) < 2_000
    with pytest.raises(RemoteProtocolError, match="8000000 bytes, at most 7999999"):
        unpack(payload, bytes_max=7_999_999)


def test_a_frame_that_grows_beyond_its_shape_is_refused() -> None:
    data = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    payload = Payload((2,), "float32", "zstd", blake3(data).digest(), data)
    with pytest.raises(RemoteProtocolError, match="does not claim"):
        unpack(payload, bytes_max=_LARGE)


def test_a_frame_of_unknown_size_is_refused() -> None:
    data = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8))
    payload = Payload((2,), "float32", "zstd", blake3(data).digest(), data)
    with pytest.raises(RemoteProtocolError, match="does not claim"):
        unpack(payload, bytes_max=_LARGE)


@pytest.mark.parametrize(
    "fields",
    [
        [[1] * 9, "float32", "raw", bytes(32), b""],
        [[0], "float32", "raw", bytes(32), b""],
        [[-1], "float32", "raw", bytes(32), b""],
        [[2**31], "float32", "raw", bytes(32), b""],
        [[1], "float16", "raw", bytes(32), b""],
        [[1], "float32", "gzip", bytes(32), b""],
        [[1], "float32", "raw", bytes(31), b""],
        [[1], "float32", "raw", bytes(32)],
    ],
)
def test_a_payload_out_of_bounds_is_not_decoded(fields: list[object]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(encode(fields), Payload, bytes_max=_LARGE)


@pytest.mark.parametrize("array", [np.zeros(0), np.zeros(3, np.float16), np.zeros((1,) * 9)])
def test_what_cannot_be_sent_is_our_own_bug(array: Array) -> None:
    with pytest.raises(LocalProtocolError):
        pack(array, "raw")
