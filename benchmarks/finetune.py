"""Fine-tuning as users do it: five models of other libraries on two real nodes, compared with a plain torch
loop.

BERT on pairs of sentences with masks, ViT on a folder of images, T5 with -100 labels, regression on a table,
a Siamese network on a Dataset. Each is requested by `peerloom train RUN.toml --out FILE` in two stages on two
node processes; the plain loop in this process uses the same samples. The loss of every step and the final
weights are compared. `--quick` uses only T5 and the ViT.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import _finetune_models as models
import numpy as np
import safetensors.torch
import torch
from _figures import Goal, arguments, leave, report
from torch import Tensor

from node import toml
from node.cli.capture import prepare_data
from node.content.datasets import Dataset, load_folder
from node.demo.processes import SwarmProcesses
from node.protocols.run_file import RunFile
from partition.capture.trees import form_of

STEPS, BATCH, MICROBATCH, RATE, SEED = 12, 16, 4, 3e-3, 5
TRAIN, TEST = 60, 20
DIFFERENCE_MAX = 5e-5
"""The relative tolerance of losses: four digits."""
WEIGHTS_MAX = 2e-4
"""The relative tolerance of all weights as one vector."""
RUN = """
model = "{model}"
data = "{data}"
[train]
steps = {steps}
batch = {batch}
microbatch = {microbatch}
optimizer = "adamw"
learning_rate = {rate}
weight_decay = 0.01
seed = {seed}
[plan]
stages = 2
replicas = 1
checkpoint_every = 0
"""
QUICK = ("t5", "vit")


@dataclass(frozen=True)
class Tuning:
    """One of the five fine-tunings. `write` writes its data into a folder and returns RUN.toml's name for
    it."""

    name: str
    write: Callable[[Path], str]


def _folder(make: Callable[[int, int], models.Arrays]) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "data").mkdir()
        for name, count, seed in (("train", TRAIN, 1), ("test", TEST, 2)):
            np.savez(folder / "data" / f"{name}.npz", **make(count, seed))  # type: ignore[arg-type]  # numpy's
        return "data"

    return write


def _one_archive(make: Callable[[int, int], models.Arrays]) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        np.savez(folder / "data.npz", **make(TRAIN + TEST, 1))  # type: ignore[arg-type]  # numpy's
        return "data.npz"

    return write


def _pictures(folder: Path) -> str:
    models.write_pictures(folder / "pictures", TRAIN + TEST, 3)
    return "pictures"


def _table(folder: Path) -> str:
    draw = np.random.default_rng(4)
    rows = draw.normal(size=(TRAIN + TEST, 6))
    target = np.sin(rows[:, 0]) + rows[:, 1] * rows[:, 2]
    lines = ["a,b,c,d,e,f,target"]
    lines += [",".join(f"{value:.6f}" for value in (*row, y)) for row, y in zip(rows, target, strict=True)]
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return "table.csv"


TUNINGS = (
    Tuning("bert", _one_archive(models.bert_data)),
    Tuning("t5", _folder(models.t5_data)),
    Tuning("vit", _pictures),
    Tuning("regression", _table),
    Tuning("siamese", lambda _: f"{Path(models.__file__).resolve()}:pairs"),
)


def plain_loop(name: str, dataset: Dataset) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of all steps, and the final weights, computed by torch alone."""
    task = getattr(models, name)()
    model = task.model.train()
    form, _ = form_of(model.forward, task.example_inputs, task.labels, task.loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    columns = [_column(dataset, name, place, form.inputs) for place, name in enumerate(form.names)]
    losses = []
    for step in range(STEPS):
        rows = _rows(step, dataset.train_samples)
        tensors = [_tensor(column[rows]) for column in columns]
        positional, keywords = form.arguments(tensors)
        output = model(*positional, **keywords)
        loss = form.loss(task.loss, output, tensors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def _column(dataset: Dataset, name: str, place: int, inputs: int) -> np.ndarray[Any, Any]:
    return dataset.train[name] if name in dataset.train else dataset.train["x" if place < inputs else "y"]


def _rows(step: int, samples: int) -> list[int]:
    """Return the samples of a step, as a run deals them (`node.content.datasets`)."""
    places = range(step * BATCH, (step + 1) * BATCH)
    return [
        int(np.random.default_rng((SEED, p // samples)).permutation(samples)[p % samples]) for p in places
    ]


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def tune(tuning: Tuning, folder: Path, data_dir: Path) -> dict[str, Any]:
    """Train one model by the command and by a plain loop; return its row of figures."""
    folder.mkdir()
    data = tuning.write(folder)
    model = f"{Path(models.__file__).resolve()}:{tuning.name}"
    text = RUN.format(
        model=model, data=data, steps=STEPS, batch=BATCH, microbatch=MICROBATCH, rate=RATE, seed=SEED
    )
    (folder / "RUN.toml").write_text(text)
    out = folder / "out.safetensors"
    begun = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "node", "train", str(folder / "RUN.toml"), "--out", str(out), "--json",
         "--data-dir", str(data_dir)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    row: dict[str, Any] = {"model": tuning.name, "seconds": round(time.perf_counter() - begun, 1)}
    if ended.returncode:
        return row | {"loss_difference": float("inf"), "weights_difference": float("inf"),
                      "why": f"{ended.stderr[-600:]} {ended.stdout[-300:]}"}  # fmt: skip
    events = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    steps = {
        each["step"]: each["loss"]
        for each in events
        if each.get("event", each.get("kind")) in ("StepCommitted", "step-committed", "step_committed")
    }
    path = folder / "converted"
    path.mkdir()
    run_file = toml.parse(text, RunFile, name="RUN.toml").value
    if not prepare_data(run_file, folder, path, "RUN.toml"):
        path = folder / data
    losses, expected = plain_loop(tuning.name, load_folder(path))
    assert sorted(steps) == list(range(STEPS)), events[:3]
    worst = max(abs(steps[step] - loss) / abs(loss) for step, loss in enumerate(losses))
    found = safetensors.torch.load_file(out)
    model_again = getattr(models, tuning.name)().model
    model_again.load_state_dict(found, strict=True)
    floats = [name for name, value in expected.items() if value.is_floating_point()]
    apart = sum(float((found[name] - expected[name]).double().pow(2).sum()) for name in floats)
    whole = sum(float(expected[name].double().pow(2).sum()) for name in floats)
    return row | {"loss_difference": worst, "weights_difference": (apart / whole) ** 0.5,
                  "first_loss": losses[0], "last_loss": losses[-1]}  # fmt: skip


def main() -> int:
    """Train all of them."""
    flags = arguments(__doc__ or "")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="peerloom-finetune-") as name:
        swarm = SwarmProcesses(Path(name), "finetune", time.sleep)
        try:
            swarm.launch("ab")
            first = swarm.start("a", None)
            swarm.start("b", first.address)
            for tuning in TUNINGS:
                if flags.quick and tuning.name not in QUICK:
                    continue
                rows.append(tune(tuning, Path(name) / f"run-{tuning.name}", first.data_dir))
        finally:
            swarm.close()
    goals = [
        Goal(
            "losses, worst relative difference", max(r["loss_difference"] for r in rows), "<=", DIFFERENCE_MAX
        ),
        Goal(
            "weights, worst relative difference",
            max(r["weights_difference"] for r in rows),
            "<=",
            WEIGHTS_MAX,
        ),
    ]
    return report("finetune", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
