"""The closure interpreter: a stage's part of an entry point as a list of Python closures over torch.

No source code is generated from a graph, and no name from a peer is looked up in torch
(`partition.execute.closures`). Compiling gives every value, parameter, size and plain argument a place in one
flat list. Each node becomes a closure that picks its arguments by index, calls the operator, and stores the
result. Arguments that depend on sizes alone are evaluated once for each new set of sizes; a list argument is
rebuilt before its node only if it contains tensors. A value is dropped right after its last use, so that only
autograd decides what stays in memory.

Nothing that the stage keeps is ever written: batch norm in training gets fresh buffers for the statistics of
this micro-batch, which the caller adds up. The exception is a state that no later node reads (`_in_place`).

Tensors only have to work with torch's operators, so the interpreter also runs on fake and meta tensors, and
on subclasses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.execute.alias import writable_in_place
from partition.execute.closures import (
    CALLS,
    SEED,
    STATISTICS,
    Call,
    Step,
    calling,
    calling_by_name,
    counting,
    seeded,
)
from partition.execute.products import Products
from partition.execute.seeds import seeder
from partition.model.graph import (
    SERVE,
    Argument,
    ConstantValue,
    DataType,
    FormatName,
    GraphNode,
    Item,
    Items,
    ParameterValue,
    Size,
    StageEntry,
    StageGraph,
    StateValue,
    TypeName,
    Value,
)
from partition.model.head import read_values
from partition.model.operators import BATCH_NORM, OPERATORS, Operator
from partition.model.sizes import evaluate

DTYPES: Mapping[DataType, torch.dtype] = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "int64": torch.int64,
        "int32": torch.int32,
        "int16": torch.int16,
        "int8": torch.int8,
        "uint8": torch.uint8,
        "bool": torch.bool,
        "complex64": torch.complex64,
        "complex128": torch.complex128,
    }
)
FORMATS = {"contiguous": torch.contiguous_format, "preserve": torch.preserve_format}

_INSTANCE_NORM = "aten.instance_norm.default"


@dataclass(frozen=True)
class CountedNorm:
    """A batch norm whose statistics are counted: the rows of its mean and variance, and its order.

    `ordinal` is its position among the `uses` of these statistics in one micro-batch.
    """

    mean_row: int
    variance_row: int
    momentum: float
    ordinal: int
    uses: int


@dataclass(frozen=True)
class Results:
    """The results of one run. `statistics` has the mean and unbiased variance for each of `Program.norms`."""

    outputs: list[torch.Tensor]
    loss: torch.Tensor | None
    count: torch.Tensor | None
    metrics: list[torch.Tensor]
    updates: dict[int, torch.Tensor]
    statistics: list[tuple[torch.Tensor, torch.Tensor]]
    kept: list[torch.Tensor] = field(default_factory=list)


class LabelOutOfRange(RemoteProtocolError):
    """An index among the inputs or labels is out of range."""


class Program:
    """One entry point of a stage, compiled by `compile_entry`. It keeps nothing from one run to the next."""

    def __init__(self, compiler: "_Compiler") -> None:
        entry = compiler.entry
        self.norms: tuple[CountedNorm, ...] = tuple(compiler.norms)
        self.in_place: tuple[int, ...] = compiler.in_place
        """Rows of states that `run` changes in place; they are not among the updates."""
        self.uses_states: bool = (
            bool(self.in_place)
            or any(kind is StateValue for kind, _ in compiler.places)
            or bool(entry.updates)
        )
        self._compiler = compiler
        self._steps = compiler.living_steps()
        self._names = compiler.names
        self._ports = compiler.ports
        self._template = compiler.template
        self._sizes: tuple[int, ...] | None = None
        kinds = (ParameterValue, ConstantValue, StateValue)
        self._tables = [
            [(index, key[1]) for key, index in compiler.places.items() if key[0] is kind] for kind in kinds
        ]
        self._outputs = [compiler.value(number) for number in entry.outputs]
        self._metrics = [compiler.value(metric.value) for metric in entry.metrics]
        self._kept = [compiler.value(number) for number in compiler.kept]
        self._loss = None if entry.loss is None else compiler.value(entry.loss)
        self._count = None if entry.count is None else compiler.value(entry.count)
        self._updates = [
            (row, compiler.value(number)) for row, number in entry.updates if row not in self.in_place
        ]

    def run(
        self,
        parameters: Mapping[int, torch.Tensor],
        constants: Mapping[int, torch.Tensor],
        states: Mapping[int, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        sizes: Sequence[int],
        seed: Callable[[int], int] | None = None,
    ) -> Results:
        """Compute the entry point once, under the caller's grad mode and autocast.

        `parameters`, `constants` and `states` are keyed by row of the graph's tables, `sizes` are the values
        of its symbols. `seed` returns the seed of a random operator for its node's id; with None the
        generators are not seeded.

        Raises:
            LabelOutOfRange: an integer is out of range for the operator that uses it as an index.
            RemoteProtocolError: the expressions do not accept the sizes, or an operator raised.
        """
        self._fit(tuple(sizes))
        values = self._template.copy()
        values[SEED] = seed
        statistics: list[tuple[torch.Tensor, torch.Tensor]] = []
        values[STATISTICS] = statistics
        for places, tensors in zip(self._tables, (parameters, constants, states), strict=True):
            for index, row in places:
                values[index] = tensors[row]
        if len(inputs) + len(labels) != len(self._ports):
            raise LocalProtocolError(
                f"{len(inputs)} inputs and {len(labels)} labels, but {len(self._ports)} are needed"
            )
        for index, tensor in zip(self._ports, (*inputs, *labels), strict=True):
            values[index] = tensor
        self._walk(values)
        return Results(
            [values[index] for index in self._outputs],
            None if self._loss is None else values[self._loss],
            None if self._count is None else values[self._count],
            [values[index] for index in self._metrics],
            {row: values[index] for row, index in self._updates},
            statistics,
            [values[index] for index in self._kept],
        )

    def _walk(self, values: list[Any]) -> None:
        number = 0
        try:
            for number, (step, dead) in enumerate(self._steps):  # noqa: B007  # for the one that raises
                step(values)
                for index in dead:
                    values[index] = None
        # Torch's exceptions if arguments do not fit together, or if memory runs out.
        except (IndexError, RuntimeError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
            reason = str(error).strip().split("\n")[0]
            kind = LabelOutOfRange if isinstance(error, IndexError) else RemoteProtocolError
            raise kind(f"{self._names[number]}: {reason}") from None

    def _fit(self, sizes: tuple[int, ...]) -> None:
        """Write the arguments that depend on sizes alone into the template."""
        if sizes == self._sizes:
            return
        rows = evaluate(self._compiler.graph.expressions, sizes)
        for index, row in self._compiler.sized:
            self._template[index] = rows[row]
        for index, items in self._compiler.sized_lists:
            self._template[index] = [rows[item.row] if isinstance(item, Size) else item for item in items]
        self._sizes = sizes


def compile_entry(
    graph: StageGraph, entry: str, *, train: bool, device: torch.device, products: Products | None = None
) -> Program:
    """Compile the entry point as a Program, for training or for evaluation. Factories make tensors on
    `device`, and `products` computes the products with weights. The input of a served model's head is among
    the results.

    Raises:
        RemoteProtocolError: there is no such entry point, or `partition.execute.admit` would refuse it.
    """
    try:
        share = graph.entry(entry)
    except KeyError:
        raise RemoteProtocolError(f"the stage has no entry point '{entry}'") from None
    compiler = _Compiler(graph, share, train, device, products)
    compiler.compile()
    return Program(compiler)


class _Compiler:
    """Assigns places in the list, and makes a closure of each node."""

    def __init__(
        self,
        graph: StageGraph,
        entry: StageEntry,
        train: bool,
        device: torch.device,
        products: Products | None,
    ) -> None:
        self._products = products
        self.kept = read_values(graph) if entry.name == SERVE else ()
        self.graph = graph
        self.entry = entry
        self.template: list[Any] = [None, None]
        self.places: dict[tuple[type, int], int] = {}
        self.sized: list[tuple[int, int]] = []
        self.sized_lists: list[tuple[int, list[Any]]] = []
        self.names: list[str] = []
        self.norms: list[CountedNorm] = []
        self.in_place: tuple[int, ...] = ()
        self.ports = [self._place(Value, number) for number in (*entry.inputs, *entry.labels)]
        self._steps: list[tuple[Step, Sequence[int], Sequence[int]]] = []
        self._train = train
        self._device = device
        self._seed = seeder(device)
        self._statistics = {node: (ordinal, uses) for node, ordinal, uses in entry.statistics}

    def compile(self) -> None:
        entry, operators = self.entry, self.graph.operators
        for name in {operators[node.operator]: None for node in entry.nodes}:
            if name not in OPERATORS:
                raise RemoteProtocolError(f"{name} is not an operator that a graph may use")
        twins: frozenset[int] = frozenset()
        if not self._train:
            self.in_place, twins = writable_in_place(entry, operators)
        for node in entry.nodes:
            self._node(node, OPERATORS[operators[node.operator]], node.id in twins)

    def value(self, number: int) -> int:
        """Return the place of a value. Raises RemoteProtocolError if no node computes it."""
        if (Value, number) not in self.places:
            raise RemoteProtocolError(f"no node computes the value {number}")
        return self.places[Value, number]

    # Places

    def _new(self, content: Any = None) -> int:
        self.template.append(content)
        return len(self.template) - 1

    def _place(self, kind: type, row: int) -> int:
        if (kind, row) not in self.places:
            self.places[kind, row] = self._new()
        return self.places[kind, row]

    def _argument(self, argument: Argument | Items, owner: str) -> int:
        """Return the place that holds an argument when its node runs. A list of tensors gets a step that
        rebuilds it."""
        match argument:
            case Value(number):
                return self.value(number)
            case ParameterValue(row) | ConstantValue(row) | StateValue(row):
                return self._place(type(argument), row)
            case Size(row):
                if (Size, row) not in self.places:
                    self.sized.append((self._place(Size, row), row))
                return self._place(Size, row)
            case Items(items):
                return self._list(items, owner)
        return self._new(_plain(argument))

    def _list(self, items: Sequence[Item], owner: str) -> int:
        plain = [item if isinstance(item, Size) else _plain(item) for item in items]
        if any(isinstance(item, Value | ParameterValue | ConstantValue | StateValue) for item in items):
            parts = [self._argument(item, owner) for item in items]
            return self._rebuilt(parts, owner)
        place = self._new(plain)
        if any(isinstance(item, Size) for item in items):
            self.sized_lists.append((place, plain))
        return place

    def _contiguous(self, given: int, owner: str) -> int:
        """Make a tensor contiguous, because its layout determines the order in which random numbers are used
        (`partition.execute.seeds`).

        Attention applies its draws to its weights, which it makes itself.
        """
        place = self._new()

        def make(values: list[Any]) -> None:
            values[place] = values[given].contiguous()

        self._add(make, f"memory for {owner}", [given], [place])
        return place

    def _rebuilt(self, parts: list[int], owner: str) -> int:
        place = self._new()

        def rebuild(values: list[Any]) -> None:
            values[place] = [values[part] for part in parts]

        self._add(rebuild, f"a list for {owner}", parts, [place])
        return place

    # Steps

    def _add(self, step: Step, name: str, reads: Sequence[int], writes: Sequence[int]) -> None:
        self._steps.append((step, reads, writes))
        self.names.append(name)

    def living_steps(self) -> list[tuple[Step, tuple[int, ...]]]:
        """Return the steps, each with the places to empty after it: values that the step was the last to
        read, or that no step reads."""
        entry = self.entry
        ends = [*entry.outputs, *self.kept, *(number for _, number in entry.updates)]
        ends += [number for number in (entry.loss, entry.count) if number is not None]
        kept = {self.value(number) for number in (*ends, *(metric.value for metric in entry.metrics))}
        mortal = {place for _, _, writes in self._steps for place in writes}.union(self.ports) - kept
        steps: list[tuple[Step, tuple[int, ...]]] = []
        for step, reads, writes in reversed(self._steps):
            dead = tuple(sorted(mortal.intersection((*reads, *writes))))
            mortal.difference_update(dead)
            steps.append((step, dead))
        return steps[::-1]

    def _node(self, node: GraphNode, operator: Operator, in_place: bool) -> None:
        name = f"{operator.name} of {self.graph.owners[node.owner] or 'the model'}"
        arguments = list(node.arguments)
        counts = False
        if operator.name == BATCH_NORM:
            counts = self._counts(node, name)
        elif operator.name == _INSTANCE_NORM and arguments[3:5] != [None, None]:
            raise RemoteProtocolError(f"{name}: running statistics of an instance norm are not supported")
        # A batch norm without running statistics uses the batch's own, in evaluation too.
        if not self._train and not (operator.name == BATCH_NORM and arguments[3] is None):
            for index, content in operator.evaluate:
                if index < len(arguments):
                    arguments[index] = content
        places = [self._argument(argument, name) for argument in arguments]
        keywords = {key: self._argument(argument, name) for key, argument in node.keywords}
        draws = operator.random and (self._train or not operator.evaluate)
        if draws and arguments and isinstance(arguments[0], Value) and operator.cost != "attention":
            places[0] = self._contiguous(places[0], name)
        if operator.factory:
            keywords["device"] = self._new(self._device)
        if any((Value, number) in self.places for number in node.outputs):
            raise RemoteProtocolError(f"{name} computes a value that was computed before")
        results = [self._place(Value, number) for number in node.outputs]
        call = self._call(operator, arguments, in_place)
        if counts:
            step = counting(call, places, results[0])
        elif any(_is_living(argument) for _, argument in node.keywords):
            step = calling_by_name(call, places, results, keywords)
        else:
            plain = {key: self.template[place] for key, place in keywords.items()}
            step = calling(call, places, results, plain)
        if draws:
            step = seeded(step, node.id, self._seed)
        self._add(step, name, [*places, *keywords.values()], results)

    def _call(self, operator: Operator, arguments: Sequence[Argument | Items], in_place: bool) -> Call:
        name = operator.state_twin if in_place and operator.state_twin else operator.name
        product = None
        if self._products is not None:
            product = self._products.product(name, CALLS[name], arguments)
        return product or CALLS[name]

    def _counts(self, node: GraphNode, name: str) -> bool:
        """Return whether this batch norm computes statistics that a step will commit. If so, record them."""
        if not self._train or node.arguments[5] is not True or node.arguments[3] is None:
            return False
        mean, variance, momentum = node.arguments[3], node.arguments[4], node.arguments[6]
        ordinal, uses = self._statistics.get(node.id, (0, 0))
        if (
            not (isinstance(mean, ParameterValue) and isinstance(variance, ParameterValue))
            or not isinstance(momentum, int | float)
            or not ordinal < uses
        ):
            raise RemoteProtocolError(f"{name} has no running statistics")
        self.norms.append(CountedNorm(mean.row, variance.row, float(momentum), ordinal, uses))
        return True


def _plain(item: Item) -> Any:
    match item:
        case TypeName(dtype):
            return DTYPES[dtype]
        case FormatName(form):
            return FORMATS[form]
    return item


def _is_living(argument: Argument) -> bool:
    """Return whether an argument can differ from run to run."""
    kinds = Value | ParameterValue | ConstantValue | StateValue | Size
    items = argument.items if isinstance(argument, Items) else (argument,)
    return any(isinstance(item, kinds) for item in items)
