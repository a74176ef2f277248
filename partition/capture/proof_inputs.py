"""Inputs and labels for a proof: in the form of the model and of the graph, with values that reveal
differences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crypto.errors import RemoteProtocolError
from partition.capture.errors import CaptureRefused
from partition.capture.trees import Form
from partition.model.graph import Entry, Graph, Size, TensorType
from partition.model.sizes import Sides, bind


@dataclass(frozen=True)
class Given:
    """Inputs and labels of one run; `all` are the tensors of both, in the order of the graph's ports."""

    graph: Graph
    entry: Entry
    form: Form
    all: tuple[torch.Tensor, ...]
    sizes: Sides

    @property
    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return self.form.arguments(self.all)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.all[: self.form.inputs]

    @property
    def labels(self) -> tuple[torch.Tensor, ...]:
        return self.all[self.form.inputs :]

    def enlarged(self, more: int = 1) -> "Given":
        """Return the same with its first samples repeated, so that a batch size fixed in the graph is
        detected. Return itself if the graph accepts no larger batch."""
        graph = self.graph
        if not graph.symbols or self.sizes[0] + more > graph.symbols[0].maximum:
            return self
        shapes = [graph.types[port.type].shape for port in (*self.entry.inputs, *self.entry.labels)]
        grown = []
        for tensor, shape in zip(self.all, shapes, strict=True):
            for place in [place for place, side in enumerate(shape) if side == Size(0)]:
                tensor = torch.cat([tensor, tensor.narrow(place, 0, more)], place)
            grown.append(tensor)
        return given(graph, self.entry, self.form, grown)

    def halves(self) -> "tuple[Given, Given] | None":
        """Return the samples in two parts; None if the graph does not accept such small batches."""
        if not self.sizes or self.sizes[0] < 2 * self.graph.symbols[0].minimum:
            return None
        middle = self.sizes[0] // 2
        return self._part(0, middle), self._part(middle, self.sizes[0] - middle)

    def _part(self, start: int, length: int) -> "Given":
        shapes = [self.graph.types[port.type].shape for port in (*self.entry.inputs, *self.entry.labels)]
        taken = []
        for tensor, shape in zip(self.all, shapes, strict=True):
            for place in [place for place, side in enumerate(shape) if side == Size(0)]:
                tensor = tensor.narrow(place, start, length)
            taken.append(tensor.contiguous())
        return given(self.graph, self.entry, self.form, taken)

    def doubled(self) -> "Given":
        """Return every sample twice; itself if the graph does not accept such a batch."""
        return self.enlarged(self.sizes[0]) if self.sizes else self


def given(graph: Graph, entry: Entry, form: Form, tensors: Sequence[torch.Tensor]) -> Given:
    """Bind tensors to the graph's ports. Raises CaptureRefused if the graph does not accept their shapes."""
    types = [graph.types[port.type] for port in (*entry.inputs, *entry.labels)]
    try:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(shapes) != len(types):
            raise RemoteProtocolError(f"{len(shapes)} tensors where {len(types)} belong")
        sizes = _bind(graph, types, shapes)
    except RemoteProtocolError as error:
        raise CaptureRefused(f"the examples do not fit the graph: {error}") from error
    # Contiguous, as in a run: `view` accepts these, but not every slice that a user may give as an example.
    return Given(graph, entry, form, tuple(tensor.contiguous() for tensor in tensors), sizes)


def lively(tensors: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Replace floating-point tensors whose elements are all equal by noise."""
    return [_lively(tensor, seed + place) for place, tensor in enumerate(tensors)]


def _bind(graph: Graph, types: list[TensorType], shapes: list[tuple[int, ...]]) -> Sides:
    """Return the symbols' values. A symbol that no input of this entry point has does not matter there."""
    for row, symbol in enumerate(graph.symbols):
        if not any(Size(row) in kind.shape for kind in types):
            types, shapes = [*types, TensorType("int64", (Size(row),))], [*shapes, (symbol.minimum,)]
    return bind(graph.symbols, graph.expressions, types, shapes)


def _lively(value: torch.Tensor, seed: int) -> torch.Tensor:
    if not value.is_floating_point() or value.numel() < 2:
        return value
    if not bool((value == value.flatten()[0]).all()):
        return value
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=value.dtype)
