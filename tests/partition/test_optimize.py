"""Optimizer steps are torch's own, with schedules, groups, and clipping over all stages."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from partition.execute.optimize import BLOCK_ELEMENTS, rate_factor
from partition.model.cut import cut
from partition.model.graph import Graph, encode_graph, graph_hash
from partition.stage import Applied, Apply, GroupSettings, Norm, Normed, OptimizerSettings, Schedule
from partition.stage_layout import parameter_layout
from tests.partition.graphs import GraphBuilder, whole
from tests.partition.held import Held

SAMPLES = 40
GROUPS = (GroupSettings(weight_decay=0.1), GroupSettings(rate_factor=0.25))
LINEAR = Schedule("linear", warmup_steps=2, total_steps=5, floor=0.1)
COSINE = Schedule("cosine", warmup_steps=0, total_steps=4)
SETTINGS = {
    "sgd": OptimizerSettings("sgd", learning_rate=0.1),
    "momentum": OptimizerSettings("sgd", learning_rate=0.1, momentum=0.9, weight_decay=1e-2),
    "adam": OptimizerSettings("adam", learning_rate=2e-2, betas=(0.8, 0.95), epsilon=1e-6, weight_decay=0.05),
    "adamw": OptimizerSettings("adamw", learning_rate=2e-2, weight_decay=0.2),
    "groups": OptimizerSettings("adamw", learning_rate=2e-2, weight_decay=9.0, groups=GROUPS),
    "linear": OptimizerSettings("sgd", learning_rate=0.1, momentum=0.5, schedule=LINEAR, groups=GROUPS),
    "cosine": OptimizerSettings("adam", learning_rate=0.1, schedule=COSINE),
    "clip": OptimizerSettings("sgd", learning_rate=0.1, momentum=0.9, clip_norm=0.05),
    "no clip": OptimizerSettings("adamw", learning_rate=0.1, clip_norm=1e3),
}


def model() -> Graph:
    """w1 (twice: tied), a frozen f, a batch norm's statistics, w2 in group 1."""
    build = GraphBuilder(dtype="float64")
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float64", batch, 4)
    w1 = build.parameter(("w1", "w1.again"), 4)
    x = build.node("mul.Tensor", x, w1)
    x = build.node("mul.Tensor", x, build.parameter("f", 4, kind="frozen"))
    mean = build.parameter("mean", 4, kind="statistic")
    variance = build.parameter("variance", 4, kind="statistic")
    x = build.node("batch_norm", x, None, None, mean, variance, True, 0.1, 1e-5, True)
    x = build.node("linear", x, build.parameter("w2", 3, 4, group=1))
    x = build.node("mul.Tensor", build.node("linear", x, build.parameter("w3", 4, 3, group=1)), w1)
    build.end(outputs=[x], loss=build.node("sum", x))
    return build.finish()


def plain(settings: OptimizerSettings, values: dict[str, torch.Tensor]) -> tuple[torch.optim.Optimizer, Any]:
    """torch's own optimizer and LambdaLR."""
    groups: list[dict[str, Any]] = [{"params": list(values.values())}]
    rates = [1.0]
    if settings.groups:
        groups = [
            {"params": [values["w1"]], "weight_decay": 0.1},
            {"params": [values["w2"], values["w3"]], "weight_decay": 0.0},
        ]
        rates = [1.0, 0.25]
    decay = settings.weight_decay
    if settings.kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=settings.learning_rate, momentum=settings.momentum, weight_decay=decay
        )
    else:
        kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
        optimizer = kind(
            groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, weight_decay=decay
        )

    def schedule(rate: float) -> Any:
        return lambda step: rate * rate_factor(settings.schedule, step)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [schedule(rate) for rate in rates])


