"""Exactness: a model trained in stages over many peers equals one process, even after a death in a step.

See docs/design.md, a step. Whole nodes, simulated network and time, real arithmetic.
"""

from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from torch import nn

from node.content.datasets import Dataset, load_text
from node.events import Event, ReplicaDropped, RunEnded, RunEvaluated, StepCommitted
from node.protocols.manifest import Manifest, Run
from partition.capture.models.gpt import GPT, GPTConfiguration, next_token_correct, next_token_loss
from partition.capture.models.model_spec import Precision, default_dtype
from partition.capture.skeleton import skeleton
from partition.capture.task import Task, capture_task, correct, cross_entropy
from partition.stage import OptimizerSettings, Schedule
from tests.stack import (
    Model,
    Swarm,
    Tensors,
    assert_equal,
    known,
    manifest,
    reference,
    simulate,
    swarm,
    train,
    weights,
)

WINDOW = 12
"""Bytes in a sample of text."""
CLIPPED = OptimizerSettings(
    kind="adamw",
    learning_rate=0.01,
    weight_decay=0.1,
    schedule=Schedule("cosine", 1, 5),
    clip_norm=0.05,
)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_two_stages_of_two_replicas_equal_one_process(dtype: Precision) -> None:
    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:
            run, events = await train(group, "e", manifest(dtype=dtype))
            assert [e.step for e in events if isinstance(e, StepCommitted)] == [0, 1, 2, 3, 4]
            expected = reference(run)
            for name in "abcde":
                assert_equal(weights(group, name, run), expected, dtype)

    simulate(scenario)


def test_a_step_with_a_death_near_its_end_equals_the_undisturbed_step() -> None:
    """`tests.test_exactness` kills a replica in each named phase of a step."""
    replayed: list[int] = []

    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 1:
                    await trio.sleep(0.97 * event.seconds)
                    group.kill(victim_of(group, 1))
                if isinstance(event, ReplicaDropped):
                    replayed.append(event.microbatches_replayed)

            run, events = await train(group, "e", manifest(), disturb)
            assert [e.step for e in events if isinstance(e, StepCommitted)] == [0, 1, 2, 3, 4]
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done"
            assert_equal(weights(group, "e", run), reference(run), "float64")

    simulate(scenario)
    assert replayed == [4], (
        "not exactly the dead replica's half of the step's eight micro-batches was replayed"
    )


def test_with_int8_frames_a_replay_is_equal_and_the_result_close() -> None:
    results: list[Tensors] = []
    expected: list[Tensors] = []

    def with_deaths(deaths: int) -> Callable[[], Awaitable[None]]:
        async def scenario() -> None:
            async with swarm("abcde", preset="lan") as group:

                async def disturb(event: Event) -> None:
                    if deaths and isinstance(event, StepCommitted) and event.step == 1:
                        await trio.sleep(0.5 * event.seconds)
                        group.kill(victim_of(group, 0))

                run, _ = await train(group, "e", manifest(frames="int8"), disturb)
                results.append(weights(group, "e", run))
                expected.append(reference(run))

        return scenario

    simulate(with_deaths(0))
    simulate(with_deaths(1))
    assert_equal(results[1], results[0], "float64")
    for name, array in expected[0].items():
        assert np.abs(results[0][name] - array).max() < 0.02
    assert any(np.abs(results[0][name] - array).max() > 1e-6 for name, array in expected[0].items())


def test_a_dead_trainer_is_replaced_and_the_result_is_the_same() -> None:
    async def scenario() -> None:
        async with swarm("abcdef", preset="lan") as group:

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 1:
                    group.kill("f")

            run, events = await train(group, "f", manifest(), disturb, watcher="a")
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            assert_equal(weights(group, "a", run), reference(run), "float64")

    simulate(scenario)


def test_a_stage_without_replicas_ends_the_run_and_names_the_loss() -> None:
    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 1:
                    group.kill(victim_of(group, 1))

            _, events = await train(group, "c", manifest(replicas=1), disturb)
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "failed"
            assert "stage 2 of 2 lost its last replica" in events[-1].detail
            assert "no checkpoint holds its parameters" in events[-1].detail

    simulate(scenario)


