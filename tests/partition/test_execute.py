"""Stages in a row compute what one machine computes; a stage cannot be led astray."""

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.codec import Array, Payload, pack, unpack
from partition.execute import StageExecutor
from partition.stage import (
    IN_FLIGHT_MAX,
    Applied,
    Apply,
    Backward,
    BackwardDone,
    Discard,
    Done,
    Export,
    Exported,
    Forward,
    Forwarded,
    Import,
    OptimizerSettings,
    Refused,
    Reply,
    Request,
    StageSpecification,
    arena_bytes,
    message_bytes_max,
    parameter_layout,
    vector_bytes,
)

SGD = OptimizerSettings("sgd", learning_rate=0.1, momentum=0.9, weight_decay=1e-4)
ADAM = OptimizerSettings("adam", learning_rate=2e-3)
LAYERS = 14
SAMPLES = 5
T = TypeVar("T")

torch.set_num_threads(1)  # these tensors are too small to be worth a second one


class Held:
    """A stage executor with arenas of its own."""

    def __init__(self, first: int = 0, last: int = LAYERS, **changes: Any) -> None:
        fields: dict[str, Any] = {"optimizer": SGD, "dtype": "float64", "samples_max": SAMPLES} | changes
        self.specification = StageSpecification(
            run=b"a run", model="simple-cnn", sample_shape=(1, 8, 8), classes=10,
            first_layer=first, last_layer=last, **fields,
        )  # fmt: skip
        self.arenas = {
            name: memoryview(bytearray(size)) for name, size in arena_bytes(self.specification).items()
        }
        self.executor = StageExecutor(self.specification, self.arenas)

    def ask(self, request: Request, kind: type[T]) -> T:
        reply = self.executor.handle(request)
        assert isinstance(reply, kind), reply
        return reply

    def array(self, name: str) -> Array:
        return np.frombuffer(self.arenas[name], dtype=self.specification.dtype).copy()


def batch(step: int, microbatch: int, dtype: str = "float64") -> tuple[Payload, Payload]:
    draws = np.random.default_rng((step, microbatch))
    images = draws.random((SAMPLES, 1, 8, 8)).astype(dtype)
    return pack(images, "raw"), pack(draws.integers(0, 10, SAMPLES), "raw")


def train(stages: list[Held], step: int, microbatch: int) -> float:
    """One micro-batch there and back through a row of stages: the summed loss."""
    images, labels = batch(step, microbatch, stages[0].specification.dtype)
    values: Payload | None = images
    for stage in stages[:-1]:
        assert values is not None
        values = stage.ask(Forward(step, microbatch, True, values), Forwarded).output
    assert values is not None
    forwarded = stages[-1].ask(Forward(step, microbatch, True, values, labels), Forwarded)
    assert forwarded.samples == SAMPLES
    gradient = forwarded.gradient
    for stage in reversed(stages[:-1]):
        assert gradient is not None
        gradient = stage.ask(Backward(step, microbatch, gradient), BackwardDone).gradient
    assert gradient is None
    return forwarded.loss


def run(stages: list[Held], steps: int = 3, microbatches: int = 2) -> Iterator[tuple[float, Array]]:
    """Train: the loss of every step, and its gradient sums over all stages."""
    for step in range(steps):
        loss = sum(train(stages, step, microbatch) for microbatch in range(microbatches))
        yield loss, np.concatenate([stage.array("gradients") for stage in stages])
        for stage in stages:
            stage.arenas["totals"][:] = stage.arenas["gradients"]
            stage.ask(Apply(step, SAMPLES * microbatches), Applied)


def parameters(stages: list[Held]) -> Array:
    return np.concatenate([stage.array("parameters") for stage in stages])


def held(cuts: tuple[int, ...], **changes: Any) -> list[Held]:
    edges = (0, *cuts, LAYERS)
    return [Held(first, last, **changes) for first, last in itertools.pairwise(edges)]


TWO = [(cut,) for cut in range(1, LAYERS)]
THREE = list(itertools.combinations(range(1, LAYERS), 2))


@pytest.fixture(scope="module", params=[SGD, ADAM], ids=["sgd", "adam"])
def whole(request: pytest.FixtureRequest) -> tuple[OptimizerSettings, list[tuple[float, Array]], Array]:
    stages = held((), optimizer=request.param)
    steps = list(run(stages))
    return request.param, steps, parameters(stages)


