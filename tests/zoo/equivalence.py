"""A model cut into stages is compared with the same module in one process: the values must be equal.

Both run the same micro-batches with the same seeds. One side is the module as its author wrote it, with
torch.optim. The other is real `StageExecutor`s over arenas in this process, with the sums that a run makes
between them. Random operators draw the same numbers on both sides: before each of the module's random
operators, a dispatch mode seeds the generator with the id of its node in the graph.

Errors: in float64, that of every tensor relative to its largest element (or, for a tensor that is only
rounding, relative to a ten-thousandth of the largest of its kind); in float32, that of the whole vector, by
norms.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from partition.capture import Captured, capture
from partition.codecs.codec import Array, Payload, pack, typed
from partition.execute import StageExecutor
from partition.execute.seeds import drawn, seed_of
from partition.model.cut import cut, legal_positions
from partition.model.graph import Graph, GraphNode, StageGraph
from partition.model.operators import OPERATORS
from partition.model.sizes import bind
from partition.stage import (
    Applied,
    Apply,
    Backward,
    BackwardDone,
    Forward,
    Forwarded,
    Import,
    Norm,
    Normed,
    OptimizerSettings,
    Refused,
    StageDone,
    StageSpecification,
)
from partition.stage_layout import Slot, arena_bytes, parameter_layout
from tests.zoo import ZOO
from tests.zoo.case import Case, Tensors

SGD = OptimizerSettings(kind="sgd", learning_rate=0.05, momentum=0.9, weight_decay=1e-3, clip_norm=0.5)
FLOAT64_MAX = 1e-9
FLOAT32_MAX = 1e-5
_FLOOR = 1e-4
"""A tensor below this share of the largest of its kind may be only rounding, such as a bias before a norm."""


@dataclass(frozen=True)
class Trial:
    """How a model is trained on both sides. Each micro-batch of a step has `batches` samples."""

    run: bytes = b"zoo"
    dtype: torch.dtype = torch.float64
    steps: int = 3
    batches: tuple[int, ...] = (3, 2)
    optimizer: OptimizerSettings = SGD
    recompute: bool = False
    replicas: int = 1


@dataclass
class History:
    """The computation of one side. Lists have an entry per step; tensors are copies, by their first name."""

    losses: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    gradients: list[dict[str, Array]] = field(default_factory=list)
    parameters: list[dict[str, Array]] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)
    """Names of all values that training changed, which the other side must have changed too."""
    boundary_bytes: int = 0
    """The largest number of bytes that crossed one boundary for one micro-batch in the forward direction."""


@dataclass(frozen=True)
class Errors:
    """The largest error of each kind."""

    forward: float
    gradients: float
    steps: float
    evaluation: float

    @property
    def worst(self) -> float:
        return max(self.forward, self.gradients, self.steps, self.evaluation)


def captured_case(case: Case, dtype: torch.dtype) -> Captured:
    """Return the graph of a case, with its loss and metrics."""
    inputs, labels = case.data(0, case.batch, dtype)
    return capture(
        case.model(dtype),
        inputs,
        labels=labels,
        loss=case.loss,
        metrics=dict(case.metrics),
        name=case.name,
    )


@cache
def captured_small(name: str, dtype: torch.dtype) -> Captured:
    """Return the graph of a model of the zoo at the scale of tests. It is captured once for all tests,
    because it is only data.

    `dtype` has no default, because a cache treats an omitted argument and its default as two calls.
    """
    return captured_case(ZOO[name]("test"), dtype)


def stages_possible(graph: Graph) -> int:
    """Return the largest number of stages that a graph can be cut into."""
    return len(legal_positions(graph)) + 1


def random_cut(graph: Graph, name: bytes, stages: int, seed: int) -> tuple[StageGraph, ...]:
    """Return the graph cut into this many stages at random legal boundaries."""
    places = legal_positions(graph)
    return cut(graph, name, sorted(random.Random(seed).sample(places, stages - 1)))


def microbatches(case: Case, trial: Trial, step: int) -> list[tuple[Tensors, Tensors]]:
    """Return the data of a step; evaluation counts as the step after the last."""
    seeds = range(1_000 * step, 1_000 * step + len(trial.batches))
    return [case.data(seed, size, trial.dtype) for seed, size in zip(seeds, trial.batches, strict=True)]


# One process


def draws(node: GraphNode, operators: Sequence[str]) -> bool:
    """Return whether this node draws random numbers in training."""
    name = operators[node.operator]
    if not OPERATORS[name].random:
        return False
    place = {"aten.dropout.default": 1, "aten.scaled_dot_product_attention.default": 4}.get(name)
    if place is None:
        return True
    rate = node.arguments[place] if place < len(node.arguments) else 0.0
    return isinstance(rate, float) and rate > 0


class SeededAsGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]  # so in torch
    """A dispatch mode that seeds torch's generator before the k-th random operator for the k-th random node
    of the graph.
    """

    def __init__(self, nodes: Sequence[int], run: bytes, step: int, microbatch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so in torch
        self._nodes = iter(nodes)
        self._at = (run, step, microbatch)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs or {}):
            torch.default_generator.manual_seed(seed_of(*self._at, "train", next(self._nodes)))
            return drawn(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def left(self) -> int:
        """Return the number of random nodes that the module did not reach."""
        return sum(1 for _ in self._nodes)


def _drops_nothing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the node is a dropout, also of attention, with a rate of zero: such a node draws
    nothing."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("p", "dropout_p") and "dropout" in f"{func}.{argument.name}":
            rate = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(rate == 0)
    return False


def run_module(case: Case, graph: Graph, trial: Trial) -> History:
    """Train the module itself."""
    model = case.model(trial.dtype)
    entry = graph.entry("train")
    random_nodes = [node.id for node in entry.nodes if draws(node, graph.operators)]
    optimizer = _optimizer(trial.optimizer, model)
    history = History()
    first = _values(model)
    for step in range(trial.steps):
        total, samples = [0.0] * (1 + len(case.metrics)), 0
        for number, (inputs, labels) in enumerate(microbatches(case, trial, step)):
            mode = SeededAsGraph(random_nodes, trial.run, step, number)
            with mode:
                output = model(*inputs)
                loss, count = case.sums(output, inputs, labels)
            loss.backward()  # type: ignore[no-untyped-call]  # so in torch
            assert mode.left() == 0, "the graph has random nodes that the module lacks"
            sums = [loss.detach(), *(metric(output, *labels) for metric in case.metrics.values())]
            total = [a + float(b.detach()) for a, b in zip(total, sums, strict=True)]
            samples += count
        history.losses.append(total[0])
        history.metrics += total[1:]
        history.samples.append(samples)
        history.gradients.append(_gradients(model))
        _step(model, optimizer, samples, trial.optimizer.clip_norm)
        history.parameters.append(_values(model))
    last = history.parameters[-1]
    history.moved = {name for name, value in last.items() if not np.array_equal(value, first[name])}
    model.eval()
    with torch.no_grad():
        for inputs, labels in microbatches(case, trial, trial.steps):
            output = model(*inputs)
            history.evaluated.append(float(case.sums(output, inputs, labels)[0]))
            history.evaluated += [float(metric(output, *labels)) for metric in case.metrics.values()]
    return history


def _optimizer(settings: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.kind == "sgd":
        return torch.optim.SGD(
            trained, settings.learning_rate, settings.momentum, weight_decay=settings.weight_decay
        )
    kind = torch.optim.AdamW if settings.kind == "adamw" else torch.optim.Adam
    return kind(
        trained, settings.learning_rate, settings.betas, settings.epsilon, weight_decay=settings.weight_decay
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, samples: int, clip_norm: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= samples
    if clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    # Zeros instead of None: a stage, too, keeps momentum for a parameter that one step does not use.
    optimizer.zero_grad(set_to_none=False)


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict(keep_vars=True))


def _values(model: nn.Module) -> dict[str, Array]:
    """Return copies of parameters and buffers, without the counts of micro-batches, which no stage has."""
    return {
        name: _numpy(value)
        for name, value in _named(model).items()
        if not name.endswith("num_batches_tracked")
    }


def _gradients(model: nn.Module) -> dict[str, Array]:
    return {name: _numpy(value.grad) for name, value in _named(model).items() if value.grad is not None}


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().numpy().copy()


# Stages


class Chain:
    """All stages, one executor for each, in this process, as if each had one replica."""

    def __init__(self, stages: Sequence[StageGraph], sizes_max: Sequence[int], trial: Trial) -> None:
        self.specifications = [
            StageSpecification(
                trial.run,
                stage,
                tuple(sizes_max),
                microbatches=len(trial.batches),
                optimizer=trial.optimizer,
                recompute=trial.recompute,
            )
            for stage in stages
        ]
        self.layouts = [parameter_layout(specification) for specification in self.specifications]
        self.arenas: list[dict[str, Any]] = []
        self.executors = []
        for specification in self.specifications:
            sizes = arena_bytes(specification)
            # numpy accepts no empty buffer, and the executor only this size.
            memory = {name: bytearray(size) for name, size in sizes.items()}
            self.arenas.append(memory)
            views = {name: memoryview(memory[name])[:size] for name, size in sizes.items()}
            self.executors.append(StageExecutor(specification, views))
        self.boundary_bytes = 0

    def ask(self, stage: int, request: Any, kind: type[Any]) -> Any:
        """Return the stage's answer. Raises AssertionError if it refused."""
        reply = self.executors[stage].handle(request)
        assert not isinstance(reply, Refused), f"stage {stage}: {reply.reason}"
        assert isinstance(reply, kind), reply
        return reply

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill every stage's parameters and named constants from a state dict."""
        for stage, specification in enumerate(self.specifications):
            names = [row.names[0] for row in specification.graph.parameters]
            names += [row.names[0] for row in specification.graph.constants if row.names]
            data = {name: tensors[name].detach().clone().contiguous() for name in names if name in tensors}
            self.ask(stage, Import(safetensors.torch.save(data)), StageDone)

    def vector(self, stage: int, arena: str) -> Array:
        """Return an arena as an array; writing to the array changes the arena."""
        specification = self.specifications[stage]
        size = arena_bytes(specification)[arena]
        return np.frombuffer(self.arenas[stage][arena], specification.dtype, size // specification.item_bytes)

    def slots(self, arena: str, *, kinds: Sequence[str]) -> Iterator[tuple[Slot, Array]]:
        """Yield each parameter of these kinds in an arena, stage by stage, in its shape."""
        for stage, layout in enumerate(self.layouts):
            vector = self.vector(stage, arena)
            for slot in layout:
                if slot.parameter.kind in kinds:
                    yield slot, vector[slot.offset : slot.offset + slot.size].reshape(slot.shape)

    def forward(self, step: int, number: int, inputs: Payload, labels: Payload, *, train: bool) -> Forwarded:
        """Send one micro-batch through all stages; return the last one's answer."""
        bundle: Payload | None = inputs
        last = len(self.executors) - 1
        for stage in range(last + 1):
            assert bundle is not None
            request = Forward(step, number, train, bundle, labels if stage == last else None)
            reply: Forwarded = self.ask(stage, request, Forwarded)
            bundle = reply.output
            if stage < last:
                assert bundle is not None
                self.boundary_bytes = max(self.boundary_bytes, bundle.size_bytes)
        return reply

    def backward(self, step: int, number: int, gradient: Payload | None) -> None:
        """Send one micro-batch's gradients from the last stage's answer back to the first stage with
        parameters.
        """
        for stage in range(len(self.executors) - 2, -1, -1):
            if not self.specifications[stage].graph.entry("train").backward_outputs:
                break
            assert gradient is not None
            reply: BackwardDone = self.ask(stage, Backward(step, number, gradient), BackwardDone)
            gradient = reply.gradient
        assert gradient is None, "a gradient that no stage expects"


def sizes_of(graph: Graph, data: tuple[Tensors, Tensors]) -> tuple[int, ...]:
    """Return the values of the graph's symbols for this data."""
    entry = graph.entry("train")
    return bind(
        graph.symbols,
        graph.expressions,
        [graph.types[port.type] for port in (*entry.inputs, *entry.labels)],
        [tuple(tensor.shape) for tensor in (*data[0], *data[1])],
    )


def payloads(graph: Graph, data: tuple[Tensors, Tensors]) -> tuple[Payload, Payload]:
    """Return inputs and labels as bundles."""
    sizes = sizes_of(graph, data)
    first, second = (pack([typed(tensor.numpy()) for tensor in part], "raw", sizes) for part in data)
    return first, second


def run_stages(case: Case, graph: Graph, stages: Sequence[StageGraph], trial: Trial) -> History:
    """Train the stages; micro-batches are given to their replicas in turn."""
    sizes_max = sizes_of(graph, case.data(0, max(trial.batches), trial.dtype))
    chains = [Chain(stages, sizes_max, trial) for _ in range(trial.replicas)]
    first = {name: value.detach() for name, value in _named(case.model(trial.dtype)).items()}
    for chain in chains:
        chain.load(first)
    history = History()
    for step in range(trial.steps):
        total, samples = [0.0] * (1 + len(case.metrics)), 0
        backward: list[tuple[Chain, int, Payload | None]] = []
        for number, data in enumerate(microbatches(case, trial, step)):
            chain = chains[number % len(chains)]
            reply = chain.forward(step, number, *payloads(graph, data), train=True)
            backward.append((chain, number, reply.gradient))
            total = [a + b for a, b in zip(total, (reply.loss, *reply.metrics), strict=True)]
            samples += reply.samples
        for chain, number, gradient in backward:
            chain.backward(step, number, gradient)
        history.losses.append(total[0])
        history.metrics += total[1:]
        history.samples.append(samples)
        history.gradients.append(_reduce(chains))
        _apply(chains, step, samples, trial.optimizer)
        history.parameters.append(_by_name(chains[0], "parameters", ("parameter", "frozen", "statistic")))
    for number, data in enumerate(microbatches(case, trial, trial.steps)):
        reply = chains[0].forward(trial.steps, number, *payloads(graph, data), train=False)
        history.evaluated += [reply.loss, *reply.metrics]
    history.boundary_bytes = max(chain.boundary_bytes for chain in chains)
    return history


def _reduce(chains: Sequence[Chain]) -> dict[str, Array]:
    """Sum gradients over replicas, and over stages in which they are tied, into every chain's totals."""
    for stage in range(len(chains[0].executors)):
        total = sum(chain.vector(stage, "gradients") for chain in chains)
        for chain in chains:
            chain.vector(stage, "totals")[:] = total
    for chain in chains:
        tied: dict[int, list[Array]] = {}
        for slot, values in chain.slots("totals", kinds=("parameter", "statistic")):
            if slot.is_tied:
                tied.setdefault(slot.row, []).append(values)
        for places in tied.values():
            total = sum(places)
            for place in places:
                place[...] = total
    return _by_name(chains[0], "totals", ("parameter",))


def _apply(chains: Sequence[Chain], step: int, samples: int, optimizer: OptimizerSettings) -> None:
    squared_norm: float | None = None
    if optimizer.clip_norm:
        asked = [
            chains[0].ask(stage, Norm(), Normed).squared_norm for stage in range(len(chains[0].executors))
        ]
        squared_norm = math.fsum(asked)
    for stage in range(len(chains[0].executors)):
        digests = {chain.ask(stage, Apply(step, samples, squared_norm), Applied).digest for chain in chains}
        assert len(digests) == 1, f"replicas of stage {stage} differ"


def _by_name(chain: Chain, arena: str, kinds: Sequence[str]) -> dict[str, Array]:
    """Return copies under every name. Tensors of several stages must be equal."""
    found: dict[str, Array] = {}
    for slot, values in chain.slots(arena, kinds=kinds):
        if slot.name in found:
            assert np.array_equal(found[slot.name], values), f"{slot.name} differs between stages"
        for name in slot.parameter.names:
            found[name] = values.copy()
    return found


# The comparison


def errors(found: History, expected: History, dtype: torch.dtype) -> Errors:
    """Return the differences between the stages' values and the module's.

    Raises AssertionError if the samples differ, or if one side lacks a gradient or parameter.
    """
    assert found.samples == expected.samples, (found.samples, expected.samples)
    assert expected.moved <= found.parameters[-1].keys(), expected.moved - found.parameters[-1].keys()
    distance = _each if dtype == torch.float64 else _whole
    sums = [{"": np.array([*side.losses, *side.metrics])} for side in (found, expected)]
    ends = [{"": np.array(side.evaluated)} for side in (found, expected)]
    gradients = zip(found.gradients, expected.gradients, strict=True)
    parameters = zip(found.parameters, expected.parameters, strict=True)
    return Errors(
        forward=_each(sums[0], sums[1]),
        gradients=max(distance(a, _like(a, b)) for a, b in gradients),
        steps=max(distance(a, _like(a, b)) for a, b in parameters),
        evaluation=_each(ends[0], ends[1]),
    )


def _like(found: dict[str, Array], expected: dict[str, Array]) -> dict[str, Array]:
    """Return the expected tensors for the found names. A gradient that torch did not make is zero."""
    return {name: expected.get(name, np.zeros_like(value)) for name, value in found.items()}


def _each(found: dict[str, Array], expected: dict[str, Array]) -> float:
    largest = max((float(np.abs(value).max(initial=0)) for value in expected.values()), default=0.0)
    worst = 0.0
    for name, value in expected.items():
        scale = max(float(np.abs(value).max(initial=0)), _FLOOR * largest) or 1.0
        difference = float(np.abs(found[name] - value).max(initial=0)) / scale
        worst = max(worst, difference) if difference == difference else math.inf
    return worst


def _whole(found: dict[str, Array], expected: dict[str, Array]) -> float:
    difference = math.sqrt(sum(float(np.square(found[name] - expected[name]).sum()) for name in expected))
    return difference / (math.sqrt(sum(float(np.square(value).sum()) for value in expected.values())) or 1.0)