class NormalisedCNN(nn.Module):
    """A model with batch norm, dropout, and a skip connection over a possible cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, 2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.3))
        self.last = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = self.first(images)
        logits: torch.Tensor = self.last(torch.relu(inner + self.second(inner)).flatten(1))
        return logits


@cache
def normalised_cnn() -> Model:
    """Return a model with its own initial values, which members fetch from the requester."""
    torch.manual_seed(3)
    example, labels = torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)
    task = Task(
        NormalisedCNN().double(),
        (example.double(),),
        (labels,),
        cross_entropy,
        {"correct": correct},
        name="cnn",
    )
    return known(capture_task(task))


@cache
def tied_gpt() -> Model:
    """Return a model whose first and last stage share the embedding table."""
    tokens = torch.zeros(2, WINDOW, dtype=torch.int64)
    with default_dtype("float64"), skeleton():
        model = GPT(GPTConfiguration(256, WINDOW, layers=2, heads=2, width=8, dropout=0.1))
    metrics = {"correct": next_token_correct}
    return known(capture_task(Task(model, (tokens,), (tokens,), next_token_loss, metrics, name="small-gpt")))


def text(folder: Path) -> tuple[Path, Dataset]:
    """Return a text for a model to memorize."""
    path = folder / "text.txt"
    path.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(200)))
    return path, load_text(path, window=WINDOW)


async def train_with_a_death(group: Swarm, wanted: Manifest, stage: int) -> tuple[Run, list[Event]]:
    """Play a run in which the requester is `g`, and a replica of `stage` is killed in the middle of the third
    step."""

    async def disturb(event: Event) -> None:
        if isinstance(event, StepCommitted) and event.step == 1:
            await trio.sleep(0.6 * event.seconds)
            group.kill(victim_of(group, stage))

    run, events = await train(group, "g", wanted, disturb)
    assert [event.step for event in events if isinstance(event, StepCommitted)] == [0, 1, 2, 3, 4]
    assert any(isinstance(event, ReplicaDropped) for event in events)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].outcome == "done", events[-1].detail
    return run, events


def test_tied_weights_and_clipping_over_three_stages_survive_a_death(tmp_path: Path) -> None:
    model = tied_gpt()
    path, data = text(tmp_path)
    assert model.graph.symbols[0].name == "batch"
    wanted = manifest(
        model,
        model="small-gpt",
        data=data.digest,
        test_samples=data.test_samples,
        window=WINDOW,
        optimizer=CLIPPED,
        stages=3,
    )
    results: list[Tensors] = []

    async def scenario() -> None:
        async with swarm("abcdefg", preset="lan") as group:
            await group.nodes["g"].runs.data.keep(data.digest, path, window=data.window)
            run, events = await train_with_a_death(group, wanted, 0)
            evaluated = next(event for event in events if isinstance(event, RunEvaluated))
            assert evaluated.samples == data.test_samples * WINDOW, "samples are not counted in tokens"
            assert evaluated.accuracy == evaluated.metrics[0] / evaluated.samples
            results.append(weights(group, "g", run))
            assert_equal(results[0], reference(run, data), "float64")

    simulate(scenario)
    (result,) = results
    assert (result["lm_head.weight"] == result["transformer.wte.weight"]).all()
    GPT(GPTConfiguration(256, WINDOW, layers=2, heads=2, width=8)).load_state_dict(
        {name: torch.from_numpy(tensor.copy()) for name, tensor in result.items()}, strict=True
    )


def test_batch_statistics_and_fetched_initial_values_survive_a_death() -> None:
    model = normalised_cnn()
    assert model.values is not None
    results: list[Tensors] = []

    async def scenario() -> None:
        async with swarm("abcdefg", preset="lan") as group:
            wanted = manifest(model, model="cnn", recompute=True)
            run, _ = await train_with_a_death(group, wanted, 1)
            results.append(weights(group, "g", run))
            assert_equal(results[0], reference(run), "float64")

    simulate(scenario)
    assert results[0]["first.1.num_batches_tracked"] == 5 * 8
    NormalisedCNN().double().load_state_dict(
        {name: torch.from_numpy(tensor.copy()) for name, tensor in results[0].items()}, strict=True
    )


def victim_of(group: Swarm, stage: int) -> str:
    """Return a replica of this stage in the only run."""
    plan = next(iter(group.nodes.values())).state.runs
    view = next(iter(plan.values())).plan
    assert view is not None
    return group.name_of(view.stages[stage][0])