def test_every_cut_trains_as_the_whole_model(
    whole: tuple[OptimizerSettings, list[tuple[float, Array]], Array],
) -> None:
    optimizer, expected_steps, expected = whole
    for cuts in TWO + THREE:
        stages = held(cuts, optimizer=optimizer)
        for (loss, gradients), (expected_loss, expected_gradients) in zip(
            run(stages), expected_steps, strict=True
        ):
            assert abs(loss - expected_loss) <= 1e-9, cuts
            assert np.abs(gradients - expected_gradients).max() <= 1e-9, cuts
        assert np.abs(parameters(stages) - expected).max() <= 1e-9, cuts


@pytest.mark.parametrize("cuts", [(3,), (10,), (13,), (6, 12)])
def test_in_float32_the_whole_vector_agrees_under_sgd(cuts: tuple[int, ...]) -> None:
    one, several = held((), dtype="float32"), held(cuts, dtype="float32")
    assert len(list(run(one))) == len(list(run(several)))
    difference = parameters(one) - parameters(several)
    assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(parameters(one))


def test_the_whole_model_computes_what_plain_torch_computes() -> None:
    """Without dropout, which is ours alone: the reference is an ordinary module with the same weights."""
    stage = Held(0, LAYERS, optimizer=ADAM)
    names = safetensors.numpy.load(stage.ask(Export(), Exported).data)
    modules = torch.nn.Sequential()
    kinds = {"relu": torch.nn.ReLU(), "pool": torch.nn.MaxPool2d(2)}
    for layer in stage.specification.built.layers:
        weight = names.get(f"{layer.name}.weight")
        module = kinds.get(layer.name[:4], torch.nn.Flatten() if layer.name == "flatten" else None)
        if weight is not None and weight.ndim == 4:
            module = torch.nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1)
        elif weight is not None:
            module = torch.nn.Linear(weight.shape[1], weight.shape[0])
        if module is not None:
            modules.add_module(layer.name, module)
    modules.double().load_state_dict({name: torch.tensor(array) for name, array in names.items()})
    images, labels = batch(0, 0)
    logits = modules(torch.tensor(unpack(images, bytes_max=1 << 20)))
    wanted = torch.tensor(unpack(labels, bytes_max=1 << 20))
    loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    reply = stage.ask(Forward(0, 0, False, images, labels), Forwarded)
    assert reply.loss == pytest.approx(float(loss.detach()), abs=1e-9)
    assert reply.correct == int((logits.argmax(1) == wanted).sum())
    assert not stage.array("gradients").any()


def test_the_optimizer_steps_as_torch_steps_by_the_mean_gradient() -> None:
    for settings in (SGD, ADAM, OptimizerSettings("sgd", learning_rate=0.1)):
        stage = Held(13, 14, optimizer=settings)
        values = torch.tensor(stage.array("parameters")).requires_grad_()
        plain: torch.optim.Optimizer = (
            torch.optim.Adam([values], lr=settings.learning_rate)
            if settings.kind == "adam"
            else torch.optim.SGD(
                [values],
                lr=settings.learning_rate,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
            )
        )
        for step in range(3):
            totals = np.random.default_rng(step).normal(size=len(values))
            np.frombuffer(stage.arenas["totals"], dtype="float64")[:] = totals
            values.grad = torch.tensor(totals / 40)
            plain.step()
            stage.ask(Apply(step, 40), Applied)
            assert not stage.array("totals").any()
        assert np.abs(stage.array("parameters") - values.detach().numpy()).max() <= 1e-12
        assert stage.array("moments").any() == (settings.moments > 0)


def test_a_replayed_microbatch_gives_the_same_bytes() -> None:
    stage = Held(6, 14)
    values = pack(np.random.default_rng(0).random((SAMPLES, 64, 2, 2)), "raw")
    labels = batch(0, 0)[1]
    request = Forward(4, 7, True, values, labels)
    first, sums = stage.ask(request, Forwarded), bytes(stage.arenas["gradients"])
    stage.ask(Forward(4, 8, True, values, labels), Forwarded)
    stage.ask(Discard(), Done)
    assert not any(stage.arenas["gradients"])
    assert stage.ask(request, Forwarded) == first
    assert bytes(stage.arenas["gradients"]) == sums
    other = stage.ask(Forward(4, 8, True, values, labels), Forwarded)
    assert other.loss != first.loss  # another micro-batch draws another mask


