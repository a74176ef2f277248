"""Any module becomes a graph with the same results, even at sizes that its examples did not have."""

import copy
from functools import cache
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

from partition.capture import Captured, capture, skeleton
from partition.capture.lower import GraphTables
from partition.capture.state_dict import contents_of
from partition.capture.trees import tensors_of
from partition.model.graph import Size, StoredValues, Symbol, decode_graph
from partition.model.sizes import evaluate
from tests.partition.captured_models import (
    SAMPLES,
    Gpt,
    Residual,
    Sample,
    Whole,
    captured,
    class_loss,
    images,
    token_loss,
    tokens,
    vectors,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def operators(model: Captured, entry: str = "train") -> list[str]:
    """Return the operators' names without namespace and default overload, in the order of the nodes."""
    graph = model.graph
    names = [graph.operators[node.operator] for node in graph.entry(entry).nodes]
    return [name.removeprefix("aten.").removesuffix(".default") for name in names]


def eager(sample: Sample, model: nn.Module, inputs: Any, labels: tuple[Tensor, ...]) -> tuple[Any, Tensor]:
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    loss = sample.loss(output, *labels)
    return output, loss[0] if isinstance(loss, tuple) else loss


@cache
def known(name: str) -> tuple[nn.Module, Captured]:
    """Return a sample's model, which no test may change, and its graph."""
    torch.manual_seed(1)
    model = SAMPLES[name].build().double()
    return model, captured(SAMPLES[name], model)


def flat(inputs: Any) -> list[Tensor]:
    values = inputs.values() if isinstance(inputs, dict) else inputs
    return [value for value in values if isinstance(value, Tensor)]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_graph_computes_like_its_model(name: str) -> None:
    sample = SAMPLES[name]
    model, graph = known(name)
    assert decode_graph(graph.data) == graph.graph
    # A different batch, and a different sequence length if it varies: 5 + batch positions.
    for batch in (5, 1):
        inputs, labels = sample.draw(batch)
        ours, theirs = copy.deepcopy(model).train(), copy.deepcopy(model).train()
        torch.manual_seed(2)
        found = Whole(graph, ours).run("train", flat(inputs), labels)
        torch.manual_seed(2)
        output, loss = eager(sample, theirs, inputs, labels)
        assert found.loss is not None
        torch.testing.assert_close(found.loss, loss, rtol=1e-13, atol=1e-13)
        for mine, other in zip(found.outputs, tensors_of(output), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13)
        gradients = torch.autograd.grad(found.loss, list(ours.parameters()))
        expected = torch.autograd.grad(loss, list(theirs.parameters()))
        for mine, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["mlp", "residual", "gpt"])
def test_the_same_graph_serves_evaluation(name: str) -> None:
    sample = SAMPLES[name]
    model, graph = known(name)
    inputs, labels = sample.draw(4)
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        found = Whole(graph, model).run("train", flat(inputs), labels, train=False)
        output, loss = eager(sample, model, inputs, labels)
    assert found.loss is not None
    torch.testing.assert_close(found.loss, loss, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.outputs[0], output, rtol=1e-13, atol=1e-13)


def test_a_hundred_decoded_tokens_equal_the_models() -> None:
    torch.manual_seed(1)
    model = Gpt().double()
    ids, labels = tokens(3)
    first = torch.zeros(3, dtype=torch.int64)
    graph = capture(
        model,
        ids,
        labels=labels,
        loss=token_loss,
        dynamic={"batch": (1, 3), "sequence": (1, 128, {0: 1, 1: 1})},
        entries={"decode": ("decode", (first, first))},
    )
    assert [state.name for state in graph.graph.states] == [
        f"blocks.{index}.{name}" for index in range(2) for name in ("keys", "values")
    ]
    assert [row for row, _ in graph.graph.entry("decode").updates] == [0, 1, 2, 3]
    assert not graph.graph.constants
    model.eval()
    whole = Whole(graph, model)
    # Each row has its own position; the rows change their order once.
    places = torch.tensor([0, 7, 20])
    with torch.no_grad():
        for step in range(100):
            ids_now = torch.randint(23, (3,))
            expected = model.decode(ids_now, places)
            found = whole.run("decode", (ids_now, places), train=False)
            torch.testing.assert_close(found.outputs[0], expected, rtol=0, atol=0)
            places = places + 1 if step != 50 else torch.tensor([3, 0, 40])
    for row, name in enumerate(state.name for state in graph.graph.states):
        torch.testing.assert_close(whole.states[row], model.get_buffer(name), rtol=0, atol=0)


def test_an_entry_point_may_be_a_function_and_reassign_a_buffer() -> None:
    class Counter(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5)
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out

    def add(model: Counter, x: Tensor) -> Tensor:
        model.total = model.total + x.sum(0)
        out: Tensor = model.layer(model.total)
        return out

    model = Counter()
    graph = capture(
        model, (torch.zeros(2, 4),), labels=(torch.zeros(2, dtype=torch.int64),), loss=class_loss,
        entries={"add": (add, (torch.zeros(2, 4),))},
    )  # fmt: skip
    whole = Whole(graph, model)
    for _ in range(3):
        out = whole.run("add", (torch.ones(2, 4),), train=False).outputs[0]
    assert bool((whole.states[0] == 6).all())
    assert bool((model.total == 0).all())
    torch.testing.assert_close(out, model.layer(torch.full((4,), 6.0)))


