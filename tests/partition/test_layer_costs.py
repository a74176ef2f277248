"""The cost table of a graph, compared with torch's counts and with the memory of a real run."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from partition.capture.models import BUILTIN
from partition.capture.task import Task, capture_task
from partition.model.graph import Graph
from partition.model.layers import with_layers
from partition.model.work import EntryWork
from partition.plan.layer_costs import layer_costs
from tests.partition.graphs import GraphBuilder
from tests.partition.test_layers import transformer

MODELS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "simple-cnn": ((3, 32, 32), 10, {}),
    "resnet18": ((3, 32, 32), 10, {}),
    "gpt": ((32,), 64, {"layers": 2, "width": 32, "heads": 4, "dropout": 0.1}),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> tuple[Task, Graph]:
    shape, classes, options = MODELS[request.param]
    torch.manual_seed(0)
    task = BUILTIN[request.param](shape, classes, **options)
    return task, capture_task(task).graph


def sizes_of(task: Task, graph: Graph) -> tuple[int, ...]:
    assert not isinstance(task.example_inputs, dict)
    inputs: Any = task.example_inputs
    return tuple(inputs[0].shape[: len(graph.symbols)])


def test_flops_equal_those_that_torch_counts(model: tuple[Task, Graph]) -> None:
    task, graph = model
    work = EntryWork(graph, graph.entries[0], sizes_of(task, graph))
    counted = FlopCounterMode(display=False)
    # torch does not count its fused attention on the CPU. Written out, attention is two products.
    with counted, sdpa_kernel(SDPBackend.MATH):
        inputs: Any = task.example_inputs
        task.model.train()(*inputs)
    products = sum(work.product_flops(node) for node in graph.entries[0].nodes)
    assert products == pytest.approx(counted.get_total_flops(), rel=0.02)
    total = sum(cost.forward_flops for cost in layer_costs(graph, sizes_of(task, graph)))
    # Other operators add a little.
    assert products < total < 1.1 * products


def test_memory_kept_for_the_backward_pass_has_an_upper_limit(model: tuple[Task, Graph]) -> None:
    task, graph = model
    own = {parameter.untyped_storage().data_ptr() for parameter in task.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs: Any = task.example_inputs
    assert task.loss is not None
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = task.loss(task.model.train()(*inputs), *task.labels)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    estimated = sum(cost.saved_bytes for cost in layer_costs(graph, sizes_of(task, graph)))
    assert measured <= estimated <= 1.5 * measured
    del loss


def test_parameters_count_in_every_layer_that_uses_them() -> None:
    graph = with_layers(transformer(2))
    costs = layer_costs(graph, (4,))
    table = 256 * 32 * 4
    attention, feed_forward = (32 + 2 * 32 * 32) * 4, (32 + 8 * 32 * 32) * 4
    assert [cost.parameter_bytes for cost in costs] == [
        table,
        attention,
        feed_forward,
        attention,
        feed_forward,
        table,
    ]
    assert [cost.output_bytes for cost in costs] == [4 * 32 * 4] * 5 + [0]


def test_costs_grow_with_the_batch() -> None:
    graph = with_layers(transformer(2))
    one, four = layer_costs(graph, (1,)), layer_costs(graph, (4,))
    for small, large in zip(one[1:-1], four[1:-1], strict=True):
        assert large.forward_flops == 4 * small.forward_flops
        assert large.saved_bytes == 4 * small.saved_bytes
        assert large.output_bytes == 4 * small.output_bytes


def test_a_boundary_counts_only_values_that_are_sent() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 256), build.label("y", "float32", batch, 256)
    mask = build.node("mul.Tensor", build.constant(np.ones((256,), dtype=np.float32)), 2.0)
    hidden = build.node("linear", x, build.parameter("a.weight", 256, 256), owner="a")
    active = build.node("relu", hidden)
    both = build.node("mul.Tensor", build.node("add.Tensor", hidden, active), mask)
    out = build.node("linear", both, build.parameter("b.weight", 256, 256), owner="b")
    late = build.node("mul.Tensor", build.node("add.Tensor", out, active), hidden)
    build.end(outputs=[late], loss=build.node("mse_loss", late, y, 2))
    graph = with_layers(build.finish(), split=["b"])
    # hidden, relu(hidden) and their sum are all needed after the boundary.
    assert layer_costs(graph, (2,))[0].output_bytes == 2 * 256 * 4


def test_without_a_loss_nothing_is_kept_and_the_outputs_are_sent() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin("forward")
    x = build.input("x", "float32", batch, 8)
    out = build.node("linear", x, build.parameter("a.weight", 3, 8))
    build.end(outputs=[out])
    (cost,) = layer_costs(build.finish(), (5,))
    assert (cost.saved_bytes, cost.output_bytes, cost.parameter_bytes) == (0, 5 * 3 * 4, 96)
    assert cost.forward_flops == 2 * 5 * 8 * 3


@pytest.mark.parametrize(
    ("operator", "shapes", "extra"),
    [
        ("mm", [(6, 5), (5, 7)], []),
        ("bmm", [(3, 6, 5), (3, 5, 7)], []),
        ("addmm", [(7,), (6, 5), (5, 7)], []),
        ("baddbmm", [(3, 6, 7), (3, 6, 5), (3, 5, 7)], []),
        ("matmul", [(2, 3, 6, 5), (5, 7)], []),
        ("linear", [(2, 3, 5), (7, 5), (7,)], []),
        ("conv1d", [(2, 4, 16), (6, 2, 3)], [None, [2], [1], [1], 2]),
        ("conv2d", [(2, 4, 9, 9), (6, 4, 3, 3)], [None, [1, 1], [1, 1]]),
        ("conv_transpose2d.input", [(2, 4, 9, 9), (4, 6, 3, 3)], [None, [2, 2]]),
        ("convolution", [(2, 4, 9, 9), (4, 6, 3, 3)], [None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1]),
        ("einsum", [(2, 6, 5), (5, 7)], None),
    ],
)
def test_products_of_every_form_are_counted_like_torch(
    operator: str, shapes: list[tuple[int, ...]], extra: list[Any] | None
) -> None:
    build = GraphBuilder()
    build.symbol("batch")
    build.begin("forward")
    values = [build.input(f"x{place}", "float32", *shape) for place, shape in enumerate(shapes)]
    tensors = [torch.zeros(shape) for shape in shapes]
    name, _, overload = operator.partition(".")
    call = getattr(getattr(torch.ops.aten, name), overload or "default")
    counted = FlopCounterMode(display=False)
    if extra is None:
        out = build.node(operator, "bij,jk->bik", values)
        with counted:
            call("bij,jk->bik", tensors)
    else:
        out = build.node(operator, *values, *extra)
        with counted:
            call(*tensors, *extra)
    build.end(outputs=[out])
    graph = build.finish()
    (node,) = graph.entries[0].nodes
    assert EntryWork(graph, graph.entries[0], (1,)).product_flops(node) == counted.get_total_flops() > 0


def test_impossible_sizes_are_an_error_without_a_crash() -> None:
    graph = with_layers(transformer(1))
    with pytest.raises(ValueError, match="do not fit the graph"):
        layer_costs(graph, ())
