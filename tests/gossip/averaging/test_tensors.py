"""Tensors are packed into one vector and back, under a signature of their names, shapes and types."""

import numpy as np
import pytest

from gossip.averaging.pace import AttemptPace
from gossip.averaging.tensors import Array, TensorLayout, TensorSpec, layout_of


def test_tensors_survive_a_round_trip_and_integers_stay_unchanged() -> None:
    tensors: dict[str, Array] = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "h": np.array([1.5, -2.0], np.float16),
        "b": np.array([0x3F80, 0xC000], np.uint16),
        "steps": np.array(7, np.int64),
    }
    layout = layout_of(tensors)
    vector = layout.flatten(tensors)
    assert vector.tolist() == [1.0, -2.0, 1.5, -2.0, 0, 1, 2, 3, 4, 5]
    layout.unflatten(vector * 2, tensors)
    assert tensors["w"].tolist() == [[0, 2, 4], [6, 8, 10]]
    assert tensors["h"].tolist() == [3.0, -4.0]
    assert tensors["b"].tolist() == [0x4000, 0xC080]
    assert tensors["steps"] == 7


def test_the_signature_covers_names_shapes_and_types_but_not_their_order() -> None:
    one = [TensorSpec("a", (2,), "float32"), TensorSpec("b", (3,), "float32")]
    signature = TensorLayout(tuple(one)).signature
    assert TensorLayout(tuple(reversed(one))).signature == signature
    for other in (
        TensorSpec("c", (3,), "float32"),
        TensorSpec("b", (1, 3), "float32"),
        TensorSpec("b", (3,), "float16"),
        TensorSpec("b", (3,), "float32", "moment"),
    ):
        assert TensorLayout((one[0], other)).signature != signature


def test_tensors_that_were_not_declared_are_refused() -> None:
    layout = layout_of({"w": np.zeros(3, np.float32)})
    for wrong in ({}, {"w": np.zeros(4, np.float32)}, {"w": np.zeros(3, np.float64)}):
        with pytest.raises(ValueError, match="tensor 'w'"):
            layout.flatten(wrong)
    with pytest.raises(ValueError, match="nothing to average"):
        layout_of({"n": np.zeros(3, np.int64)})


def test_the_timeout_follows_measurements_and_doubles_on_failure() -> None:
    pace = AttemptPace(1e6)
    first = pace.patience(100_000_000).scatter_seconds
    for _ in range(40):
        pace.succeeded(100_000_000, 2.0)
    fast = pace.patience(100_000_000).scatter_seconds
    assert 2.0 <= fast < 3.0 < first
    pace.failed()
    assert pace.patience(100_000_000).scatter_seconds == pytest.approx(2 * fast)
    assert pace.patience(1).scatter_seconds >= 2.0