@pytest.mark.parametrize("name", SETTINGS)
def test_stages_step_like_torch_by_the_mean_gradient(name: str) -> None:
    settings, graph = SETTINGS[name], model()
    stages = [Held(stage, (4,), optimizer=settings) for stage in
              cut(graph, graph_hash(encode_graph(graph)), [1, 3])]  # fmt: skip
    assert [stage.specification.graph.borrowed for stage in stages] == [(), (), (0,)]
    values = {
        key: torch.tensor(array).requires_grad_()
        for stage in stages
        for key, array in stage.named("parameters").items()
        if key.startswith("w")
    }
    optimizer, scheduler = plain(settings, values)
    for step in range(6):
        draws = np.random.default_rng(step)
        totals = {key: draws.normal(size=tuple(value.shape)) for key, value in values.items()}
        for stage in stages:
            for slot in parameter_layout(stage.specification):
                if slot.name in totals:
                    part = stage.vector("totals")[slot.offset : slot.offset + slot.size]
                    part[:] = totals[slot.name].ravel()
        norm = sum(stage.ask(Norm(), Normed).squared_norm for stage in stages)
        assert norm == pytest.approx(sum(float((array**2).sum()) for array in totals.values()), rel=1e-12)
        for key, value in values.items():
            value.grad = torch.tensor(totals[key] / SAMPLES)
        if settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(values.values(), settings.clip_norm)
        optimizer.step()
        scheduler.step()
        for stage in stages:
            stage.ask(Apply(step, SAMPLES, norm), Applied)
            assert not stage.vector("totals").any()
            for key, array in stage.named("parameters").items():
                if key in values:
                    assert np.abs(array - values[key].detach().numpy()).max() <= 1e-12, key
    assert any(stage.vector("moments").any() for stage in stages) == (settings.moments > 0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSettings(kind="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.01),
        OptimizerSettings(kind="adam", learning_rate=1e-3, weight_decay=0.01),
        OptimizerSettings(kind="adamw", learning_rate=1e-3, weight_decay=0.01),
    ],
    ids=lambda settings: settings.kind,
)
def test_blocks_of_a_large_parameter_step_bit_for_bit_like_the_whole(
    settings: OptimizerSettings, threads: int
) -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float32", batch, 331)
    x = build.node("linear", x, build.parameter("w", 2 * BLOCK_ELEMENTS // 331 + 57, 331))
    build.end(outputs=[x], loss=build.node("sum", x))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        held = Held(whole(build.finish()), (4,), optimizer=settings)
        value = torch.tensor(held.named("parameters")["w"]).requires_grad_()
        assert value.numel() > 2 * BLOCK_ELEMENTS
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.kind]
        more = {"momentum": settings.momentum} if settings.kind == "sgd" else {}
        optimizer = kind(
            [value], lr=settings.learning_rate, weight_decay=settings.weight_decay, foreach=False, **more
        )
        for step in range(4):
            total = np.random.default_rng(step).normal(size=value.shape).astype(np.float32)
            held.vector("totals")[:] = total.ravel()
            value.grad = torch.tensor(total) / SAMPLES
            held.ask(Apply(step, SAMPLES), Applied)
            optimizer.step()
            assert np.array_equal(held.named("parameters")["w"], value.detach().numpy())
    finally:
        torch.set_num_threads(before)


def test_a_step_updates_statistics_and_leaves_frozen_parameters() -> None:
    held = Held(whole(model()), (4,), microbatches=3, optimizer=SETTINGS["momentum"])
    before = held.named("parameters")
    layout = {slot.name: slot for slot in parameter_layout(held.specification)}
    slot = layout["mean"]
    held.vector("totals")[slot.offset : slot.offset + slot.size] = [1.0, 2.0, 3.0, 4.0]
    assert held.ask(Norm(), Normed).squared_norm == 0.0
    held.ask(Apply(0, 7), Applied)
    after = held.named("parameters")
    assert np.array_equal(after["f"], before["f"])
    assert np.allclose(after["mean"], 0.9**3 * before["mean"] + [1.0, 2.0, 3.0, 4.0], atol=1e-15)
    assert np.allclose(after["variance"], 0.9**3 * before["variance"], atol=1e-15)


def test_a_replica_that_joins_later_steps_like_the_others() -> None:
    first, late = (Held(whole(model()), (4,), optimizer=SETTINGS["adamw"]) for _ in range(2))
    for step in range(3):
        first.vector("totals")[:] = np.random.default_rng(step).normal(size=len(first.vector("totals")))
        first.ask(Apply(step, SAMPLES), Applied)
    for name in ("parameters", "moments"):
        late.arenas[name][:] = first.arenas[name]
    for held in (first, late):
        held.vector("totals")[:] = 1.0
        held.ask(Apply(3, SAMPLES), Applied)
    assert bytes(first.arenas["parameters"]) == bytes(late.arenas["parameters"])


def test_parameters_of_a_missing_group_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="group"):
        Held(whole(model()), (4,), optimizer=OptimizerSettings(groups=GROUPS[:1]))


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    length=st.integers(1, 50),
    floor=st.floats(0, 1),
)
def test_a_schedule_rises_to_one_and_falls_to_its_floor(
    kind: Any, warmup: int, length: int, floor: float
) -> None:
    schedule = Schedule(kind, warmup, warmup + length, floor)
    factors = [rate_factor(schedule, step) for step in range(warmup + length + 3)]
    assert factors[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    assert factors[warmup] == pytest.approx(1.0)
    later = factors[warmup:]
    assert all(a >= b - 1e-12 for a, b in pairwise(later))
    assert later[-1] == pytest.approx(1.0 if kind == "constant" else floor)
