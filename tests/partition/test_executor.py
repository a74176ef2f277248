"""Stages in a row compute what one machine computes, however micro-batches are assigned."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from partition.codecs.codec import CODECS, Array, Payload, Rounding, pack
from partition.model.cut import cut
from partition.model.graph import Graph, encode_graph, graph_hash
from partition.stage import (
    Applied,
    Apply,
    Backward,
    BackwardDone,
    Discard,
    Forward,
    Forwarded,
    OptimizerSettings,
    Schedule,
    StageDone,
    vector_bytes,
)
from tests.partition.graphs import ONES, GraphBuilder, whole
from tests.partition.hand_models import Cnn, cnn_graph, gpt_graph
from tests.partition.held import Held, Row, bundle, spread, tensors_of

torch.set_num_threads(1)  # these tensors are too small to be worth a second one
MICROBATCHES = 4
SGD = OptimizerSettings("sgd", learning_rate=0.1, momentum=0.9, weight_decay=1e-4, clip_norm=2.0)
ADAM = OptimizerSettings("adamw", learning_rate=2e-3, weight_decay=0.1, schedule=Schedule("linear", 1, 9))


@cache
def model(name: str, dtype: Any = "float64") -> Graph:
    return gpt_graph(30, 8, 16, 2, 2, 0.25, dtype) if name == "gpt" else cnn_graph(4, dtype)


def data(name: str, step: int, number: int, dtype: str = "float64") -> tuple[Payload, Payload]:
    """Micro-batches of different sizes."""
    draws = np.random.default_rng((step, number))
    rows = 2 + number % 3
    if name == "gpt":
        length = 5 + number
        tokens = draws.integers(0, 30, (2, rows, length))
        return bundle(tokens[0], sizes=(rows, length)), bundle(tokens[1], sizes=(rows, length))
    images = draws.normal(size=(rows, 1, 8, 8)).astype(dtype)
    return bundle(images, sizes=(rows,)), bundle(draws.integers(0, 5, rows), sizes=(rows,))


def sizes_max(name: str) -> tuple[int, ...]:
    return (4, 8) if name == "gpt" else (4,)


def train(row: Row, name: str, dtype: str = "float64", steps: int = 3) -> Iterator[dict[str, Array]]:
    """Yield each step's results: sums of the loss, sums of gradients before the step, and parameters after
    it."""
    for step in range(steps):
        loss, samples, metrics = 0.0, 0, 0.0
        for number in range(MICROBATCHES):
            done = row.forward(step, number, *data(name, step, number, dtype), train=True)
            loss, samples, metrics = loss + done.loss, samples + done.samples, metrics + sum(done.metrics)
        row.apply(step, samples)
        yield {"loss": np.array([loss, metrics, samples])} | row.named("parameters")
    evaluated = [row.forward(steps, 0, *data(name, steps, 0, dtype), train=False) for _ in range(2)]
    assert evaluated[0] == evaluated[1]
    yield {"evaluated": np.array([evaluated[0].loss, *evaluated[0].metrics])}


@cache
def expected(name: str, optimizer: OptimizerSettings) -> list[dict[str, Array]]:
    row = Row([whole(model(name))], sizes_max(name), microbatches=MICROBATCHES, optimizer=optimizer)
    return list(train(row, name))


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", ["gpt", "cnn"])
@pytest.mark.parametrize(("stages", "replicas", "recompute"), [(3, 1, False), (3, 2, False), (2, 1, True)])
def test_stages_and_replicas_train_and_evaluate_like_one_process(
    name: str, optimizer: OptimizerSettings, stages: int, replicas: int, recompute: bool
) -> None:
    parts = spread(model(name), stages)
    assert len(parts) == stages
    changes: dict[str, Any] = {"microbatches": MICROBATCHES, "optimizer": optimizer, "recompute": recompute}
    row = Row(parts, sizes_max(name), replicas, **changes)
    for found, wanted in zip(train(row, name), expected(name, optimizer), strict=True):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert np.abs(found[key] - wanted[key]).max() <= 1e-9, key
    if name == "gpt":
        assert row.chains[0][0].specification.graph.tied == (0,)


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_in_float32_the_whole_vector_agrees_under_sgd(name: str) -> None:
    graph = model(name, "float32")
    changes: dict[str, Any] = {"microbatches": MICROBATCHES, "optimizer": SGD}
    one = Row([whole(graph)], sizes_max(name), **changes)
    several = Row(spread(graph, 3), sizes_max(name), 2, **changes)
    for _ in zip(train(one, name, "float32"), train(several, name, "float32"), strict=True):
        vectors = [
            np.concatenate([array.ravel() for _, array in sorted(row.named("parameters").items())])
            for row in (one, several)
        ]
        assert np.linalg.norm(vectors[0] - vectors[1]) <= 1e-5 * np.linalg.norm(vectors[0])


def test_three_stages_update_batch_statistics_like_the_module() -> None:
    """The same norm is used twice in a micro-batch; four micro-batches per step are dealt to two replicas."""
    optimizer = OptimizerSettings("sgd", learning_rate=0.1)
    row = Row(spread(model("cnn"), 3), (4,), 2, microbatches=MICROBATCHES, optimizer=optimizer)
    module = Cnn(4).double()
    module.load_state_dict(
        {name: torch.tensor(array) for name, array in row.named("parameters").items()}, False
    )
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    for step, found in zip(range(2), train(row, "cnn"), strict=False):
        plain.zero_grad()
        samples = 0
        for number in range(MICROBATCHES):
            (images,), (labels,) = (tensors_of(payload) for payload in data("cnn", step, number))
            functional.cross_entropy(module(images), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]  # so in torch
            samples += len(images)
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad /= samples
        plain.step()
        state = module.state_dict()
        for name, array in found.items():
            if name != "loss":
                assert np.abs(array - state[name].numpy()).max() <= 1e-9, name


@pytest.mark.parametrize("positions", [[], [2], [1, 2]])
def test_statistics_are_also_updated_in_a_later_stage_that_reads_them(positions: list[int]) -> None:
    """One norm trains, and one uses the same statistics as they were at the start of the step."""
    build = GraphBuilder(dtype="float64")
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float64", batch, 3), build.label("y", "float64", batch, 3)
    pair = [build.parameter(name, 3, kind="statistic", source=ONES) for name in ("mean", "variance")]
    scale = build.parameter("scale", 3)
    values = build.node("batch_norm", x, scale, None, *pair, True, 0.3, 1e-5, False)
    values = build.node("linear", values, build.parameter("weight", 3, 3))
    values = build.node("batch_norm", values, None, None, *pair, False, 0.3, 1e-5, False)
    build.end(outputs=[values], loss=build.node("mse_loss", values, y, 2))
    graph = build.finish()
    row = Row(cut(graph, bytes(32), positions), (4,), 2, microbatches=2)
    mean, variance = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    draws = np.random.default_rng(0)
    for step in range(2):
        for number in range(2):
            array = draws.normal(size=(4, 3))
            row.forward(step, number, bundle(array, sizes=(4,)), bundle(array, sizes=(4,)), train=True)
            functional.batch_norm(torch.tensor(array), mean, variance, training=True, momentum=0.3)
        row.apply(step, 8)
        for stage in row.chains[0]:
            found = stage.named("parameters")
            if "mean" in found:
                assert np.allclose(found["mean"], mean, rtol=0, atol=1e-12)
                assert np.allclose(found["variance"], variance, rtol=0, atol=1e-12)


def skip() -> Graph:
    """Return c = relu(a w1) w2 + a, with a = x w0. If it is cut around w1, the middle stage passes `a` on."""
    build = GraphBuilder(dtype="float64")
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float64", batch, 3)
    mask = build.input("mask", "bool", batch, 3)
    a = build.node("mul.Tensor", x, build.parameter("w0", 3))
    b = build.node("relu", build.node("mul.Tensor", a, build.parameter("w1", 3)))
    c = build.node("add.Tensor", build.node("mul.Tensor", b, build.parameter("w2", 3)), a)
    d = build.node("masked_fill.Scalar", c, mask, 0.0)
    build.end(outputs=[d], loss=build.node("sum", build.node("mul.Tensor", d, d)))
    return build.finish()


def test_a_value_that_is_passed_on_gets_gradients_of_both_paths() -> None:
    graph = skip()
    parts = cut(graph, graph_hash(encode_graph(graph)), [1, 3])
    middle = parts[1].entry("train")
    assert set(middle.inputs) & set(middle.outputs) & set(middle.backward_inputs)
    row = Row(parts, (4,))
    x, mask = np.random.default_rng(0).normal(size=(4, 3)), np.eye(4, 3, dtype=bool)
    weights = {name: torch.tensor(array).requires_grad_() for name, array in row.named("parameters").items()}
    inputs = bundle(x, mask, sizes=(4,))
    done = row.forward(0, 0, inputs, bundle(sizes=(4,)), train=True)
    a = torch.tensor(x) * weights["w0"]
    c = torch.relu(a * weights["w1"]) * weights["w2"] + a
    loss = (c * ~torch.tensor(mask)).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]  # so in torch
    assert done.loss == pytest.approx(float(loss.detach()), abs=1e-12)
    assert done.samples == 4
    for name, array in row.named("gradients").items():
        gradient = weights[name].grad
        assert gradient is not None
        assert np.abs(array - gradient.numpy()).max() <= 1e-12


def test_frozen_parameters_and_detached_outputs_have_no_gradient() -> None:
    build = GraphBuilder(dtype="float64")
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float64", batch, 3)
    a = build.node("mul.Tensor", x, build.parameter("fixed", 3, kind="frozen"))
    b = build.node("mul.Tensor", a, build.parameter("w", 3))
    c = build.node("mul.Tensor", b, build.parameter("v", 3))
    build.end(outputs=[c], loss=build.node("sum", c))
    graph = build.finish()
    parts = cut(graph, graph_hash(encode_graph(graph)), [1, 2])
    row = Row(parts, (4,))
    first, second, third = row.chains[0]
    assert parts[0].entry("train").backward_outputs == ()
    before = first.named("parameters")
    given = bundle(np.ones((4, 3)), sizes=(4,))
    between = first.ask(Forward(0, 0, True, given), Forwarded).output
    assert between is not None
    # No gradient can come back to it, and nothing was kept. A request for it is refused with that reason.
    assert first.ask(Backward(0, 0, bundle(sizes=(4,))), BackwardDone).gradient is None
    values = second.ask(Forward(0, 0, True, between), Forwarded).output
    assert values is not None
    gradient = third.ask(Forward(0, 0, True, values), Forwarded).gradient
    assert gradient is not None
    assert second.ask(Backward(0, 0, gradient), BackwardDone).gradient is None
    row.apply(0, 4)
    assert np.array_equal(first.named("parameters")["fixed"], before["fixed"])
    assert vector_bytes(first.specification) == 24
    assert first.arenas["gradients"].nbytes == 0


def test_a_stage_without_parameters_forwards_backwards_and_steps() -> None:
    graph = skip()
    parts = cut(graph, graph_hash(encode_graph(graph)), [1, 2, 3])
    held = Held(parts[2], (4,), optimizer=ADAM)
    assert vector_bytes(held.specification) == 0
    entry = parts[2].entry("train")
    given = bundle(*(np.ones((4, 3)) if number != 1 else np.eye(4, 3, dtype=bool) for number in entry.inputs),
                   sizes=(4,))  # fmt: skip
    output = held.ask(Forward(0, 0, True, given), Forwarded).output
    assert output is not None
    gradients = [np.ones((4, 3)) for _ in entry.backward_outputs]
    back = held.ask(Backward(0, 0, bundle(*gradients, sizes=(4,))), BackwardDone).gradient
    assert back is not None
    assert len(back.tensors) == len(entry.backward_inputs)
    held.ask(Apply(0, 4), Applied)


def test_a_replayed_microbatch_gives_the_same_bytes() -> None:
    first, last = spread(model("gpt"), 2)
    stage, end = Held(first, (4, 8)), Held(last, (4, 8))
    inputs, labels = data("gpt", 4, 1)
    once = stage.ask(Forward(4, 7, True, inputs), Forwarded)
    other = stage.ask(Forward(4, 8, True, inputs), Forwarded)
    assert other != once  # a different micro-batch draws a different mask
    stage.ask(Discard(), StageDone)
    assert stage.ask(Forward(4, 7, True, inputs), Forwarded) == once
    assert once.output is not None
    request = Forward(4, 7, True, once.output, labels)
    closed, sums = end.ask(request, Forwarded), bytes(end.arenas["gradients"])
    end.ask(Forward(4, 8, True, once.output, labels), Forwarded)
    assert bytes(end.arenas["gradients"]) != sums
    end.ask(Discard(), StageDone)
    assert not any(end.arenas["gradients"])
    assert end.ask(request, Forwarded) == closed
    assert bytes(end.arenas["gradients"]) == sums


def test_each_answer_uses_the_codec_of_its_request() -> None:
    first, last = (Held(part, (4, 8)) for part in spread(model("gpt", "float32"), 2))
    inputs, labels = data("gpt", 0, 1)
    shorter = []
    for number, codec in enumerate(CODECS):
        once = first.ask(Forward(0, number, True, inputs, None, codec), Forwarded)
        assert once.output is not None
        assert once.output.codec == codec
        closed = last.ask(Forward(0, number, True, once.output, labels, codec), Forwarded)
        assert closed.gradient is not None
        assert closed.gradient.codec == codec
        done = first.ask(Backward(0, number, closed.gradient, codec), BackwardDone)
        assert done == BackwardDone(None)
        is_exact = codec in ("raw", "zstd")
        for rounding in (once.rounding, closed.rounding):
            assert (rounding == Rounding()) is is_exact
            assert rounding.relative < 0.2
        shorter.append(len(once.output.data))
    assert shorter[-2] < shorter[-4] < shorter[4] < shorter[0]


def test_int4_errors_are_added_to_the_next_gradient_of_the_step() -> None:
    first, last = (Held(part, (4, 8)) for part in spread(model("gpt", "float32"), 2))
    inputs, labels = data("gpt", 0, 1)
    values = first.ask(Forward(0, 0, True, inputs), Forwarded).output
    assert values is not None

    def gradient(held: Held, number: int) -> Payload | None:
        return held.ask(Forward(0, number, True, values, labels, "int4"), Forwarded).gradient

    found = [gradient(last, 0), gradient(last, 1)]
    last.ask(Discard(), StageDone)
    again = [gradient(last, 1), gradient(last, 0)]
    assert again[0] != found[1], "a residual of the previous step is still used"
    last.ask(Discard(), StageDone)
    assert [gradient(last, 0), gradient(last, 1)] == found


def test_statistics_count_once_and_only_completed_microbatches() -> None:
    graph = model("cnn")
    parts = spread(graph, 3)
    number = next(number for number, part in enumerate(parts) if part.entry("train").statistics)
    for recompute in (False, True):
        row = Row(parts, (4,), microbatches=2, recompute=recompute)
        whole_row = Row([whole(graph)], (4,), microbatches=2)
        held = row.chains[0][number]
        assert not held.vector("gradients").any()
        inputs, labels = data("cnn", 0, 0)
        values: Payload | None = inputs
        for stage in row.chains[0][: number + 1]:
            assert values is not None
            values = stage.ask(Forward(0, 0, True, values), Forwarded).output
        assert not held.vector("gradients").any()
        for stage in row.chains[0]:
            stage.ask(Discard(), StageDone)
        row.forward(0, 0, inputs, labels, train=True)
        whole_row.forward(0, 0, inputs, labels, train=True)
        row.apply(0, 2)
        whole_row.apply(0, 2)
        for name, array in whole_row.named("parameters").items():
            assert np.abs(array - row.named("parameters")[name]).max() <= 1e-9


def test_with_bfloat16_boundaries_traffic_halves_and_training_still_learns() -> None:
    graph = gpt_graph(30, 8, 32, 2, 2, 0.0)
    optimizer = OptimizerSettings("adam", learning_rate=5e-3)
    changes: dict[str, Any] = {"optimizer": optimizer, "autocast": "bfloat16"}
    rows = {
        kind: Row(spread(graph, 3), (4, 8), 1, **(changes | {"recompute": kind == "recompute"}))
        for kind in ("plain", "recompute")
    }
    exact = Row([whole(graph)], (4, 8), optimizer=optimizer)
    inputs, labels = data("gpt", 0, 2)
    losses: dict[str, list[float]] = {}
    for kind, row in (rows | {"exact": exact}).items():
        losses[kind] = []
        for step in range(5):
            losses[kind].append(row.forward(step, 0, inputs, labels, train=True).loss)
            row.apply(step, 28)
    assert losses["plain"] == losses["recompute"]
    assert losses["plain"] == pytest.approx(losses["exact"], rel=0.02)
    assert losses["plain"] != losses["exact"]
    assert losses["plain"][-1] < 0.9 * losses["plain"][0]
    values = rows["plain"].chains[0][0].ask(Forward(9, 0, False, inputs), Forwarded).output
    assert values is not None
    kinds = {header.dtype for header in values.tensors}
    assert kinds <= {"float32", "bfloat16", "bool", "int64"}


def test_bfloat16_boundary_tensors_are_accepted_only_under_autocast() -> None:
    graph = skip32()
    parts = cut(graph, graph_hash(encode_graph(graph)), [1])
    half = np.ones((4, 3), dtype="uint16")
    given = pack([("bfloat16", half)], "raw", (4,))
    on, off = Held(parts[1], (4,), autocast="bfloat16"), Held(parts[1], (4,))
    assert isinstance(on.handle(Forward(0, 0, True, given)), Forwarded)
    assert not isinstance(off.handle(Forward(0, 0, True, given)), Forwarded)
    gradient = on.ask(Forward(0, 1, True, given), Forwarded).gradient
    assert gradient is not None
    assert gradient.tensors[0].dtype == "bfloat16"


def skip32() -> Graph:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float32", batch, 3)
    a = build.node("mul.Tensor", x, build.parameter("w0", 3))
    b = build.node("mul.Tensor", a, build.parameter("w1", 3))
    build.end(outputs=[b], loss=build.node("sum", b))
    return build.finish()
