"""The proof that a graph equals the model: equal graphs pass, tampered ones never do."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn
from torch.nn import functional

from partition.capture import Task, capture, skeleton
from partition.capture import export as exporting
from partition.capture.capture import Captured
from partition.capture.compare import FLOOR, TOLERANCES, signs_of, sketch_of
from partition.capture.errors import CaptureRefused
from partition.capture.lazy_tensor import NOISE, TILE, LazyTensor, Materialised, Tiles, lazy
from partition.capture.proof import Proof, prove
from partition.capture.task import capture_task, correct, cross_entropy, prove_task
from partition.model.graph import (
    FillStep,
    Graph,
    GraphNode,
    Items,
    Recipe,
    Size,
    Value,
    encode_graph,
    graph_hash,
)

SIDE, CLASSES = 6, 5


class Small(nn.Module):
    """A module with every operation that differs between training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(4 * SIDE * SIDE // 4, 12)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(12, 12)
        self.head = nn.Linear(12, CLASSES)
        self.head.bias.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = functional.max_pool2d(functional.relu(self.norm(self.conv(images))), 2)
        inner = self.dropout(torch.tanh(self.first(inner.view(inner.shape[0], -1))))
        logits: torch.Tensor = self.head(inner + functional.gelu(self.second(inner)))
        return logits


def task(*, outlined: bool = False, dtype: torch.dtype = torch.float64) -> Task:
    torch.manual_seed(0)
    with skeleton() if outlined else nullcontext():
        model = Small().to(dtype)
    return Task(
        model,
        (torch.zeros(3, 2, SIDE, SIDE, dtype=dtype),),
        (torch.tensor([0, 4, 2]),),
        loss=cross_entropy,
        metrics={"correct": correct},
        name="small",
    )


@dataclass(frozen=True)
class Shipped:
    """A possibly tampered graph with a matching name."""

    graph: Graph

    @property
    def hash(self) -> bytes:
        return graph_hash(encode_graph(self.graph))


@cache
def captured_small(outlined: bool = False, dtype: torch.dtype = torch.float64) -> Captured:
    """Captured once: a graph is data."""
    return capture_task(task(outlined=outlined, dtype=dtype))


def graph() -> Graph:
    return captured_small().graph


def shown(tampered: Graph, **options: Any) -> Proof:
    """Run the proof of a different graph against the small model."""
    made = task(**options)
    return prove(
        made.model, Shipped(tampered), made.example_inputs, made.labels, loss=made.loss, metrics=made.metrics
    )


def edited(change: Callable[[GraphNode, str], GraphNode | None]) -> Graph:
    """Return the small model's graph with exactly one node changed: the first node that `change` accepts."""
    whole = graph()
    entry = whole.entries[0]
    nodes, done = [], False
    for node in entry.nodes:
        other = None if done else change(node, whole.operators[node.operator])
        done = done or other is not None
        nodes.append(other or node)
    assert done
    return structs.replace(whole, entries=(structs.replace(entry, nodes=tuple(nodes)),))


def with_argument(operator: str, place: int, value: Any) -> Callable[[GraphNode, str], GraphNode | None]:
    def change(node: GraphNode, name: str) -> GraphNode | None:
        if name != f"aten.{operator}.default" or len(node.arguments) <= place:
            return None
        assert node.arguments[place] != value
        arguments = (*node.arguments[:place], value, *node.arguments[place + 1 :])
        return structs.replace(node, arguments=arguments)

    return change


def with_keyword(operator: str, key: str, value: Any) -> Callable[[GraphNode, str], GraphNode | None]:
    def change(node: GraphNode, name: str) -> GraphNode | None:
        if name != f"aten.{operator}.default":
            return None
        assert dict(node.keywords).get(key) != value
        return structs.replace(node, keywords=((key, value),))

    return change


@pytest.mark.parametrize("outlined", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_captured_model_is_proved(outlined: bool, dtype: torch.dtype) -> None:
    made = task(outlined=outlined, dtype=dtype)
    proof = prove_task(made, captured_small(outlined, dtype))
    assert proof.entries == ("train",)
    assert proof.gradients == 9
    assert proof.error <= proof.tolerance == TOLERANCES[dtype]
    assert proof.sizes == (3,)
    assert proof.loss > 0


def test_only_one_operators_parameters_have_values_at_a_time() -> None:
    made = task(outlined=True)
    proof = prove_task(made, captured_small(True))
    largest = (
        made.model.get_parameter("first.weight").numel() + made.model.get_parameter("first.bias").numel()
    )
    assert proof.materialised_bytes == 8 * largest
    assert prove_task(task(), captured_small()).materialised_bytes == 0


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (with_argument("dropout", 1, 0.31), "output 0"),
        (with_argument("batch_norm", 7, 1e-4), "output 0"),
        (with_keyword("gelu", "approximate", "tanh"), "output 0"),
        (with_argument("max_pool2d", 1, Items((1, 1))), "cannot be computed"),
    ],
)
def test_a_changed_argument_is_detected(
    change: Callable[[GraphNode, str], GraphNode | None], where: str
) -> None:
    with pytest.raises(CaptureRefused, match=where):
        shown(edited(change))


