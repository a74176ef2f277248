"""Three small models and a task for each, for tests of exactness. No tests are here.

They are hard to cut: they have batch statistics and dropout, an embedding table that two stages hold, and
skips over several stages. They have a few hundred to a few thousand parameters, so that the nodes themselves
take most of the time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from node.content.datasets import Dataset, load_digits, load_folder, load_text
from partition.capture.models.gpt import GPT, GPTConfiguration, next_token_correct, next_token_loss
from partition.capture.models.model_spec import default_dtype
from partition.capture.skeleton import skeleton
from partition.capture.task import Task, capture_task, correct, cross_entropy
from partition.stage import OptimizerSettings
from tests.stack import Model, known

WINDOW = 8
"""Number of characters in a sample of text."""
SIDE = 8
PICTURES = 48
HELD_OUT = 8


@dataclass(frozen=True)
class Job:
    """A model and its data. `path` is the data's location; None if every node has the data.

    `clip_norm` is below the gradient's norm in most steps, so that clipping has an effect.
    """

    name: str
    model: Model
    dataset: Dataset
    path: Path | None
    clip_norm: float
    learning_rate: float = 0.05

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return the fields of a manifest for this task."""
        return {
            "model": self.name,
            "data": self.dataset.digest,
            "window": self.dataset.window,
            "test_samples": min(HELD_OUT, self.dataset.test_samples),
            "optimizer": OptimizerSettings(
                kind="sgd", learning_rate=self.learning_rate, momentum=0.9, clip_norm=self.clip_norm
            ),
        }


class NormalisedCNN(nn.Module):
    """A model with batch norm, dropout, and a residual sum over a possible cut."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(dropout))
        self.last = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 1, 8, 8) to (batch, 10)."""
        inner = self.first(images)
        logits: Tensor = self.last(torch.relu(inner + self.second(inner)).flatten(1))
        return logits


class SmallUNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015), two levels deep: each level's features skip over all deeper
    levels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = self.level(1, 2)
        self.down = self.level(2, 4)
        self.bottom = self.level(4, 8)
        self.raise_first = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.up_first = self.level(8, 4)
        self.raise_second = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.up_second = self.level(4, 2)
        self.leave = nn.Conv2d(2, 2, 1)

    @staticmethod
    def level(before: int, after: int) -> nn.Module:
        """Return a block of convolution, batch norm and ReLU."""
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 1, side, side) to (batch, 2, side, side)."""
        upper = self.enter(x)
        lower = self.down(functional.max_pool2d(upper, 2))
        x = self.bottom(functional.max_pool2d(lower, 2))
        x = self.up_first(torch.cat((lower, self.raise_first(x)), dim=1))
        x = self.up_second(torch.cat((upper, self.raise_second(x)), dim=1))
        out: Tensor = self.leave(x)
        return out


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over samples of the mean loss over pixels."""
    return functional.cross_entropy(logits, labels, reduction="none").mean((1, 2)).sum()


def pixel_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over samples of the share of pixels that are classified right."""
    return (logits.argmax(1) == labels).to(logits.dtype).mean((1, 2)).sum()


@cache
def normalised_cnn(dropout: float = 0.3) -> Model:
    """Return a model with its own initial values, which members fetch from the requester."""
    torch.manual_seed(3)
    examples, labels = torch.zeros(2, 1, SIDE, SIDE, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    module = NormalisedCNN(dropout).double()
    return known(
        capture_task(Task(module, (examples,), (labels,), cross_entropy, {"correct": correct}, name="cnn"))
    )


@cache
def tied_gpt(width: int = 8, dropout: float = 0.1) -> Model:
    """Return a model whose first and last stages share the embedding table; every stage draws its own initial
    values."""
    tokens = torch.zeros(2, WINDOW, dtype=torch.int64)
    with default_dtype("float64"), skeleton():
        model = GPT(GPTConfiguration(256, WINDOW, layers=2, heads=2, width=width, dropout=dropout))
    metrics = {"correct": next_token_correct}
    return known(capture_task(Task(model, (tokens,), (tokens,), next_token_loss, metrics, name="gpt")))


@cache
def small_unet() -> Model:
    """Return a model with two skips that cross, cut into three stages, of which one does not use the
    skips."""
    torch.manual_seed(5)
    examples = torch.zeros(2, 1, SIDE, SIDE, dtype=torch.float64)
    labels = torch.zeros(2, SIDE, SIDE, dtype=torch.int64)
    metrics = {"pixel_accuracy": pixel_accuracy}
    return known(
        capture_task(Task(SmallUNet().double(), (examples,), (labels,), pixel_loss, metrics, name="unet"))
    )


def text(folder: Path) -> tuple[Dataset, Path]:
    """Return a text for a model to memorize."""
    path = folder / "text.txt"
    path.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(200)))
    return load_text(path, window=WINDOW), path


def blobs(folder: Path) -> tuple[Dataset, Path]:
    """Return noisy pictures, each with one bright rectangle whose pixels the model must learn to find."""
    draw = np.random.default_rng(11)
    labels = np.zeros((PICTURES + HELD_OUT, SIDE, SIDE), np.int64)
    for picture in labels:
        top, left = draw.integers(0, SIDE // 2, 2)
        height, width = draw.integers(2, SIDE // 2 + 1, 2)
        picture[top : top + height, left : left + width] = 1
    inputs = (labels + draw.normal(0, 0.5, labels.shape))[:, np.newaxis]
    np.savez(folder / "train.npz", x=inputs[:PICTURES], y=labels[:PICTURES])
    np.savez(folder / "test.npz", x=inputs[PICTURES:], y=labels[PICTURES:])
    return load_folder(folder), folder


def cnn_job(folder: Path) -> Job:
    """The task of classifying digits."""
    return Job("cnn", normalised_cnn(), load_digits(), None, clip_norm=1.0)


def gpt_job(folder: Path) -> Job:
    """The task of predicting characters of a text, with a window of `WINDOW`."""
    return Job("gpt", tied_gpt(), *text(folder), clip_norm=0.5)


def unet_job(folder: Path) -> Job:
    """The task of classifying the pixels of small pictures."""
    return Job("unet", small_unet(), *blobs(folder), clip_norm=0.3)


def digits_job(folder: Path) -> Job:
    """Return the digits task without dropout, for runs whose manifests differ: dropout masks follow from the
    manifest."""
    return Job("cnn", normalised_cnn(0.0), load_digits(), None, clip_norm=1.0)


def characters_job(folder: Path) -> Job:
    """Return the text task without dropout, and wider, so that an int8 block does not hold several tokens."""
    return Job("gpt", tied_gpt(32, 0.0), *text(folder), clip_norm=1.0, learning_rate=0.1)


JOBS: Mapping[str, Callable[[Path], Job]] = {"cnn": cnn_job, "gpt": gpt_job, "unet": unet_job}
