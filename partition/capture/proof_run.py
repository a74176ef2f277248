"""The two computations of one batch that a proof compares: the model's own, and its graph's.

Both make the same draws: before the k-th random operator the generator is seeded with k.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from msgspec import structs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from crypto.errors import RemoteProtocolError
from partition.capture.compare import Computed, sketch_of, total_of
from partition.capture.errors import CaptureRefused
from partition.capture.origin import place_of
from partition.capture.proof_inputs import Given
from partition.execute.interpret import DTYPES, Program, Results, compile_entry
from partition.execute.seeds import drawn
from partition.model.cut import cut
from partition.model.graph import Entry, Graph, StageGraph
from partition.model.sizes import Sides, evaluate, shape_of


class Provable(Protocol):
    """A captured model with its name."""

    @property
    def graph(self) -> Graph: ...

    @property
    def hash(self) -> bytes: ...


@contextmanager
def _buffers_copied(model: nn.Module) -> Iterator[None]:
    """Undo a run's changes to buffers, such as batch norm's counters or a cache."""
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


class _Seeded(TorchDispatchMode):
    """Seeds the generator with k before the k-th operator that draws.

    The count of draws is kept in the generator itself, as its seed: a checkpointed region that is computed
    again restores the generator, and makes the same draws again. The graph has the model's operators at the
    positions `kept` (all, if it is empty); unused random numbers are drawn only in eager mode.
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


@dataclass(frozen=True)
class ProofRun:
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
        """Run the model as its author wrote it. A mean is multiplied by the count of the graph's run
        `beside`."""
        try:
            return self._eager(train=train, beside=beside)
        except CaptureRefused:
            raise
        except Exception as error:  # the user's own code
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
            # After the backward pass, because a checkpointed batch norm updates its statistics once more
            # there.
            for parameter in self.graph.parameters if train else ():
                if parameter.kind == "statistic" and (name := parameter.names[0]) in buffers:
                    made.states[name] = sketch_of(buffers[name], self.signs)
        return made

    def _total(self, loss: torch.Tensor, numbers: dict[str, torch.Tensor], beside: Computed) -> torch.Tensor:
        """Return the loss as one number in the graph's form: a sum, or a mean times its count."""
        count = beside.numbers.get("count")
        if count is not None:
            numbers["count"] = torch.tensor(count)
            return loss * count
        total, mean, samples = beside.numbers["loss"], float(loss.detach()), self.given.sizes[0]
        return loss * samples if abs(total - mean * samples) < abs(total - mean) else loss

    def graphed(self, *, train: bool) -> Computed:
        """Run the uncut graph like a stage. Raises CaptureRefused if it cannot be computed."""
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
        except Exception as error:  # the user's own code
            raise self._fails(error) from error

    def _whole(self) -> StageGraph:
        """Return the graph as one stage that returns the model's outputs even if only a loss is needed."""
        stage = cut(self.graph, self.captured.hash, ())[0]
        share = stage.entry(self.entry.name)
        types = dict(share.types) | {value: self.entry.types[value] for value in self.entry.outputs}
        told = structs.replace(share, outputs=self.entry.outputs, types=tuple(sorted(types.items())))
        entries = tuple(told if entry is share else entry for entry in stage.entries)
        return structs.replace(stage, entries=entries)

    def _rows(self) -> dict[int, torch.Tensor]:
        """Return parameters and statistics by row. Raises CaptureRefused if the model lacks a name or
        shape."""
        held = dict(self.model.named_buffers(remove_duplicate=False))
        held |= dict(self.model.named_parameters(remove_duplicate=False))
        rows = {}
        for number, row in enumerate(self.graph.parameters):
            tensor = held.get(row.names[0])
            if tensor is None or tuple(tensor.shape) != shape_of(row.type, ()):
                raise CaptureRefused(f"the model has no '{row.names[0]}' of shape {row.type.shape}")
            if row.kind == "parameter" and not tensor.requires_grad:
                raise CaptureRefused(f"the graph trains '{row.names[0]}', but it is frozen in the model")
            # A separate leaf, without the hooks of the model's. A statistic is updated only when a step
            # commits; a frozen parameter has no gradient on either side.
            rows[number] = tensor.detach().requires_grad_(row.kind == "parameter")
        return rows

    def _finish(
        self,
        made: Computed,
        outputs: Sequence[torch.Tensor],
        numbers: Mapping[str, torch.Tensor],
        leaves: Mapping[str, torch.Tensor],
    ) -> None:
        """Compute sketches of a run's results and of its leaves' gradients."""
        made.outputs = [sketch_of(output, self.signs) for output in outputs]
        made.numbers = {name: float(number.detach()) for name, number in numbers.items()}
        if leaves:
            total = numbers["loss"] if "loss" in numbers else total_of(outputs, self.signs)
            if total is not None and total.requires_grad:
                self._backward(made, total, leaves)

    def _backward(self, made: Computed, total: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
        """Compute sketches of the gradients, and drop each gradient as soon as it is complete."""
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
    """Return the running statistics after this batch, by row, updated norm after norm as in torch."""
    moved: dict[int, torch.Tensor] = {}
    for norm, pair in zip(program.norms, results.statistics, strict=True):
        for row, found in zip((norm.mean_row, norm.variance_row), pair, strict=True):
            before = moved.get(row, rows[row])
            moved[row] = (1 - norm.momentum) * before + norm.momentum * found
    return moved


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
