"""Requests that no correct peer makes are refused and leave a stage unchanged."""

from math import inf
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.execute import StageExecutor
from partition.model.cut import cut, legal_positions
from partition.model.graph import Graph, StoredValues
from partition.stage import (
    IN_FLIGHT_MAX,
    Applied,
    Apply,
    Backward,
    BackwardDone,
    Discard,
    Export,
    Exported,
    Forward,
    Forwarded,
    Import,
    Norm,
    Normed,
    OptimizerSettings,
    Refused,
    Reload,
    Reply,
    Request,
    RunEntryPoint,
    StageDone,
    StageSpecification,
    vector_bytes,
)
from partition.stage_layout import message_bytes_max, parameter_layout
from tests.partition.graphs import ONES, GraphBuilder, whole
from tests.partition.held import Held, bundle, spread, tensors_of

torch.set_num_threads(1)
ROWS = 5


def model(source: Any = None) -> Graph:
    """Return two linear layers with dropout and a batch norm between them; `count` is the number of labels
    that are not -1."""
    build = GraphBuilder(dtype="float64")
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float64", batch, 4)
    y = build.label("y", "int64", batch)
    first = build.parameter(("fc1.weight", "again"), 6, 4), build.parameter("fc1.bias", 6)
    values = build.node("linear", x, *first, owner="fc1")
    norm = (
        build.parameter("norm.running_mean", 6, kind="statistic", source=ONES),
        build.parameter("norm.running_var", 6, kind="statistic", source=ONES),
    )
    values = build.node("batch_norm", values, None, None, *norm, True, 0.1, 1e-5, True, owner="norm")
    values = build.node("dropout", values, 0.5, True)
    scale = build.constant(np.array([1.0, 2.0, 1.0]), "scale")
    kwargs: dict[str, Any] = {"source": source} if source else {}
    logits = build.node("linear", values, build.parameter("fc2.weight", 3, 6, **kwargs), None, owner="fc2")
    logits = build.node("mul.Tensor", logits, scale)
    loss = build.node("cross_entropy_loss", logits, y, None, 2, -1, owner="loss")
    count = build.node("sum", build.node("ne.Scalar", y, -1))
    build.end(outputs=[logits], loss=loss, count=count)
    return build.finish()


def one() -> Held:
    return Held(whole(model()), (ROWS,), microbatches=4)


X, Y = np.random.default_rng(0).normal(size=(ROWS, 4)), np.array([0, 2, -1, 1, 1])
GOOD, LABELS = bundle(X, sizes=(ROWS,)), bundle(Y, sizes=(ROWS,))


def inputs(array: Any, *more: Any, sizes: tuple[int, ...] = (ROWS,)) -> Forward:
    return Forward(0, 1, True, bundle(array, *more, sizes=sizes), LABELS)


def labels(array: Any, sizes: tuple[int, ...] = (ROWS,)) -> Forward:
    return Forward(0, 1, True, GOOD, bundle(array, sizes=sizes))


GARBAGE: dict[str, Request] = {
    "wrong digest": Forward(0, 1, True, msgspec.structs.replace(GOOD, digest=bytes(32)), LABELS),
    "no labels": Forward(0, 1, True, GOOD),
    "wrong type": inputs(X.astype("float32")),
    "wrong shape": inputs(np.zeros((ROWS, 5))),
    "wrong dimensions": inputs(np.zeros((ROWS, 4, 1))),
    "not of its size": inputs(X, sizes=(ROWS - 1,)),
    "no sizes": inputs(X, sizes=()),
    "too many sizes": inputs(X, sizes=(ROWS, ROWS)),
    "too many samples": inputs(np.zeros((ROWS + 1, 4)), sizes=(ROWS + 1,)),
    "no tensors": Forward(0, 1, True, bundle(sizes=(ROWS,)), LABELS),
    "too many tensors": inputs(X, X),
    "infinite": inputs(np.full((ROWS, 4), np.inf)),
    "not a number": inputs(np.where(X[2, 2] == X, np.nan, X)),
    "overflows": inputs(np.full((ROWS, 4), 1.79e308)),
    "one sample has no variance": Forward(0, 1, True, bundle(X[:1], sizes=(1,)), bundle(Y[:1], sizes=(1,))),
    "labels of a wrong type": labels(np.zeros(ROWS)),
    "labels of a wrong size": labels(Y[:-1], sizes=(ROWS - 1,)),
    "too few labels": labels(Y[:-1]),
    "label of no class": labels(np.full(ROWS, 3)),
    "negative label": labels(np.full(ROWS, -2)),
    "the same again": Forward(0, 0, True, GOOD, LABELS),
    "another step": Forward(1, 1, True, GOOD, LABELS),
    "backward at the last stage": Backward(0, 0, bundle(np.zeros((ROWS, 3)), sizes=(ROWS,))),
    "backward without forward": Backward(0, 7, bundle(sizes=(ROWS,))),
    "apply of another step": Apply(1, ROWS),
    "to run what wants labels": RunEntryPoint(b"one", "train", GOOD),
    "to run what is not there": RunEntryPoint(b"one", "decode", GOOD),
}


