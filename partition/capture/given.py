"""Inputs and labels for a proof: as the model takes them and as the graph does, with values that tell."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from crypto.errors import RemoteProtocolError
from partition.capture.refused import CaptureRefused
from partition.model.graph import Entry, Graph, Size, TensorType
from partition.model.sizes import Sides, bind


class Given:
    """Inputs and labels of one run, as the model takes them and as the graph does."""

    def __init__(
        self,
        graph: Graph,
        entry: Entry,
        inputs: Sequence[Any] | Mapping[str, Any],
        labels: Sequence[torch.Tensor],
        seed: int,
    ) -> None:
        self._graph, self._entry, self._seed = graph, entry, seed
        items = list(inputs.items()) if isinstance(inputs, Mapping) else list(enumerate(inputs))
        self._items = [(key, _lively(value, seed + place)) for place, (key, value) in enumerate(items)]
        self._is_mapping = isinstance(inputs, Mapping)
        self.labels = tuple(_lively(label, seed - 1) for label in labels)
        types = [graph.types[port.type] for port in (*entry.inputs, *entry.labels)]
        try:
            shapes = [tuple(tensor.shape) for tensor in (*self.tensors, *self.labels)]
            if len(shapes) != len(types):
                raise RemoteProtocolError(f"{len(shapes)} tensors where {len(types)} belong")
            self.sizes: Sides = _bind(graph, types, shapes)
        except RemoteProtocolError as error:
            raise CaptureRefused(f"the examples do not fit the graph: {error}") from error

    @property
    def positional(self) -> tuple[Any, ...]:
        return () if self._is_mapping else tuple(value for _, value in self._items)

    @property
    def keywords(self) -> dict[str, Any]:
        return {str(key): value for key, value in self._items} if self._is_mapping else {}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(value for _, value in self._items if isinstance(value, torch.Tensor))

    def enlarged(self) -> "Given":
        """The same with one sample more, so that a batch frozen into the graph is seen; or itself."""
        graph, entry = self._graph, self._entry
        if not graph.symbols or self.sizes[0] >= graph.symbols[0].maximum:
            return self
        batch = Size(0)
        ports = [graph.types[port.type].shape for port in (*entry.inputs, *entry.labels)]
        if any(batch in shape[1:] for shape in ports):
            return self
        grows = iter(bool(shape) and shape[0] == batch for shape in ports)

        def grown(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not next(grows):
                return value
            return torch.cat([value, value[:1]])

        items = [(key, grown(value)) for key, value in self._items]
        labels = [grown(label) for label in self.labels]
        inputs = dict(items) if self._is_mapping else [value for _, value in items]
        return Given(graph, entry, inputs, labels, self._seed)  # type: ignore[arg-type]  # keys are names


def _bind(graph: Graph, types: list[TensorType], shapes: list[tuple[int, ...]]) -> Sides:
    """The symbols' values; one that no input of this entry point has counts for nothing there."""
    for row, symbol in enumerate(graph.symbols):
        if not any(Size(row) in kind.shape for kind in types):
            types, shapes = [*types, TensorType("int64", (Size(row),))], [*shapes, (symbol.minimum,)]
    return bind(graph.symbols, graph.expressions, types, shapes)


def _lively(value: Any, seed: int) -> Any:
    """A floating tensor that is all one number, as noise."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 2:
        return value
    if not bool((value == value.flatten()[0]).all()):
        return value
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=value.dtype)
