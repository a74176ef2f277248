"""Losses that are not plain sums over samples, trained by two whole nodes and by a plain torch loop.

One is connectionist temporal classification, which torch itself cannot export. The other is a contrastive
loss whose negatives are the other samples of its micro-batch. Virtual time, real arithmetic.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from node.content.datasets import Dataset, load_folder
from node.events import RunEnded, StepCommitted
from node.protocols.manifest import Manifest
from node.runs.manifest_builder import make_batches
from partition.capture import CaptureRefused, Task
from partition.capture.explain import explain
from partition.capture.task import captured_and_proved
from partition.stage import OptimizerSettings
from tests.stack import Model, known, manifest, simulate, swarm, train, weights

STEPS, MICROBATCH, MICROBATCHES = 3, 4, 2
SAMPLES, HELD_OUT = STEPS * MICROBATCH * MICROBATCHES, 4
RATE, MOMENTUM = 0.05, 0.9
PLACES, LENGTH, SYMBOLS = 9, 3, 5
Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


class Listener(nn.Module):
    """Map sounds (batch, places, 6) to symbols (batch, places, SYMBOLS), the first of which is a blank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, SYMBOLS)

    def forward(self, sound: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(sound)))))
        return out


def ctc(output: Tensor, labels: Tensor, heard: Tensor, said: Tensor) -> Tensor:
    """Graves et al. 2006; labels are padded with -100."""
    places = functional.log_softmax(output, -1).transpose(0, 1)
    return functional.ctc_loss(places, labels, heard, said, reduction="sum", zero_infinity=True)


def sounds(count: int, seed: int) -> Arrays:
    draw = np.random.default_rng(seed)
    said = draw.integers(0, LENGTH + 1, count)
    labels = draw.integers(1, SYMBOLS, (count, LENGTH))
    labels[np.arange(LENGTH) >= said[:, None]] = -100
    return {
        "sound": draw.normal(size=(count, PLACES, 6)),
        "labels": labels,
        # Some targets are longer than their input allows, so no alignment exists.
        "heard": draw.integers(2, PLACES + 1, count),
        "said": said,
    }


