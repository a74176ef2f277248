"""The requester's proof that a graph is the model: both are computed, and must agree, before anything leaves.

Forward, the gradient of every parameter, and evaluation are compared with the module as its author wrote it.
Nobody needs to hold the model: a parameter on meta has values only while an operator runs
(`partition.capture.lazy`), and of a gradient only a sketch is kept, its norm and its product with a vector of
signs. It is for this that a custom `autograd.Function` with a wrong backward, or an operator whose graph form
differs from what eager does, is found here and not by those who train.

Both runs draw the same: before the k-th random operator the generator is seeded by k.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from msgspec import structs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from crypto.errors import RemoteProtocolError
from partition.capture.agreement import Computed, compare, signs_of, sketch_of, tolerance_of, total_of
from partition.capture.capture import Further
from partition.capture.given import Given
from partition.capture.lazy import Materialised, with_values
from partition.capture.refused import CaptureRefused
from partition.capture.whole import tensors_of
from partition.execute.interpret import DTYPES, compile_entry
from partition.execute.random import drawn
from partition.model.cut import cut
from partition.model.graph import Entry, Graph, StageGraph
from partition.model.sizes import Sides, evaluate, shape_of


class Provable(Protocol):
    """What `capture` gives."""

    @property
    def graph(self) -> Graph: ...

    @property
    def hash(self) -> bytes: ...


@dataclass(frozen=True)
class Proof:
    """What was compared, and how near it came.

    `entries` are the entry points, the first of them in training and in evaluation; the other numbers are of
    its training. `error` is the largest difference of all, relative as `tolerance` is. `materialised_bytes`
    is the most that parameters without memory had at once; 0 if the model is held for real. `sizes` are those
    of the training run; evaluation takes a batch of one more where the graph allows.
    """

    entries: tuple[str, ...]
    loss: float
    outputs: int
    gradients: int
    parameters: int
    error: float
    tolerance: float
    materialised_bytes: int
    sizes: tuple[int, ...]


def prove(
    model: nn.Module,
    captured: Provable,
    inputs: Sequence[Any] | Mapping[str, Any],
    labels: Sequence[torch.Tensor] = (),
    *,
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, Callable[..., torch.Tensor]] | None = None,
    entries: Mapping[str, Further] | None = None,
    seed: int = 0,
) -> Proof:
    """Compare a captured graph with its model: in training, in evaluation, and in its further entry points.

    Arguments are those of `capture`, but here values count: floating inputs that are all equal are replaced
    by noise, since zeros would prove little. Without a loss, gradients are those of the outputs' product with
    signs. Of a further entry point the states are compared too. The model is as before afterwards.

    Raises:
        CaptureRefused: the graph is not the model; the text names the first output, or the parameter nearest
            to the loss, that differs, and its module.
    """
    graph = captured.graph
    tolerance = tolerance_of(graph)
    counter = Materialised()
    error = 0.0
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_without_fast_path())
        stack.enter_context(_modes_kept(model))
        stack.enter_context(with_values(model, seed, counter))
        if not model.training:
            model.train()
        first = graph.entries[0]
        given = Given(graph, first, inputs, labels, seed)
        run = _Run(model, captured, first, _forward, given, loss, metrics or {}, signs_of(seed), seed)
        trained = run.eager(train=True)
        error = compare(graph, first, trained, run.graphed(train=True), tolerance, "training")
        model.eval()
        run = replace(run, given=given.enlarged())
        pairs = [("evaluation", run)]
        for name, (method, examples, *_) in (entries or {}).items():
            entry = _entry(graph, name)
            example = Given(graph, entry, examples, (), seed)
            call = partial(_call, method)
            further = replace(run, entry=entry, call=call, given=example, loss=None, metrics={})
            pairs.append((f"'{name}'", further))
        for when, each in pairs:
            results = each.eager(train=False), each.graphed(train=False)
            error = max(error, compare(graph, each.entry, *results, tolerance, when))
    return Proof(
        entries=tuple(entry.name for entry in (first, *(each.entry for _, each in pairs[1:]))),
        loss=trained.numbers.get("loss", 0.0),
        outputs=len(trained.outputs),
        gradients=len(trained.gradients),
        parameters=sum(prod(shape_of(row.type, ())) for row in graph.parameters),
        error=error,
        tolerance=tolerance,
        materialised_bytes=counter.bytes_peak,
        sizes=given.sizes,
    )


def _forward(model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    return model(*arguments, **keywords)


def _call(method: str | Callable[..., Any], model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    if isinstance(method, str):
        return getattr(model, method)(*arguments, **keywords)
    return method(model, *arguments, **keywords)


def _entry(graph: Graph, name: str) -> Entry:
    try:
        return graph.entry(name)
    except KeyError:
        raise CaptureRefused(f"the graph has no entry point '{name}'") from None


# The model, with values for a while


@contextmanager
def _buffers_copied(model: nn.Module) -> Iterator[None]:
    """What a run does to buffers is forgotten: batch norm counts, a cache fills."""
    places = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies: dict[int, torch.Tensor] = {}
    try:
        for module, name, buffer in places:
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.clone()
            module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in places:
            module._buffers[name] = buffer


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """nn.TransformerEncoder evaluates by fused kernels that answer otherwise where there is padding."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Seeded(TorchDispatchMode):
    """Before the k-th operator that draws, the generator is seeded by k."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._seed = seed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._seed += 1
            torch.default_generator.manual_seed(self._seed)
            return drawn(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


# The two runs


@dataclass(frozen=True)
class _Run:
    """Both ways through one batch."""

    model: nn.Module
    captured: Provable
    entry: Entry
    call: Callable[..., Any]
    given: Given
    loss: Callable[..., Any] | None
    metrics: Mapping[str, Callable[..., torch.Tensor]]
    signs: torch.Tensor
    seed: int

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    def eager(self, *, train: bool) -> Computed:
        """As the model's author wrote it."""
        made = Computed()
        with _buffers_copied(self.model), _Seeded(self.seed), torch.set_grad_enabled(train):
            output = self.call(self.model, *self.given.positional, **self.given.keywords)
            outputs = list(tensors_of(output))
            numbers: dict[str, torch.Tensor] = {}
            if self.loss is not None:
                loss = self.loss(output, *self.given.labels)
                if isinstance(loss, tuple):
                    numbers["loss"], numbers["count"] = loss[0], torch.as_tensor(loss[1])
                else:
                    numbers["loss"] = loss
            for name, metric in self.metrics.items():
                numbers[f"metric '{name}'"] = metric(output, *self.given.labels)
            self._finish(made, outputs, numbers, train)
            buffers = dict(self.model.named_buffers(remove_duplicate=False))
            for row, _ in self.entry.updates:
                name = self.graph.states[row].name
                if name not in buffers:
                    raise CaptureRefused(f"the model has no buffer '{name}', which is a state of the graph")
                made.states[name] = sketch_of(buffers[name], self.signs)
        return made

    def graphed(self, *, train: bool) -> Computed:
        """As a stage computes the graph, uncut. Raises CaptureRefused: it cannot be computed."""
        made = Computed()
        stage = self._whole()
        sizes = self.given.sizes
        try:
            program = compile_entry(stage, self.entry.name, train=train, device=torch.device("cpu"))
            with _Seeded(self.seed), torch.set_grad_enabled(train):
                states = _states(self.graph, sizes)
                results = program.run(
                    self._rows(), _constants(self.graph), states,
                    self.given.tensors, self.given.labels, sizes,
                )  # fmt: skip
                numbers: dict[str, torch.Tensor] = {}
                if results.loss is not None:
                    numbers["loss"] = results.loss
                if results.count is not None:
                    numbers["count"] = results.count
                for metric, value in zip(self.entry.metrics, results.metrics, strict=True):
                    numbers[f"metric '{metric.name}'"] = value
                self._finish(made, results.outputs, numbers, train)
                for row, _ in self.entry.updates:
                    state = results.updates.get(row, states[row])
                    made.states[self.graph.states[row].name] = sketch_of(state, self.signs)
        except RemoteProtocolError as error:
            raise CaptureRefused(f"the graph cannot be computed: {error}") from error
        return made

    def _whole(self) -> StageGraph:
        """The graph as one stage, which gives the model's outputs even where a loss is all that counts."""
        stage = cut(self.graph, self.captured.hash, ())[0]
        share = stage.entry(self.entry.name)
        types = dict(share.types) | {value: self.entry.types[value] for value in self.entry.outputs}
        told = structs.replace(share, outputs=self.entry.outputs, types=tuple(sorted(types.items())))
        entries = tuple(told if entry is share else entry for entry in stage.entries)
        return structs.replace(stage, entries=entries)

    def _rows(self) -> dict[int, torch.Tensor]:
        """Parameters and statistics by row. Raises CaptureRefused: a name or shape that the model has not."""
        held = dict(self.model.named_buffers(remove_duplicate=False))
        held |= dict(self.model.named_parameters(remove_duplicate=False))
        rows = {}
        for number, row in enumerate(self.graph.parameters):
            tensor = held.get(row.names[0])
            if tensor is None or tuple(tensor.shape) != shape_of(row.type, ()):
                raise CaptureRefused(f"the model has no '{row.names[0]}' of shape {row.type.shape}")
            if row.kind == "parameter" and not tensor.requires_grad:
                raise CaptureRefused(f"'{row.names[0]}' is trained by the graph and frozen in the model")
            # A statistic moves only when a step commits; a frozen parameter has no gradient on either side.
            rows[number] = tensor if row.kind == "parameter" else tensor.detach()
        return rows

    def _finish(
        self,
        made: Computed,
        outputs: Sequence[torch.Tensor],
        numbers: Mapping[str, torch.Tensor],
        train: bool,
    ) -> None:
        made.outputs = [sketch_of(output, self.signs) for output in outputs]
        made.numbers = {name: float(number.detach()) for name, number in numbers.items()}
        if train:
            total = numbers["loss"] if "loss" in numbers else total_of(outputs, self.signs)
            if total is not None and total.requires_grad:
                self._backward(made, total)

    def _backward(self, made: Computed, total: torch.Tensor) -> None:
        """Gradients as sketches, each dropped as soon as it is whole."""
        hooks = []

        def keep(name: str) -> Callable[[torch.Tensor], None]:
            def hook(parameter: torch.Tensor) -> None:
                assert parameter.grad is not None
                made.gradients[name] = sketch_of(parameter.grad, self.signs)
                parameter.grad = None

            return hook

        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                hook = keep(name)
                hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]  # torch's
        try:
            total.backward()  # type: ignore[no-untyped-call]  # torch's own
        finally:
            for handle in hooks:
                handle.remove()


def _constants(graph: Graph) -> dict[int, torch.Tensor]:
    made = {}
    for row, constant in enumerate(graph.constants):
        dtype, shape = DTYPES[constant.type.dtype], shape_of(constant.type, ())
        if not prod(shape):
            made[row] = torch.empty(shape, dtype=dtype)
        else:
            made[row] = torch.frombuffer(bytearray(constant.data), dtype=dtype).view(shape)
    return made


def _states(graph: Graph, sizes: Sides) -> dict[int, torch.Tensor]:
    values = evaluate(graph.expressions, sizes)
    return {
        row: torch.zeros(shape_of(state.type, values), dtype=DTYPES[state.type.dtype])
        for row, state in enumerate(graph.states)
    }
