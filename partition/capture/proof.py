"""The requester's proof that a graph is the model: both are computed, and must agree, before anything leaves.

Forward, the gradient of every parameter, and evaluation are compared with the module as its author wrote it.
The model need not fit into memory: a parameter on meta has values only while an operator runs
(`partition.capture.lazy_tensor`), and only a sketch of each gradient is kept, its norm and its product with a
vector of signs. So a custom `autograd.Function` with a wrong backward, or an operator whose graph form
differs from eager mode, is found here and not by those who train.

Both runs draw the same: before the k-th random operator the generator is seeded by k.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, prod
from typing import Any, Protocol

import torch
from msgspec import structs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from crypto.errors import RemoteProtocolError
from partition.capture.capture import Further
from partition.capture.compare import Computed, compare, signs_of, sketch_of, tolerance_of, total_of
from partition.capture.errors import CaptureRefused, EvaluationDiffers
from partition.capture.lazy_tensor import Materialised, with_values
from partition.capture.module_state import restored
from partition.capture.origin import place_of
from partition.capture.own_backward import compared
from partition.capture.proof_inputs import Given, given, lively
from partition.capture.reduction import Reduction
from partition.capture.trees import Inputs, Labels, form_of
from partition.execute.interpret import DTYPES, Program, Results, compile_entry
from partition.execute.seeds import drawn
from partition.model.cut import cut
from partition.model.graph import EVALUATE, Entry, Graph, StageGraph
from partition.model.operators import OPERATORS
from partition.model.sizes import Sides, evaluate, shape_of

ADDITION_TOLERANCE = 1e-3
"""The relative tolerance of the losses of two halves against that of the whole: a norm by batch is seen,
rounding is not."""


class Provable(Protocol):
    """A captured model with its name."""

    @property
    def graph(self) -> Graph: ...

    @property
    def hash(self) -> bytes: ...


@dataclass(frozen=True)
class Proof:
    """The result of a comparison: its extent, and the difference found.

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
    inputs: Inputs,
    labels: Labels = (),
    *,
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, Callable[..., torch.Tensor]] | None = None,
    entries: Mapping[str, Further] | None = None,
    reduction: Reduction = "auto",
    seed: int = 0,
) -> Proof:
    """Compare a captured graph with its model: in training, in evaluation, and in its further entry points.

    Arguments are those of `capture`, but here values count: floating inputs that are all equal are replaced
    by noise, since zeros would prove little. Without a loss, gradients are those of the outputs' product with
    signs. The states of further entry points are compared too. The model is as before afterwards.

    Raises:
        CaptureRefused: the graph is not the model; the text names the first output, or the parameter nearest
            to the loss, that differs, and its module.
    """
    graph = captured.graph
    tolerance = tolerance_of(graph)
    counter = Materialised()
    with _as_it_trains(model, seed, counter):
        first = graph.entries[0]
        form, tensors = form_of(model.forward, inputs, labels, loss)
        examples = given(graph, first, form, lively(tensors, seed))
        run = _Run(model, captured, first, _forward, examples, loss, metrics or {}, signs_of(seed), seed)
        trained, error = _compare_training(run, tolerance)
        model.eval()
        run = replace(run, given=examples.enlarged())
        twin = next((entry for entry in graph.entries if entry.name == EVALUATE), None)
        if twin is not None:
            run = replace(run, entry=twin, given=replace(run.given, entry=twin))
        for when, each in (("evaluation", run), *_further_runs(run, entries or {})):
            try:
                error = max(error, _compare_evaluation(each, tolerance, when))
            except CaptureRefused as refusal:
                if twin is not None or each is not run:
                    raise
                raise EvaluationDiffers(str(refusal)) from refusal
        if loss is not None and reduction != "microbatch":
            _check_addition(replace(run, given=replace(examples, entry=run.entry)))
    return Proof(
        entries=tuple(entry.name for entry in graph.entries),
        loss=trained.numbers.get("loss", 0.0),
        outputs=len(trained.outputs),
        gradients=len(trained.gradients),
        parameters=sum(prod(shape_of(row.type, ())) for row in graph.parameters),
        error=error,
        tolerance=tolerance,
        materialised_bytes=counter.bytes_peak,
        sizes=examples.sizes,
    )


