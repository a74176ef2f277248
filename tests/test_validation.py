"""Runs in exact mode that are validated between their steps, with whole nodes in virtual time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crypto.errors import RemoteProtocolError
from crypto.facts import IdentitySigner
from crypto.identity import Identity, PeerId
from node.cli.runs import run_lines
from node.cli.screen import EventScreen
from node.content.datasets import Dataset, load_digits, load_folder
from node.errors import UsageError
from node.events import Event, RunEnded, RunEvaluated, RunPlanned, StepCommitted
from node.protocols.manifest import Manifest, Run, make_run
from node.protocols.run_file import RunFile, TrainTable, check_run_file
from node.runs.manifest_builder import make_manifest
from node.runs.metrics import metric_rows
from node.state import RunView, State, apply
from node.state_documents import event_document, run_document
from node.web.charts import Charts
from partition.stage import OptimizerSettings
from partition.steps.messages import Apply, Synced
from partition.steps.resume import check_synced
from partition.steps.validation import Series, ValidationSettings
from tests.partition.test_checkpoint_rounds import PLAN
from tests.stack import Swarm, assert_equal, manifest, reference, simple_cnn, simulate, swarm, weights
from tests.stack import train as train_as

STEPS = 12
VALIDATED = 24
WILD = OptimizerSettings(kind="sgd", learning_rate=0.4, momentum=0.9)
"""A learning rate so high that the newest state is not always the best."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    folder, digits = tmp_path_factory.mktemp("data"), load_digits()
    parts = {"train": slice(0, 600), "validation": slice(600, 600 + VALIDATED), "test": slice(700, 740)}
    for name, rows in parts.items():
        np.savez(folder / f"{name}.npz", x=digits.train["x"][rows], y=digits.train["y"][rows])
    return folder, load_folder(folder)


async def train(
    group: Swarm, data: tuple[Path, Dataset], *given: Any, watcher: str = "", **changes: Any
) -> tuple[Run, Any]:
    folder, dataset = data
    fields: dict[str, Any] = {
        "data": dataset.digest,
        "test_samples": 40,
        "validation_samples": VALIDATED,
        "steps": STEPS,
        "microbatches": 2,
        "save_every": 0,
    }
    await group.nodes["a"].runs.data.keep(dataset.digest, folder)
    return await train_as(group, "a", manifest(**(fields | changes)), *given, watcher=watcher)


def validations(events: list[Event]) -> dict[int, RunEvaluated]:
    return {e.step: e for e in events if isinstance(e, RunEvaluated) and e.step is not None}


def test_validation_between_steps_leaves_the_steps_unchanged(data: Any) -> None:
    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:
            run, events = await train(group, data, validation=ValidationSettings(5))
            found = validations(events)
            assert sorted(found) == [5, 10, 12]
            assert {each.samples for each in found.values()} == {VALIDATED}
            assert validations(group.events["b"]).keys() == found.keys()
            (tested,) = [e for e in events if isinstance(e, RunEvaluated) and e.step is None]
            assert tested.samples == 40
            assert_equal(weights(group, "a", run), reference(run, data[1]), "float64")
            assert group.nodes["c"].state.runs[run.text].validations[-1].step == 12

    simulate(scenario)


def test_screens_and_the_chart_show_steps_and_validations(data: Any) -> None:
    """Check the screens of a real run: the output of `train`, `runs show`, and the page's chart."""
    told: list[Event] = []

    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:
            _, events = await train(group, data, validation=ValidationSettings(5), metrics=("correct",))
            told.extend(events)

    simulate(scenario)
    screen, state, charts = EventScreen(), State(), Charts()
    printed = []
    for event in told:
        printed += screen.lines(event_document(event))
        state = apply(state, event)
        charts.take(event)
    found = validations(told)
    lines = [line for line in printed if "validation loss" in line]
    assert len(lines) == 3
    for (step, event), line in zip(sorted(found.items()), lines, strict=True):
        best = "the best so far" if event.best_step == step else f"best after step {event.best_step}"
        figures = f"loss {event.loss:.4f}, accuracy {event.accuracy:.3f}"
        assert line == f"step {step:>5}  validation {figures}  {best}"
    (view,) = state.runs.values()
    shown = [line for line in run_lines(run_document(view)) if line.startswith("  validation")]
    last = found[12]
    assert shown == [f"  validation    loss {last.loss:.4f} after step 12, best after step {last.best_step}"]
    (course,) = charts.courses.values()
    marks = [(step, text) for _, step, kind, text in course.document()["marks"] if kind == "validation"]
    assert marks == [
        (step, f"loss {event.loss:.4f}, best after step {event.best_step}")
        for step, event in sorted(found.items())
    ]


def test_a_validation_costs_little_more_than_its_forward_passes(data: Any) -> None:
    """A pass takes a second. Validation has six micro-batches, in two concurrent stages."""

    def lasted(validation: ValidationSettings | None) -> float:
        seconds: list[float] = []

        async def scenario() -> None:
            async with swarm("abcde", stage_seconds=1.0, preset="lan") as group:
                _, events = await train(group, data, validation=validation, steps=4, replicas=1)
                steps = [event for event in events if isinstance(event, StepCommitted)]
                seconds.append(steps[-1].at - steps[0].at)

        simulate(scenario)
        return seconds[0]

    passes = VALIDATED // 4
    each = (lasted(ValidationSettings(1)) - lasted(None)) / 3
    assert passes <= each <= passes + 2, "a validation takes longer than its passes, a wait and some messages"


