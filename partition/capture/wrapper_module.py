"""The module that is exported: the model with its loss and its metrics, and the caller's request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from partition.capture.errors import CaptureRefused
from partition.capture.module_state import python_state
from partition.capture.origin import named
from partition.capture.trees import Form

MODEL = "model"
"""The name of the model within the exported module. It is a prefix of every path, and is removed again."""

BATCH = "batch"
BATCH_MAX = 4_096
COUNTER = "num_batches_tracked"
"""The buffer in which batch norm counts its micro-batches. It is read only if the momentum is None."""


@dataclass(frozen=True)
class Example:
    """One input or label. Its values do not matter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Dynamic:
    """A size that varies, and where: pairs of a port's number (inputs, then labels) and a dimension.

    If `is_open`, torch narrows the bounds to what the model accepts.
    """

    name: str
    minimum: int
    maximum: int
    places: tuple[tuple[int, int], ...]
    is_open: bool = False


@dataclass(frozen=True)
class ModelExport:
    """A request to export. `call` takes the model and its inputs; `form` says how these are arranged in the
    arguments."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[Example, ...]
    labels: tuple[Example, ...]
    form: Form
    dynamics: tuple[Dynamic, ...]
    loss: Callable[..., Any] | None
    metrics: Mapping[str, Callable[..., Any]]
    train: bool
    reduction: Literal["auto", "sum", "microbatch"] = "auto"


@dataclass
class ResultLayout:
    """The exported results, in order: outputs, loss, count, metrics, buffers that were assigned a new tensor.

    `counters` are batch norms' counters among these, `attributes` are tensors that are not buffers. `states`
    are the model's Python states, before and after each call of it.
    """

    outputs: int = 0
    has_loss: bool = False
    has_count: bool = False
    metrics: tuple[str, ...] = ()
    assigned: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    states: list[dict[str, Any]] = field(default_factory=list)


def strip(path: str) -> str:
    """Return the model's own form of a path in the exported module; "loss" and "metrics.0" stay."""
    return "" if path == MODEL else path.removeprefix(MODEL + ".")


class _Part(nn.Module):
    """A loss or a metric, wrapped so that the nodes it makes carry its name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class Whole(nn.Module):
    """The model with its loss and metrics: takes inputs and labels flat, returns a flat tuple of tensors."""

    def __init__(self, model: nn.Module, request: ModelExport, layout: ResultLayout) -> None:
        super().__init__()
        self.model = model
        self.loss = _Part(request.loss) if request.loss else None
        self.metrics = nn.ModuleList([_Part(metric) for metric in request.metrics.values()])
        self.request = request
        self.layout = layout
        self.calls = 1

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        request, layout = self.request, self.layout
        positional, keywords = request.form.arguments(tensors)
        labels = request.form.label_arguments(tensors)
        held = _held(self.model)
        layout.states = [python_state(self.model)]
        for _ in range(self.calls):
            output = request.call(self.model, *positional, **keywords)
            layout.states.append(python_state(self.model))
        results = request.form.outputs(output)
        layout.outputs = len(results)
        assigned = self._assigned(held)
        if self.loss is not None:
            loss = request.form.loss(self.loss, output, tensors)
            layout.has_loss = True
            if isinstance(loss, tuple):
                loss, count = loss
                layout.has_count = True
                if not isinstance(count, Tensor):
                    count = torch.full((), count, dtype=torch.int64)
                results += [scalar(loss, "loss"), scalar(count, "count")]
            else:
                results.append(scalar(loss, "loss"))
        for name, metric in zip(request.metrics, self.metrics, strict=True):
            results.append(scalar(metric(output, *labels), f"metric '{name}'"))
        layout.metrics = tuple(request.metrics)
        return (*results, *assigned)

    def _assigned(self, held: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the tensors that the model assigned in place of its buffers and other tensors; they are the
        new values."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        changed = [path for path, tensor in _held(self.model).items() if tensor is not held.get(path, tensor)]
        counters = [path for path in changed if path.split(".")[-1] == COUNTER]
        assigned = [path for path in changed if path in buffers and path not in counters]
        if assigned and self.request.train:
            module = named(assigned[0].rpartition(".")[0])
            raise CaptureRefused(
                f"{module}: the buffer '{assigned[0]}' is changed while training, but "
                "stages keep no statistics other than batch norm's; change it outside "
                "forward, or put its module in evaluation (eval()) before the capture"
            )
        self.layout.counters, self.layout.assigned = tuple(counters), tuple(assigned)
        self.layout.attributes = tuple(path for path in changed if path not in buffers)
        for path in (*counters, *assigned):
            parent, _, name = path.rpartition(".")
            self.model.get_submodule(parent)._buffers[name] = held[path]
        return [buffers[path] for path in assigned]


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's buffers, and the tensors that it holds without having registered them."""
    held = dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        held |= {prefix + name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return held


def scalar(value: Any, what: str) -> Tensor:
    """Return `value` if it is a tensor without dimensions. Raises CaptureRefused otherwise."""
    if not isinstance(value, Tensor) or value.dim() != 0:
        found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise CaptureRefused(
            f"the {what} is {found}, but it must be a tensor with a single number, summed over samples"
        )
    return value
