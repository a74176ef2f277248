"""Random graphs that pass the check, and an evaluator for them in which every tensor is one integer.

The meaning of an operator does not matter to a cut. So here each operator mixes its arguments, its own name
and, if it draws random numbers, its id. A gradient is the sum over all paths of products of integers that
stand for the derivatives. So it is right only if every path is included once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from blake3 import blake3
from hypothesis import strategies as st

from partition.model.graph import (
    GRAPH_VERSION,
    Argument,
    Constant,
    ConstantValue,
    Entry,
    Expression,
    FillStep,
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
    StateValue,
    Symbol,
    TensorType,
    Value,
    arguments_of,
)

OPERATORS = (
    "aten.relu.default",
    "aten.linear.default",
    "aten.add.Tensor",
    "aten.dropout.default",
    "aten.detach.default",
    "aten.gt.Scalar",
    "aten.where.self",
    "aten.chunk.default",
    "aten.arange.default",
    "aten.mul.Tensor",
    "aten.batch_norm.default",
    "aten.cat.default",
    "aten.sum.default",
    "aten.expand.default",
    "aten.index_copy.default",
)
RELU, LINEAR, ADD, DROPOUT, DETACH, GREATER, WHERE, CHUNK, ARANGE, MUL, NORM, CAT, SUM, EXPAND, COPY = range(
    15
)
BOOL, SCALAR = 4, 5
TYPES = (
    TensorType("float32", (Size(0), 4)),
    TensorType("float32", (Size(0), 64)),
    TensorType("float32", (64,)),
    TensorType("int64", (Size(0),)),
    TensorType("bool", (Size(0), 4)),
    TensorType("float32", ()),
)
PRIME = 2**61 - 1
KINDS: tuple[Literal["parameter", "frozen", "statistic"], ...] = (
    "parameter",
    "parameter",
    "frozen",
    "statistic",
    "statistic",
    "parameter",
)


@dataclass
class _Writer:
    draw: st.DrawFn
    inputs: int
    labels: int
    nodes: list[GraphNode] = field(default_factory=list)
    types: list[int] = field(default_factory=list)

    def node(self, operator: int, arguments: Sequence[Argument], kinds: Sequence[int]) -> int:
        first = len(self.types)
        outputs = tuple(range(first, first + len(kinds)))
        self.types.extend(kinds)
        self.nodes.append(GraphNode(len(self.nodes), operator, tuple(arguments), (), outputs))
        return first

    def value(self, allowed: Sequence[int]) -> Value:
        return Value(self.draw(st.sampled_from(allowed)))

    def any_node(self, allowed: list[int]) -> None:
        """Add a node over values of `allowed`, and add the node's results to `allowed`."""
        operator = self.draw(st.sampled_from([RELU, LINEAR, LINEAR, ADD, ADD, *range(14)]))
        kind = self.draw(st.sampled_from([0, 1, 2]))
        value, other = self.value(allowed), self.value(allowed)
        parameter = ParameterValue(self.draw(st.sampled_from([0, 1, 5])))
        kinds = [kind]
        arguments: list[Argument] = [value]
        match operator:
            case 1:
                arguments = [value, parameter]
            case 2 | 9:
                choices: list[Argument] = [other, other, ConstantValue(0), ParameterValue(2)]
                arguments = [value, self.draw(st.sampled_from(choices))]
            case 3:
                arguments = [value, 0.5, True]
            case 5:
                arguments, kinds = [value, 0], [BOOL]
            case 6:
                arguments = [self.value(allowed), value, other]
            case 7:
                arguments, kinds = [value, 2], [kind, kind]
            case 8:
                arguments = [Size(0)]
            case 10:
                training = self.draw(st.booleans())
                arguments = [
                    value,
                    None,
                    None,
                    ParameterValue(3),
                    ParameterValue(4),
                    training,
                    0.1,
                    1e-5,
                    True,
                ]
            case 11:
                arguments = [Items((value, other))]
            case _:
                pass
        first = self.node(operator, arguments, kinds)
        allowed.extend(range(first, first + len(kinds)))


