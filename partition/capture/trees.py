"""The arguments of a model and its loss: tensors in any nesting of tuples, lists and dictionaries.

A graph has a flat list of inputs and labels. `Form` remembers their positions in the arguments, so that a
tensor inside a dictionary is an input like any other. Everything else is fixed, and a constant of the graph.
"""

import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from partition.capture.errors import CaptureRefused

Inputs = Sequence[Any] | Mapping[str, Any]
Labels = Sequence[Any] | Mapping[str, Any]

_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_+/:@-]+")
_NAME_LENGTH_MAX = 256


def own_loss(output: Any) -> Tensor:
    """Return the loss that a model computes itself: `output.loss`, `output["loss"]`, or the output itself.

    If this function is a task's `loss`, each label is passed to the model as the keyword argument with its
    name.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = getattr(output, "loss", output[0] if isinstance(output, tuple) and output else None)
    if not isinstance(loss, Tensor):
        raise CaptureRefused("the model returns no loss of its own (output.loss) for these labels")
    return loss


@dataclass(frozen=True)
class Hole:
    """The position of a tensor, by its number among inputs and labels."""

    number: int


@dataclass(frozen=True)
class Form:
    """How a flat list of tensors becomes arguments. `names` are those of the inputs, then of the labels."""

    names: tuple[str, ...]
    inputs: int
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    labels: tuple[Any, ...]
    own_loss: bool = False

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model."""
        made = tuple(_filled(tree, tensors) for tree in self.positional)
        return made, {name: _filled(tree, tensors) for name, tree in self.keywords.items()}

    def label_arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the arguments of a metric after the output. They are also those of a loss, unless it is the
        model's own."""
        return tuple(_filled(tree, tensors) for tree in self.labels)

    def outputs(self, output: Any) -> list[Tensor]:
        """Return the tensors of a model's answer. A loss that the model computes itself is not an output."""
        loss = own_loss(output) if self.own_loss else None
        return [tensor for tensor in tensors_of(output) if tensor is not loss]

    def loss(self, function: Callable[..., Any], output: Any, tensors: Sequence[Tensor]) -> Any:
        """Call a loss."""
        return function(output) if self.own_loss else function(output, *self.label_arguments(tensors))


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a model's answer, in order, including those in lists, dictionaries and
    dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_of(value)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from tensors_of(getattr(output, name))


def form_of(
    signature: Callable[..., Any], inputs: Inputs, labels: Labels, loss: Callable[..., Any] | None = None
) -> tuple[Form, tuple[Tensor, ...]]:
    """Return the form of these arguments, and the tensors in them.

    Raises:
        CaptureRefused: there is no tensor among the inputs, or an argument is an object that may contain
            tensors.
    """
    holes = _Holes()
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        keywords = {str(name): holes.of(str(name), value) for name, value in inputs.items()}
    else:
        for name, value in zip(_positional_names(signature, len(inputs)), inputs, strict=True):
            if not isinstance(value, Tensor | list | tuple | dict):
                raise CaptureRefused(
                    f"the input '{name}' is {type(value).__name__}; pass arguments that are "
                    "not tensors by keyword"
                )
            positional.append(holes.of(name, value))
    count = len(holes.tensors)
    if not count:
        raise CaptureRefused("a model needs at least one input tensor")
    if isinstance(labels, Mapping):
        named = {str(name): value for name, value in labels.items()}
    else:
        named = {f"label_{place}" if len(labels) > 1 else "label": each for place, each in enumerate(labels)}
    trees = {name: holes.of(name, value) for name, value in named.items()}
    is_own = loss is own_loss and bool(trees)
    if is_own:
        if not isinstance(labels, Mapping):
            raise CaptureRefused("a model's own loss needs labels by name: labels={'labels': ...}")
        keywords |= trees
    form = Form(tuple(holes.names), count, tuple(positional), keywords, tuple(trees.values()), is_own)
    return form, tuple(holes.tensors)


class _Holes:
    """Takes the tensors out of arguments."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tensors: list[Tensor] = []

    def of(self, name: str, value: Any) -> Any:
        pairs, _ = tree_flatten_with_path(value)
        paths = iter(_NOT_IN_NAMES.sub(".", keystr(path)).strip(".") for path, _ in pairs)

        def hole(leaf: Any) -> Any:
            path = next(paths)
            where = f"{name}.{path}" if path else name
            if not isinstance(leaf, Tensor):
                _check_fixed(where, leaf)
                return leaf
            self.tensors.append(leaf)
            self.names.append(self._unused(where[:_NAME_LENGTH_MAX]))
            return Hole(len(self.tensors) - 1)

        return tree_map(hole, value)

    def _unused(self, name: str) -> str:
        while name in self.names:
            name += "_"
        return name


def _check_fixed(where: str, leaf: Any) -> None:
    """Refuse an object that may contain tensors, which would be frozen with their values. Raises
    CaptureRefused."""
    if isinstance(leaf, _PLAIN):
        return
    inner = [getattr(leaf, each.name) for each in fields(leaf)] if is_dataclass(leaf) else []
    inner += list(getattr(leaf, "__dict__", {}).values())
    if isinstance(leaf, np.ndarray | np.generic) or any(
        isinstance(each, Tensor | np.ndarray) for each in inner
    ):
        raise CaptureRefused(
            f"the input '{where}' is {type(leaf).__name__}, whose values would be "
            "frozen in the graph; pass tensors, which may be in tuples, lists and "
            "dictionaries"
        )


def _filled(tree: Any, tensors: Sequence[Tensor]) -> Any:
    return tree_map(lambda leaf: tensors[leaf.number] if isinstance(leaf, Hole) else leaf, tree)


def _positional_names(function: Callable[..., Any], count: int) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [
        name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind in kinds
    ]
    return [names[index] if index < len(names) else f"input_{index}" for index in range(count)]