def test_a_change_of_any_value_that_a_node_uses_is_detected() -> None:
    # Each input of a node is replaced in turn by the output of the previous node. No such graph equals the
    # model.
    entry = graph().entries[0]
    tried = 0
    for node in entry.nodes[2:]:
        taken = [argument for argument in node.arguments if isinstance(argument, Value)]
        other = Value(entry.nodes[node.id - 2].outputs[0])
        if not taken or other in taken or other.id == taken[0].id:
            continue

        def change(
            each: GraphNode, _: str, wanted: GraphNode = node, other: Value = other
        ) -> GraphNode | None:
            if each.id != wanted.id:
                return None
            place = next(i for i, argument in enumerate(each.arguments) if isinstance(argument, Value))
            return structs.replace(
                each, arguments=(*each.arguments[:place], other, *each.arguments[place + 1 :])
            )

        with pytest.raises(CaptureRefused):
            shown(edited(change))
        tried += 1
    assert tried >= 5


def test_swapped_parameters_are_detected_and_reported() -> None:
    whole = graph()
    rows = list(whole.parameters)
    one, other = (
        next(i for i, row in enumerate(rows) if row.names == (name,)) for name in ("norm.weight", "norm.bias")
    )
    rows[one], rows[other] = (
        structs.replace(rows[one], names=rows[other].names),
        structs.replace(rows[other], names=rows[one].names),
    )
    with pytest.raises(CaptureRefused, match="differs in training"):
        shown(structs.replace(whole, parameters=tuple(rows)))


def test_swapped_running_statistics_are_detected() -> None:
    whole = graph()
    rows = [
        structs.replace(
            row, names=(row.names[0].replace("mean", "x").replace("var", "mean").replace("x", "var"),)
        )
        for row in whole.parameters
    ]
    with pytest.raises(CaptureRefused, match=r"'norm.running_var' differs in training"):
        shown(structs.replace(whole, parameters=tuple(rows)))


def test_a_batch_frozen_into_the_graph_is_detected() -> None:
    def change(node: GraphNode, _: str) -> GraphNode | None:
        for place, argument in enumerate(node.arguments):
            if isinstance(argument, Items) and Size(0) in argument.items:
                items = Items(tuple(3 if item == Size(0) else item for item in argument.items))
                return structs.replace(
                    node, arguments=(*node.arguments[:place], items, *node.arguments[place + 1 :])
                )
        return None

    with pytest.raises(CaptureRefused, match="cannot be computed"):
        shown(edited(change))


