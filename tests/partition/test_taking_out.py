"""Counted micro-batches can be taken out of the sums again, begun ones can be forgotten, and the state can be
transferred."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.capture import Captured
from partition.codecs.codec import Array, Payload
from partition.model.cut import cut
from partition.model.graph import Graph, StageGraph
from partition.stage import (
    Apply,
    Backward,
    BackwardDone,
    Discard,
    Forget,
    Forward,
    Forwarded,
    Import,
    OptimizerSettings,
    Refused,
    Request,
    Restore,
    Schedule,
    StageDone,
)
from partition.stage_layout import parameter_layout
from tests.partition.graphs import GraphBuilder
from tests.partition.hand_models import cnn_graph, gpt_graph
from tests.partition.held import Held, Row, bundle, spread
from tests.zoo import ZOO
from tests.zoo.equivalence import captured_small, payloads, random_cut, sizes_of

pytestmark = pytest.mark.usefixtures("one_thread")

FLOAT64_MAX = 1e-12
FLOAT32_MAX = 1e-5
FLOOR = 1e-4
"""A sum below this share of the largest sum may be only rounding, such as that of a bias before a norm."""
HAND = ("hand-gpt", "hand-cnn")
STEP = 3
ADAMW = OptimizerSettings("adamw", 2e-3, weight_decay=0.1, schedule=Schedule("linear", 1, 9), clip_norm=1.0)
MOMENTUM = OptimizerSettings("sgd", 0.1, momentum=0.9, clip_norm=2.0)
Batch = tuple[Payload, Payload]


def captured(name: str) -> Captured:
    return captured_small(name, torch.float64)


@cache
def hand(name: str, dtype: Any = "float64") -> Graph:
    return gpt_graph(30, 8, 16, 2, 2, 0.25, dtype) if name == "hand-gpt" else cnn_graph(4, dtype)


def stages_of(name: str, stages: int) -> tuple[StageGraph, ...]:
    if name in HAND:
        return spread(hand(name), stages)
    return random_cut(captured(name).graph, captured(name).hash, stages, seed=stages)


def batch_of(name: str, number: int, dtype: str = "float64") -> Batch:
    draws = np.random.default_rng(number)
    if name == "hand-gpt":
        tokens = draws.integers(0, 30, (2, 3, 5 + number))
        return bundle(tokens[0], sizes=(3, 5 + number)), bundle(tokens[1], sizes=(3, 5 + number))
    if name == "hand-cnn":
        images = draws.normal(size=(3, 1, 8, 8)).astype(dtype)
        return bundle(images, sizes=(3,)), bundle(draws.integers(0, 5, 3), sizes=(3,))
    return payloads(captured(name).graph, ZOO[name]("test").data(number, 3, torch.float64))


def sizes_max(name: str) -> tuple[int, ...]:
    if name in HAND:
        return (4, 8) if name == "hand-gpt" else (4,)
    return sizes_of(captured(name).graph, ZOO[name]("test").data(0, 3, torch.float64))


class Chain:
    """Stages in a row that remember their inputs for each micro-batch, as peers do."""

    def __init__(self, stages: Sequence[StageGraph], sizes: Sequence[int], **changes: Any) -> None:
        self.stages = [Held(stage, sizes, **changes) for stage in stages]
        self.given: dict[int, tuple[list[Payload], list[Payload | None]]] = {}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Initial values that the graph does not hold."""
        for stage in self.stages:
            rows = [slot.name for slot in parameter_layout(stage.specification)]
            data = {name: tensors[name].detach().clone().contiguous() for name in rows}
            stage.ask(Import(safetensors.torch.save(data)), StageDone)

    def give(self, number: int, batch: Batch) -> Forwarded:
        inputs: list[Payload] = [batch[0]]
        for stage in self.stages[:-1]:
            output = stage.ask(Forward(STEP, number, True, inputs[-1]), Forwarded).output
            assert output is not None
            inputs.append(output)
        end = self.stages[-1].ask(Forward(STEP, number, True, inputs[-1], batch[1]), Forwarded)
        gradients: list[Payload | None] = [None] * len(self.stages)
        gradient = end.gradient
        for place in reversed(range(len(self.stages) - 1)):
            if not goes_back(self.stages[place]):
                break
            assert gradient is not None
            gradients[place] = gradient
            gradient = self.stages[place].ask(Backward(STEP, number, gradient), BackwardDone).gradient
        self.given[number] = inputs, gradients
        return end

    def take_out(self, number: int, labels: Payload) -> Forwarded:
        """Replay each stage alone, in any order; a replay no longer needs the other stages."""
        inputs, gradients = self.given.pop(number)
        for place, stage in reversed(list(enumerate(self.stages))):
            wanted = labels if place == len(self.stages) - 1 else None
            done = stage.ask(Forward(STEP, number, True, inputs[place], wanted, sign=-1), Forwarded)
            assert done.output is None
            assert done.gradient is None
            if place == len(self.stages) - 1:
                end = done
            elif goes_back(stage):
                gradient = gradients[place]
                assert gradient is not None
                back = stage.ask(Backward(STEP, number, gradient, sign=-1), BackwardDone)
                assert back.gradient is None
        return end

    def sums(self) -> list[Array]:
        """Return the sums of every parameter and statistic, stage by stage."""
        found = []
        for stage in self.stages:
            vector = stage.vector("gradients")
            for slot in parameter_layout(stage.specification):
                if slot.parameter.kind != "frozen":
                    found.append(vector[slot.offset : slot.offset + slot.size].copy())
        return found


