"""Prices of operators: how they are fitted, the time of a layer that follows from them, and limits on other
peers' prices."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from partition.calibrate.fit import fit
from partition.model.layers import with_layers
from partition.plan.cost import LayerCost
from partition.plan.forecast import forecast
from partition.plan.operations import KINDS, Amount, layer_operations
from partition.plan.problem import Constraints, Problem, uniform_peers
from partition.plan.rates import (
    REFERENCE,
    Calibration,
    KindPace,
    OperatorPace,
    assumed,
    decode_calibration,
    encode_calibration,
)
from partition.plan.solver import solve
from tests.partition.test_layers import transformer

pieces = st.integers(0, 10**9)
paces = st.builds(OperatorPace, pieces, pieces, pieces)


@given(
    st.lists(st.builds(KindPace, st.sampled_from(KINDS), paces, paces), unique_by=lambda row: row.kind), paces
)
@settings(max_examples=50)
def test_a_calibration_is_read_back_as_it_was_written(kinds: list[KindPace], pace: OperatorPace) -> None:
    given = msgspec.structs.replace(REFERENCE, kinds=tuple(kinds), frame=pace)
    assert decode_calibration(encode_calibration(given)) == given


def test_a_class_twice_or_a_negative_price_is_refused() -> None:
    twice = msgspec.structs.replace(REFERENCE, kinds=REFERENCE.kinds[:1] * 2)
    with pytest.raises(RemoteProtocolError):
        decode_calibration(encode(twice))
    with pytest.raises(RemoteProtocolError):
        decode_calibration(encode(msgspec.structs.replace(REFERENCE, frame=OperatorPace(-1, 0, 0))))


@given(st.integers(1, 10**6), st.integers(0, 10**5), st.integers(0, 10**8))
@settings(max_examples=60)
def test_a_fit_recovers_the_prices_behind_the_times(call: int, megaflop: int, mebibyte: int) -> None:
    made = OperatorPace(1000 * call, 1000 * megaflop, mebibyte)
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


def test_a_nodes_own_work_slows_its_steps_by_as_much() -> None:
    layers = tuple(LayerCost(1 << 20, 10**8, 1 << 20, 1 << 20) for _ in range(6))
    (peer,) = uniform_peers(layers, [("a", 10**10, 8 << 30)])
    plain = Problem(layers, (peer,), microbatches=8)
    busy = replace(plain, peers=(replace(peer, node_nanoseconds=(3_000_000, 0)),))
    split = solve(plain)
    assert solve(busy).ranges == split.ranges
    more = forecast(busy, split).step_nanoseconds - forecast(plain, split).step_nanoseconds
    assert more == 8 * 3_000_000
    once = replace(plain, peers=(replace(peer, node_step_nanoseconds=5_000_000),))
    more = forecast(once, split).step_nanoseconds - forecast(plain, split).step_nanoseconds
    assert more == 5_000_000


def test_a_quota_slows_applying_a_step_like_all_other_work() -> None:
    device = msgspec.structs.replace(REFERENCE, share_permille=150)
    assert device.step_nanoseconds == tuple(1000 * value // 150 for value in REFERENCE.step_nanoseconds)
    layers = tuple(LayerCost(3 << 20, 10**8, 1 << 20, 1 << 20, parameters=4) for _ in range(6))
    (peer,) = uniform_peers(layers, [("a", 10**10, 8 << 30)])
    plain = Problem(layers, (peer,), microbatches=8)
    split = solve(plain)
    stepping = replace(plain, peers=(replace(peer, step_nanoseconds=device.step_nanoseconds),))
    more = forecast(stepping, split).step_nanoseconds - forecast(plain, split).step_nanoseconds
    call, mebibyte = device.step_nanoseconds
    assert more == 6 * (4 * call + 3 * mebibyte)


def test_a_nodes_own_work_moves_layers_to_the_faster_peer() -> None:
    layers = tuple(LayerCost(1 << 20, 10**8, 1 << 20, 1 << 10) for _ in range(12))
    peers = uniform_peers(layers, [("a", 10**10, 8 << 30), ("b", 4 * 10**10, 8 << 30)])
    rules = Constraints(stages=2, replicas=1)
    plain = Problem(layers, peers, microbatches=64, constraints=rules)
    slow, fast = (
        replace(peer, node_nanoseconds=(call, 0))
        for peer, call in zip(peers, (40_000_000, 10_000_000), strict=True)
    )
    busy = replace(plain, peers=(slow, fast))

    def share(problem: Problem) -> int:
        split = solve(problem)
        return next(
            last - first
            for (first, last), group in zip(split.ranges, split.groups, strict=True)
            if problem.peers[group[0]].name == "b"
        )

    assert share(busy) > share(plain)


def test_a_calibration_without_own_work_and_power_is_still_read() -> None:
    given = msgspec.structs.replace(
        REFERENCE, node=OperatorPace(1, 2, 3), busy_milliwatts=40_000, idle_milliwatts=9_000, node_step=4
    )
    assert decode_calibration(encode_calibration(given)) == given
    fields = msgspec.to_builtins(given)
    assert decode_calibration(msgspec.msgpack.encode(fields[:-1])).node_step == 0
    without_power = decode_calibration(msgspec.msgpack.encode(fields[:-3]))
    assert (without_power.node, without_power.busy_milliwatts) == (given.node, 0)
    assert decode_calibration(msgspec.msgpack.encode(fields[:-4])).node == OperatorPace(0, 0, 0)
    own = {"node": OperatorPace(10**9, 0, 10**9), "node_step": 10**9, "frame": OperatorPace(10**8, 0, 10**9)}
    half = msgspec.structs.replace(given, share_permille=500, **own)
    assert half.node_nanoseconds == (2_800_000, 4_000_000), (
        "the node's own work does not count four frames per micro-batch"
    )
    assert half.node_step_nanoseconds == 2 * 10**6
    assert half.scaled(500).node_step_nanoseconds == 4 * 10**6