def test_garbage_is_refused_and_changes_nothing() -> None:
    stage, clean = one(), one()
    for each in (stage, clean):
        assert each.ask(Forward(0, 0, True, GOOD, LABELS), Forwarded).samples == 4
    for name, request in GARBAGE.items():
        assert isinstance(stage.handle(request), Refused), name
    for each in (stage, clean):
        each.ask(Forward(0, 2, True, GOOD, LABELS), Forwarded)
    arenas = [{name: bytes(arena) for name, arena in each.arenas.items()} for each in (stage, clean)]
    assert arenas[0] == arenas[1]


def test_a_refusal_names_the_unusable_payload() -> None:
    stage = one()
    stage.ask(Forward(0, 0, True, GOOD, LABELS), Forwarded)
    found: dict[str, set[str]] = {}
    for name, request in GARBAGE.items():
        found.setdefault(stage.ask(request, Refused).part, set()).add(name)
    assert found["labels"] == {
        "labels of a wrong type",
        "labels of a wrong size",
        "too few labels",
        "label of no class",
        "negative label",
    }
    assert found["input"] == {
        "wrong digest",
        "wrong type",
        "wrong shape",
        "wrong dimensions",
        "not of its size",
        "no sizes",
        "too many sizes",
        "too many samples",
        "no tensors",
        "too many tensors",
        "infinite",
        "not a number",
    }
    short = Forward(0, 1, True, bundle(X[:-1], sizes=(ROWS - 1,)), LABELS)
    assert stage.ask(short, Refused).part == "input"  # the labels have the size of everything else


def test_an_error_of_an_operator_names_it() -> None:
    reason = one().ask(GARBAGE["label of no class"], Refused).reason
    assert reason.startswith("aten.cross_entropy_loss.default of loss: ")
    assert "\n" not in reason


def test_a_correct_gradient_is_accepted_after_a_refused_one() -> None:
    stage = Held(spread(model(), 2)[0], (ROWS,))
    output = stage.ask(Forward(0, 0, True, GOOD), Forwarded).output
    assert output is not None
    (header,) = output.tensors
    shape = header.shape
    for wrong in (
        bundle(np.zeros((*shape[:-1], 7)), sizes=(ROWS,)),
        bundle(np.zeros((ROWS - 1, *shape[1:])), sizes=(ROWS - 1,)),
        bundle(np.zeros(shape, "float32"), sizes=(ROWS,)),
        bundle(sizes=(ROWS,)),
    ):
        assert stage.ask(Backward(0, 0, wrong), Refused).part == "gradient"
    assert not stage.vector("gradients").any()
    assert stage.ask(Backward(0, 1, output), Refused).part == ""
    assert stage.ask(Backward(1, 0, output), Refused).part == ""
    stage.ask(Backward(0, 0, output), BackwardDone)
    stage.ask(Backward(0, 0, output), Refused)


def test_an_error_in_the_backward_pass_ends_the_process() -> None:
    stage = one()

    def out_of_memory(gradient: torch.Tensor) -> None:
        raise RuntimeError("no memory is left")

    stage.executor._arenas.parameters[0].register_hook(out_of_memory)  # type: ignore[no-untyped-call]  # so in torch
    with pytest.raises(RuntimeError, match="no memory"):
        stage.handle(Forward(0, 0, True, GOOD, LABELS))


def test_non_finite_totals_are_refused() -> None:
    stage = one()
    before = bytes(stage.arenas["parameters"])
    stage.vector("totals")[3] = np.nan
    assert "not finite" in stage.ask(Apply(0, 1), Refused).reason
    assert stage.ask(Norm(), Normed).squared_norm == inf
    assert bytes(stage.arenas["parameters"]) == before


def test_a_skipped_step_drops_its_totals_and_changes_nothing() -> None:
    stage = one()
    before = {name: bytes(stage.arenas[name]) for name in ("parameters", "moments")}
    stage.ask(Forward(0, 0, True, GOOD, LABELS), Forwarded)
    stage.vector("totals")[3] = np.nan
    stage.ask(Apply(0, 1, is_skipped=True), Applied)
    assert {name: bytes(stage.arenas[name]) for name in before} == before
    assert not stage.vector("totals").any()
    assert not stage.vector("gradients").any()
    stage.ask(Forward(1, 0, True, GOOD, LABELS), Forwarded)
    stage.vector("totals")[:] = stage.vector("gradients")
    stage.ask(Apply(1, ROWS), Applied)
    assert bytes(stage.arenas["parameters"]) != before["parameters"]


