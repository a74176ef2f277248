"""A model as data: its layers, the shapes between them, and their cost. No torch.

Models known by name are the skeleton's placeholder for captured graphs: the rest of
the package speaks only of layers by index, parameters by name and shapes between, which a captured
graph will also have.
"""

from collections.abc import Callable

import msgspec

from partition.model import simple_cnn
from partition.model.layers import (
    Conv2d,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    Parameter,
    ReLU,
    Shape,
)

__all__ = [
    "CLASSES_MAX",
    "SIDE_MAX",
    "Conv2d",
    "Dropout",
    "Flatten",
    "Layer",
    "Linear",
    "MaxPool2d",
    "Model",
    "Parameter",
    "ReLU",
    "Shape",
    "build",
    "names",
]

SIDE_MAX = 1_024
"""Channels, height or width of a sample. Larger ones would only serve to ask for absurd memory."""
CLASSES_MAX = 65_536

_REGISTRY: dict[str, Callable[[Shape, int], tuple[Layer, ...]]] = {"simple-cnn": simple_cnn.layers}


class Model(msgspec.Struct, frozen=True):
    """A chain of layers. `shapes[i]` goes into layer i, `shapes[i + 1]` comes out; all without the batch.

    A stage is a half-open range of layers; the last layer gives logits of shape (classes,), and the loss
    is the cross entropy.
    """

    name: str
    layers: tuple[Layer, ...]
    shapes: tuple[Shape, ...]

    def parameters(self, first: int = 0, last: int | None = None) -> tuple[Parameter, ...]:
        """The parameters of layers [first, last), in the order of torch's state dict."""
        return tuple(parameter for layer in self.layers[first:last] for parameter in layer.parameters)

    def flops(self, layer: int) -> int:
        """Forward FLOPs per sample of one layer."""
        return self.layers[layer].flops(self.shapes[layer])

    def saved_bytes(self, layer: int, item_bytes: int) -> int:
        """Bytes per sample that one layer keeps for the backward pass, at most."""
        return self.layers[layer].saved_bytes(self.shapes[layer], item_bytes)


def build(name: str, sample_shape: Shape, classes: int) -> Model:
    """The model called `name` for samples of `sample_shape` and `classes` classes.

    Raises:
        ValueError: an unknown name (the known ones are listed), or a shape the model cannot take.
    """
    if name not in _REGISTRY:
        raise ValueError(f"no model is called '{name[:40]}'; known: {', '.join(names())}")
    if not all(1 <= side <= SIDE_MAX for side in sample_shape):
        raise ValueError(f"the sides of a sample are 1 to {SIDE_MAX}, not {sample_shape}")
    if not 1 <= classes <= CLASSES_MAX:
        raise ValueError(f"classes are 1 to {CLASSES_MAX}, not {classes}")
    layers = _REGISTRY[name](sample_shape, classes)
    shapes = [sample_shape]
    for layer in layers:
        shapes.append(layer.output_shape(shapes[-1]))
    return Model(name, layers, tuple(shapes))


def names() -> tuple[str, ...]:
    """The models known by name, sorted."""
    return tuple(sorted(_REGISTRY))