def test_first_parameters_depend_on_seed_and_name_but_not_on_the_cut() -> None:
    assert bytes(Held(0, 3).arenas["parameters"]) == bytes(Held(0, 6).arenas["parameters"])[: 320 * 8]
    assert bytes(Held(13, 14, seed=1).arenas["parameters"]) != bytes(Held(13, 14).arenas["parameters"])
    single = Held(13, 14, dtype="float32").array("parameters")
    assert np.array_equal(single, Held(13, 14).array("parameters").astype("float32"))


def test_torch_s_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    assert list(run(held(()), steps=1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_applied_gives_the_digest_of_the_parameters_which_replicas_share() -> None:
    one, other = Held(10, 14), Held(10, 14)
    for stage in (one, other):
        stage.arenas["totals"][:] = np.full(len(stage.array("totals")), 0.5).tobytes()
    assert one.ask(Apply(0, 3), Applied) == other.ask(Apply(0, 3), Applied)


def test_parameters_travel_by_name_from_one_stage_to_another() -> None:
    one, other = Held(9, 14, seed=1), Held(9, 14, seed=2)
    data = one.ask(Export(), Exported).data
    other.ask(Import(data), Done)
    assert bytes(one.arenas["parameters"]) == bytes(other.arenas["parameters"])
    assert other.ask(Export(), Exported).data == data
    assert sorted(safetensors.numpy.load(data)) == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]


def test_a_safetensors_file_that_is_not_exactly_the_stage_is_refused() -> None:
    stage = Held(13, 14)
    good = safetensors.numpy.load(stage.ask(Export(), Exported).data)
    before = bytes(stage.arenas["parameters"])
    bad: list[bytes] = [
        b"",
        b"not a file",
        (1 << 60).to_bytes(8, "little") + b"{}",
        safetensors.numpy.save({"fc2.bias": good["fc2.bias"]}),
        safetensors.numpy.save(good | {"fc1.bias": good["fc2.bias"]}),
        safetensors.numpy.save(good | {"fc2.weight": good["fc2.weight"].T.copy()}),
        safetensors.numpy.save(good | {"fc2.bias": good["fc2.bias"].astype("float32")}),
        safetensors.numpy.save(good | {"fc2.bias": np.full(10, np.nan)}),
        bytes(message_bytes_max(stage.specification) + 1),
    ]
    for data in bad:
        stage.ask(Import(data), Refused)
    assert bytes(stage.arenas["parameters"]) == before


def test_a_stage_without_parameters_forwards_backwards_and_steps() -> None:
    stage = Held(7, 10, optimizer=ADAM)
    assert vector_bytes(stage.specification) == 0
    values = pack(np.random.default_rng(0).normal(size=(SAMPLES, 128, 2, 2)), "raw")
    output = stage.ask(Forward(0, 0, True, values), Forwarded).output
    assert output is not None
    assert output.shape == (SAMPLES, 128)
    gradient = stage.ask(Backward(0, 0, output), BackwardDone).gradient
    assert gradient is not None
    assert gradient.shape == values.shape
    stage.ask(Apply(0, SAMPLES), Applied)
    stage.ask(Import(stage.ask(Export(), Exported).data), Done)


IMAGES, LABELS = batch(0, 0)
GARBAGE: dict[str, Request] = {
    "wrong digest": Forward(0, 1, True, msgspec.structs.replace(IMAGES, digest=bytes(32)), LABELS),
    "no labels": Forward(0, 1, True, IMAGES),
    "wrong type": Forward(0, 1, True, batch(0, 0, "float32")[0], LABELS),
    "wrong shape": Forward(0, 1, True, pack(np.zeros((SAMPLES, 1, 8, 9)), "raw"), LABELS),
    "no batch": Forward(0, 1, True, pack(np.zeros((1, 8, 8)), "raw"), LABELS),
    "too many samples": Forward(0, 1, True, pack(np.zeros((SAMPLES + 1, 1, 8, 8)), "raw"), LABELS),
    "not finite": Forward(0, 1, True, pack(np.full((SAMPLES, 1, 8, 8), np.inf), "raw"), LABELS),
    "overflows": Forward(0, 1, True, pack(np.full((SAMPLES, 1, 8, 8), 1.79e308), "raw"), LABELS),
    "labels of a wrong type": Forward(0, 1, True, IMAGES, pack(np.zeros(SAMPLES), "raw")),
    "too few labels": Forward(0, 1, True, IMAGES, pack(np.zeros(SAMPLES - 1, "int64"), "raw")),
    "label of no class": Forward(0, 1, True, IMAGES, pack(np.full(SAMPLES, 10), "raw")),
    "negative label": Forward(0, 1, True, IMAGES, pack(np.full(SAMPLES, -1), "raw")),
    "the same again": Forward(0, 0, True, IMAGES, LABELS),
    "another step": Forward(1, 1, True, IMAGES, LABELS),
    "backward without forward": Backward(0, 0, pack(np.zeros((SAMPLES, 10)), "raw")),
    "apply of another step": Apply(1, SAMPLES),
}


def test_garbage_is_refused_and_changes_nothing() -> None:
    stage, clean = Held(), Held()
    for each in (stage, clean):
        each.ask(Forward(0, 0, True, IMAGES, LABELS), Forwarded)
    for name, request in GARBAGE.items():
        assert isinstance(stage.executor.handle(request), Refused), name
    for each in (stage, clean):
        each.ask(Forward(0, 1, True, *batch(0, 1)), Forwarded)
    assert {name: bytes(arena) for name, arena in stage.arenas.items()} == {
        name: bytes(arena) for name, arena in clean.arenas.items()
    }


def test_a_gradient_of_a_wrong_shape_is_refused_and_the_right_one_still_taken() -> None:
    stage = Held(0, 3)
    output = stage.ask(Forward(0, 0, True, IMAGES), Forwarded).output
    assert output is not None
    stage.ask(Backward(0, 0, pack(np.zeros((SAMPLES, 32, 4, 5)), "raw")), Refused)
    stage.ask(Backward(0, 0, pack(np.zeros((SAMPLES - 1, 32, 4, 4)), "raw")), Refused)
    stage.ask(Backward(0, 1, output), Refused)
    stage.ask(Backward(0, 0, output), BackwardDone)
    stage.ask(Backward(0, 0, output), Refused)


def test_totals_that_are_not_finite_are_refused() -> None:
    stage = Held(13, 14)
    before = bytes(stage.arenas["parameters"])
    np.frombuffer(stage.arenas["totals"], dtype="float64")[3] = np.nan
    stage.ask(Apply(0, 1), Refused)
    assert bytes(stage.arenas["parameters"]) == before


def test_the_microbatches_in_flight_are_bounded_and_evaluation_holds_none() -> None:
    stage = Held(10, 13)
    values = pack(np.zeros((1, 128)), "raw")
    for microbatch in range(IN_FLIGHT_MAX):
        stage.ask(Forward(0, microbatch, True, values), Forwarded)
    assert "in flight" in stage.ask(Forward(0, IN_FLIGHT_MAX, True, values), Refused).reason
    stage.ask(Forward(5, 0, False, values), Forwarded)
    stage.ask(Discard(), Done)
    stage.ask(Forward(5, 0, True, values), Forwarded)


def test_arenas_of_a_wrong_size_are_our_own_bug() -> None:
    stage = Held(13, 14)
    for arenas in ({}, stage.arenas | {"totals": memoryview(bytearray(8))}):
        with pytest.raises(LocalProtocolError, match="arena"):
            StageExecutor(stage.specification, arenas)


def test_the_layout_of_an_arena_has_no_gaps() -> None:
    specification = Held(3, 14).specification
    offset = 0
    for slot in parameter_layout(specification):
        assert slot.offset == offset
        offset += slot.size
    assert offset * 8 == vector_bytes(specification)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "gpt-9"},
        {"first_layer": 3, "last_layer": 3},
        {"last_layer": 15},
        {"sample_shape": [1, 8, 2048]},
        {"sample_shape": [1, 1024, 1024], "last_layer": 14},
        {"sample_shape": [64, 1024, 1024], "samples_max": 1024},
        {"threads": 0},
        {"device": "cpu; rm"},
        {"samples_max": 1 << 40},
        {"optimizer": {"learning_rate": float("nan")}},
        {"optimizer": {"momentum": 1.0}},
    ],
)
def test_a_specification_out_of_bounds_is_not_decoded(change: dict[str, object]) -> None:
    fields = msgspec.to_builtins(Held(0, 3).specification, builtin_types=(bytes,))
    assert decode(encode(fields), StageSpecification, bytes_max=9_999) is not None
    with pytest.raises(RemoteProtocolError):
        decode(encode(fields | change), StageSpecification, bytes_max=9_999)


@given(st.binary(max_size=300), st.sampled_from([StageSpecification, Request, Reply]))
def test_random_bytes_are_no_message(data: bytes, kind: Any) -> None:
    # A lone tag is a whole message for those without fields; random bytes do not hit one.
    with pytest.raises(RemoteProtocolError):
        decode(data, kind, bytes_max=1_000)
