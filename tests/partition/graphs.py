"""Small graphs written by hand for tests. A builder infers types by calling torch on meta tensors.

    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin("train")
    x = build.input("x", "float32", batch, 4)
    y = build.label("y", "int64", batch)
    logits = build.node("linear", x, build.parameter("fc.weight", 3, 4), build.parameter("fc.bias", 3))
    loss = build.node("cross_entropy_loss", logits, y, None, 2)
    build.end(outputs=[logits], loss=loss)
    graph = build.finish()

Inputs and labels come before nodes, and parameters in the order of first use, as in a captured graph. While a
graph is built, every symbol is a different large prime, so that a size made of symbols can be told from a
plain number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from partition.model.graph import (
    GRAPH_VERSION,
    Argument,
    Constant,
    ConstantValue,
    DataType,
    Entry,
    Expression,
    FillStep,
    FormatName,
    Graph,
    GraphNode,
    GraphState,
    Items,
    Metric,
    Parameter,
    ParameterValue,
    Port,
    Recipe,
    Size,
    StageEntry,
    StageGraph,
    StateValue,
    StoredValues,
    Symbol,
    TensorType,
    TypeName,
    Value,
    encode_graph,
    graph_hash,
    values_of,
)
from partition.model.operators import OPERATORS

PRIMES = (10_007, 10_009, 10_037, 10_039, 10_061, 10_067, 10_069, 10_079)
UNIFORM = Recipe((FillStep("uniform", -0.5, 0.5),))
ONES = Recipe((FillStep("constant", 1.0),))
ZEROS = Recipe((FillStep("constant", 0.0),))
Side = int | Size


class GraphBuilder:
    """Collects the tables of one graph; call `begin` before and `end` after each entry point."""

    def __init__(self, name: str = "toy", dtype: DataType = "float32") -> None:
        self.name = name
        self.dtype = dtype
        self.symbols: list[Symbol] = []
        self.expressions: list[Expression] = []
        self.hints: list[int] = []
        self.types: list[TensorType] = []
        self.operators: list[str] = []
        self.owners: list[str] = [""]
        self.parameters: list[Parameter] = []
        self.constants: list[Constant] = []
        self.states: list[GraphState] = []
        self.entries: list[Entry] = []
        self.layers: list[str] = ["model"]
        self._begin = ""
        self._inputs: list[Port] = []
        self._labels: list[Port] = []
        self._nodes: list[GraphNode] = []
        self._metas: list[torch.Tensor] = []
        self._value_types: list[int] = []

    # Tables

    def symbol(self, name: str, minimum: int = 1, maximum: int = 4096) -> Size:
        """All symbols come before any other size."""
        assert len(self.symbols) == len(self.expressions)
        self.symbols.append(Symbol(name, minimum, maximum))
        self.expressions.append(Expression("symbol", len(self.expressions)))
        self.hints.append(PRIMES[len(self.hints)])
        return Size(len(self.expressions) - 1)

    def size(self, operator: Any, left: Side, right: Side) -> Size:
        """Return a row of the table of expressions, the same row for the same operation."""
        expression = Expression(operator, left, right)
        if expression not in self.expressions:
            a, b = self._number(left), self._number(right)
            self.hints.append(
                {
                    "add": lambda: a + b,
                    "sub": lambda: a - b,
                    "mul": lambda: a * b,
                    "floordiv": lambda: a // b,
                    "mod": lambda: a % b,
                    "min": lambda: min(a, b),
                    "max": lambda: max(a, b),
                }[operator]()
            )
            self.expressions.append(expression)
        return Size(self.expressions.index(expression))

    def parameter(
        self,
        names: str | tuple[str, ...],
        *shape: int,
        kind: Any = "parameter",
        source: Recipe | StoredValues = UNIFORM,
        group: int = 0,
    ) -> ParameterValue:
        names = (names,) if isinstance(names, str) else names
        self.parameters.append(Parameter(names, TensorType(self.dtype, shape), kind, source, group))
        return ParameterValue(len(self.parameters) - 1)

    def constant(self, array: np.ndarray[Any, Any], name: str = "") -> ConstantValue:
        kind = TensorType(array.dtype.name, array.shape)
        self.constants.append(Constant((name,) if name else (), kind, array.tobytes()))
        return ConstantValue(len(self.constants) - 1)

    def state(self, name: str, dtype: DataType, *shape: Side) -> StateValue:
        self.states.append(GraphState(name, TensorType(dtype, shape)))
        return StateValue(len(self.states) - 1)

    # Entry points

    def begin(self, name: str = "train") -> None:
        self._begin = name
        self._inputs, self._labels, self._nodes = [], [], []
        self._metas, self._value_types = [], []

    def input(self, name: str, dtype: DataType, *shape: Side) -> Value:
        assert not self._labels
        assert not self._nodes
        return self._port(self._inputs, name, dtype, shape)

    def label(self, name: str, dtype: DataType, *shape: Side) -> Value:
        assert not self._nodes
        return self._port(self._labels, name, dtype, shape)

    def node(self, operator: str, *arguments: Any, owner: str = "", **keywords: Any) -> Any:
        """Add a node. Return the Value that it makes, or a tuple of them. `operator` may lack `aten.` and
        `.default`."""
        full = operator if operator.startswith("aten.") else f"aten.{operator}"
        full = full if full.count(".") == 2 else f"{full}.default"
        assert full in OPERATORS, full
        _, name, overload = full.split(".")
        call = getattr(getattr(torch.ops.aten, name), overload)
        given = {key: self._meta(value) for key, value in keywords.items()}
        if OPERATORS[full].factory:
            given["device"] = torch.device("meta")
        made = call(*(self._meta(argument) for argument in arguments), **given)
        results = [made] if isinstance(made, torch.Tensor) else list(made)
        ids = tuple(range(len(self._metas), len(self._metas) + len(results)))
        self._nodes.append(
            GraphNode(
                len(self._nodes),
                _row(self.operators, full),
                tuple(_argument(argument) for argument in arguments),
                tuple((key, _argument(value)) for key, value in sorted(keywords.items())),
                ids,
                _row(self.owners, owner),
            )
        )
        for result in results:
            self._metas.append(result)
            self._value_types.append(_row(self.types, self._type(result)))
        values = tuple(Value(number) for number in ids)
        return values[0] if isinstance(made, torch.Tensor) else values

    def end(
        self,
        *,
        outputs: Sequence[Value],
        loss: Value | None = None,
        count: Value | None = None,
        metrics: dict[str, Value] | None = None,
        updates: Sequence[tuple[StateValue, Value]] = (),
        boundaries: Sequence[int] = (),
    ) -> None:
        self.entries.append(
            Entry(
                self._begin,
                tuple(self._inputs),
                tuple(self._labels),
                tuple(self._nodes),
                tuple(self._value_types),
                tuple(value.id for value in outputs),
                None if loss is None else loss.id,
                None if count is None else count.id,
                tuple(Metric(name, value.id) for name, value in (metrics or {}).items()),
                tuple((state.row, value.id) for state, value in updates),
                tuple(boundaries),
            )
        )

    def finish(self) -> Graph:
        return Graph(
            GRAPH_VERSION,
            self.name,
            tuple(self.symbols),
            tuple(self.expressions),
            tuple(self.types),
            tuple(self.operators),
            tuple(self.owners),
            tuple(self.parameters),
            tuple(self.constants),
            tuple(self.states),
            tuple(self.entries),
            tuple(self.layers),
        )

    # Types

    def _number(self, side: Side) -> int:
        return self.hints[side.row] if isinstance(side, Size) else side

    def _empty(self, kind: TensorType) -> torch.Tensor:
        shape = [self._number(side) for side in kind.shape]
        return torch.empty(shape, dtype=getattr(torch, kind.dtype), device="meta")

    def _port(self, ports: list[Port], name: str, dtype: DataType, shape: tuple[Side, ...]) -> Value:
        kind = TensorType(dtype, shape)
        ports.append(Port(name, _row(self.types, kind)))
        self._metas.append(self._empty(kind))
        self._value_types.append(ports[-1].type)
        return Value(len(self._metas) - 1)

    def _meta(self, argument: Any) -> Any:
        match argument:
            case list() | tuple():
                return [self._meta(item) for item in argument]
            case Size():
                return self._number(argument)
            case Value():
                return self._metas[argument.id]
            case ParameterValue():
                return self._empty(self.parameters[argument.row].type)
            case ConstantValue():
                return self._empty(self.constants[argument.row].type)
            case StateValue():
                return self._empty(self.states[argument.row].type)
            case TypeName():
                return getattr(torch, argument.dtype)
            case FormatName():
                return {"contiguous": torch.contiguous_format, "preserve": torch.preserve_format}[
                    argument.format
                ]
        return argument

    def _type(self, tensor: torch.Tensor) -> TensorType:
        return TensorType(
            str(tensor.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # torch's names are ours
            tuple(self._side(side) for side in tensor.shape),
        )

    def _side(self, side: int) -> Side:
        """Return a number, or the size of which it must have been made: one in the table, or a product."""
        if side > 1_000 and side in self.hints:
            return Size(self.hints.index(side))
        for row in range(len(self.symbols)):
            if side and side % self.hints[row] == 0:
                return self.size("mul", Size(row), self._side(side // self.hints[row]))
        assert side < PRIMES[0] // 2, f"size {side} is not a product of known sizes: make its size first"
        return side


def whole(graph: Graph) -> StageGraph:
    """Return the graph as the only stage of a run, made without `partition.model.cut`."""
    return StageGraph(
        graph=graph_hash(encode_graph(graph)),
        index=0,
        stages=1,
        symbols=graph.symbols,
        expressions=graph.expressions,
        types=graph.types,
        operators=graph.operators,
        owners=graph.owners,
        rows=tuple(range(len(graph.parameters))),
        parameters=graph.parameters,
        tied=(),
        borrowed=(),
        constant_rows=tuple(range(len(graph.constants))),
        constants=graph.constants,
        state_rows=tuple(range(len(graph.states))),
        states=graph.states,
        entries=tuple(_whole_entry(graph, entry) for entry in graph.entries),
    )


def _whole_entry(graph: Graph, entry: Entry) -> StageEntry:
    ports = len(entry.inputs) + len(entry.labels)
    norms = [node for node in entry.nodes if graph.operators[node.operator] == "aten.batch_norm.default"]
    statistics = []
    for node in norms:
        same = [other.id for other in norms if other.arguments[3] == node.arguments[3]]
        statistics.append((node.id, same.index(node.id), len(same)))
    return StageEntry(
        entry.name,
        tuple(range(len(entry.inputs))),
        tuple(range(len(entry.inputs), ports)),
        entry.nodes,
        entry.outputs,
        (),
        (),
        tuple(enumerate(entry.types)),
        entry.loss,
        entry.count,
        entry.metrics,
        entry.updates,
        tuple(statistics),
    )


def readers(graph: Graph, entry: str) -> dict[int, list[int]]:
    """Return the nodes that take each value, by id."""
    found: dict[int, list[int]] = {}
    for node in graph.entry(entry).nodes:
        for value in values_of(node):
            found.setdefault(value, []).append(node.id)
    return found


def _row(table: list[Any], item: Any) -> int:
    if item not in table:
        table.append(item)
    return table.index(item)


def _argument(argument: Any) -> Argument:
    if isinstance(argument, list | tuple):
        return Items(tuple(argument))
    result: Argument = argument
    return result