def test_early_stopping_keeps_its_step_if_the_committer_dies(data: Any) -> None:
    async def scenario() -> None:
        async with swarm("abcdef") as group:

            async def kill_the_committer(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 3 and "a" in group.nodes:
                    group.kill("a")

            # Nothing improves by this much, so the first validation stays the best, and two more end the run.
            early = ValidationSettings(2, patience=2, improvement=100.0)
            run, events = await train(
                group, data, kill_the_committer, watcher="b", validation=early, steps=40, trainers=2
            )
            assert max(e.step for e in events if isinstance(e, StepCommitted)) + 1 == 6
            assert max(e.height for e in events if isinstance(e, RunPlanned)) > 0
            assert_equal(weights(group, "b", run), reference(run, data[1], steps=6), "float64")
            (end,) = [e for e in events if isinstance(e, RunEnded)]
            assert end.outcome == "done"
            assert end.detail == "its validations stopped improving after step 2"
            assert end.is_here, "an early end changes where the run's result is"
            assert group.nodes["b"].runs.archive.result(run.id) == end.weights

    simulate(scenario)


def test_the_result_is_the_state_that_validated_best(data: Any) -> None:
    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:
            keep = ValidationSettings(2, keep="best")
            run, events = await train(group, data, validation=keep, optimizer=WILD, steps=16)
            found = validations(events)
            losses = {step: each.loss for step, each in found.items()}
            best = min(losses, key=lambda step: losses[step])
            assert best < 16, "the last state is the best, although the rate is high"
            assert found[16].best_step == best
            assert_equal(weights(group, "a", run), reference(run, data[1], steps=best), "float64")
            assert [e.restored_step for e in events if isinstance(e, RunPlanned)][-1] == best
            assert {node.state.runs[run.text].status for node in group.nodes.values()} == {"done"}

    simulate(scenario)


def asked(dataset: Dataset, **train: Any) -> Manifest:
    graph = simple_cnn().graph
    given: dict[str, Any] = {"dtype": "float64", "steps": 100} | train
    run = RunFile("simple-cnn", train=TrainTable(**given))
    return make_manifest(run, graph, bytes(32), dataset, name="RUN.toml", created=0)


def test_a_run_states_when_it_is_validated_and_by_which_metric(data: Any) -> None:
    assert asked(data[1]).validation == ValidationSettings(5)
    accuracy = asked(data[1], validate_every=7, watch="accuracy", keep="best", patience=3).validation
    assert accuracy == ValidationSettings(7, 3, watched=1, more_is_better=True, keep="best")
    assert asked(data[1], validate_every=7).validation_samples == VALIDATED
    assert asked(load_digits()).validation is None


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"validate_every": 5}, "train.validate_every: the data has no validation samples"),
        ({"patience": 5}, "train.patience: the data has no validation samples"),
        ({"keep": "best"}, "train.keep: the data has no validation samples"),
    ],
)
def test_settings_that_need_validation_samples_are_refused_without_them(
    train: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        asked(load_digits(), **train)


def test_a_metric_that_the_model_lacks_is_refused_with_the_available_ones(data: Any) -> None:
    with pytest.raises(UsageError, match=r"train.watch 'f1': the model has loss, accuracy"):
        asked(data[1], watch="f1")


@pytest.mark.parametrize("key", [{"validate_every": 5}, {"watch": "accuracy"}, {"keep": "best"}])
def test_keys_of_exact_mode_are_refused_in_local_mode(key: dict[str, Any]) -> None:
    run = RunFile("simple-cnn", train=TrainTable(mode="local", **key))
    with pytest.raises(UsageError, match=f"train.{next(iter(key))}: is only for train.mode"):
        check_run_file(run, "RUN.toml")


def test_rows_of_metrics_include_validations_tokens_and_samples() -> None:
    shared: dict[str, Any] = {"at": 0.0, "run": "r", "loss": 2.0}
    view = RunView("r", "m", "d", 9, PeerId(bytes(32)), "running", step=5, metrics=("correct",))
    seen = [
        StepCommitted(step=4, samples=8, seconds=2.0, replicas=1, counted=80, **shared),
        RunEvaluated(step=5, accuracy=0.5, samples=4, metrics=(2.0,), best_step=5, **shared),
    ]
    (row,) = metric_rows(view, seen)
    assert (row["samples_per_second"], row["tokens_per_second"]) == (4.0, 40.0)
    assert (row["validation_loss"], row["validation_accuracy"], row["validation_correct"]) == (2.0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("validation", "samples"), [(ValidationSettings(1, watched=2), 8), (ValidationSettings(1), 0)]
)
def test_a_manifest_with_impossible_validations_is_refused(
    validation: ValidationSettings, samples: int
) -> None:
    signer = IdentitySigner(Identity(bytes(32)), "swarm")
    wanted = manifest(validation=validation, validation_samples=samples)
    with pytest.raises(RemoteProtocolError, match="validation uses a metric or samples"):
        make_run(signer, wanted)


@pytest.mark.parametrize("series", [Series(9, 1, 0.5), Series(2, 3, 0.5), Series(1, 1, float("nan"))])
def test_validations_that_a_replica_cannot_know_are_refused(series: Series) -> None:
    apply = Apply(plan=bytes(32), step=3, attempt=0, samples=1, validated=series)
    with pytest.raises(RemoteProtocolError, match="validations that do not fit"):
        check_synced(PLAN, Synced(plan=bytes(32), step=4, applied=apply))
