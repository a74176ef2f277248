"""`simple-cnn`: CloudMesh's image classifier, three convolutions and two linear layers.

The architecture and the parameter names are those of the seed project, so that its CIFAR-10 result is
comparable. For 3x32x32 it is the same model. The first linear layer depends on the sample's size, and the
three halvings need sides of at least 8 (scikit-learn's digits are 1x8x8).
"""

import torch
from torch import nn
from torch.nn import functional

from partition.capture.task import Task, correct, cross_entropy

SIDE_MIN = 8
_HALVINGS = 3
_WIDTHS = (32, 64, 128)
_HIDDEN = 512
_DROPOUT = 0.5


class SimpleCNN(nn.Module):
    """A network that maps (batch, channels, height, width) to logits (batch, classes)."""

    def __init__(self, sample_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = sample_shape
        first, second, third = _WIDTHS
        self.conv1 = nn.Conv2d(channels, first, 3, padding=1)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.conv3 = nn.Conv2d(second, third, 3, padding=1)
        self.fc1 = nn.Linear(third * (height >> _HALVINGS) * (width >> _HALVINGS), _HIDDEN)
        self.dropout = nn.Dropout(_DROPOUT)
        self.fc2 = nn.Linear(_HIDDEN, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = images
        for convolution in (self.conv1, self.conv2, self.conv3):
            inner = functional.max_pool2d(functional.relu(convolution(inner)), 2)
        hidden = functional.relu(self.fc1(inner.flatten(1)))
        logits: torch.Tensor = self.fc2(self.dropout(hidden))
        return logits


def simple_cnn(sample_shape: tuple[int, ...], classes: int) -> Task:
    """Return the task for samples of (channels, height, width). Raises ValueError for invalid options."""
    if len(sample_shape) != 3 or min(sample_shape[1:]) < SIDE_MIN or sample_shape[0] < 1:
        raise ValueError(
            "simple-cnn needs images of (channels, height, width) with at least "
            f"{SIDE_MIN} x {SIDE_MIN} pixels, not samples of shape {sample_shape}"
        )
    channels, height, width = sample_shape
    return Task(
        SimpleCNN((channels, height, width), classes),
        example_inputs=(torch.zeros(2, *sample_shape),),
        labels=(torch.zeros(2, dtype=torch.int64),),
        loss=cross_entropy,
        metrics={"correct": correct},
        name="simple-cnn",
    )