# The model itself


def snapshot(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Return all state of a module: identities of tensors, copies of lists."""

    def seen(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: [id(item) for item in value] if type(value) is list else id(value)
            for key, value in values.items()
            if not key.startswith("_is_")
        }

    return [
        (seen(vars(module)) | {"training": module.training}, seen(module._parameters), seen(module._buffers))
        for module in model.modules()
    ]


@pytest.mark.parametrize(("name", "train"), [("residual", True), ("gpt", False), ("lstm", False)])
def test_capture_leaves_the_model_unchanged(name: str, train: bool) -> None:
    sample = SAMPLES[name]
    model = sample.build().double().train(train)
    before, values = snapshot(model), copy.deepcopy(model.state_dict())
    captured(sample, model)
    assert snapshot(model) == before
    for key, value in model.state_dict().items():
        assert torch.equal(value, values[key]), key


def test_a_refused_capture_leaves_the_model_unchanged() -> None:
    model = Residual().double()
    before = snapshot(model)
    inputs, labels = images(3)
    with pytest.raises(ValueError, match="no loss"):
        capture(model, inputs, labels=labels, loss=refusing_loss)
    assert snapshot(model) == before


def refusing_loss(output: Tensor, labels: Tensor) -> Tensor:
    raise ValueError("no loss")


# Tables


def test_tied_weights_are_one_row_with_all_their_names() -> None:
    graph = known("gpt")[1].graph
    names = [parameter.names for parameter in graph.parameters]
    assert names[0] == ("tokens.weight", "head.weight")
    assert len(names) == len(set(names))


def test_batch_norms_statistics_are_rows_and_counters_are_names() -> None:
    graph = known("residual")[1].graph
    kinds = {name: parameter.kind for parameter in graph.parameters for name in parameter.names}
    assert kinds["norms.0.running_mean"] == kinds["norms.1.running_var"] == "statistic"
    assert kinds["norms.0.weight"] == "parameter"
    assert graph.counters == ("norms.0.num_batches_tracked", "norms.1.num_batches_tracked")


def test_parameters_are_stored_in_order_of_first_use_without_gaps() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    model[0].requires_grad_(False)
    inputs, labels = vectors(3)
    graph = capture(
        model,
        (inputs[0].float(),),
        labels=labels,
        loss=class_loss,
        groups=lambda name, _: int("bias" in name),
    )
    rows = graph.graph.parameters
    assert [row.names[0] for row in rows] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [row.kind for row in rows] == ["frozen", "frozen", "parameter", "parameter"]
    assert [row.group for row in rows] == [0, 0, 0, 1]
    offset = 0
    for row, (name, tensor) in zip(rows, graph.stored, strict=True):
        assert isinstance(row.source, StoredValues)
        assert (row.names[0], row.source.offset) == (name, offset)
        assert tensor.data_ptr() == model.get_parameter(name).data_ptr()
        offset += row.source.length


def test_a_skeleton_is_captured_by_its_recipes() -> None:
    with skeleton():
        model = Gpt()
    ids, labels = tokens(3)
    graph = capture(model, ids, labels=labels, loss=token_loss)
    assert not graph.stored
    assert all(parameter.is_meta for parameter in model.parameters())


def test_unused_parameters_are_frozen_and_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 5))
    model.register_parameter("spare", nn.Parameter(torch.zeros(3)))
    inputs, labels = vectors(3)
    graph = capture(model, (inputs[0].float(),), labels=labels, loss=class_loss)
    assert graph.unused == ("spare",)
    assert [row.kind for row in graph.graph.parameters] == ["parameter", "parameter", "frozen"]


def test_equal_constants_are_one_row() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(
                x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.tensor([1.0, 2.0, 3.0, 4.0])
            )
            return out

    inputs, labels = vectors(3)
    graph = capture(Scaled(), (inputs[0].float(),), labels=labels, loss=class_loss).graph
    assert [constant.type.shape for constant in graph.constants] == [(4,)]


def test_without_a_loss_there_is_an_entry_point_forward() -> None:
    graph = capture(nn.Linear(4, 5), (torch.zeros(3, 4),)).graph
    (entry,) = graph.entries
    assert (entry.name, entry.loss, entry.labels, len(entry.outputs)) == ("forward", None, (), 1)


def test_loss_count_and_metrics_are_scalars_of_the_graph() -> None:
    model = Gpt().double()
    (ids,), labels = tokens(3)
    graph = capture(
        model, (ids,), labels=labels, loss=token_loss, dynamic=SAMPLES["gpt"].options["dynamic"],
        metrics={"right": lambda output, labels: (output.argmax(2) == labels).sum()},
    )  # fmt: skip
    found = Whole(graph, model).run("train", (ids[:2],), (labels[0][:2],), train=False)
    assert found.count is not None
    assert int(found.count) == 2 * 8
    expected = (model.eval()(ids[:2]).argmax(2) == labels[0][:2]).sum()
    assert int(found.metrics[0]) == int(expected)


# Rewrites


class Scripted(nn.Module):
    """A linear layer, then the operations of a test."""

    def __init__(self, script: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.script = script

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.script(self.layer(x))
        return out


def assign_parts(y: Tensor) -> Tensor:
    y = y * 1
    y[:, 0] = 0.5
    y[:, 1:3] *= 2
    y[..., -1].add_(1)
    return y


def fill_empty(y: Tensor) -> Tensor:
    out = torch.empty_like(y)
    out[:, :2] = y[:, 3:]
    out[:, 2:].copy_(y[:, :3])
    return out


def without_gradient(y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = y.abs().amax() + 1
        scale.mul_(2)
    return y / scale


def with_gradient_inside(y: Tensor) -> Tensor:
    with torch.no_grad():
        a = y * 2
        with torch.enable_grad():
            b = y * 3
    return a + b


def converted(y: Tensor) -> Tensor:
    return y.to("cpu", torch.float64).to(memory_format=torch.preserve_format).T.T.type_as(y)


def broadcast_copy(y: Tensor) -> Tensor:
    out = torch.zeros(2, 5, dtype=torch.float32)
    out.copy_(y.sum(0))
    return y + out.sum(0)


@pytest.mark.parametrize(
    "script",
    [
        assign_parts,
        fill_empty,
        without_gradient,
        with_gradient_inside,
        converted,
        broadcast_copy,
    ],
)
def test_rewritten_code_computes_the_same(script: Any) -> None:
    torch.manual_seed(1)
    model = Scripted(script).double()
    inputs, labels = vectors(3)
    graph = capture(model, inputs, labels=labels, loss=class_loss)
    assert not [name for name in operators(graph) if name.endswith("_") and not name.startswith("__")]
    inputs, labels = vectors(4)
    found = Whole(graph, model).run("train", flat(inputs), labels)
    assert found.loss is not None
    gradients = torch.autograd.grad(found.loss, list(model.parameters()))
    expected = torch.autograd.grad(class_loss(model(*inputs), *labels), list(model.parameters()))
    assert all(map(torch.equal, gradients, expected))


def test_assertions_devices_and_identities_leave_no_trace() -> None:
    def script(y: Tensor) -> Tensor:
        torch._check(y.shape[1] == 5)  # type: ignore[no-untyped-call]  # torch's own has no types
        return functional.dropout(y.to("cpu").detach() * 0 + y, 0.0)

    inputs, labels = vectors(3)
    graph = capture(Scripted(script), (inputs[0].float(),), labels=labels, loss=class_loss)
    assert operators(graph) == ["linear", "detach", "mul.Tensor", "add.Tensor", "cross_entropy_loss"]


def test_a_frozen_batch_norm_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    model[1].eval()
    inputs, labels = vectors(3)
    graph = capture(model, (inputs[0].float(),), labels=labels, loss=class_loss).graph
    assert {constant.names for constant in graph.constants} == {("1.running_mean",), ("1.running_var",)}
    assert "statistic" not in {parameter.kind for parameter in graph.parameters}


def test_nodes_record_the_module_that_called_them() -> None:
    graph = known("residual")[1].graph
    owners = {graph.operators[node.operator]: graph.owners[node.owner] for node in graph.entries[0].nodes}
    assert owners["aten.cross_entropy_loss.default"] == "loss"
    assert owners["aten.linear.default"] == "head"
    assert owners["aten.batch_norm.default"] == "norms.1"


# Sizes


larger: Any = Max
smaller: Any = Min


def expressions(symbols: list[Any]) -> st.SearchStrategy[Any]:
    leaves = st.sampled_from(symbols) | st.integers(-9, 9).map(sympy.Integer)
    positive = st.integers(1, 9).map(sympy.Integer)

    def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return (
            st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1])
            | st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1])
            | st.tuples(inner, positive).map(lambda pair: FloorDiv(*pair))
            | st.tuples(inner, inner).map(lambda pair: larger(*pair))
            | st.tuples(inner, inner).map(lambda pair: smaller(*pair))
            | st.tuples(st.sampled_from(symbols), positive).map(lambda pair: Mod(*pair))
        )

    return st.recursive(leaves, grown, max_leaves=6)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 99), st.integers(1, 99))
def test_expressions_of_sizes_compute_like_torch(data: st.DataObject, batch: int, sequence: int) -> None:
    symbols = [sympy.Symbol(name, positive=True, integer=True) for name in ("s1", "s2")]
    expression = data.draw(expressions(symbols))
    tables = GraphTables(
        contents_of(nn.Identity()),
        (Symbol("batch", 1, 99), Symbol("sequence", 1, 99)),
        None,
        frozenset(),
    )
    found = tables.size(expression, dict(zip(symbols, ("batch", "sequence"), strict=True)))
    expected = int(expression.subs(dict(zip(symbols, (batch, sequence), strict=True))))
    values = evaluate(tuple(tables.expressions), (batch, sequence))
    assert (values[found.row] if isinstance(found, Size) else found) == expected