class Towers(nn.Module):
    """Map two views (batch, 6) to two directions (batch, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))
        self.right = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.left(left), dim=1), functional.normalize(self.right(right), dim=1)


def contrast(output: tuple[Tensor, Tensor]) -> Tensor:
    """InfoNCE (van den Oord et al. 2018): which right view of a batch belongs to each left view."""
    left, right = output
    likeness = left @ right.T / 0.2
    return functional.cross_entropy(likeness, torch.arange(likeness.shape[0]))


def views(count: int, seed: int) -> Arrays:
    draw = np.random.default_rng(seed)
    left = draw.normal(size=(count, 6))
    return {"left": left, "right": left + 0.3 * draw.normal(size=(count, 6))}


def ctc_task() -> Task:
    torch.manual_seed(1)
    arrays = {name: torch.from_numpy(array) for name, array in sounds(MICROBATCH, 7).items()}
    inputs = (arrays.pop("sound"),)
    return Task(Listener().double(), inputs, arrays, loss=ctc)


def contrast_task(**settings: Any) -> Task:
    torch.manual_seed(2)
    inputs = tuple(torch.from_numpy(array) for array in views(MICROBATCH, 7).values())
    return Task(Towers().double(), inputs, loss=contrast, **settings)


def plain_loop(
    task: Task, wanted: Manifest, model: Model, dataset: Dataset, *, is_mean: bool
) -> Mapping[str, Any]:
    """Return the weights that torch alone computes, micro-batch by micro-batch."""
    module, loss = task.model.train(), task.loss
    assert loss is not None
    optimizer = torch.optim.SGD(module.parameters(), RATE, MOMENTUM)
    batches = make_batches(dataset, wanted, model.graph)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(step * MICROBATCHES, (step + 1) * MICROBATCHES):
            inputs, labels = ([torch.from_numpy(array) for array in each] for each in batches.train(number))
            found = loss(module(*inputs), *labels)
            share = MICROBATCH if is_mean else 1
            (found * share / (MICROBATCH * MICROBATCHES)).backward()
        optimizer.step()
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("task", "draw", "is_mean"),
    [
        pytest.param(ctc_task(), sounds, False, id="ctc"),
        pytest.param(contrast_task(reduction="microbatch"), views, True, id="contrastive"),
    ],
)
def test_two_nodes_train_like_a_plain_loop(
    task: Task, draw: Callable[[int, int], Arrays], is_mean: bool, tmp_path: Path
) -> None:
    for part, count, seed in (("train", SAMPLES, 3), ("test", HELD_OUT, 4)):
        np.savez(tmp_path / f"{part}.npz", **draw(count, seed))  # type: ignore[arg-type]  # numpy's own
    dataset = load_folder(tmp_path)
    captured, proof = captured_and_proved(task)
    assert proof.error < 1e-12
    model = known(captured)
    optimizer = OptimizerSettings(kind="sgd", learning_rate=RATE, momentum=MOMENTUM)
    wanted = manifest(
        model, model="loss", data=dataset.digest, window=0, test_samples=HELD_OUT, steps=STEPS,
        microbatch=MICROBATCH, microbatches=MICROBATCHES, replicas=1, optimizer=optimizer,
    )  # fmt: skip
    results: list[Mapping[str, Any]] = []

    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            await group.nodes["a"].runs.data.keep(dataset.digest, tmp_path)
            run, events = await train(group, "a", wanted)
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            assert sum(isinstance(event, StepCommitted) for event in events) == STEPS
            results.append(weights(group, "a", run))

    simulate(scenario)
    before = {name: value.detach().clone() for name, value in task.model.state_dict().items()}
    expected = plain_loop(task, wanted, model, dataset, is_mean=is_mean)
    assert sorted(results[0]) == sorted(expected)
    for name, value in expected.items():
        assert not np.array_equal(value, before[name].numpy()), f"{name} was not trained"
        np.testing.assert_allclose(results[0][name], value, rtol=1e-9, atol=1e-12)


def test_a_loss_over_the_whole_batch_is_refused_with_a_remedy() -> None:
    with pytest.raises(CaptureRefused, match=r"reduction='microbatch'(.|\n)*train.microbatch"):
        captured_and_proved(contrast_task())
    facts = dict(explain(contrast_task(reduction="microbatch")).facts)
    assert "train.microbatch" in facts["loss"]


def ctc_trial(
    targets: Tensor, heard: Any, said: Any, **settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses and gradients, computed by torch and by the traced loss."""
    from partition.capture.ctc import traceable

    torch.manual_seed(3)
    scores = torch.randn(7, targets.shape[0], SYMBOLS, dtype=torch.float64)
    found: list[Tensor] = []
    for is_ours in (False, True):
        leaf = scores.clone().requires_grad_()
        with traceable() if is_ours else torch.enable_grad():
            loss = functional.ctc_loss(functional.log_softmax(leaf, 2), targets, heard, said, **settings)
        loss.sum().backward()  # type: ignore[no-untyped-call]  # torch's own
        assert leaf.grad is not None
        found += [loss.detach(), leaf.grad]
    return found[0], found[1], found[2], found[3]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("blank", [0, 2])
def test_the_traced_ctc_equals_torchs_own(reduction: str, blank: int) -> None:
    choices = torch.tensor([each for each in range(SYMBOLS) if each != blank])
    targets = choices[torch.randint(4, (6, LENGTH), generator=torch.Generator().manual_seed(1))]
    targets[0] = choices[1]  # the same symbol three times, which needs blanks between the repetitions
    heard, said = torch.tensor([7, 6, 5, 7, 3, 2]), torch.tensor([3, 2, 1, 0, 3, 3])
    found = ctc_trial(targets, heard, said, blank=blank, reduction=reduction, zero_infinity=True)
    torch.testing.assert_close(found[2], found[0])
    torch.testing.assert_close(found[3], found[1])


def test_ctc_of_labels_without_padding_is_refused_with_a_remedy() -> None:
    def unpadded(output: Tensor, labels: Tensor, heard: Tensor, said: Tensor) -> Tensor:
        return ctc(output, labels.flatten(), heard, said)

    task = ctc_task()
    with pytest.raises(CaptureRefused, match=r"pad the labels to \(batch, length\)"):
        captured_and_proved(Task(task.model, task.example_inputs, task.labels, loss=unpadded))