def test_a_lost_metric_and_a_lost_parameter_are_detected() -> None:
    whole = graph()
    entry = structs.replace(whole.entries[0], metrics=())
    with pytest.raises(CaptureRefused, match="results that differ"):
        shown(structs.replace(whole, entries=(entry,)))
    frozen = [
        structs.replace(row, kind="frozen") if row.names == ("second.weight",) else row
        for row in whole.parameters
    ]
    with pytest.raises(CaptureRefused, match=r"'second.weight' \(module 'second'\)"):
        shown(structs.replace(whole, parameters=tuple(frozen)))
    absent = [
        structs.replace(row, names=("third.weight",)) if row.names == ("second.weight",) else row
        for row in whole.parameters
    ]
    with pytest.raises(CaptureRefused, match=r"no 'third.weight'"):
        shown(structs.replace(whole, parameters=tuple(absent)))


class WrongBackward(torch.autograd.Function):
    """Its backward doubles the gradient. torch exports the forward pass and forgets the backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


class Deceiving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 6)
        self.after = nn.Linear(6, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        deceived = WrongBackward.apply(self.before(values))  # type: ignore[no-untyped-call]  # torch's own
        out: torch.Tensor = self.after(deceived)
        return out


@pytest.mark.parametrize("outlined", [False, True])
def test_a_wrong_backward_that_capture_missed_is_detected(
    monkeypatch: pytest.MonkeyPatch, outlined: bool
) -> None:
    with skeleton() if outlined else nullcontext():
        model = Deceiving()
    inputs, labels = (torch.randn(2, 4),), (torch.tensor([0, 2]),)
    monkeypatch.setattr(exporting, "_watched", lambda *_: nullcontext())
    captured = capture(model, inputs, labels=labels, loss=cross_entropy)
    with pytest.raises(CaptureRefused, match=r"'before\.\w+' \(module 'before'\) differs in training"):
        prove(model, captured, inputs, labels, loss=cross_entropy)


class Gated(nn.Module):
    """A module behind a gate that starts at zero, so that no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.gate * torch.tanh(self.inner(values))


@pytest.mark.parametrize("outlined", [False, True])
def test_modules_behind_a_zero_gate_are_proved_too(outlined: bool) -> None:
    with skeleton() if outlined else nullcontext():
        model = Gated()
    inputs = (torch.randn(2, 4),)
    captured = capture(model, inputs)
    proof = prove(model, captured, inputs)
    assert proof.entries == ("forward",)
    assert proof.gradients == 3
    whole = captured.graph
    sine = whole.operators.index("aten.tanh.default")
    operators = (*whole.operators[:sine], "aten.sin.default", *whole.operators[sine + 1 :])
    with pytest.raises(CaptureRefused, match="output 0"):
        prove(model, Shipped(structs.replace(whole, operators=operators)), inputs)


def test_the_proof_leaves_the_model_unchanged() -> None:
    for outlined in (False, True):
        made = task(outlined=outlined)
        model = made.model
        captured = captured_small(outlined)
        first = dict(model.named_parameters())["first.weight"]
        first.grad = torch.ones_like(first)
        model.eval()
        model.get_submodule("norm").train()
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        values = {name: tensor.clone() for name, tensor in held.items() if not tensor.is_meta}
        state, gradient = torch.get_rng_state(), first.grad
        prove_task(made, captured)
        now = dict(model.named_parameters()) | dict(model.named_buffers())
        assert all(now[name] is tensor for name, tensor in held.items())
        assert all(torch.equal(now[name], tensor) for name, tensor in values.items())
        assert first.grad is gradient
        assert [module.training for module in (model, model.get_submodule("norm"))] == [False, True]
        assert torch.equal(torch.get_rng_state(), state)


def test_a_recurrent_model_without_memory_is_proved() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6, padding_idx=0)
            self.recurrent = nn.LSTM(6, 5, batch_first=True)
            self.head = nn.Linear(5, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.recurrent(self.embedding(tokens))[0][:, -1])
            return out

    with skeleton():
        model = Recurrent()
    inputs, labels = (torch.tensor([[1, 2, 3], [4, 10, 0]]),), (torch.tensor([0, 2]),)
    captured = capture(model, inputs, labels=labels, loss=cross_entropy)
    assert prove(model, captured, inputs, labels, loss=cross_entropy).gradients == 7


