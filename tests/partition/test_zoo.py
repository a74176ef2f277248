"""Each model of the zoo, cut into stages, trains like its module in one process."""

from functools import cache

import pytest
import torch

from partition.capture import Captured
from partition.model.cut import cut, legal_positions
from partition.stage import OptimizerSettings
from tests.zoo import ZOO
from tests.zoo.equivalence import (
    FLOAT32_MAX,
    FLOAT64_MAX,
    History,
    Trial,
    captured_small,
    errors,
    random_cut,
    run_module,
    run_stages,
    stages_possible,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES = (2, 3, 5, 8)
BRIEF = Trial(steps=2)


def captured(name: str, dtype: torch.dtype = torch.float64) -> Captured:
    return captured_small(name, dtype)


@cache
def expected(name: str, trial: Trial) -> History:
    return run_module(ZOO[name]("test"), captured(name, trial.dtype).graph, trial)


@pytest.mark.parametrize("name", ZOO)
def test_a_cut_model_trains_like_its_module(name: str) -> None:
    model = captured(name)
    seed = list(ZOO).index(name)
    stages = min(STAGES[seed % len(STAGES)], stages_possible(model.graph))
    cut_at_random = random_cut(model.graph, model.hash, stages, seed)
    found = run_stages(ZOO[name]("test"), model.graph, cut_at_random, BRIEF)
    assert errors(found, expected(name, BRIEF), BRIEF.dtype).worst <= FLOAT64_MAX


@pytest.mark.parametrize("name", ["unet", "gpt", "siamese"])
def test_a_model_in_one_piece_trains_like_its_module(name: str) -> None:
    model = captured(name)
    found = run_stages(ZOO[name]("test"), model.graph, cut(model.graph, model.hash, []), BRIEF)
    assert errors(found, expected(name, BRIEF), BRIEF.dtype).worst <= FLOAT64_MAX


@pytest.mark.parametrize("name", ["mobilenet", "hf-gpt2"])
def test_a_stage_with_recomputation_trains_the_same(name: str) -> None:
    model = captured(name)
    trial = Trial(steps=2, recompute=True)
    found = run_stages(ZOO[name]("test"), model.graph, random_cut(model.graph, model.hash, 3, 1), trial)
    assert errors(found, expected(name, BRIEF), trial.dtype).worst <= FLOAT64_MAX


@pytest.mark.parametrize("name", ["siamese", "hf-bert"])
def test_two_replicas_that_share_micro_batches_train_like_one_process(name: str) -> None:
    model = captured(name)
    trial = Trial(steps=2, batches=(2, 3, 2), replicas=2)
    found = run_stages(ZOO[name]("test"), model.graph, random_cut(model.graph, model.hash, 3, 2), trial)
    assert errors(found, expected(name, trial), trial.dtype).worst <= FLOAT64_MAX


@pytest.mark.parametrize("name", ["gpt", "recommender"])
def test_in_float32_the_whole_vector_stays_close_to_the_module(name: str) -> None:
    model = captured(name, torch.float32)
    trial = Trial(steps=2, dtype=torch.float32)
    found = run_stages(ZOO[name]("test"), model.graph, random_cut(model.graph, model.hash, 3, 3), trial)
    assert errors(found, expected(name, trial), trial.dtype).worst <= FLOAT32_MAX


def test_adamw_in_float32_stays_close_to_the_module() -> None:
    model = captured("mlp", torch.float32)
    optimizer = OptimizerSettings(kind="adamw", learning_rate=1e-3, weight_decay=0.01)
    trial = Trial(dtype=torch.float32, optimizer=optimizer)
    found = run_stages(ZOO["mlp"]("test"), model.graph, random_cut(model.graph, model.hash, 2, 4), trial)
    assert errors(found, expected("mlp", trial), trial.dtype).worst <= FLOAT32_MAX


def test_a_different_run_draws_different_dropout_so_the_test_can_fail() -> None:
    model = captured("mlp")
    stages = random_cut(model.graph, model.hash, 2, 0)
    found = run_stages(ZOO["mlp"]("test"), model.graph, stages, Trial(steps=2, run=b"another"))
    assert errors(found, expected("mlp", BRIEF), torch.float64).worst > 1e-3


def test_a_mask_of_minus_infinity_may_cross_a_boundary() -> None:
    model = captured("graph-network")
    nodes, operators = model.graph.entry("train").nodes, model.graph.operators
    masked = next(node.id for node in nodes if operators[node.operator] == "aten.masked_fill.Scalar")
    stages = cut(model.graph, model.hash, [masked + 1])
    assert nodes[masked].outputs[0] in stages[0].entry("train").outputs
    found = run_stages(ZOO["graph-network"]("test"), model.graph, stages, BRIEF)
    assert errors(found, expected("graph-network", BRIEF), BRIEF.dtype).worst <= FLOAT64_MAX


def test_a_first_stage_without_trainable_parameters_gets_no_gradients() -> None:
    model = captured("hf-gpt2")
    stages = cut(model.graph, model.hash, [legal_positions(model.graph)[0]])
    assert not stages[0].entry("train").backward_outputs
    found = run_stages(ZOO["hf-gpt2"]("test"), model.graph, stages, BRIEF)
    assert errors(found, expected("hf-gpt2", BRIEF), BRIEF.dtype).worst <= FLOAT64_MAX


def test_dropout_is_the_same_across_a_stage_boundary() -> None:
    model = captured("lstm")
    entry = model.graph.entry("train")
    dropped = [
        node.id for node in entry.nodes if model.graph.operators[node.operator] == "aten.dropout.default"
    ]
    stages = cut(model.graph, model.hash, [dropped[-1]])
    found = run_stages(ZOO["lstm"]("test"), model.graph, stages, BRIEF)
    assert errors(found, expected("lstm", BRIEF), BRIEF.dtype).worst <= FLOAT64_MAX
