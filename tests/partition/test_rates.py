"""Prices of operators: what they are fitted to, what a layer takes by them, and what strangers may send."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from partition.calibrate import fit
from partition.model.layers import with_layers
from partition.plan.operations import KINDS, Amount, layer_operations
from partition.plan.rates import (
    REFERENCE,
    Calibration,
    KindPace,
    Pace,
    assumed,
    decode_calibration,
    encode_calibration,
)
from tests.partition.test_layers import transformer

pieces = st.integers(0, 10**9)
paces = st.builds(Pace, pieces, pieces, pieces)


@given(
    st.lists(st.builds(KindPace, st.sampled_from(KINDS), paces, paces), unique_by=lambda row: row.kind), paces
)
@settings(max_examples=50)
def test_a_calibration_is_read_back_as_it_was_written(kinds: list[KindPace], pace: Pace) -> None:
    given = msgspec.structs.replace(REFERENCE, kinds=tuple(kinds), frame=pace)
    assert decode_calibration(encode_calibration(given)) == given


def test_a_class_twice_or_a_negative_price_is_refused() -> None:
    twice = msgspec.structs.replace(REFERENCE, kinds=REFERENCE.kinds[:1] * 2)
    with pytest.raises(RemoteProtocolError):
        decode_calibration(encode(twice))
    with pytest.raises(RemoteProtocolError):
        decode_calibration(encode(msgspec.structs.replace(REFERENCE, frame=Pace(-1, 0, 0))))


@given(st.integers(1, 10**6), st.integers(0, 10**5), st.integers(0, 10**8))
@settings(max_examples=60)
def test_a_fit_finds_the_prices_that_made_the_times(call: int, megaflop: int, mebibyte: int) -> None:
    made = Pace(1000 * call, 1000 * megaflop, mebibyte)
    amounts = [
        Amount(1, flops, size)
        for flops, size in ((10**3, 10**4), (10**6, 10**5), (10**8, 10**6), (10**9, 10**8), (10**4, 10**7))
    ]
    seconds = [made.picoseconds(amount) / 1e12 for amount in amounts]
    found = fit(amounts, seconds)
    for amount, time in zip(amounts, seconds, strict=True):
        assert found.picoseconds(amount) / 1e12 == pytest.approx(time, rel=0.2, abs=1e-9)


def test_a_faster_processor_takes_proportionally_less() -> None:
    layers = layer_operations(with_layers(transformer(2)), (4,))
    slow, fast = (
        sum(sum(row) for row in assumed(rate).model_nanoseconds(layers)) for rate in (10**10, 10**11)
    )
    assert slow == pytest.approx(10 * fast, rel=0.01)


def test_half_a_processor_takes_twice_as_long() -> None:
    layers = layer_operations(with_layers(transformer(2)), (4,))

    def total(calibration: Calibration) -> int:
        return sum(sum(row) for row in calibration.model_nanoseconds(layers))

    half = msgspec.structs.replace(REFERENCE, share_permille=500)
    assert total(half) == pytest.approx(2 * total(REFERENCE), rel=0.01)
    assert half.flops_per_second == pytest.approx(REFERENCE.flops_per_second / 2, rel=0.01)


def test_every_layer_of_a_graph_has_work_in_both_passes() -> None:
    for layer in layer_operations(with_layers(transformer(2)), (4,)):
        forward, backward = REFERENCE.layer_nanoseconds(layer)
        assert forward > 0
        assert backward > 0
