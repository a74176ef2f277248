"""Operations that a device lacks are refused at admission with a clear reason, and not in the middle of a
step.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partition.execute import device_limits
from partition.execute.admit import admit
from partition.model.graph import Graph
from partition.stage import OptimizerSettings
from tests.partition import test_executor as training
from tests.partition.graphs import whole
from tests.partition.hand_models import gpt_graph
from tests.partition.held import Row
from tests.partition.test_admit import Layer, refusal, specification


def pooled(side: int) -> Graph:
    """Return a linear layer, its output as images of 3x9x9, and a pool to this many places on each side."""
    layer = Layer()
    weight = layer.build.parameter("w", 243, 8)
    image = layer.node("view", layer.node("linear", layer.x, weight), [layer.batch, 3, 9, 9])
    return layer.graph(layer.node("adaptive_avg_pool2d", image, [side, side]))


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU refuse what CUDA and MPS refuse; torch's meta backward works for every device."""
    monkeypatch.setitem(device_limits.NOT_DETERMINISTIC, "cpu", device_limits.NOT_DETERMINISTIC["cuda"])
    monkeypatch.setitem(device_limits.MISSING, "cpu", device_limits.MISSING["mps"])


def test_an_operator_without_a_deterministic_backward_is_refused(as_a_gpu: None) -> None:
    said = refusal(pooled(4))
    assert said.endswith(
        "cpu computes adaptive_avg_pool2d_backward in a different order each time. Use a CPU for this stage"
    )


def test_a_pool_to_a_single_value_is_admitted_as_a_mean(as_a_gpu: None) -> None:
    admit(specification(pooled(1)))


def test_a_device_without_float64_refuses_a_float64_run(as_a_gpu: None) -> None:
    said = refusal(gpt_graph(30, 8, 16, 2, 2, 0.0, "float64"))
    assert said.endswith("cpu has no float64. Use a CPU for this stage, or float32")
    admit(specification(gpt_graph(30, 8, 16, 2, 2, 0.0, "float32")))


def test_the_limits_of_devices_refuse_nothing_on_a_cpu() -> None:
    admit(specification(pooled(4)))
    admit(specification(gpt_graph(30, 8, 16, 2, 2, 0.0, "float64")))


class Without(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """A device without float64 that reports this as MPS does. The arenas that the node sees are not on the
    device."""

    def __init__(self, row: Row) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        executors = [held.executor for chain in row.chains for held in chain]
        self._arenas = {each.shared.data_ptr() for one in executors for each in one._arenas.vectors.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_there = any(isinstance(each, torch.Tensor) and not self._is_of_node(each) for each in args)
        for each in made if isinstance(made, tuple | list) else (made,):
            if is_there and isinstance(each, torch.Tensor) and each.dtype == torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return made

    def _is_of_node(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._arenas or tensor.dtype == torch.float64


def test_a_step_needs_no_float64_on_the_device() -> None:
    adam = OptimizerSettings("adamw", learning_rate=2e-3, weight_decay=0.1, clip_norm=1.0)
    graph = training.model("cnn", "float32")
    row = Row([whole(graph)], (4,), microbatches=training.MICROBATCHES, optimizer=adam)
    with Without(row):
        steps = list(training.train(row, "cnn", "float32"))
    assert len(steps) == 4
