"""From steps to the graph format: values get numbers, and repeated names get a row in a table."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from partition.capture.clean import Cleaned
from partition.capture.errors import CaptureRefused
from partition.capture.export import ExportedGraph
from partition.capture.origin import named
from partition.capture.skeleton import recipe_of
from partition.capture.state_dict import Contents, StateDictStore, bytes_of, check_parameter
from partition.capture.steps import DATA_TYPES, Leaf, Made, Reference, Step, Symbolic, data_type
from partition.capture.wrapper_module import COUNTER, Example
from partition.model.graph import (
    GRAPH_BYTES_MAX,
    NODES_MAX,
    Argument,
    Constant,
    ConstantValue,
    Entry,
    Expression,
    Graph,
    GraphNode,
    GraphState,
    Item,
    Items,
    Metric,
    Parameter,
    ParameterValue,
    Port,
    Size,
    StateValue,
    Symbol,
    TensorType,
    Value,
    version_for,
)

T = TypeVar("T")
Groups = Callable[[str, Tensor], int]
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.+/:@-]")
UNUSED_BYTES_MAX = 1 << 20
"""Maximum size of all constants when unused buffers are among them."""
_FACTORS_MAX = 8
"""Maximum power of a size: more than a tensor has sides."""


@dataclass
class GraphTables:
    """The rows of a graph while its entry points are being lowered."""

    contents: Contents
    symbols: tuple[Symbol, ...]
    groups: Groups | None
    statistics: frozenset[str]
    is_trained: bool = True
    store: StateDictStore = field(default_factory=StateDictStore)
    expressions: dict[Expression, int] = field(default_factory=dict)
    types: dict[TensorType, int] = field(default_factory=dict)
    operators: dict[str, int] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    parameters: dict[Any, tuple[int, Parameter]] = field(default_factory=dict)
    constants: dict[Any, tuple[int, Constant]] = field(default_factory=dict)
    states: dict[Any, tuple[int, GraphState]] = field(default_factory=dict)
    constant_bytes: int = 0

    def __post_init__(self) -> None:
        for row in range(len(self.symbols)):
            self.expressions[Expression("symbol", row)] = row

    # Sizes and types

    def size(self, expression: Any, symbols: dict[Any, str]) -> int | Size:
        """Return a row that computes a sympy expression, or its value if it is a constant integer."""
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            names = [symbol.name for symbol in self.symbols]
            if expression not in symbols:
                raise CaptureRefused("a size depends on the data")
            return Size(names.index(symbols[expression]))
        kind = type(expression).__name__
        operands = list(expression.args)
        if kind == "Pow":
            base, power = operands
            if not power.is_Integer or not 1 < int(power) <= _FACTORS_MAX:
                raise CaptureRefused(f"a size of {expression} cannot be in a graph")
            operands, kind = [base] * int(power), "Mul"
        operator = _OPERATORS.get(kind)
        if operator is None:
            raise CaptureRefused(f"a size of {expression} cannot be in a graph")
        total = self.size(operands[0], symbols)
        for operand in operands[1:]:
            row = Expression(operator, total, self.size(operand, symbols))
            total = Size(_row(self.expressions, row))
        return total

    def kind(self, tensor: Tensor, symbols: dict[Any, str]) -> TensorType:
        """Return the type of a fake tensor."""
        sides = tuple(
            side if isinstance(side, int) else self.size(side.node.expr, symbols) for side in tensor.shape
        )
        return TensorType(data_type(tensor.dtype), sides)

    # Rows of the model

    def parameter(self, path: str) -> ParameterValue:
        key = self.contents.key(path)
        if key not in self.parameters:
            tensor = self.contents.tensors[path]
            names = self.contents.names_of(path)
            check_parameter(path, tensor, is_trained=self.is_trained or tensor.requires_grad)
            is_statistic = path in self.statistics
            kind = "statistic" if is_statistic else "parameter" if tensor.requires_grad else "frozen"
            group = self.groups(names[0], tensor) if self.groups and kind == "parameter" else 0
            parameter = Parameter(
                names,
                TensorType(data_type(tensor.dtype), tuple(tensor.shape)),
                kind,  # type: ignore[arg-type]  # one of the three
                self.store.source(names[0], tensor),
                group,
            )
            self.parameters[key] = len(self.parameters), parameter
        return ParameterValue(self.parameters[key][0])

    def keep_unused(self) -> None:
        """Add rows for parameters and buffers of the state dict that no entry point uses, because results
        must have them.

        The parameters are frozen, just as torch.optim ignores a parameter without a gradient.
        """
        kinds = {parameter.type.dtype for _, parameter in self.parameters.values()}
        for path in self.contents.kept:
            key, tensor = self.contents.key(path), self.contents.tensors[path]
            if any(key in table for table in (self.parameters, self.constants, self.states)):
                continue
            if tensor.is_meta and recipe_of(tensor) is None:
                continue
            if path not in self.contents.parameters:
                if path.split(".")[-1] != COUNTER and self._fits(tensor):
                    self.buffer(path)
            elif tensor.numel() and (kinds or {"float32"}) == {DATA_TYPES.get(tensor.dtype)}:
                names = self.contents.names_of(path)
                kind = TensorType(data_type(tensor.dtype), tuple(tensor.shape))
                source = self.store.source(names[0], tensor)
                self.parameters[key] = len(self.parameters), Parameter(names, kind, "frozen", source)

    def _fits(self, tensor: Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        plain = tensor.dtype in DATA_TYPES and not tensor.is_complex() and not tensor.is_meta
        return plain and self.constant_bytes + size <= UNUSED_BYTES_MAX

    def buffer(self, path: str) -> ConstantValue:
        # A buffer that is not persistent is in no state dict, so it is in no result either.
        names = tuple(name for name in self.contents.names_of(path) if name in self.contents.kept)
        return self.constant(self.contents.key(path), self.contents.tensors[path], names)

    def constant(self, key: Any, tensor: Tensor, names: tuple[str, ...]) -> ConstantValue:
        if key not in self.constants:
            if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
                raise CaptureRefused(
                    f"the buffer '{names[0] if names else key}' is on meta and has no values: "
                    "build the model in partition.capture.skeleton()"
                )
            self.constant_bytes += tensor.numel() * tensor.element_size()
            if self.constant_bytes > GRAPH_BYTES_MAX:
                raise CaptureRefused(
                    f"constants of more than {GRAPH_BYTES_MAX} bytes, including "
                    f"'{names[0] if names else key}' with "
                    f"{tensor.numel() * tensor.element_size()}. Make it a parameter without "
                    "gradient"
                )
            kind = TensorType(data_type(tensor.dtype), tuple(tensor.shape))
            # the safetensors file of a result cannot hold complex numbers
            names = () if tensor.is_complex() else names
            self.constants[key] = len(self.constants), Constant(names, kind, bytes_of(tensor))
        return ConstantValue(self.constants[key][0])

    def state(self, path: str) -> StateValue:
        key = self.contents.key(path)
        if key not in self.states:
            tensor = self.contents.tensors[path]
            if not tensor.is_meta and bool(tensor.any()):
                raise CaptureRefused(
                    f"an entry point changes the buffer '{path}', which does not begin at zero"
                )
            kind = TensorType(data_type(tensor.dtype), tuple(tensor.shape))
            self.states[key] = len(self.states), GraphState(self.contents.names_of(path)[0], kind)
        return StateValue(self.states[key][0])


_OPERATORS: dict[str, Literal["add", "mul", "floordiv", "mod", "max", "min"]] = {
    "Add": "add",
    "Mul": "mul",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "Max": "max",
    "Min": "min",
}
"""sympy's and torch's functions on sizes."""


def _row(table: dict[T, int], key: T) -> int:
    return table.setdefault(key, len(table))


@dataclass
class _Lowering:
    """One entry point that is being lowered."""

    tables: GraphTables
    exported: ExportedGraph
    cleaned: Cleaned
    numbers: dict[Reference, int] = field(default_factory=dict)
    types: list[int] = field(default_factory=list)

    def entry(self) -> Entry:
        request = self.exported.request
        ports = [
            self._port(number, example) for number, example in enumerate((*request.inputs, *request.labels))
        ]
        if len(self.cleaned.steps) > NODES_MAX:
            raise CaptureRefused(f"{len(self.cleaned.steps)} operators, but a graph has at most {NODES_MAX}")
        nodes = tuple(self._node(index, step) for index, step in enumerate(self.cleaned.steps))
        layout = self.exported.layout
        results = [self.numbers[reference] for reference in self.cleaned.results]
        rest = results[layout.outputs :]
        loss = rest.pop(0) if layout.has_loss else None
        count = rest.pop(0) if layout.has_count else None
        return Entry(
            name=request.name,
            inputs=tuple(ports[: len(request.inputs)]),
            labels=tuple(ports[len(request.inputs) :]),
            nodes=nodes,
            types=tuple(self.types),
            outputs=tuple(results[: layout.outputs]),
            loss=loss,
            count=count,
            metrics=tuple(Metric(name, value) for name, value in zip(layout.metrics, rest, strict=True)),
            updates=tuple(
                (self.tables.state(path).row, self.numbers[value])
                for path, value in self.cleaned.updates.items()
            ),
            boundaries=(),
        )

    def _port(self, number: int, example: Example) -> Port:
        sides: list[int | Size] = list(example.shape)
        names = [symbol.name for symbol in self.tables.symbols]
        for dynamic in self.exported.request.dynamics:
            for port, dimension in dynamic.places:
                if port == number:
                    sides[dimension] = Size(names.index(dynamic.name))
        row = _row(self.tables.types, TensorType(data_type(example.dtype), tuple(sides)))
        self.numbers[Leaf("input", number)] = number
        self.types.append(row)
        return Port(example.name, row)

    def _node(self, index: int, step: Step) -> GraphNode:
        try:
            arguments = tuple(self._argument(value) for value in step.arguments)
            keywords = tuple((name, self._argument(value)) for name, value in step.keywords)
            outputs = []
            for place, fake in enumerate(step.results):
                self.numbers[Made(step, place)] = len(self.types)
                outputs.append(len(self.types))
                kind = self.tables.kind(fake, dict(self.exported.symbols))
                self.types.append(_row(self.tables.types, kind))
        except CaptureRefused as refusal:
            raise CaptureRefused(f"{named(step.owner)}, {step.operator}: {refusal}") from refusal
        return GraphNode(
            index,
            _row(self.tables.operators, step.operator),
            arguments,
            keywords,
            tuple(outputs),
            _row(self.tables.owners, _NOT_IN_NAMES.sub("_", step.owner)),
        )

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, tuple):
            return Items(tuple(self._item(item) for item in value))
        return self._item(value)

    def _item(self, value: Any) -> Item:
        match value:
            case Made() | Leaf(kind="input"):
                return Value(self.numbers[value])
            case Leaf(kind="parameter", key=str(path)):
                return self.tables.parameter(path)
            case Leaf(kind="buffer", key=str(path)):
                if path in self.tables.statistics:
                    return self.tables.parameter(path)
                return self.tables.state(path) if path in self.cleaned.updates else self.tables.buffer(path)
            case Leaf(kind="constant", key=str(path)):
                tensor = self.exported.constants[path]
                return self.tables.constant(
                    (str(tensor.dtype), tuple(tensor.shape), bytes_of(tensor)), tensor, ()
                )
            case Symbolic():
                return self.tables.size(value.expression, dict(self.exported.symbols))
            case tuple():
                raise CaptureRefused("a list of lists cannot be an argument in a graph")
        item: Item = value
        return item


def lower(
    name: str,
    parts: Sequence[tuple[ExportedGraph, Cleaned]],
    contents: Contents,
    symbols: tuple[Symbol, ...],
    groups: Groups | None,
) -> tuple[Graph, tuple[tuple[str, Tensor], ...]]:
    """Return the graph with a single layer, and the tensors for the accompanying file, in their order.

    Raises:
        CaptureRefused: a parameter or a buffer has no values or has a type that no stage holds, or a size is
            not an integer computed from sizes.
    """
    statistics = frozenset(path for _, cleaned in parts for path in cleaned.statistics)
    is_trained = any(exported.request.train for exported, _ in parts)
    tables = GraphTables(contents, symbols, groups, statistics, is_trained)
    entries = tuple(_Lowering(tables, exported, cleaned).entry() for exported, cleaned in parts)
    tables.keep_unused()
    counters: dict[str, None] = {}
    for _, cleaned in parts:
        for path in cleaned.counters:
            counters.update(dict.fromkeys(contents.names_of(path)))
    rows = tuple(row for _, row in tables.parameters.values())
    graph = Graph(
        version=version_for(rows),
        name=name,
        symbols=symbols,
        expressions=tuple(tables.expressions),
        types=tuple(tables.types),
        operators=tuple(tables.operators),
        owners=tuple(tables.owners),
        parameters=rows,
        constants=tuple(row for _, row in tables.constants.values()),
        states=tuple(row for _, row in tables.states.values()),
        entries=entries,
        layers=(name or "model",),
        counters=tuple(counters),
    )
    return graph, tuple(tables.store.tensors)