def goes_back(stage: Held) -> bool:
    return bool(stage.specification.graph.entry("train").backward_outputs)


def distance(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    largest = max(float(np.abs(array).max(initial=0)) for array in wanted)
    return max(
        float(np.abs(a - b).max(initial=0)) / max(float(np.abs(b).max(initial=0)), FLOOR * largest)
        for a, b in zip(found, wanted, strict=True)
    )


CASES = [
    *((name, stages, recompute) for name in HAND for stages in (1, 2, 3) for recompute in (False, True)),
    ("mobilenet", 3, False),
    ("mobilenet", 2, True),
    ("hf-gpt2", 4, False),
    ("siamese", 2, True),
    ("lstm", 3, False),
    ("experts", 2, False),
    ("graph-network", 3, True),
]


@pytest.mark.parametrize(("name", "stages", "recompute"), CASES)
def test_sums_without_one_micro_batch_equal_those_of_the_others(
    name: str, stages: int, recompute: bool
) -> None:
    changes: dict[str, Any] = {"microbatches": 3, "recompute": recompute}
    found, wanted = (Chain(stages_of(name, stages), sizes_max(name), **changes) for _ in range(2))
    if name not in HAND:
        for chain in (found, wanted):
            chain.load(ZOO[name]("test").model(torch.float64).state_dict())
    for number in range(3):
        answer = found.give(number, batch_of(name, number))
        if number == 1:
            first = answer
        else:
            wanted.give(number, batch_of(name, number))
    complete = found.sums()
    taken = found.take_out(1, batch_of(name, 1)[1])
    assert (taken.loss, taken.samples, taken.metrics) == (first.loss, first.samples, first.metrics)
    assert distance(found.sums(), wanted.sums()) <= FLOAT64_MAX
    # It may come again, and then the sums are complete once more.
    assert found.give(1, batch_of(name, 1)) == first
    assert distance(found.sums(), complete) <= FLOAT64_MAX


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
@pytest.mark.parametrize("name", HAND)
def test_in_float32_only_rounding_errors_remain(
    name: str, autocast: Literal["off", "bfloat16"], recompute: bool, stages: int
) -> None:
    """The same holds under autocast: a different replay in bfloat16 would leave a thousandth."""
    changes: dict[str, Any] = {"microbatches": 3, "recompute": recompute, "autocast": autocast}
    parts = spread(hand(name, "float32"), stages)
    found, wanted = (Chain(parts, sizes_max(name), **changes) for _ in range(2))
    for number in (0, 1, 2):
        found.give(number, batch_of(name, number, "float32"))
        if number != 1:
            wanted.give(number, batch_of(name, number, "float32"))
    found.take_out(1, batch_of(name, 1, "float32")[1])
    pairs = [np.concatenate(chain.sums()) for chain in (found, wanted)]
    assert np.linalg.norm(pairs[0] - pairs[1]) <= FLOAT32_MAX * np.linalg.norm(pairs[1])


@pytest.mark.parametrize("name", HAND)
def test_taking_out_the_last_micro_batch_leaves_exactly_zero(name: str) -> None:
    chain = Chain(stages_of(name, 3), sizes_max(name), microbatches=2)
    for number in (0, 1):
        chain.give(number, batch_of(name, number))
    for number in (0, 1):
        assert any(array.any() for array in chain.sums())
        chain.take_out(number, batch_of(name, number)[1])
    assert not any(array.any() for array in chain.sums())
    inputs = batch_of(name, 0)[0]
    assert chain.stages[0].ask(Forward(STEP + 1, 9, True, inputs), Forwarded).output is not None


def test_only_counted_micro_batches_can_be_taken_out_once() -> None:
    first, _ = stages_of("hand-gpt", 2)
    stage = Held(first, (4, 8))
    given = batch_of("hand-gpt", 0)[0]

    def forward(number: int, sign: Literal[1, -1], step: int = 0, *, train: bool = True) -> Forward:
        return Forward(step, number, train, given, sign=sign)

    assert "do not hold" in stage.ask(forward(0, -1), Refused).reason
    gradient = stage.ask(forward(0, 1), Forwarded).output
    assert gradient is not None
    assert "second time" in stage.ask(forward(0, -1), Refused).reason  # it is in flight
    stage.ask(Backward(0, 0, gradient, sign=-1), Refused)
    stage.ask(Backward(0, 0, gradient), BackwardDone)
    assert "evaluation" in stage.ask(forward(0, -1, train=False), Refused).reason
    stage.ask(forward(0, -1, step=1), Refused)
    stage.ask(Backward(0, 0, gradient, sign=-1), Refused)
    before = stage.vector("gradients").copy()
    stage.ask(forward(0, -1), Forwarded)
    for request in (forward(0, -1), forward(0, 1), Backward(0, 0, gradient)):
        stage.ask(request, Refused)
    assert np.array_equal(stage.vector("gradients"), before)
    stage.ask(Backward(0, 0, gradient, sign=-1), BackwardDone)
    assert not stage.vector("gradients").any()
    stage.ask(forward(0, -1), Refused)


def test_a_forgotten_micro_batch_leaves_no_trace() -> None:
    first, _ = stages_of("hand-gpt", 2)
    stage = Held(first, (4, 8))
    inputs = [batch_of("hand-gpt", number)[0] for number in (0, 1)]
    once = stage.ask(Forward(0, 0, True, inputs[0]), Forwarded)
    assert once.output is not None
    stage.ask(Forward(0, 1, True, inputs[1]), Forwarded)
    stage.ask(Forget(0, 0), StageDone)
    for gone in (Forget(0, 0), Forget(1, 1), Forget(0, 7), Backward(0, 0, once.output)):
        stage.ask(gone, Refused)
    assert stage.ask(Forward(0, 0, True, inputs[0]), Forwarded) == once
    stage.ask(Backward(0, 0, once.output), BackwardDone)
    counted = stage.vector("gradients").copy()
    assert "not in flight" in stage.ask(Forget(0, 0), Refused).reason
    # A micro-batch that is being taken out stays there.
    stage.ask(Forward(0, 0, True, inputs[0], sign=-1), Forwarded)
    stage.ask(Forget(0, 0), StageDone)
    assert np.array_equal(stage.vector("gradients"), counted)
    assert "second time" in stage.ask(Forward(0, 0, True, inputs[0]), Refused).reason
    stage.ask(Discard(), StageDone)
    stage.ask(Forward(4, 1, True, inputs[1]), Forwarded)
    stage.ask(Forget(4, 1), StageDone)
    stage.ask(Forward(5, 1, True, inputs[1]), Forwarded)  # no data of step 4 is here


def product() -> Graph:
    """Return a graph with loss = sum(x w v). The first of its two stages has the gradient sum(x g) for its
    w."""
    build = GraphBuilder(dtype="float64")
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float64", batch, 1)
    a = build.node("mul.Tensor", x, build.parameter("w", 1))
    build.end(outputs=[a], loss=build.node("sum", build.node("mul.Tensor", a, build.parameter("v", 1))))
    return build.finish()


ACTIONS = st.sampled_from(["forward", "backward", "out", "back-out", "forget", "discard"])


@settings(max_examples=150)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 2), st.integers(0, 1)), max_size=40))
def test_the_sums_always_hold_exactly_the_counted_micro_batches(asked: list[tuple[str, int, int]]) -> None:
    stage = Held(cut(product(), bytes(32), [1])[0], (1,))
    step, counted, flying = 0, set[int](), dict[int, int]()
    for action, number, at in asked:
        is_open = at == step or not (counted or flying)
        given = bundle(np.array([[float(10**number)]]), sizes=(1,))
        sign: Literal[1, -1] = -1 if "out" in action else 1
        request: Request
        if action == "discard":
            request, is_right = Discard(), True
        elif action == "forget":
            request, is_right = Forget(at, number), is_open and number in flying
        elif action in ("forward", "out"):
            request = Forward(at, number, True, given, sign=sign)
            is_right = is_open and number not in flying and (number in counted) == (sign < 0)
        else:
            request = Backward(at, number, bundle(np.ones((1, 1)), sizes=(1,)), sign=sign)
            is_right = is_open and flying.get(number) == sign
        assert isinstance(stage.handle(request), Refused) != is_right, (action, number, at)
        if not is_right:
            continue
        if action == "discard":
            counted.clear()
            flying.clear()
        elif action == "forget":
            del flying[number]
        elif action in ("forward", "out"):
            step, flying[number] = at, sign
        else:
            del flying[number]
            (counted.add if sign > 0 else counted.remove)(number)
        assert stage.vector("gradients") == sum(10.0**each for each in counted)


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "sgd"])
@pytest.mark.parametrize("name", HAND)
def test_a_stage_restored_after_three_steps_continues_bit_for_bit(
    name: str, optimizer: OptimizerSettings
) -> None:
    def row() -> Row:
        return Row(stages_of(name, 2), sizes_max(name), microbatches=2, optimizer=optimizer, seed=1)

    def train(row: Row, step: int) -> None:
        samples = 0
        for number in range(2):
            batch = batch_of(name, 2 * (step % 2) + number)
            samples += row.forward(step, number, *batch, train=True).samples
        row.apply(step, samples)

    old, new = row(), row()
    for step in range(3):
        train(old, step)
    for source, stage in zip(old.chains[0], new.chains[0], strict=True):
        # Work begun in step 0 is not part of the restored state.
        stage.handle(Forward(0, 0, True, batch_of(name, 0)[0]))
        for arena in ("parameters", "moments"):
            stage.arenas[arena][:] = source.arenas[arena]
        stage.ask(Restore(3), StageDone)
    for step in (3, 4, 5):
        for each in (old, new):
            train(each, step)
    for source, stage in zip(old.chains[0], new.chains[0], strict=True):
        for arena in ("parameters", "moments"):
            assert stage.arenas[arena] == source.arenas[arena], arena