@st.composite
def graphs(draw: st.DrawFn, nodes_max: int = 16) -> Graph:
    """Return a training entry and, often, a second entry with states, which uses the parameters in any
    order."""
    entries = [_training(draw, nodes_max)]
    if draw(st.booleans()):
        entries.append(_serving(draw, nodes_max))
    sources = Recipe((FillStep("constant", 1.0),))
    return Graph(
        GRAPH_VERSION,
        "random",
        (Symbol("batch", 1, 64),),
        (Expression("symbol", 0),),
        TYPES,
        OPERATORS,
        ("", "a", "b"),
        tuple(
            Parameter((f"p{row}",), TensorType("float32", (4,)), kind, sources)
            for row, kind in enumerate(KINDS)
        ),
        (Constant(("mask",), TensorType("uint8", (4,)), b"abcd"),),
        (GraphState("cache.0", TYPES[0]), GraphState("cache.1", TYPES[0])),
        tuple(entries),
        ("model",),
    )


def _training(draw: st.DrawFn, nodes_max: int) -> Entry:
    writer = _Writer(draw, 2, 1)
    writer.types = [0, 3, 3]
    allowed = [0, 1]
    for _ in range(draw(st.integers(2, nodes_max))):
        writer.any_node(allowed)
    told = writer.node(EXPAND, [Value(2)], [3])
    loss = writer.node(SUM, [Items((writer.value(allowed), writer.value(allowed), Value(told)))], [SCALAR])
    count = writer.node(SUM, [Value(told)], [SCALAR])
    metric = writer.node(SUM, [Value(allowed[-1])], [SCALAR])
    return Entry(
        "train",
        (Port("x", 0), Port("ids", 3)),
        (Port("y", 3),),
        tuple(writer.nodes),
        tuple(writer.types),
        (allowed[-1],),
        loss,
        count if draw(st.booleans()) else None,
        (Metric("right", metric),) if draw(st.booleans()) else (),
        (),
        (),
    )


def _serving(draw: st.DrawFn, nodes_max: int) -> Entry:
    writer = _Writer(draw, 1, 0)
    writer.types = [0]
    allowed = [0]
    updates: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, nodes_max))):
        row = len(updates)
        if row < 2 and draw(st.booleans()):
            made = writer.node(COPY, [StateValue(row), writer.value(allowed)], [0])
            updates.append((row, made))
            allowed.append(made)
        writer.any_node(allowed)
    outputs = tuple(dict.fromkeys((allowed[-1], draw(st.sampled_from(allowed)))))
    return Entry(
        "decode",
        (Port("x", 0),),
        (),
        tuple(writer.nodes),
        tuple(writer.types),
        outputs,
        None,
        None,
        (),
        tuple(updates),
        (),
    )


def _mixed(*parts: object) -> int:
    return int.from_bytes(blake3(repr(parts).encode()).digest(8), "little")


def run(graph: Graph, nodes: Sequence[GraphNode], given: Mapping[int, int]) -> dict[int, int]:
    """Return every value: the given values, and the results of the nodes. Raises KeyError if a value is
    missing.
    """
    values = dict(given)
    for node in nodes:
        name = graph.operators[node.operator]
        taken = [
            values[argument.id] if isinstance(argument, Value) else repr(argument)
            for argument in arguments_of(node)
        ]
        for place, value in enumerate(node.outputs):
            assert value not in values, "a stage computes a value twice"
            values[value] = _mixed(name, taken, place, node.id if "dropout" in name else None)
    return values


def derive(
    graph: Graph, entry: Entry, nodes: Sequence[GraphNode], gradients: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Go back through the nodes. Return gradients keyed by values, and keyed by rows of parameters."""
    by_value = dict(gradients)
    by_row: dict[int, int] = {}
    for node in reversed(nodes):
        if graph.operators[node.operator] in ("aten.detach.default", "aten.arange.default"):
            continue
        for made in node.outputs:
            if made not in by_value or not TYPES[entry.types[made]].dtype.startswith("float"):
                continue
            for place, argument in enumerate(arguments_of(node)):
                share = by_value[made] * _mixed(node.id, made, place) % PRIME
                if isinstance(argument, Value) and TYPES[entry.types[argument.id]].dtype.startswith("float"):
                    by_value[argument.id] = (by_value.get(argument.id, 0) + share) % PRIME
                elif isinstance(argument, ParameterValue) and KINDS[argument.row] == "parameter":
                    by_row[argument.row] = (by_row.get(argument.row, 0) + share) % PRIME
    return by_value, by_row


def ports(entry: Entry) -> dict[int, int]:
    """Return integers for the inputs and labels of a whole entry point."""
    return {value: _mixed("port", value) for value in range(len(entry.inputs) + len(entry.labels))}
