"""Comparison of two runs of a model by sketches, so that no results need to be kept.

A sketch of a tensor is its norm and its product with a vector of signs. The product of a difference with
random signs is about as large as the difference itself, so a difference is detected in any position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch

from partition.capture.errors import CaptureRefused
from partition.capture.lazy_tensor import TILE
from partition.execute.interpret import DTYPES
from partition.model.graph import Entry, Graph

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""The tolerance of a sketch, relative to its norm."""
FLOOR = 1e-2
"""A gradient below this share of the largest one is compared relative to that share: before a batch norm, the
gradient of a bias consists only of rounding errors."""


@dataclass(frozen=True)
class Sketch:
    """Three figures of a tensor. Two tensors that agree in all three are equal, unless the vector of signs is
    unlucky."""

    shape: tuple[int, ...]
    norm: float
    product: float


@dataclass
class Computed:
    """The results of one run. Gradients are keyed by the first of a parameter's names."""

    outputs: list[Sketch] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Sketch] = field(default_factory=dict)
    states: dict[str, Sketch] = field(default_factory=dict)


def tolerance_of(graph: Graph) -> float:
    """Return the tolerance of the least precise type used in the computation: a model of float64 may compute
    its loss in float32."""
    kinds = {DTYPES[row.type.dtype] for row in graph.parameters}
    kinds |= {DTYPES[kind.dtype] for kind in graph.types}
    return max((TOLERANCES[kind] for kind in kinds if kind in TOLERANCES), default=TOLERANCES[torch.float32])


def total_of(outputs: Sequence[torch.Tensor], signs: torch.Tensor) -> torch.Tensor | None:
    """Return a number that depends on every element of the outputs separately. It serves as the loss if there
    is none."""
    total: torch.Tensor | None = None
    for output in outputs:
        if output.requires_grad:
            output = _real(output)
            repeated = signs.repeat(-(-output.numel() // TILE))[: output.numel()].to(output.dtype)
            part = (output.reshape(-1) * repeated).sum()
            total = part if total is None else total + part
    return total


def signs_of(seed: int) -> torch.Tensor:
    """Return a vector of +1 and -1, repeated along longer tensors."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (TILE,), generator=generator).mul_(2).sub_(1).double()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def sketch_of(tensor: torch.Tensor, signs: torch.Tensor) -> Sketch:
    """Compute the sketch of a tensor in float64, piece by piece."""
    flat = _real(tensor.detach()).reshape(-1)
    square, product = 0.0, 0.0
    for start in range(0, flat.numel(), TILE):
        part = flat[start : start + TILE].double()
        square += float(part.dot(part))
        product += float(part.dot(signs[: part.numel()]))
    return Sketch(tuple(tensor.shape), float(square) ** 0.5, product)


def compare(
    graph: Graph, entry: Entry, eager: Computed, graphed: Computed, tolerance: float, when: str
) -> float:
    """Return the largest relative difference. Raises CaptureRefused if it exceeds the tolerance."""
    if len(eager.outputs) != len(graphed.outputs) or sorted(eager.numbers) != sorted(graphed.numbers):
        raise CaptureRefused(
            f"the graph has results that differ from the model's in {when}: "
            f"{len(graphed.outputs)} outputs and {sorted(graphed.numbers)}, not "
            f"{len(eager.outputs)} and {sorted(eager.numbers)}"
        )
    comparison = _Comparison(tolerance, when)
    makers = _makers(graph, entry)
    for place, pair in enumerate(zip(eager.outputs, graphed.outputs, strict=True)):
        comparison.agree(f"output {place} ({makers(entry.outputs[place])})", *pair)
    for name, number in eager.numbers.items():
        comparison.agree(f"the {name}", _of_number(number), _of_number(graphed.numbers[name]))
    for name, sketch in eager.states.items():
        comparison.agree(f"the state '{name}'", sketch, graphed.states.get(name))
    norms = [sketch.norm for sketch in eager.gradients.values() if isfinite(sketch.norm)]
    least = FLOOR * max(norms, default=0.0)
    # From the loss backwards, because an error in one place affects all gradients before it.
    for row in reversed(graph.parameters):
        for name in row.names:
            what = f"the gradient of '{name}' ({_module(name.rpartition('.')[0])})"
            comparison.agree(what, eager.gradients.get(name), graphed.gradients.get(name), least)
    known = {name for row in graph.parameters for name in row.names}
    for name, sketch in eager.gradients.items():
        if name not in known and sketch.norm:
            raise CaptureRefused(f"the graph does not train '{name}', but the model does")
    return comparison.largest


class _Comparison:
    """Compares sketches and keeps the largest difference."""

    def __init__(self, tolerance: float, when: str) -> None:
        self.largest = 0.0
        self._tolerance = tolerance
        self._when = when

    def agree(self, what: str, eager: Sketch | None, graphed: Sketch | None, least: float = 0.0) -> None:
        """Compare two sketches. `least` is the norm below which a tensor counts as zero. Raises
        CaptureRefused if they differ."""
        if (eager is None or not eager.norm) and (graphed is None or not graphed.norm):
            return  # no gradient and zeros have the same effect on a step
        if eager is None or graphed is None or eager.shape != graphed.shape:
            raise CaptureRefused(
                f"{what} differs in {self._when}: {_told(eager)} in eager, {_told(graphed)} in the graph"
            )
        if not isfinite(eager.norm) and not isfinite(graphed.norm):
            return  # not finite on both sides: this is how the model itself behaves
        scale = max(eager.norm, graphed.norm, least)
        difference = max(abs(eager.norm - graphed.norm), abs(eager.product - graphed.product)) / scale
        if not difference <= self._tolerance:
            raise CaptureRefused(
                f"{what} differs in {self._when} by {difference:.1e}, but only "
                f"{self._tolerance:.0e} is allowed: the graph does not compute what the "
                "model does"
            )
        self.largest = max(self.largest, difference)


def _makers(graph: Graph, entry: Entry) -> Callable[[int], str]:
    owners = {value: node.owner for node in entry.nodes for value in node.outputs}
    return lambda value: _module(graph.owners[owners[value]] if value in owners else "")


def _module(path: str) -> str:
    return f"module '{path}'" if path else "the model itself"


def _told(sketch: Sketch | None) -> str:
    return "nothing" if sketch is None else f"shape {sketch.shape}"


def _of_number(number: float) -> Sketch:
    return Sketch((), abs(number), number)