@contextmanager
def _as_it_trains(model: nn.Module, seed: int, counter: Materialised) -> Iterator[None]:
    """Give the model values and put it into training; undo all of that afterwards."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_without_fast_path())
        stack.enter_context(restored(model))
        stack.enter_context(with_values(model, seed, counter))
        if not model.training:
            model.train()
        yield


def _compare_training(run: "_Run", tolerance: float) -> tuple[Computed, float]:
    """Return what the model computes of a step, and how far the graph is from it. Raises CaptureRefused."""
    graphed = run.graphed(train=True)
    wrong: list[str] = []
    with compared(wrong):
        trained = run.eager(train=True, beside=graphed)
    error = compare(run.graph, run.entry, trained, graphed, tolerance, "training")
    if wrong:
        raise CaptureRefused("\n".join(dict.fromkeys(wrong)))
    return trained, error


def _compare_evaluation(run: "_Run", tolerance: float, when: str) -> float:
    """Return how far the graph is from the model without a step. Raises CaptureRefused."""
    graphed = run.graphed(train=False)
    eager = run.eager(train=False, beside=graphed)
    return compare(run.graph, run.entry, eager, graphed, tolerance, when)


def _further_runs(run: "_Run", entries: Mapping[str, Further]) -> Iterator[tuple[str, "_Run"]]:
    """Return what each further entry point is called in a refusal, and its run."""
    graph = run.graph
    for name, (method, inputs, *_) in entries.items():
        entry = _entry(graph, name)
        form, tensors = form_of(_signature(run.model, method), inputs, ())
        examples = given(graph, entry, form, lively(tensors, run.seed))
        call = partial(_call, method)
        yield f"'{name}'", replace(run, entry=entry, call=call, given=examples, loss=None, metrics={})


def _forward(model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    return model(*arguments, **keywords)


def _call(method: str | Callable[..., Any], model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    if isinstance(method, str):
        return getattr(model, method)(*arguments, **keywords)
    return method(model, *arguments, **keywords)


def _signature(model: nn.Module, method: str | Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = getattr(model, method) if isinstance(method, str) else partial(method, model)
    return made


def _entry(graph: Graph, name: str) -> Entry:
    try:
        return graph.entry(name)
    except KeyError:
        raise CaptureRefused(f"the graph has no entry point '{name}'") from None


# The model, with values for a while


@contextmanager
def _buffers_copied(model: nn.Module) -> Iterator[None]:
    """Undo a run's changes to buffers: batch norm counts, a cache fills."""
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
def _without_fast_path() -> Iterator[None]:
    """Disable the fused kernels by which nn.TransformerEncoder evaluates: they answer otherwise where there
    is padding."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Seeded(TorchDispatchMode):
    """Seeds the generator by k before the k-th operator that draws.

    The count of draws is kept in the generator itself, as its seed: a checkpointed region that is computed
    again puts the generator back, and draws the same again. The graph has the model's operators in the places
    `kept` (all where it is empty): an unused number is drawn in eager mode alone.
    """

    def __init__(self, seed: int, kept: Sequence[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._places = iter(kept)
        self._seed = seed
        torch.default_generator.manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            place = next(self._places, None)
            after = torch.default_generator.initial_seed() if place is None else self._seed + place
            torch.default_generator.manual_seed(after + 1)
            return drawn(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


# The two runs


@dataclass(frozen=True)
class _Run:
    """Both computations of one batch."""

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

    def eager(self, *, train: bool, beside: Computed) -> Computed:
        """Run the model as its author wrote it; a mean is taken as often as the graph `beside` counts."""
        try:
            return self._eager(train=train, beside=beside)
        except CaptureRefused:
            raise
        except Exception as error:  # a person's own code
            raise self._fails(error) from error

    def _fails(self, error: Exception) -> CaptureRefused:
        said = " ".join(str(error).split())[:300]
        where = place_of(error, self.model)
        return CaptureRefused(
            f"{where}: the model itself fails on the example inputs: {type(error).__name__}: {said}"
        )

    def _eager(self, *, train: bool, beside: Computed) -> Computed:
        made = Computed()
        with _buffers_copied(self.model), _Seeded(self.seed), torch.set_grad_enabled(train):
            positional, keywords = self.given.arguments
            output = self.call(self.model, *positional, **keywords)
            outputs = self.given.form.outputs(output)
            places = getattr(self.captured, "outputs", {}).get(self.entry.name, range(len(outputs)))
            outputs = [outputs[place] for place in places if place < len(outputs)]
            numbers: dict[str, torch.Tensor] = {}
            if self.loss is not None:
                loss = self.given.form.loss(self.loss, output, self.given.all)
                if isinstance(loss, tuple):
                    numbers["loss"], numbers["count"] = loss[0], torch.as_tensor(loss[1])
                else:
                    numbers["loss"] = self._total(loss, numbers, beside)
            labels = self.given.form.label_arguments(self.given.all)
            for name, metric in self.metrics.items():
                numbers[f"metric '{name}'"] = metric(output, *labels)
            leaves = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
            self._finish(made, outputs, numbers, leaves if train else {})
            buffers = dict(self.model.named_buffers(remove_duplicate=False))
            for row, _ in self.entry.updates:
                name = self.graph.states[row].name
                if name not in buffers:
                    raise CaptureRefused(f"the model has no buffer '{name}', which is a state of the graph")
                made.states[name] = sketch_of(buffers[name], self.signs)
            # After the backward pass: a checkpointed batch norm moves them once more there.
            for parameter in self.graph.parameters if train else ():
                if parameter.kind == "statistic" and (name := parameter.names[0]) in buffers:
                    made.states[name] = sketch_of(buffers[name], self.signs)
        return made

    def _total(self, loss: torch.Tensor, numbers: dict[str, torch.Tensor], beside: Computed) -> torch.Tensor:
        """Return the loss as one number, as the graph has it: a sum, or a mean with its count."""
        count = beside.numbers.get("count")
        if count is not None:
            numbers["count"] = torch.tensor(count)
            return loss * count
        total, mean, samples = beside.numbers["loss"], float(loss.detach()), self.given.sizes[0]
        return loss * samples if abs(total - mean * samples) < abs(total - mean) else loss

    def graphed(self, *, train: bool) -> Computed:
        """Run the graph as a stage does, uncut. Raises CaptureRefused: it cannot be computed."""
        made = Computed()
        stage = self._whole()
        sizes = self.given.sizes
        try:
            program = compile_entry(stage, self.entry.name, train=train, device=torch.device("cpu"))
            kept = getattr(self.captured, "draws", {}).get(self.entry.name, ())
            with _Seeded(self.seed, kept), torch.set_grad_enabled(train):
                states = _states(self.graph, sizes)
                rows = self._rows()
                results = program.run(
                    rows, _constants(self.graph), states,
                    self.given.tensors, self.given.labels, sizes,
                )  # fmt: skip
                numbers: dict[str, torch.Tensor] = {}
                if results.loss is not None:
                    numbers["loss"] = results.loss
                if results.count is not None:
                    numbers["count"] = results.count
                for metric, value in zip(self.entry.metrics, results.metrics, strict=True):
                    numbers[f"metric '{metric.name}'"] = value
                leaves = {
                    row.names[0]: rows[number]
                    for number, row in enumerate(self.graph.parameters)
                    if row.kind == "parameter"
                }
                self._finish(made, results.outputs, numbers, leaves if train else {})
                if train:
                    moved = _moved(program, rows, results)
                    names = {row: self.graph.parameters[row].names[0] for row in moved}
                    made.states |= {names[row]: sketch_of(moved[row], self.signs) for row in moved}
                for row, _ in self.entry.updates:
                    state = results.updates.get(row, states[row])
                    made.states[self.graph.states[row].name] = sketch_of(state, self.signs)
        except RemoteProtocolError as error:
            self._check_model()
            raise CaptureRefused(f"the graph cannot be computed: {error}") from error
        return made

    def _check_model(self) -> None:
        """Check that the model itself can be computed. Raises CaptureRefused."""
        try:
            with _buffers_copied(self.model), torch.no_grad():
                positional, keywords = self.given.arguments
                self.call(self.model, *positional, **keywords)
        except Exception as error:  # a person's own code
            raise self._fails(error) from error

    def _whole(self) -> StageGraph:
        """Return the graph as one stage, which gives the model's outputs even where only a loss counts."""
        stage = cut(self.graph, self.captured.hash, ())[0]
        share = stage.entry(self.entry.name)
        types = dict(share.types) | {value: self.entry.types[value] for value in self.entry.outputs}
        told = structs.replace(share, outputs=self.entry.outputs, types=tuple(sorted(types.items())))
        entries = tuple(told if entry is share else entry for entry in stage.entries)
        return structs.replace(stage, entries=entries)

    def _rows(self) -> dict[int, torch.Tensor]:
        """Return parameters and statistics by row. Raises CaptureRefused: a name or shape that the model
        lacks."""
        held = dict(self.model.named_buffers(remove_duplicate=False))
        held |= dict(self.model.named_parameters(remove_duplicate=False))
        rows = {}
        for number, row in enumerate(self.graph.parameters):
            tensor = held.get(row.names[0])
            if tensor is None or tuple(tensor.shape) != shape_of(row.type, ()):
                raise CaptureRefused(f"the model has no '{row.names[0]}' of shape {row.type.shape}")
            if row.kind == "parameter" and not tensor.requires_grad:
                raise CaptureRefused(f"'{row.names[0]}' is trained by the graph and frozen in the model")
            # A leaf of its own, without the hooks of the model's. A statistic moves only when a step commits;
            # a frozen parameter has no gradient on either side.
            rows[number] = tensor.detach().requires_grad_(row.kind == "parameter")
        return rows

    def _finish(
        self,
        made: Computed,
        outputs: Sequence[torch.Tensor],
        numbers: Mapping[str, torch.Tensor],
        leaves: Mapping[str, torch.Tensor],
    ) -> None:
        """Sketch the results of a run, and the gradients of its leaves."""
        made.outputs = [sketch_of(output, self.signs) for output in outputs]
        made.numbers = {name: float(number.detach()) for name, number in numbers.items()}
        if leaves:
            total = numbers["loss"] if "loss" in numbers else total_of(outputs, self.signs)
            if total is not None and total.requires_grad:
                self._backward(made, total, leaves)

    def _backward(self, made: Computed, total: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
        """Sketch gradients, each dropped as soon as it is whole."""
        hooks = []

        def keep(name: str) -> Callable[[torch.Tensor], None]:
            def hook(parameter: torch.Tensor) -> None:
                assert parameter.grad is not None
                grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                made.gradients[name] = sketch_of(grad, self.signs)
                parameter.grad = None

            return hook

        for name, leaf in leaves.items():
            hooks.append(leaf.register_post_accumulate_grad_hook(keep(name)))  # type: ignore[no-untyped-call]  # torch's
        try:
            total.backward()  # type: ignore[no-untyped-call]  # torch's own
        finally:
            for handle in hooks:
                handle.remove()


def _moved(program: Program, rows: Mapping[int, torch.Tensor], results: Results) -> dict[int, torch.Tensor]:
    """Return running statistics after this batch, by row, as torch moves them: norm after norm."""
    moved: dict[int, torch.Tensor] = {}
    for norm, pair in zip(program.norms, results.statistics, strict=True):
        for row, found in zip((norm.mean_row, norm.variance_row), pair, strict=True):
            before = moved.get(row, rows[row])
            moved[row] = (1 - norm.momentum) * before + norm.momentum * found
    return moved


def _check_addition(run: _Run) -> None:
    """Check that a batch's loss is the sum of the losses of its halves. Raises CaptureRefused."""
    whole = run.given
    parts = whole.halves()
    if parts is None:
        whole = whole.doubled()
        if whole is run.given:
            return  # the graph takes this one batch only
        parts = run.given, run.given
    totals, counts = [], []
    for each in (whole, *parts):
        numbers = replace(run, given=each).graphed(train=False).numbers
        totals.append(numbers["loss"])
        counts.append(numbers.get("count", each.sizes[0]))
    if not all(map(isfinite, totals)) or not totals[0]:
        return
    added, counted = sum(totals[1:]) / totals[0], sum(counts[1:]) / (counts[0] or 1)
    if whole.sizes != parts[0].sizes and len(set(counts)) == 1 and counts[0] > 1:
        raise CaptureRefused(
            f"the loss has a count of {counts[0]:.0f}, however large the batch is: count samples"
        )
    if abs(added - counted) <= ADDITION_TOLERANCE:
        return
    draws = any(
        OPERATORS[run.graph.operators[node.operator]].random
        and not OPERATORS[run.graph.operators[node.operator]].evaluate
        for node in run.entry.nodes
    )
    if abs(added - 2 * counted) <= ADDITION_TOLERANCE + 0.2 * draws:
        raise CaptureRefused(
            "the loss is a mean over the batch, which a step would divide a second time: return the sum, or "
            "the pair of the sum and of how many it is divided by"
        )
    if not draws:
        raise CaptureRefused(
            f"the losses of two halves of a batch add up to {added:.3f} of that of the whole, counts to "
            f"{counted:.3f}: the loss looks at the batch as a whole (or its count is another). Say "
            "reduction='microbatch' if each micro-batch shall count as it is: the batch that it looks at is "
            "then that of train.microbatch"
        )


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
