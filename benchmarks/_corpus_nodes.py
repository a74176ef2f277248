"""Trains a captured model for three steps on two whole nodes, one stage each, and compares with the same run
in one process.

The nodes are those of `tests/stack.py`: all of their code and real arithmetic, but in one process and virtual
time, so that a hundred models take minutes. `finetune.py` covers steps between processes.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from node.content.datasets import Dataset, load_folder
from node.events import RunEnded, StepCommitted
from node.protocols.manifest import Manifest
from partition.capture import Captured
from partition.stage import OptimizerSettings
from tests.stack import known, manifest, reference, simulate, swarm, train, weights
from tests.zoo.case import Case

Array = np.ndarray[Any, np.dtype[Any]]

STEPS, MICROBATCHES, HELD_OUT = 3, 2, 4
EXACT_MAX = 1e-9
"""The relative tolerance of every float64 tensor."""


def trained_on_nodes(case: Case, captured: Captured, dtype: torch.dtype, microbatch: int) -> float:
    """Train a model on two nodes and in one process; return the largest relative difference of a resulting
    tensor.

    Raises AssertionError, with an explanation, if the run failed or committed fewer steps.
    """
    samples = STEPS * MICROBATCHES * microbatch
    with TemporaryDirectory() as name:
        folder = Path(name)
        for part, count, seed in (("train", samples, 1), ("test", HELD_OUT, 2)):
            inputs, labels = case.data(seed, count, dtype)
            arrays = _arrays(captured, (*inputs, *labels))
            np.savez(folder / f"{part}.npz", **arrays)  # type: ignore[arg-type]  # numpy's own
        dataset = load_folder(folder)
        model = known(captured)
        wanted = manifest(
            model,
            model=case.name,
            data=dataset.digest,
            window=0,
            test_samples=HELD_OUT,
            steps=STEPS,
            microbatch=microbatch,
            microbatches=MICROBATCHES,
            replicas=1,
            optimizer=OptimizerSettings(kind="sgd", learning_rate=1e-3, momentum=0.9),
        )
        return _difference(wanted, dataset, folder)


def _difference(wanted: Manifest, dataset: Dataset, folder: Path) -> float:
    worst: list[float] = []

    async def scenario() -> None:
        async with swarm("ab") as group:
            await group.nodes["a"].runs.data.keep(dataset.digest, folder)
            run, events = await train(group, "a", wanted)
            end = events[-1]
            assert isinstance(end, RunEnded), end
            assert end.outcome == "done", end.detail
            committed = sum(isinstance(event, StepCommitted) for event in events)
            assert committed == STEPS, f"{committed} steps were committed"
            result, expected = weights(group, "a", run), reference(run, dataset)
            assert sorted(result) == sorted(expected), "the result has different tensors"
            worst.append(max(_relative(result[name], expected[name]) for name in expected))

    simulate(scenario)
    return worst[0]


def _relative(one: Array, other: Array) -> float:
    scale = max(1e-12, float(np.abs(other.astype("f8")).max(initial=0)))
    return float(np.abs(one.astype("f8") - other.astype("f8")).max(initial=0)) / scale


def _arrays(captured: Captured, tensors: tuple[Tensor, ...]) -> dict[str, Array]:
    entry = captured.graph.entry("train")
    names = [port.name for port in (*entry.inputs, *entry.labels)]
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
