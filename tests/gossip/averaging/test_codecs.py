"""Codecs of averaging have bounded errors and repeatable bytes, and decode hostile input to finite values
only."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from gossip.averaging.codecs import CHUNK_ITEMS, codec_of, coded_bytes, roundtrip
from gossip.averaging.feedback import ErrorFeedback

LOSSY = ("bfloat16", "float16", "int8", "int4", "topk64", "topk512")


@pytest.mark.parametrize(
    ("name", "error_max", "ratio_min"),
    [
        ("float32", 0.0, 1),
        ("bfloat16", 0.003, 2),
        ("float16", 4e-4, 1.99),
        ("int8", 0.01, 3.7),
        ("int4", 0.13, 7),
    ],
)
def test_errors_on_normally_distributed_values_are_small(
    name: str, error_max: float, ratio_min: float
) -> None:
    values = np.random.default_rng(1).standard_normal(300_001).astype(np.float32)
    codec = codec_of(name, "float32")
    error = float(np.sqrt(np.mean((roundtrip(codec, values) - values) ** 2)))
    assert error <= error_max
    assert values.nbytes / coded_bytes(codec, len(values)) >= ratio_min


def test_topk_keeps_the_largest_values_of_each_block() -> None:
    values = np.random.default_rng(1).standard_normal(1 << 18).astype(np.float32)
    codec = codec_of("topk64", "float32")
    decoded = roundtrip(codec, values).reshape(-1, 4_096)
    blocks = values.reshape(-1, 4_096)
    assert (np.count_nonzero(decoded, axis=1) == 64).all()
    for kept, block in zip(decoded, blocks, strict=True):
        assert set(np.flatnonzero(kept)) == set(np.argsort(np.abs(block))[-64:])
        chosen = kept != 0
        assert np.abs(kept[chosen] / block[chosen] - 1).max() < 0.4
    assert values.nbytes / codec.encode(values).nbytes > 130


@settings(max_examples=150)
@given(
    st.sampled_from(("float32", *LOSSY)), st.integers(1, 9_000), st.integers(0, 10**6), st.integers(-30, 30)
)
def test_coding_is_repeatable_and_decodes_to_finite_values(
    name: str, count: int, seed: int, exponent: int
) -> None:
    draws = np.random.default_rng(seed)
    values = (draws.standard_normal(count) * 10.0**exponent).astype(np.float32)
    values[draws.random(count) < 0.3] = 0
    codec = codec_of(name, "float32")
    data = bytes(codec.encode(values))
    assert data == bytes(codec.encode(values.copy()))
    decoded = codec.decode(memoryview(data), count)
    assert decoded.shape == (count,)
    assert np.isfinite(decoded).all()
    if not name.startswith("topk"):
        largest = float(np.abs(values).max())
        assert np.abs(decoded - values).max() <= 0.08 * largest


@settings(max_examples=200)
@given(st.sampled_from(("float32", *LOSSY)), st.integers(1, 300), st.binary(max_size=1_300))
def test_hostile_bytes_are_refused_or_decode_to_finite_values(name: str, count: int, data: bytes) -> None:
    codec = codec_of(name, "float32")
    size = codec.encode(np.zeros(count, np.float32)).nbytes
    for each in (data, (data * (size // max(len(data), 1) + 1))[:size]):
        with suppress(RemoteProtocolError):
            decoded = codec.decode(memoryview(each), count)
            assert decoded.shape == (count,)
            assert np.isfinite(decoded).all()


def test_values_that_are_not_finite_are_never_sent() -> None:
    for name in ("float32", *LOSSY):
        with pytest.raises(ValueError, match="not finite"):
            codec_of(name, "float32").encode(np.array([1.0, np.nan], np.float32))


@pytest.mark.parametrize("name", ["int4", "topk64"])
def test_error_feedback_eventually_sends_what_a_codec_omits(name: str) -> None:
    codec = codec_of(name, "float32")
    draws = np.random.default_rng(2)
    truth = draws.standard_normal(CHUNK_ITEMS // 8).astype(np.float32)
    feedback = ErrorFeedback(codec)
    received = np.zeros_like(truth)
    rounds = 400
    for number in range(rounds):
        sent = feedback.add(truth)
        # Every fifth round fails, and its error must not be counted twice.
        failed = number % 5 == 4
        if not failed:
            received += roundtrip(codec, sent)
        feedback.settle(is_included=not failed)
    error = np.abs(received / (rounds * 4 / 5) - truth).max()
    assert error < (0.002 if name == "int4" else 0.9)
    plain = np.abs(roundtrip(codec, truth) - truth).max()
    assert error < plain / 4
