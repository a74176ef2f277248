"""`capture`: any `nn.Module` with its loss as a checked graph. It is the only call that a requester needs.

    def loss(output, y):
        return cross_entropy(output, y, reduction="sum")

    captured = capture(model, (x,), labels=(y,), loss=loss)

It exports (`export`), cleans (`clean`), lowers (`lower`), marks where a plan may cut, and passes the result
through the same checks as a graph from an unknown peer. `partition.capture.proof` checks that the graph
computes what the model does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from crypto.errors import RemoteProtocolError
from partition.capture.clean import Cleaned, clean
from partition.capture.errors import CaptureRefused, SizesRefused
from partition.capture.export import ExportedGraph, export
from partition.capture.lower import Groups, lower
from partition.capture.reduction import Reduction
from partition.capture.state_dict import contents_of
from partition.capture.steps import data_type
from partition.capture.trees import Inputs, Labels, form_of
from partition.capture.wrapper_module import BATCH, BATCH_MAX, Dynamic, Example, ModelExport
from partition.model.check import check_graph
from partition.model.graph import (
    EVALUATE,
    Graph,
    ParameterValue,
    Symbol,
    arguments_of,
    decode_graph,
    encode_graph,
    graph_hash,
)
from partition.model.layers import with_layers
from partition.model.operators import OPERATORS

Places = Mapping[int | str, int]
Bounds = tuple[int, int] | tuple[int, int, Places]
Further = (
    tuple[str | Callable[..., Any], Inputs]
    | tuple[str | Callable[..., Any], Inputs, Mapping[str, Bounds] | None]
)


@dataclass(frozen=True)
class Through:
    """A different way through a model: the entry point's name, a function of the model and its inputs, and a
    transformation of the graph that is applied before the checks."""

    name: str
    call: Callable[..., Any]
    finish: Callable[[Graph], Graph]


@dataclass(frozen=True)
class Captured:
    """A model as data.

    `data` are the bytes of `graph` and `hash` is their name. `stored` are the tensors whose values are in the
    accompanying safetensors file, by the first of their names, in the order of their offsets and without
    gaps; they are the model's own tensors, not copies. `unused` are parameters that no entry point uses: they
    are not trained. `functions` are the model's own backward passes that the graph has left out: only a proof
    can tell whether it is the same without them. `draws` and `outputs` are also for a proof, by entry point:
    the positions of the graph's random operators among those that the model runs (only if some are unused),
    and of its outputs among the model's.
    """

    graph: Graph
    data: bytes
    hash: bytes
    stored: tuple[tuple[str, Tensor], ...]
    unused: tuple[str, ...]
    functions: tuple[str, ...] = ()
    draws: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def capture(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    labels: Labels = (),
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    dynamic: Mapping[str, Bounds] | None = None,
    entries: Mapping[str, Further] | None = None,
    split: Sequence[str] = (),
    together: Sequence[Sequence[str]] = (),
    groups: Groups | None = None,
    reduction: Reduction = "auto",
    evaluation: bool | None = None,
    unproved: bool = False,
    name: str = "",
    through: Through | None = None,
) -> Captured:
    """Capture a model for training, with further entry points over the same parameters.

    `example_inputs` are a tuple, or a dictionary of keywords; tensors may be in tuples, lists and
    dictionaries, and everything else is fixed. Only shapes and types of these and of `labels` (by position or
    by name) matter. `loss(output, *labels)` returns a scalar *sum* over samples, or (sum, count) if a step
    divides by a number other than the batch size, such as tokens; each metric returns a scalar sum. If the
    loss is `own_loss`, the labels are passed to the model by name, and the loss is its `output.loss`.

    `dynamic` names the sizes that vary, with inclusive bounds: {"batch": (1, 64), "sequence": (1, 1024, {0:
    1, "mask": 1})}. The third part says where: an input's position (labels count on after the inputs) or
    name, and its dimension. Without it a size is dimension 0 of every input and label. "batch" always exists
    and comes first; its default is 1 to 4096.

    `entries` are further ways through the model in evaluation: {"decode": ("decode", (token, position))},
    each a method's name or a function of the model and the inputs, example inputs, and optionally `dynamic`.
    Buffers that one changes in place, such as a KV cache, become states, initially zero. `split` and
    `together` name modules before which a plan may cut, or inside which it may not. `groups(name, parameter)`
    returns the optimizer's group.

    With `evaluation` there is a second graph for held-out samples; by default only if the first one draws
    random numbers that it cannot leave out. The model's own autograd functions are refused unless `unproved`:
    in that case the caller must prove the graph.

    `through` is captured in place of the model's own forward, in evaluation.

    The model is unchanged afterwards. Raises CaptureRefused: what cannot be a graph, and where it is.
    """
    if loss is None and (labels or metrics):
        raise CaptureRefused("labels and metrics need a loss")
    contents = contents_of(model)
    bounds: dict[str, Bounds] = {BATCH: (1, BATCH_MAX), **(dynamic or {})}
    way = through or Through("train" if loss is not None else "forward", _forward, _as_it_is)
    forward = model.forward if through is None else partial(way.call, model)
    ports = _Ports(forward, example_inputs, labels, loss)
    told = (way.name, way.call, bounds, loss, metrics or {})
    first = ports.request(*told, train=through is None, reduction=reduction)
    requests = [first, *_further_requests(model, entries or {}, bounds[BATCH][:2])]
    may_fix = BATCH not in (dynamic or {})
    requests, parts = _parts(model, requests, may_fix=may_fix, evaluation=evaluation, unproved=unproved)
    graph, stored = lower(name, parts, contents, _symbols(requests), groups)
    graph = _with_cuts(graph, split, together)
    return _captured(way.finish(graph), stored, parts, contents.parameters)


def _with_cuts(graph: Graph, split: Sequence[str], together: Sequence[Sequence[str]]) -> Graph:
    """Mark where a plan may cut. Raises CaptureRefused if the model has no such modules."""
    try:
        return with_layers(graph, split=split, together=together)
    except ValueError as error:
        raise CaptureRefused(str(error)) from error


def _captured(
    graph: Graph, stored: tuple[tuple[str, Tensor], ...], parts: Sequence["Part"], parameters: Iterable[str]
) -> Captured:
    """Pass a finished graph through the checks that a stage makes. Raises CaptureRefused."""
    data = encode_graph(graph)
    try:
        check_graph(decode_graph(data))
    except RemoteProtocolError as error:
        raise CaptureRefused(f"no stage would accept this model: {error}") from error
    used = _used_parameters(graph)
    unused = tuple(path for path in parameters if path not in used)
    functions = tuple(dict.fromkeys(each for exported, _ in parts for each in exported.functions))
    draws = {exported.request.name: cleaned.draws for exported, cleaned in parts if cleaned.draws}
    outputs = {exported.request.name: cleaned.outputs for exported, cleaned in parts}
    return Captured(graph, data, graph_hash(data), stored, unused, functions, draws, outputs)


Part = tuple[ExportedGraph, Cleaned]


def _parts(
    model: nn.Module,
    requests: Sequence[ModelExport],
    *,
    may_fix: bool,
    evaluation: bool | None,
    unproved: bool,
) -> tuple[list[ModelExport], list[Part]]:
    """Capture each entry point within the sizes of the first one, and evaluation of the first one if it needs
    a separate graph. Return the entry points with those sizes, and the parts."""
    parts = [_part(model, requests[0], may_fix=may_fix, unproved=unproved)]
    found = parts[0][0].request
    if found.loss is not None and (_draws_always(parts[0][1]) if evaluation is None else evaluation):
        twin = replace(found, name=EVALUATE, train=False)
        parts.append(_part(model, twin, unproved=True))
    limits = {each.name: each for each in found.dynamics}
    further = [_within(each, limits) for each in requests[1:]]
    parts += [_part(model, each, unproved=unproved) for each in further]
    return [found, *further], parts


def _used_parameters(graph: Graph) -> set[str]:
    """Return the names of the parameters that an entry point uses."""
    rows = {
        argument.row
        for entry in graph.entries
        for node in entry.nodes
        for argument in arguments_of(node)
        if isinstance(argument, ParameterValue)
    }
    return {path for row in rows for path in graph.parameters[row].names}


def _part(model: nn.Module, request: ModelExport, *, may_fix: bool = False, unproved: bool = False) -> Part:
    """Capture one entry point. If the caller gave no sizes, use those that the model accepts."""
    try:
        exported = export(model, request)
    except SizesRefused as refusal:
        if not may_fix:
            raise
        exported = _with_sizes_found(model, request, refusal)
    if exported.functions and not unproved:
        raise CaptureRefused("\n".join(exported.functions))
    return exported, clean(exported)


def _with_sizes_found(model: nn.Module, request: ModelExport, refusal: SizesRefused) -> ExportedGraph:
    """Export with bounds for the batch that torch chooses; if that fails, with the batch of the examples."""
    batch = next(each for each in request.dynamics if each.name == BATCH)
    ports = (*request.inputs, *request.labels)
    size = ports[batch.places[0][0]].shape[batch.places[0][1]]
    for attempt in (replace(batch, is_open=True), replace(batch, minimum=size, maximum=size)):
        others = tuple(attempt if each is batch else each for each in request.dynamics)
        try:
            return export(model, replace(request, dynamics=others))
        except SizesRefused:
            continue
    raise refusal


def _draws_always(cleaned: Cleaned) -> bool:
    """Return whether the entry point draws random numbers in evaluation too."""
    rows = [OPERATORS[step.operator] for step in cleaned.steps]
    return any(row.random and not row.evaluate for row in rows)


def _further_requests(
    model: nn.Module, entries: Mapping[str, Further], batch: tuple[int, int]
) -> Iterator[ModelExport]:
    for key, (method, inputs, *rest) in entries.items():
        call, signature = _method(model, method)
        bounds: dict[str, Bounds] = {BATCH: batch, **((rest[0] if rest else None) or {})}
        yield _Ports(signature, inputs, ()).request(key, call, bounds, None, {}, train=False)


def _within(request: ModelExport, limits: Mapping[str, Dynamic]) -> ModelExport:
    """Narrow the sizes that the first entry point has narrowed."""
    found = []
    for each in request.dynamics:
        first = limits.get(each.name, each)
        found.append(
            replace(each, minimum=first.minimum, maximum=first.maximum) if each.name == BATCH else each
        )
    return replace(request, dynamics=tuple(found))


def _as_it_is(graph: Graph) -> Graph:
    return graph


def _forward(model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    return model(*arguments, **keywords)


def _method(
    model: nn.Module, method: str | Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function to call for an entry point, and the function whose signature names its inputs."""
    if not isinstance(method, str):
        return method, partial(method, model)
    bound = getattr(model, method, None)
    if not callable(bound):
        raise CaptureRefused(f"the model has no method '{method}'")

    def call(model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return getattr(model, method)(*arguments, **keywords)

    return call, bound


class _Ports:
    """The inputs and labels of one entry point, as the caller gave them."""

    def __init__(
        self,
        signature: Callable[..., Any],
        inputs: Inputs,
        labels: Labels,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        self.form, tensors = form_of(signature, inputs, labels, loss)
        examples = [_example(name, each) for name, each in zip(self.form.names, tensors, strict=True)]
        self.inputs, self.labels = tuple(examples[: self.form.inputs]), tuple(examples[self.form.inputs :])

    def request(
        self,
        name: str,
        call: Callable[..., Any],
        bounds: Mapping[str, Bounds],
        loss: Callable[..., Any] | None,
        metrics: Mapping[str, Callable[..., Any]],
        *,
        train: bool,
        reduction: Reduction = "auto",
    ) -> ModelExport:
        dynamics = tuple(self._dynamic(key, bound) for key, bound in bounds.items())
        return ModelExport(
            name, call, self.inputs, self.labels, self.form, dynamics, loss, metrics, train, reduction
        )

    def _dynamic(self, name: str, bounds: Bounds) -> Dynamic:
        ports = (*self.inputs, *self.labels)
        minimum, maximum, *rest = bounds
        if not 1 <= minimum <= maximum < 2**31:
            raise CaptureRefused(f"'{name}' from {minimum} to {maximum}: sizes must be from 1 to 2**31 - 1")
        numbers = {example.name: number for number, example in enumerate(ports)}
        places: list[tuple[int, int]] = []
        for where, dimension in (rest[0] if rest else dict.fromkeys(range(len(ports)), 0)).items():
            port = numbers.get(where, -1) if isinstance(where, str) else where
            if not 0 <= port < len(ports):
                raise CaptureRefused(f"'{name}' varies in '{where}', which is not an input or label")
            sides = len(ports[port].shape)
            if not rest and sides == 0:
                continue
            if not -sides <= dimension < sides:
                raise CaptureRefused(
                    f"'{name}' is dimension {dimension} of '{ports[port].name}', which has {sides}"
                )
            places.append((port, dimension % sides))
        if not places:
            raise CaptureRefused(f"'{name}' is not the size of any input")
        return Dynamic(name, minimum, maximum, tuple(places))


def _example(name: str, value: Tensor) -> Example:
    data_type(value.dtype)
    return Example(name, tuple(value.shape), value.dtype)


def _symbols(requests: Sequence[ModelExport]) -> tuple[Symbol, ...]:
    """Return the symbols, the batch first. Raises CaptureRefused if one name has two different bounds."""
    symbols: dict[str, Symbol] = {}
    for request in requests:
        for dynamic in request.dynamics:
            symbol = Symbol(dynamic.name, dynamic.minimum, dynamic.maximum)
            if symbols.setdefault(dynamic.name, symbol) != symbol:
                raise CaptureRefused(f"'{dynamic.name}' has different bounds in '{request.name}'")
    return tuple(sorted(symbols.values(), key=lambda symbol: symbol.name != BATCH))