def test_a_norm_whose_square_overflows_is_infinite() -> None:
    build = GraphBuilder(dtype="float64")
    batch = build.symbol("batch")
    build.begin()
    # For a single element torch gives the norm without squaring it.
    scaled = build.node("mul.Tensor", build.input("x", "float64", batch, 1), build.parameter("w", 1))
    build.end(outputs=[scaled], loss=build.node("sum", scaled))
    stage = Held(whole(build.finish()), (1,))
    stage.vector("totals")[:] = 1e200
    assert stage.ask(Norm(), Normed).squared_norm == inf


def test_the_norm_reveals_a_non_finite_gradient() -> None:
    graph = model()
    first, _ = cut(graph, bytes(32), legal_positions(graph)[:1])
    stage = Held(first, (ROWS,), microbatches=4)
    output = stage.ask(Forward(0, 0, True, GOOD), Forwarded).output
    assert output is not None
    broken = bundle(*(np.full(array.shape, np.nan) for array in tensors_of(output)), sizes=(ROWS,))
    stage.ask(Backward(0, 0, broken), BackwardDone)
    stage.vector("totals")[:] = stage.vector("gradients")
    assert stage.ask(Norm(), Normed).squared_norm == inf


def test_a_step_that_clips_needs_the_norm_of_all_stages() -> None:
    stage = Held(whole(model()), (ROWS,), optimizer=OptimizerSettings("sgd", clip_norm=1.0))
    stage.ask(Forward(0, 0, True, GOOD, LABELS), Forwarded)
    for norm in (None, float("nan"), -1.0):
        stage.ask(Apply(0, 4, norm), Refused)
    stage.vector("totals")[:] = stage.vector("gradients")
    stage.ask(Apply(0, 4, stage.ask(Norm(), Normed).squared_norm), Applied)


def test_microbatches_in_flight_are_limited_and_evaluation_holds_none() -> None:
    stage = Held(spread(model(), 2)[0], (ROWS,))
    for microbatch in range(IN_FLIGHT_MAX):
        stage.ask(Forward(0, microbatch, True, GOOD), Forwarded)
    assert "in flight" in stage.ask(Forward(0, IN_FLIGHT_MAX, True, GOOD), Refused).reason
    stage.ask(Forward(5, 0, False, GOOD), Forwarded)
    stage.ask(Discard(), StageDone)
    stage.ask(Forward(5, 0, True, GOOD), Forwarded)


def test_parameters_and_named_constants_are_transferred_by_name() -> None:
    first, other = one(), Held(whole(model()), (ROWS,), seed=2)
    assert bytes(first.arenas["parameters"]) != bytes(other.arenas["parameters"])
    data = first.ask(Export(), Exported).data
    other.ask(Forward(0, 0, True, GOOD, LABELS), Forwarded)
    other.ask(Import(data), StageDone)
    assert bytes(first.arenas["parameters"]) == bytes(other.arenas["parameters"])
    assert not other.vector("gradients").any()
    assert other.ask(Export(), Exported).data == data
    names = ["fc1.bias", "fc1.weight", "fc2.weight", "norm.running_mean", "norm.running_var", "scale"]
    tensors = safetensors.numpy.load(data)
    assert sorted(tensors) == names
    assert np.array_equal(tensors["scale"], [1.0, 2.0, 1.0])


def test_a_safetensors_file_that_differs_from_the_stage_is_refused() -> None:
    stage = one()
    good = safetensors.numpy.load(stage.ask(Export(), Exported).data)
    without = {name: array for name, array in good.items() if name != "scale"}
    before = bytes(stage.arenas["parameters"])
    bad: list[bytes] = [
        b"",
        b"not a file",
        (1 << 60).to_bytes(8, "little") + b"{}",
        safetensors.numpy.save({"fc1.bias": good["fc1.bias"]}),
        safetensors.numpy.save(good | {"fc3.bias": good["fc1.bias"]}),
        safetensors.numpy.save(good | {"fc1.weight": good["fc1.weight"].T.copy()}),
        safetensors.numpy.save(good | {"fc1.bias": good["fc1.bias"].astype("float32")}),
        safetensors.numpy.save(good | {"fc1.bias": np.full(6, np.nan)}),
        safetensors.numpy.save(good | {"scale": np.ones(3)}),
        safetensors.numpy.save(good | {"scale": np.ones(2)}),
        bytes(message_bytes_max(stage.specification) + 1),
    ]
    for data in bad:
        stage.ask(Import(data), Refused)
    assert bytes(stage.arenas["parameters"]) == before
    stage.ask(Import(safetensors.numpy.save(without)), StageDone)


