"""The graph that serves a model, made from the one that trains it, as data. No torch.

A served graph has one entry point, `serve`, over the same parameters. It maps token ids (flat over the units
of a batch), their positions in their sessions, and the rows to answer, to logits. It has no batch of
sequences: the batch size is 1, a sequence is all tokens, causal attention is `attend`, whose pages are
outside the graph, and operators that count positions use the given positions. Its layers are those of the
model.

This relies on how graphs of causal models look. A model that mixes tokens by other means than causal
attention (a convolution over the sequence, its mean) passes here and would be served wrongly: the proof of
`partition.capture.serving_proof` refuses it before it is offered.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from crypto.errors import RemoteProtocolError
from partition.model.graph import (
    LAYERS_MAX,
    SERVE,
    SERVE_INPUTS,
    SERVE_SYMBOLS,
    TRAIN,
    TRAINED,
    Argument,
    Entry,
    Expression,
    Graph,
    GraphNode,
    Item,
    Items,
    Parameter,
    ParameterValue,
    Port,
    Size,
    StageEntry,
    StageGraph,
    Symbol,
    TensorType,
    Value,
    values_of,
)
from partition.model.operators import ATTEND, WHOLE_WINDOW

TOKENS_MAX = 2_048
"""Maximum number of tokens in one call. A long prompt comes in parts, so that other sessions can be served in
between."""
ROWS_MAX = 256
"""Maximum number of rows of logits in one answer: with a vocabulary of 150,000 they take 154 MB."""
CONTEXT_MAX = 1 << 20

_ATTENTION = "aten.scaled_dot_product_attention.default"
_TOKENS, _ROWS = Size(0), Size(1)
_BY_ROW = (
    "aten.linear.default",
    "aten.layer_norm.default",
    "aten.rms_norm.default",
    "aten.dropout.default",
)
"""Operators that process each row separately: wanted rows are chosen before them."""


def serving_graph(graph: Graph, context: int) -> Graph:
    """Return the graph that serves a checked graph's model, for sessions of at most `context` tokens.

    Raises:
        ValueError: the model has inputs other than sequences of tokens, or is not causal.
    """
    return _Rewriter(graph, context).rewrite()


def served_sizes(specified: Sequence[int], tokens: int, rows: int) -> tuple[int, ...]:
    """Return the sizes of a call, for a graph made for at most `specified`."""
    return (tokens, rows, specified[2])


class Sizes:
    """Rows of a new table of expressions, derived from those of an old one."""

    def __init__(self, old: Sequence[Expression], known: dict[int, int | Size]) -> None:
        self.rows = [Expression("symbol", row) for row in range(len(SERVE_SYMBOLS))]
        self._places: dict[Expression, int] = {}
        self._new = dict(known)
        for row, expression in enumerate(old):
            if row not in self._new:
                left, right = self.size(expression.left), self.size(expression.right)
                self._new[row] = self._made(expression.operator, left, right)

    def size(self, side: int | Size) -> int | Size:
        """Return an old side as a new one."""
        return self._new[side.row] if isinstance(side, Size) else side

    def _made(self, operator: str, left: int | Size, right: int | Size) -> int | Size:
        if operator == "mul" and 1 in (left, right):
            return right if left == 1 else left
        row = Expression(operator, left, right)  # type: ignore[arg-type]  # of the old table
        if row not in self._places:
            self._places[row] = len(self.rows)
            self.rows.append(row)
        return Size(self._places[row])

    def node(self, node: GraphNode) -> GraphNode:
        """Return the same node over the new table."""
        return msgspec.structs.replace(
            node,
            arguments=tuple(self._argument(argument) for argument in node.arguments),
            keywords=tuple((key, self._argument(argument)) for key, argument in node.keywords),
        )

    def _argument(self, argument: Argument) -> Argument:
        if isinstance(argument, Size):
            return self.size(argument)
        if isinstance(argument, Items):
            return Items(tuple(cast(Item, self._argument(item)) for item in argument.items))
        return argument

    def kind(self, kind: TensorType) -> TensorType:
        return TensorType(kind.dtype, tuple(self.size(side) for side in kind.shape))


def serving_symbols(context: int) -> tuple[Symbol, ...]:
    """Return the symbols of a graph that serves sessions of at most `context` tokens."""
    return tuple(
        Symbol(name, 1, most)
        for name, most in zip(
            SERVE_SYMBOLS, (TOKENS_MAX, ROWS_MAX, max(1, min(context, CONTEXT_MAX))), strict=True
        )
    )


@dataclass
class _Rewriter:
    graph: Graph
    context: int
    types: list[TensorType] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    nodes: list[GraphNode] = field(default_factory=list)
    value_types: list[int] = field(default_factory=list)
    values: dict[int, int] = field(default_factory=dict)
    layers: int = 0

    def rewrite(self) -> Graph:
        graph = self.graph
        entry = graph.entries[0]
        self._check(entry)
        source = graph.types[entry.inputs[0].type]
        length = source.shape[1]
        assert isinstance(length, Size)
        known: dict[int, int | Size] = dict.fromkeys(range(len(graph.symbols)), 1)
        known[length.row] = _TOKENS
        self.sizes = Sizes(graph.expressions, known)
        self.length = length
        self.operators = list(graph.operators)
        for side in (_TOKENS, _TOKENS, _ROWS):
            self.value_types.append(self._type(TensorType("int64", (side,))))
        output = entry.outputs[0]
        needed = _needed(entry, output)
        tail = _tail(graph, entry, output)
        self.values[0] = self._add(
            "aten.unsqueeze.default", (Value(0), 0), TensorType("int64", (1, _TOKENS)), 0
        )
        boundaries: list[int] = []
        for number, node in enumerate(entry.nodes):
            boundaries += [len(self.nodes)] * entry.boundaries.count(number)
            if number in needed:
                self._node(entry, node, is_tail=node.id in tail)
        self._finish(output, tail)
        kept: list[int] = []
        names = [graph.layers[0]]
        for name, boundary in zip(graph.layers[1:], boundaries, strict=True):
            if (kept[-1] if kept else 1) < boundary < len(self.nodes):
                kept.append(boundary)
                names.append(name)
        inputs = tuple(
            Port(name, kind) for name, kind in zip(SERVE_INPUTS, self.value_types[:3], strict=True)
        )
        served = Entry(
            SERVE,
            inputs,
            (),
            tuple(self.nodes),
            tuple(self.value_types),
            (len(self.value_types) - 1,),
            None,
            None,
            (),
            (),
            tuple(kept),
        )
        return msgspec.structs.replace(
            graph,
            symbols=serving_symbols(self.context),
            expressions=tuple(self.sizes.rows),
            types=tuple(self.types),
            operators=tuple(self.operators),
            parameters=tuple(frozen(row) for row in graph.parameters),
            states=(),
            entries=(served,),
            layers=tuple(names),
        )

    def _check(self, entry: Entry) -> None:
        kind = self.graph.types[entry.inputs[0].type]
        if entry.name != TRAIN or len(entry.inputs) != 1 or kind.dtype != "int64" or len(kind.shape) != 2:
            raise ValueError("only a model whose only input is token ids (batch, tokens) can be served")
        if not isinstance(kind.shape[1], Size) or kind.shape[1].row >= len(self.graph.symbols):
            raise ValueError(
                "the model is captured for one sequence length. To serve it, "
                "capture it with a sequence length that varies"
            )
        if not entry.outputs:
            raise ValueError("the model has no outputs except its loss, so it cannot be served")

    def _type(self, kind: TensorType) -> int:
        if kind not in self.types:
            self.types.append(kind)
        return self.types.index(kind)

    def _operator(self, name: str) -> int:
        if name not in self.operators:
            self.operators.append(name)
        return self.operators.index(name)

    def _add(self, name: str, arguments: tuple[Argument, ...], kind: TensorType, owner: int) -> int:
        return self._append(name, arguments, (), (kind,), owner)[0]

    def _append(
        self,
        name: str,
        arguments: tuple[Argument, ...],
        keywords: tuple[tuple[str, Argument], ...],
        kinds: Sequence[TensorType],
        owner: int,
    ) -> tuple[int, ...]:
        outputs = tuple(range(len(self.value_types), len(self.value_types) + len(kinds)))
        self.value_types += [self._type(kind) for kind in kinds]
        self.nodes.append(
            GraphNode(len(self.nodes), self._operator(name), arguments, keywords, outputs, owner)
        )
        return outputs

    def _node(self, entry: Entry, node: GraphNode, *, is_tail: bool) -> None:
        name = self.graph.operators[node.operator]
        if name == _ATTENTION:
            self.values[node.outputs[0]] = self._attend(entry, node)
            return
        if self._counts_places(name, node):
            self.values[node.outputs[0]] = 1
            return
        kinds = [self.sizes.kind(self.graph.types[entry.types[number]]) for number in node.outputs]
        if (dimension := self._sliced(name, node)) is not None:
            arguments: tuple[Argument, ...] = (self._given(node.arguments[0]), dimension, Value(1))
            self.values[node.outputs[0]] = self._add(
                "aten.index_select.default", arguments, kinds[0], node.owner
            )
            return
        if is_tail:
            self._choose_rows(node)
            kinds = [TensorType(kind.dtype, (1, _ROWS, *kind.shape[2:])) for kind in kinds]
        made = self._append(
            name,
            tuple(self._given(argument) for argument in node.arguments),
            tuple((key, self._given(argument)) for key, argument in node.keywords),
            kinds,
            node.owner,
        )
        self.values.update(zip(node.outputs, made, strict=True))

    def _choose_rows(self, node: GraphNode) -> None:
        """Give only the wanted rows to the first node after the last node that needs all rows."""
        given = node.arguments[0]
        assert isinstance(given, Value)
        place = self.values[given.id]
        kind = self.types[self.value_types[place]]
        if kind.shape[1] != _ROWS:
            chosen = TensorType(kind.dtype, (1, _ROWS, *kind.shape[2:]))
            self.values[given.id] = self._add(
                "aten.index_select.default", (Value(place), 1, Value(2)), chosen, node.owner
            )

    def _finish(self, output: int, tail: frozenset[int]) -> None:
        place = self.values[output]
        kind = self.types[self.value_types[place]]
        if len(kind.shape) != 3 or kind.shape[0] != 1 or kind.shape[1] not in (_TOKENS, _ROWS):
            raise ValueError("the model's first output is not a row of scores for each token")
        if not tail:
            kind = TensorType(kind.dtype, (1, _ROWS, kind.shape[2]))
            place = self._add("aten.index_select.default", (Value(place), 1, Value(2)), kind, 0)
        self._add("aten.select.int", (Value(place), 0, 0), TensorType(kind.dtype, kind.shape[1:]), 0)

    def _given(self, argument: Argument) -> Argument:
        if isinstance(argument, Value):
            return Value(self.values[argument.id])
        if isinstance(argument, Size):
            return self.sizes.size(argument)
        if isinstance(argument, Items):
            return Items(tuple(cast(Item, self._given(item)) for item in argument.items))
        return argument

    def _counts_places(self, name: str, node: GraphNode) -> bool:
        """Return whether the node makes the integers from 0 to the length of a sequence."""
        if name == "aten.arange.default":
            return node.arguments[:1] == (self.length,)
        return name == "aten.arange.start" and node.arguments[:2] == (0, self.length)

    def _sliced(self, name: str, node: GraphNode) -> int | None:
        """Return the dimension in which the node takes the first positions of a tensor that all sequences
        share."""
        if name != "aten.slice.Tensor" or len(node.arguments) != 4 or isinstance(node.arguments[0], Value):
            return None
        _, dimension, start, end = node.arguments
        is_first = start in (None, 0) and end == self.length
        return dimension if is_first and isinstance(dimension, int) else None

    def _attend(self, entry: Entry, node: GraphNode) -> int:
        given = (*node.arguments, *(None, 0.0, False)[len(node.arguments) - 3 :])
        query, key, value, mask, _, is_causal = given[:6]
        options = dict(node.keywords)
        if mask is not None or is_causal is not True:
            owner = self.graph.owners[node.owner] or "the model"
            raise ValueError(
                f"{owner}: attention with a mask, or with later tokens visible, cannot be "
                "served. Use is_causal=True without a mask"
            )
        if not (isinstance(query, Value) and isinstance(key, Value) and isinstance(value, Value)):
            raise ValueError("attention over parameters cannot be served")
        kinds = [self.sizes.kind(self.graph.types[entry.types[each.id]]) for each in (query, value)]
        width = kinds[0].shape[-1]
        if not isinstance(width, int) or len(kinds[0].shape) != 4:
            raise ValueError(
                "attention over tensors that are not (batch, heads, tokens, width) cannot be served"
            )
        scale = options.get("scale")
        if scale is None:
            scale = width**-0.5
        arguments = (
            *(self._given(each) for each in (query, key, value)),
            self.layers,
            scale,
        )
        self.layers += 1
        made = TensorType(kinds[0].dtype, (*kinds[0].shape[:3], kinds[1].shape[3]))
        return self._add(ATTEND, arguments, made, node.owner)


def frozen(parameter: Parameter) -> Parameter:
    """Return the same parameter without a gradient. Statistics stay in the form that batch norms expect."""
    if parameter.kind == "statistic":
        return parameter
    return msgspec.structs.replace(parameter, kind="frozen")


def _needed(entry: Entry, output: int) -> frozenset[int]:
    """Return the nodes that an output needs."""
    makers = {value: number for number, node in enumerate(entry.nodes) for value in node.outputs}
    waiting, found = [output], set[int]()
    while waiting:
        number = makers.get(waiting.pop())
        if number is not None and number not in found:
            found.add(number)
            waiting.extend(values_of(entry.nodes[number]))
    return frozenset(found)


def _tail(graph: Graph, entry: Entry, output: int) -> frozenset[int]:
    """Return the nodes at the end that process each row separately, and whose results no other node needs."""
    makers = {value: node for node in entry.nodes for value in node.outputs}
    needed = _needed(entry, output)
    uses: dict[int, int] = {}
    for number in needed:
        for value in values_of(entry.nodes[number]):
            uses[value] = uses.get(value, 0) + 1
    found: set[int] = set()
    value = output
    while (node := makers.get(value)) is not None and graph.operators[node.operator] in _BY_ROW:
        first = node.arguments[0]
        others = [each for each in (*node.arguments[1:],) if isinstance(each, Value)]
        if others or not isinstance(first, Value) or uses.get(first.id) != 1:
            break
        found.add(node.id)
        value = first.id
    return frozenset(found)


# Checks of an unknown peer's graph


def check_serve(graph: Graph, entry: Entry) -> None:
    """Check the form of the entry point `serve`, and that only it has `attend`.

    Raises:
        RemoteProtocolError: inputs or sizes are not those that a stage computes, or the layers of attention
            do not have distinct numbers and one kind each.
    """
    if entry.name != SERVE:
        if any(graph.operators[node.operator] == ATTEND for node in entry.nodes):
            raise RemoteProtocolError(
                f"a graph in which '{entry.name}' attends to pages, but only '{SERVE}' may"
            )
        return
    if tuple(symbol.name for symbol in graph.symbols) != SERVE_SYMBOLS:
        raise RemoteProtocolError(f"a graph in which the sizes of '{SERVE}' are not {SERVE_SYMBOLS}")
    given = tuple((port.name, graph.types[port.type]) for port in entry.inputs)
    sides = (_TOKENS, _TOKENS, _ROWS)
    wanted = tuple(
        (name, TensorType("int64", (side,))) for name, side in zip(SERVE_INPUTS, sides, strict=True)
    )
    if given != wanted or entry.labels or entry.updates or len(entry.outputs) != 1:
        raise RemoteProtocolError(f"a graph in which '{SERVE}' has wrong inputs or results")
    output = graph.types[entry.types[entry.outputs[0]]]
    if len(output.shape) != 2 or output.shape[0] != _ROWS:
        raise RemoteProtocolError(f"a graph in which '{SERVE}' does not return one row for each wanted row")
    if output.dtype not in TRAINED:
        raise RemoteProtocolError(f"a graph in which '{SERVE}' gives logits of {output.dtype}")
    _check_attention(graph, entry)


def _check_attention(graph: Graph, entry: Entry) -> None:
    seen: set[int] = set()
    for node in entry.nodes:
        if graph.operators[node.operator] != ATTEND:
            continue
        where = f"a graph in which node {node.id} of '{SERVE}'"
        tensors, layer = node.arguments[:3], node.arguments[3] if len(node.arguments) > 3 else None
        is_free = isinstance(layer, int) and layer not in seen and 0 <= layer <= LAYERS_MAX
        if not isinstance(layer, int) or isinstance(layer, bool) or not is_free:
            raise RemoteProtocolError(f"{where} attends in a layer that does not have its own number")
        seen.add(layer)
        kinds = [graph.types[entry.types[each.id]] for each in tensors if isinstance(each, Value)]
        if len(kinds) != 3 or any(
            len(kind.shape) != 4 or kind.shape[0] != 1 or kind.shape[2] != _TOKENS for kind in kinds
        ):
            raise RemoteProtocolError(f"{where} attends over tensors that are not [1, heads, tokens, width]")
        (_, heads, _, width), (_, key_heads, _, key_width), (_, value_heads, _, value_width) = (
            kind.shape for kind in kinds
        )
        fixed = (heads, width, key_heads, key_width, value_heads, value_width)
        if not all(isinstance(side, int) and side > 0 for side in fixed):
            raise RemoteProtocolError(f"{where} attends with heads that vary")
        if (width, key_heads) != (key_width, value_heads) or cast(int, heads) % cast(int, key_heads):
            raise RemoteProtocolError(f"{where} attends with heads that do not fit together")
        if len({kind.dtype for kind in kinds}) > 1:
            raise RemoteProtocolError(f"{where} attends with several types")


def is_whole(graph: Graph | StageGraph, entry: Entry | StageEntry) -> bool:
    """Return whether tokens see later tokens, so that a session must come as one unit: an encoder."""
    return any(
        graph.operators[node.operator] == ATTEND and WHOLE_WINDOW in node.arguments[5:6]
        for node in entry.nodes
    )


def count_words(graph: Graph) -> int:
    """Return the number of token ids that a served graph knows: the rows of the table in which tokens are
    looked up, the smallest number if there are several tables. Raises ValueError if there is none."""
    entry = graph.entries[0]
    ids, sides = {0}, []
    for node in entry.nodes:
        name, given = graph.operators[node.operator], node.arguments
        if name == "aten.unsqueeze.default" and isinstance(given[0], Value) and given[0].id in ids:
            ids.add(node.outputs[0])
        elif name == "aten.embedding.default" and isinstance(given[0], ParameterValue):
            side = graph.parameters[given[0].row].type.shape[0]
            if isinstance(given[1], Value) and given[1].id in ids and isinstance(side, int):
                sides.append(side)
    if not sides:
        raise ValueError("the model does not look up its tokens in any table")
    return min(sides)


def attention_layers(graph: StageGraph, entry: StageEntry) -> Iterable[tuple[int, TensorType, TensorType]]:
    """Return (layer, type of its keys, type of its values) for a stage's part of `serve`."""
    types = dict(entry.types)
    for node in entry.nodes:
        if graph.operators[node.operator] == ATTEND:
            layer, (_, key, value) = node.arguments[3], node.arguments[:3]
            if not (isinstance(layer, int) and isinstance(key, Value) and isinstance(value, Value)):
                raise RemoteProtocolError(f"node {node.id} attends to something that is not a layer")
            yield layer, graph.types[types[key.id]], graph.types[types[value.id]]
