"""Coders: the error of each value, the use of zstd, and how feedback compensates errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from partition.codecs.base import TILE
from partition.codecs.block_quantization import BLOCK
from partition.codecs.codec import Array, Codec, Rounding, pack, pack_measured, typed, unpack
from partition.codecs.error_feedback import Feedback
from partition.codecs.lossless import restore, shrink
from partition.model.graph import DataType

LOSSY: tuple[Codec, ...] = ("float16", "bfloat16", "int8", "int4")


def back(array: Array, codec: Codec, dtype: DataType = "float32") -> Array:
    payload = pack([(dtype, array)], codec)
    assert len(payload.data) < array.nbytes, "the tensor was not compressed"
    ((_, found),) = unpack(payload, bytes_max=array.nbytes)
    return found


@st.composite
def numbers(draw: st.DrawFn) -> Array:
    """Draw tensors: empty, only zeros, with blocks of very different magnitudes, or subnormal."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(3 * BLOCK, 6 * BLOCK) | st.sampled_from([TILE, TILE + 1, 2 * TILE + 70]))
    array: Array = rng.standard_normal(count, np.float32)
    scales = np.exp2(rng.integers(draw(st.integers(-148, 100)), 101, -(-count // BLOCK)).astype(np.float64))
    array = (array * np.repeat(scales, BLOCK)[:count]).astype(np.float32)
    array[rng.random(count) < draw(st.sampled_from([0, 0, 0.5, 1]))] = 0
    return array


def peaks_of(array: Array) -> Array:
    """Return the largest magnitude in each item's block."""
    padded = np.zeros(-(-len(array) // BLOCK) * BLOCK)
    padded[: len(array)] = np.abs(array)
    peaks: Array = padded.reshape(-1, BLOCK).max(axis=1)
    each: Array = np.repeat(peaks, BLOCK)
    return each[: len(array)]


@given(numbers(), st.sampled_from([("int8", 254), ("int8+zstd", 254), ("int4", 14)]))
def test_blocks_change_a_value_by_half_a_scale_at_most(array: Array, codec: tuple[Codec, int]) -> None:
    name, steps = codec
    moved = np.abs(back(array, name).astype(np.float64) - array)
    peaks = peaks_of(array)
    tiny = peaks < 2.0**-118
    assert (moved[~tiny] <= (peaks / steps * (1 + 2**-8))[~tiny]).all()
    assert (moved[tiny] < 2.0**-118).all()


@given(numbers())
def test_bfloat16_rounds_to_the_nearest_with_ties_to_even(array: Array) -> None:
    bits = array.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    assert back(array, "bfloat16").tobytes() == rounded.tobytes()
    assert (np.abs(rounded - array) <= np.maximum(np.abs(array) * np.float32(2**-8), 2.0**-134)).all()


@given(numbers())
def test_scaled_float16_keeps_eleven_bits_of_large_numbers(array: Array) -> None:
    moved = np.abs(back(array, "float16").astype(np.float64) - array)
    for start in range(0, len(array), TILE):
        part = np.abs(array[start : start + TILE]).astype(np.float64)
        bound = np.maximum(part * 2**-11, max(part.max() * 2**-38, 2.0**-150))
        assert (moved[start : start + TILE] <= bound).all()


def test_scaled_float16_keeps_a_gradient_that_unscaled_would_lose() -> None:
    gradient = np.random.default_rng(1).standard_normal(1_000, np.float32) * np.float32(1e-8)
    assert np.linalg.norm(gradient.astype(np.float16) - gradient) > 0.5 * np.linalg.norm(gradient)
    assert np.linalg.norm(back(gradient, "float16") - gradient) < 3e-4 * np.linalg.norm(gradient)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-38, 3e-36, 1.0, -7e37])
def test_a_constant_tensor_is_restored(codec: Codec, value: float) -> None:
    array = np.full(1_000, value, np.float32)
    moved = np.abs(back(array, codec).astype(np.float64) - array)
    # Scales are bfloat16 values, which are off by at most 2^-9.
    assert (moved <= max(abs(float(array[0])) * 2**-8, 2.0**-118)).all()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_blocks_of_other_floating_types_are_as_precise(codec: Codec) -> None:
    array = np.random.default_rng(2).standard_normal(1_000, np.float32)
    step = peaks_of(array) / (254 if codec == "int8" else 14) * (1 + 2**-7)
    wide = array.astype(np.float64)
    assert (np.abs(back(wide, codec, "float64") - wide) <= step).all()
    half = array.astype(np.float16)
    assert (np.abs(back(half, codec, "float16").astype(np.float32) - half) <= step + 2**-10).all()
    brain = (array.view(np.uint32) >> 16).astype(np.uint16)
    found = back(brain, codec, "bfloat16")
    widened = [(bits.astype(np.uint32) << 16).view(np.float32) for bits in (found, brain)]
    assert (np.abs(widened[0] - widened[1]) <= step + np.abs(widened[1]) * 2**-7).all()


def test_float64_beyond_float32_stays_exact_and_underflow_becomes_zero() -> None:
    array = np.full(1_000, 1e300)
    for codec in LOSSY:
        payload = pack([typed(array)], codec)
        assert unpack(payload, bytes_max=8_000)[0][1].tobytes() == array.tobytes()
    assert not back(np.full(1_000, 1e-300), "int8", "float64").any()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("count", [500, 5 * TILE + 17])
def test_the_reported_error_is_the_actual_one(codec: Codec, count: int) -> None:
    rng = np.random.default_rng(4)
    array = rng.standard_normal(count, np.float32) * np.exp(rng.standard_normal(count, np.float32))
    _, rounding = pack_measured([typed(array), typed(array)], codec)
    relative = np.linalg.norm(back(array, codec) - array) / np.linalg.norm(array)
    assert rounding.relative == pytest.approx(relative, rel=0.05)
    assert rounding.squared_norm == pytest.approx(2 * float(array @ array), rel=0.1)


def test_exact_codecs_have_no_error_and_errors_add_up() -> None:
    array = np.arange(1_000.0)
    assert pack_measured([typed(array)], "raw")[1] == Rounding()
    assert pack_measured([typed(array)], "zstd")[1] == Rounding()
    assert Rounding().relative == 0
    assert (Rounding(1, 2) + Rounding(3, 98)).relative == pytest.approx(0.2)


# zstd


def test_zstd_encodes_dense_floats_by_planes_and_sparse_ones_whole() -> None:
    rng = np.random.default_rng(6)
    dense = rng.standard_normal(1 << 16, np.float32)
    sparse = np.where(rng.random(1 << 16) < 0.6, 0, dense).astype(np.float32)
    for array, is_apart in ((dense, True), (sparse, False)):
        found = shrink(array.view(np.uint8), 4)
        assert found is not None
        assert found[1] is is_apart
        restored = restore(memoryview(found[0]), array.nbytes, 4, is_apart=is_apart)
        assert restored.tobytes() == array.tobytes()


def test_zstd_is_left_out_if_it_saves_nothing() -> None:
    data = np.frombuffer(np.random.default_rng(7).bytes(1 << 20), np.uint8)
    assert shrink(data, 1) is None
    assert shrink(data, 4) is None
    assert shrink(data[:1], 1) is None
    # It is also left out if only the middle looks compressible.
    mixed = data.copy()
    mixed[(1 << 19) - 4_096 : (1 << 19) + 40_000] = 0
    found = shrink(mixed, 1)
    assert found is None or len(found[0]) < len(mixed)


@given(st.binary(max_size=300), st.integers(1, 64), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_random_bytes_are_not_a_frame(data: bytes, items: int, item_bytes: int, is_apart: bool) -> None:
    with pytest.raises(RemoteProtocolError):
        restore(memoryview(data), items * item_bytes, item_bytes, is_apart=is_apart)


# Feedback


def test_feedback_loses_nothing_in_the_sum() -> None:
    rng = np.random.default_rng(8)
    gradients = [rng.standard_normal(1_000, np.float32) + np.float32(0.05) for _ in range(40)]
    feedback = Feedback(1 << 20)
    sums = np.zeros((3, 1_000))
    for gradient in gradients:
        owing, rounding = pack_measured([typed(gradient)], "int4", (), feedback)
        assert 0.05 < rounding.relative < 0.2
        sums[0] += gradient
        sums[1] += unpack(owing, bytes_max=4_000)[0][1]
        sums[2] += back(gradient, "int4")
    with_feedback, without = (np.linalg.norm(sums[0] - sums[row]) for row in (1, 2))
    assert with_feedback < 0.25 * without


def test_feedback_is_only_for_int4_and_separate_for_each_tensor() -> None:
    rng = np.random.default_rng(9)
    bundle = [typed(rng.standard_normal(500, np.float32)), typed(np.arange(500)), typed(rng.random(700))]
    feedback = Feedback(1 << 20)
    assert pack_measured(bundle, "int8", (), feedback)[0] == pack(bundle, "int8")
    assert feedback.size_bytes == 0
    first, _ = pack_measured(bundle, "int4", (), feedback)
    assert first == pack(bundle, "int4"), "the first result already contains a residual"
    assert feedback.size_bytes == 4 * 1_200
    second, _ = pack_measured(bundle, "int4", (), feedback)
    assert second.data != first.data
    feedback.clear()
    assert pack_measured(bundle, "int4", (), feedback)[0] == first


def test_a_residual_is_dropped_if_lengths_change_or_values_are_infinite() -> None:
    rng = np.random.default_rng(10)
    long, short = rng.standard_normal(500, np.float32), rng.standard_normal(400, np.float32)
    broken = long.copy()
    broken[3] = np.inf
    for between in (short, broken):
        feedback = Feedback(1 << 20)
        pack_measured([typed(long)], "int4", (), feedback)
        payload, _ = pack_measured([typed(between)], "int4", (), feedback)
        assert payload == pack([typed(between)], "int4")


def test_feedback_has_bounded_bytes_and_drops_the_least_recently_used() -> None:
    feedback = Feedback(1_000)
    for key in "abc":
        feedback.keep(key, np.ones(100, np.float32), np.zeros(100, np.float32))
    feedback.keep("large", np.ones(251, np.float32), np.zeros(251, np.float32))
    assert feedback.size_bytes == 800
    found = {}
    for key in ("a", "b", "c", "large"):
        values = np.zeros(251 if key == "large" else 100, np.float32)
        feedback.add_to(key, values)
        found[key] = float(values.sum())
    assert found == {"a": 0, "b": 100, "c": 100, "large": 0}
    assert feedback.size_bytes == 0