def test_a_file_of_many_small_parameters_fits_a_message() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 1), build.label("y", "float32", batch, 1)
    path = "model.encoder.layers.attention.self.blocks.projection"
    parts = [build.parameter(f"{path}.{number}.bias", 1) for number in range(10_240)]
    out = x
    for begin in range(0, len(parts), 1024):
        out = build.node("add.Tensor", out, build.node("sum", build.node("cat", parts[begin : begin + 1024])))
    build.end(outputs=[out], loss=build.node("mse_loss", out, y, 2))
    stage = Held(whole(build.finish()), (ROWS,))
    data = stage.ask(Export(), Exported).data
    assert 1 << 20 < len(data) <= message_bytes_max(stage.specification)
    stage.ask(Import(data), StageDone)


def test_an_invalid_count_of_samples_is_refused() -> None:
    build = GraphBuilder(dtype="float64")
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float64", batch, 4), build.label("y", "float64", batch)
    values = build.node("mv", x, build.parameter("weight", 4))
    loss = build.node("mse_loss", values, y, 2)
    build.end(outputs=[values], loss=loss, count=build.node("sum", build.node("mul.Scalar", y, 2.0**54)))
    stage = Held(whole(build.finish()), (ROWS,))
    for label in (1e100, 1.0, -1.0, 2.0**-55):
        wanted = np.array([label, 0.0, 0.0, 0.0, 0.0])
        reply = stage.ask(Forward(0, 0, True, GOOD, bundle(wanted, sizes=(ROWS,))), Refused)
        assert "samples" in reply.reason
    assert not stage.vector("gradients").any()


def test_parameters_are_zero_until_the_node_has_written_them() -> None:
    stored = StoredValues(0, 3 * 6 * 8, bytes(32))
    stage = Held(whole(model(stored)), (ROWS,))
    assert not stage.named("parameters")["fc2.weight"].any()
    assert stage.named("parameters")["fc1.weight"].any()
    stage.ask(Forward(0, 0, True, GOOD, LABELS), Forwarded)
    stage.vector("parameters")[:] = 2.0
    stage.ask(Reload(), StageDone)
    assert not stage.vector("gradients").any()
    assert (stage.vector("parameters") == 2.0).all()
    stage.ask(Forward(0, 0, True, GOOD, LABELS), Forwarded)
    stage.vector("parameters")[0] = np.inf
    stage.ask(Reload(), Refused)


def test_initial_parameters_depend_on_seed_and_name_but_not_on_the_cut() -> None:
    together = one().named("parameters")
    for part in spread(model(), 3):
        for name, array in Held(part, (ROWS,)).named("parameters").items():
            assert np.array_equal(array, together[name])
    assert not np.array_equal(
        Held(whole(model()), (ROWS,), seed=1).vector("parameters"), one().vector("parameters")
    )


def test_applying_a_step_returns_the_parameter_digest_of_all_replicas() -> None:
    stages = [one(), one()]
    for stage in stages:
        stage.vector("totals")[:] = 0.5
    assert stages[0].ask(Apply(0, 3), Applied) == stages[1].ask(Apply(0, 3), Applied)


def test_arenas_of_a_wrong_size_are_a_programming_error() -> None:
    stage = one()
    for arenas in ({}, stage.arenas | {"totals": memoryview(bytearray(8))}):
        with pytest.raises(LocalProtocolError, match="arena"):
            StageExecutor(stage.specification, arenas)


def test_the_layout_of_an_arena_has_no_gaps() -> None:
    specification = one().specification
    offset = 0
    for slot in parameter_layout(specification):
        assert slot.offset == offset
        offset += slot.size
    assert offset * 8 == vector_bytes(specification)


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 0},
        {"device": "cpu; rm"},
        {"sizes_max": [1 << 40]},
        {"sizes_max": []},
        {"microbatches": 0},
        {"autocast": "float16"},
        {"memory_bytes_max": 0},
        {"optimizer": {"learning_rate": float("nan")}},
        {"optimizer": {"momentum": 1.0}},
        {"optimizer": {"schedule": {"kind": "linear"}}},
        {"optimizer": {"groups": [{"rate_factor": -1.0}]}},
    ],
)
def test_a_specification_out_of_bounds_is_not_decoded(change: dict[str, object]) -> None:
    fields = msgspec.to_builtins(one().specification, builtin_types=(bytes,))
    assert decode(encode(fields), StageSpecification, bytes_max=9_999) is not None
    with pytest.raises(RemoteProtocolError):
        decode(encode(fields | change), StageSpecification, bytes_max=9_999)


@given(st.binary(max_size=300), st.sampled_from([StageSpecification, Request, Reply]))
def test_random_bytes_are_not_a_request(data: bytes, kind: Any) -> None:
    # A lone tag is a complete message if its type has no fields; random bytes never hit such a tag.
    with pytest.raises(RemoteProtocolError):
        decode(data, kind, bytes_max=1_000)