def test_a_restored_stage_accepts_only_its_next_step() -> None:
    stage = Held(stages_of("hand-gpt", 2)[0], (4, 8))
    inputs = batch_of("hand-gpt", 0)[0]
    stage.ask(Restore(3), StageDone)
    for wrong in (Forward(2, 0, True, inputs), Forward(4, 0, True, inputs), Apply(4, 1)):
        assert "step 3 is the next" in stage.ask(wrong, Refused).reason
    stage.ask(Forward(7, 0, False, inputs), Forwarded)  # an evaluation belongs to no step
    stage.ask(Forward(3, 0, True, inputs), Forwarded)
    stage.ask(Discard(), StageDone)
    stage.handle(Apply(3, 1))
    assert "step 4 is the next" in stage.ask(Forward(3, 0, True, inputs), Refused).reason


def test_values_that_training_cannot_give_are_not_restored() -> None:
    stage = Held(stages_of("hand-gpt", 2)[0], (4, 8), optimizer=ADAMW)
    output = stage.ask(Forward(0, 0, True, batch_of("hand-gpt", 0)[0]), Forwarded).output
    assert output is not None
    for arena, place, value, complaint in (
        ("parameters", 0, np.nan, "a parameter is not finite"),
        ("moments", 0, np.inf, "a moment is not finite"),
        ("moments", -1, -1.0, "squared gradients is negative"),
    ):
        before = stage.vector(arena)[place]
        stage.vector(arena)[place] = value
        assert complaint in stage.ask(Restore(0), Refused).reason
        stage.vector(arena)[place] = before
    stage.ask(Backward(0, 0, output), BackwardDone)  # nothing was forgotten
    stage.ask(Restore(0), StageDone)
    assert not stage.vector("gradients").any()
