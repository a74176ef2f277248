"""The parts of a zoo model's case: how to build it, its data, its loss and its metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Scale = Literal["test", "bench"]
"""`test` is a small model of the same structure; `bench` is a model of a realistic size for one core."""
Tensors = tuple[Tensor, ...]
Loss = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""A function of the output and the labels. If it returns a second number, that number replaces the batch size
as divisor of the sum."""
Sample = Callable[[torch.Generator, int], tuple[Tensors, Tensors]]


@dataclass(frozen=True)
class Case:
    """A model and its task.

    `build` makes the module with torch's own initial values. `sample(generator, batch)` draws inputs and
    labels. `loss(output, *labels)` is a sum over samples, and so is each metric.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: Sample
    loss: Loss
    metrics: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    batch: int = 3

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the module in training mode, the same at every call."""
        torch.manual_seed(0)
        return self.build().to(dtype).train()

    def data(self, seed: int, batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensors, Tensors]:
        """Return inputs and labels of one micro-batch; floating-point tensors have the type `dtype`."""
        inputs, labels = self.sample(torch.Generator().manual_seed(seed), batch)
        return _to(inputs, dtype), _to(labels, dtype)

    def sums(self, output: Any, inputs: Tensors, labels: Tensors) -> tuple[Tensor, int]:
        """Return the loss of one micro-batch, and the number of samples in the sum."""
        loss = self.loss(output, *labels)
        return (loss[0], int(loss[1])) if isinstance(loss, tuple) else (loss, len(inputs[0]))


def _to(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)


def images(*shape: int, classes: int) -> Sample:
    """Return a sampler of noise of `shape`, with a class for each sample."""

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        pictures = torch.randn(batch, *shape, generator=generator)
        return (pictures,), (torch.randint(classes, (batch,), generator=generator),)

    return sample


def tokens(length: int, vocabulary: int) -> Sample:
    """Return a sampler of ids of `length`, with the id that follows each position as its label."""

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        ids = torch.randint(vocabulary, (batch, length + 1), generator=generator)
        return (ids[:, :-1].contiguous(),), (ids[:, 1:].contiguous(),)

    return sample


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy over classes in dimension 1."""
    return functional.cross_entropy(logits, labels, reduction="sum")


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the number of correct classifications."""
    return (logits.argmax(1) == labels).sum()


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of `logits` (batch, length, vocabulary)."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def counted_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy where the label is not -100, and the number of such labels."""
    return token_loss(logits, labels), (labels != -100).sum()


def tokens_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the number of correctly predicted next ids."""
    return (logits.argmax(-1) == labels).sum()
