"""The codec of a link never costs more time than it saves, and never loses precision without a gain."""

import time
from itertools import count, pairwise
from typing import get_args

import numpy as np
import pytest

from partition.codecs.choice import LOSS_PAYS, Cost, Frames, allowed, calibrate, choose, narrowest, seconds_of
from partition.codecs.codec import CODECS, Codec
from partition.model.graph import DataType

MIB = 1 << 20
SAMPLE = np.random.default_rng(0).standard_normal(MIB // 4, np.float32)
# Measured on one core with 4 MiB of a GPT's activations.
COSTS: dict[Codec, Cost] = {
    "raw": Cost(2e-5, 4.5e9, 6.5e9),
    "zstd": Cost(2e-4, 0.6e9, 1.0e9, 0.85),
    "float16": Cost(1e-4, 1.2e9, 2.6e9),
    "float16+zstd": Cost(3e-4, 0.7e9, 1.2e9, 0.92),
    "bfloat16": Cost(1e-4, 2.4e9, 5.5e9),
    "bfloat16+zstd": Cost(3e-4, 0.6e9, 1.7e9, 0.69),
    "int8": Cost(1e-4, 1.9e9, 5.8e9),
    "int8+zstd": Cost(3e-4, 1.2e9, 2.5e9, 0.9),
    "int4": Cost(1e-4, 1.6e9, 4.9e9),
    "int4+zstd": Cost(3e-4, 1.3e9, 2.8e9, 0.88),
}


@pytest.mark.parametrize(
    ("bytes_per_second", "exact", "bfloat16", "int8", "int4"),
    [
        (10e9, "raw", "raw", "raw", "raw"),
        (2e9, "raw", "raw", "raw", "raw"),
        (1.25e9, "raw", "bfloat16", "bfloat16", "bfloat16"),
        (500e6, "zstd", "float16", "int8", "int8"),
        (125e6, "zstd", "bfloat16+zstd", "int8+zstd", "int4+zstd"),
        (12.5e6, "zstd", "bfloat16+zstd", "int8+zstd", "int4+zstd"),
        (1e6, "zstd", "bfloat16+zstd", "int8+zstd", "int4+zstd"),
    ],
)
def test_a_slower_link_gets_smaller_frames(
    bytes_per_second: float, exact: Codec, bfloat16: Codec, int8: Codec, int4: Codec
) -> None:
    wanted: dict[Frames, Codec] = {"exact": exact, "bfloat16": bfloat16, "int8": int8, "int4": int4}
    found = {
        frames: choose(allowed(frames, is_gradient=True), 4 * MIB, "float32", bytes_per_second, COSTS)
        for frames in wanted
    }
    assert found == wanted


@pytest.mark.parametrize("frames", ["exact", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("size_bytes", [4_096, MIB, 16 * MIB])
def test_no_chosen_codec_is_slower_than_raw(frames: Frames, size_bytes: int) -> None:
    codecs = allowed(frames, is_gradient=True)
    for rate in np.geomspace(1e5, 1e11, 60):
        chosen = choose(codecs, size_bytes, "float32", rate, COSTS)
        seconds = {codec: seconds_of(codec, size_bytes, "float32", rate, COSTS[codec]) for codec in codecs}
        assert seconds[chosen] <= seconds["raw"]
        assert seconds[chosen] * LOSS_PAYS <= min(seconds.values())
        less_lossy = codecs[: codecs.index(chosen)]
        assert all(seconds[chosen] < seconds[codec] / LOSS_PAYS for codec in less_lossy)


def test_short_tensors_are_sent_raw_over_fast_links() -> None:
    codecs = allowed("int8", is_gradient=False)
    assert choose(codecs, 4_096, "float32", 125e6, COSTS) == "raw"
    assert choose(codecs, 4_096, "float32", 1e6, COSTS) != "raw"


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_integers_are_compressed_without_loss(dtype: DataType) -> None:
    codecs = allowed("int4", is_gradient=True)
    assert choose(codecs, MIB, dtype, 1e6, COSTS) == "zstd"


def test_half_precision_is_not_halved_again() -> None:
    codecs = allowed("bfloat16", is_gradient=False)
    assert choose(codecs, MIB, "bfloat16", 1e6, {**COSTS, "bfloat16+zstd": COSTS["bfloat16"]}) == "zstd"


def test_int4_is_for_gradients_and_exact_is_lossless() -> None:
    assert narrowest("int4", is_gradient=True) == "int4+zstd"
    assert narrowest("int4", is_gradient=False) == "int8+zstd"
    assert allowed("exact", is_gradient=True) == ("raw", "zstd")
    frames: tuple[Frames, ...] = get_args(Frames)
    rows = [allowed(each, is_gradient=True) for each in frames]
    assert all(set(less) < set(more) for less, more in pairwise(rows))


def test_without_costs_only_raw_is_chosen() -> None:
    assert choose(allowed("int8", is_gradient=True), MIB, "float32", 1e6, {}) == "raw"


def test_calibration_measures_every_codec_of_this_machine() -> None:
    costs = calibrate(time.perf_counter, SAMPLE)
    assert set(costs) == set(CODECS)
    assert costs["raw"].zstd_share == costs["int8"].zstd_share == 1
    assert 0.8 < costs["zstd"].zstd_share < 1
    assert 0.5 < costs["bfloat16+zstd"].zstd_share < 0.8
    assert choose(allowed("int8", is_gradient=False), 16 * MIB, "float32", 1e6, costs).startswith("int8")


def test_calibration_works_with_a_clock_that_stands_still() -> None:
    ticks = count()
    for costs in (calibrate(lambda: 0.0, SAMPLE), calibrate(lambda: float(next(ticks)), SAMPLE)):
        for cost in costs.values():
            assert cost.fixed_seconds >= 0
            assert cost.encode_bytes_per_second > 0
            assert cost.decode_bytes_per_second > 0