def test_tied_weights_are_one_tensor_with_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(torch.tanh(self.embedding(tokens)))
            return out

    with skeleton():
        model = Tied()
    inputs, labels = (torch.tensor([1, 2, 6]),), (torch.tensor([0, 2, 5]),)
    captured = capture(model, inputs, labels=labels, loss=cross_entropy)
    assert captured.graph.parameters[0].names == ("embedding.weight", "head.weight")
    assert prove(model, captured, inputs, labels, loss=cross_entropy).gradients == 1
    assert model.head.weight is model.embedding.weight


def test_examples_that_do_not_fit_are_refused() -> None:
    made = task()
    captured = captured_small()
    with pytest.raises(CaptureRefused, match="do not fit"):
        prove(made.model, captured, (torch.zeros(3, 2, SIDE, SIDE + 1),), made.labels, loss=made.loss)
    with pytest.raises(CaptureRefused, match="do not fit"):
        prove(made.model, captured, made.example_inputs, (), loss=made.loss)


# Lazy tensors


def counting(shape: tuple[int, ...], counter: Materialised) -> tuple[LazyTensor, torch.Tensor]:
    values = torch.randn(shape)
    return lazy(values, lambda: values, counter), values


def test_views_of_a_lazy_tensor_are_lazy_and_correct() -> None:
    counter = Materialised()
    base, values = counting((4, 6), counter)
    pairs = [
        (base.t(), values.t()),
        (base.view(2, 12), values.view(2, 12)),
        (base[1], values[1]),
        (base.expand(3, 4, 6), values.expand(3, 4, 6)),
        (base.chunk(2, dim=1)[1].transpose(0, 1), values.chunk(2, dim=1)[1].transpose(0, 1)),
        (base.detach(), values),
    ]
    assert counter.bytes_peak == 0
    for view, expected in pairs:
        assert isinstance(view, LazyTensor)
        assert view.shape == expected.shape
        assert view.stride() == expected.stride()
        assert torch.equal(view + 0, expected)
    assert counter.bytes_peak == 4 * 24
    assert counter.bytes_now == 0


def test_gradients_go_through_lazy_tensors() -> None:
    base, values = counting((4, 6), Materialised())
    weight, real = nn.Parameter(base), values.clone().requires_grad_()
    inputs = torch.randn(3, 6)
    for each in (weight, real):
        functional.linear(inputs, each).square().sum().backward()  # type: ignore[no-untyped-call]  # torch's own
    assert weight.grad is not None
    assert real.grad is not None
    assert torch.allclose(weight.grad, real.grad)


def test_proof_values_follow_the_recipe_and_differ_by_name() -> None:
    tiles = Tiles(0)
    normal = Recipe((FillStep("normal", 1.0, 0.02), FillStep("zero_row", 2.0)))
    values = tiles.values(normal, "a", (40, 50), torch.float32, 2000)
    assert torch.equal(values, tiles.values(normal, "a", (40, 50), torch.float32, 2000))
    assert not torch.equal(values, tiles.values(normal, "b", (40, 50), torch.float32, 2000))
    assert not values[2].any()
    assert float(values[3:].std()) == pytest.approx(0.02, rel=0.2)
    constant = tiles.values(Recipe((FillStep("constant", 3.0),)), "a", (1000,), torch.float32, 1000)
    assert 3 - NOISE <= float(constant.min()) < float(constant.max()) <= 3 + NOISE
    long = tiles.values(Recipe((FillStep("uniform", -1.0, 1.0),)), "a", (TILE + 5,), torch.float32, TILE + 5)
    assert torch.equal(long[:5], long[TILE:])


def test_a_sketch_detects_what_a_norm_does_not() -> None:
    signs = signs_of(0)
    values = torch.randn(50, 40)
    assert sketch_of(values, signs) == sketch_of(values.clone(), signs)
    assert sketch_of(values.t(), signs) == sketch_of(values.t().contiguous(), signs)
    swapped = values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    assert sketch_of(swapped, signs).norm == pytest.approx(sketch_of(values, signs).norm)
    assert abs(sketch_of(swapped, signs).product - sketch_of(values, signs).product) > FLOOR
