"""The work of one node, by formulas over its types: FLOPs, bytes touched, and bytes kept for the backward
pass.

No torch. One multiply-add counts as two FLOPs, as in `torch.utils.flop_counter`, from which these formulas
come. Every other operator counts one for each element it makes (reductions: reads); that counter leaves these
out.

`saved` is the memory that autograd keeps for a node until the backward pass. It is rather too high: by
default nodes are assumed to keep their inputs and their results.
"""

from collections.abc import Sequence
from math import prod

from partition.model.graph import (
    ITEM_BYTES,
    Argument,
    ConstantValue,
    Entry,
    Graph,
    GraphNode,
    Items,
    ParameterValue,
    StateValue,
    TensorType,
    Value,
    arguments_of,
)
from partition.model.operators import OPERATORS, Cost
from partition.model.sizes import Sides, evaluate, shape_of

_NOTHING = """
    add sub rsub neg negative positive sum mean cat concat concatenate stack hstack vstack dstack column_stack
    to _to_copy type_as clone copy where masked_fill roll flip fliplr flipud tril triu pad constant_pad_nd
    repeat tile trace cumsum eq ne lt le gt ge greater less greater_equal less_equal not_equal isnan isinf
    isfinite isclose logical_and logical_or logical_not logical_xor argmax argmin argsort zeros_like
    ones_like full_like new_zeros new_ones new_full rand_like randn_like sign floor ceil round trunc
    repeat_interleave pixel_shuffle pixel_unshuffle channel_shuffle slice_scatter select_scatter
    avg_pool1d adaptive_avg_pool1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_bilinear2d upsample_linear1d one_hot
"""
_OUTPUT = """
    relu relu6 sigmoid tanh exp exp2 expm1 sqrt rsqrt reciprocal softmax log_softmax _softmax _log_softmax
    special_expit
"""
_KEEPS_NOTHING = frozenset(_NOTHING.split())
"""Operators whose gradient needs no tensor except, for `where` and `masked_fill`, the condition."""
_KEEPS_OUTPUT = frozenset(_OUTPUT.split())
_KEEPS_CONDITION = ("where", "masked_fill")
_INDEX_BYTES = 8
_NATIVE_POOLS = ("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices")
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_FIRST_FACTOR = {"addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1}
_ATTENTION_DROPOUT = 4
"""The position of `dropout_p` among the arguments of scaled dot product attention."""
_ATTENTION_WEIGHTS_KEPT = 3
"""With dropout, torch's CPU kernels compute attention step by step and keep the weights, their mask, and the
masked weights."""
_TRANSPOSED = 6
"""The position of `transposed` among the arguments of `convolution`."""


class EntryWork:
    """The work of one entry point at one value of every symbol.

    Raises RemoteProtocolError if the sizes do not fit the table of expressions, or a shape becomes negative.
    """

    def __init__(self, graph: Graph, entry: Entry, sizes: Sequence[int]) -> None:
        numbers = evaluate(graph.expressions, sizes)
        rows = set(entry.types)
        shapes = [shape_of(kind, numbers) if row in rows else () for row, kind in enumerate(graph.types)]
        for state in graph.states:
            shape_of(state.type, numbers)
        self._graph = graph
        self._numbers = numbers
        self._shapes = [shapes[row] for row in entry.types]
        self._types = [graph.types[row].dtype for row in entry.types]

    def shape(self, value: int) -> Sides:
        return self._shapes[value]

    def value_bytes(self, value: int) -> int:
        return prod(self._shapes[value]) * ITEM_BYTES[self._types[value]]

    def type_bytes(self, kind: TensorType) -> int:
        return prod(shape_of(kind, self._numbers)) * ITEM_BYTES[kind.dtype]

    def touched_bytes(self, node: GraphNode) -> int:
        """Return the bytes read and written."""
        read = 0
        for argument in arguments_of(node):
            if isinstance(argument, Value):
                read += self.value_bytes(argument.id)
            elif (kind := self._kind(argument)) is not None:
                read += self.type_bytes(kind)
        return read + sum(self.value_bytes(value) for value in node.outputs)

    def flops(self, node: GraphNode) -> int:
        """Return the forward FLOPs."""
        cost, _ = _class(self._graph, node)
        made = sum(prod(self._shapes[value]) for value in node.outputs)
        match cost:
            case "free":
                return 0
            case "matmul" | "convolution" | "attention":
                return self.product_flops(node)
            case "reduction" | "normalization":
                return max(made, prod(self._side(node, 0)))
            case _:
                return made

    def product_flops(self, node: GraphNode) -> int:
        """Return the forward FLOPs of matrix products and convolutions only, as `torch.utils.flop_counter`
        counts."""
        cost, name = _class(self._graph, node)
        made = prod(self._shapes[node.outputs[0]]) if node.outputs else 0
        match cost:
            case "matmul":
                return self._matmul_flops(node, name, made)
            case "convolution":
                kernel = prod(self._side(node, 1)[1:])
                return 2 * kernel * (prod(self._side(node, 0)) if _is_transposed(node, name) else made)
            case "attention":
                query, key, value = (self._side(node, place) for place in range(3))
                if min(len(query), len(key), len(value)) < 2:
                    return 0
                return 2 * prod(query) * key[-2] + 2 * prod(query[:-1]) * key[-2] * value[-1]
            case _:
                return 0

    def _matmul_flops(self, node: GraphNode, name: str, made: int) -> int:
        if name == "einsum":
            return self._einsum_flops(node)
        if name == "bilinear":
            return 2 * made * prod(self._side(node, 2)[1:])
        factor = self._side(node, _FIRST_FACTOR.get(name, 0))
        if name == "addbmm" and len(factor) == 3:
            return 2 * made * factor[0] * factor[2]
        return 2 * made * (factor[-1] if factor else 1)

    def _einsum_flops(self, node: GraphNode) -> int:
        """Return the FLOPs as if all factors were multiplied together; exact for two factors."""
        sides: dict[str, int] = {}
        equation = node.arguments[0] if node.arguments else ""
        factors = [item for argument in node.arguments[1:] for item in _items(argument)]
        if not isinstance(equation, str):
            return 0
        for term, factor in zip(equation.split("->")[0].replace(" ", "").split(","), factors, strict=False):
            shape = self._side_of(factor)
            head, dots, tail = term.partition("...")
            named = [*zip(head, shape, strict=False)]
            if dots:
                rest = shape[len(head) : len(shape) - len(tail)]
                named += [(f".{place - len(rest)}", side) for place, side in enumerate(rest)]
                named += [*zip(tail, shape[len(shape) - len(tail) :], strict=False)]
            for letter, side in named:
                sides[letter] = max(side, sides.get(letter, 1))
        return 2 * max(1, len(factors) - 1) * prod(sides.values())

    def saved(self, node: GraphNode) -> tuple[tuple[int, ...], int]:
        """Return the values that autograd keeps for this node, and the bytes of tensors that only autograd
        knows."""
        cost, name = _class(self._graph, node)
        read = tuple(dict.fromkeys(item.id for item in arguments_of(node) if isinstance(item, Value)))
        made = tuple(node.outputs)
        made_bytes = sum(self.value_bytes(value) for value in made)
        match cost:
            case "free":
                return (), 0
            case "matmul" | "convolution":
                return read, 0
            case "attention":
                return (*read, *made), self._attention_bytes(node)
            case "normalization":
                return read, 2 * self._statistics_bytes(node, name)
            case "gather":
                return tuple(value for value in read if self._is_index(value)), 0
        if name in _DROPOUTS:
            return (), made_bytes
        if name in _NATIVE_POOLS:
            return read, _INDEX_BYTES * sum(prod(self._shapes[value]) for value in made)
        if name == "cross_entropy_loss":
            return read, self._bytes_of(node, 0)
        if name in _KEEPS_CONDITION:
            return tuple(value for value in read if self._is_index(value)), 0
        if name in _KEEPS_NOTHING:
            return (), 0
        if name in _KEEPS_OUTPUT:
            return made, 0
        return (*read, *made), 0

    def _attention_bytes(self, node: GraphNode) -> int:
        query, key = self._side(node, 0), self._side(node, 1)
        if min(len(query), len(key)) < 2:
            return 0
        item = self._bytes_of(node, 0) // max(1, prod(query))
        rows = prod(query[:-1])
        dropout = node.arguments[_ATTENTION_DROPOUT] if len(node.arguments) > _ATTENTION_DROPOUT else 0.0
        if dropout:
            return _ATTENTION_WEIGHTS_KEPT * rows * key[-2] * item
        return rows * max(4, item)

    def _statistics_bytes(self, node: GraphNode, name: str) -> int:
        shape = self._side(node, 0)
        if name == "batch_norm":
            return 8 * (shape[1] if len(shape) > 1 else 1)
        if name == "instance_norm" or name == "group_norm":
            return 8 * prod(shape[:2])
        return 8 * prod(shape[:-1])

    def _is_index(self, value: int) -> bool:
        return self._types[value] in ("int64", "int32", "bool", "uint8")

    def _side(self, node: GraphNode, place: int) -> Sides:
        """Return the shape of an argument; () if there is none."""
        return self._side_of(node.arguments[place]) if place < len(node.arguments) else ()

    def _side_of(self, argument: object) -> Sides:
        if isinstance(argument, Value):
            return self._shapes[argument.id]
        kind = self._kind(argument)
        return () if kind is None else shape_of(kind, self._numbers)

    def _bytes_of(self, node: GraphNode, place: int) -> int:
        argument = node.arguments[place] if place < len(node.arguments) else None
        if isinstance(argument, Value):
            return self.value_bytes(argument.id)
        kind = self._kind(argument)
        return 0 if kind is None else self.type_bytes(kind)

    def _kind(self, argument: object) -> TensorType | None:
        if isinstance(argument, ParameterValue):
            return self._graph.parameters[argument.row].type
        if isinstance(argument, ConstantValue):
            return self._graph.constants[argument.row].type
        if isinstance(argument, StateValue):
            return self._graph.states[argument.row].type
        return None


def _items(argument: Argument) -> tuple[object, ...]:
    return argument.items if isinstance(argument, Items) else (argument,)


def _is_transposed(node: GraphNode, name: str) -> bool:
    if name.startswith("conv_transpose"):
        return True
    return name == "convolution" and len(node.arguments) > _TRANSPOSED and node.arguments[_TRANSPOSED] is True


def _class(graph: Graph, node: GraphNode) -> tuple[Cost, str]:
    """Return the cost class, and the operator's name without namespace and overload."""
    full = graph.operators[node.operator]
    operator = OPERATORS.get(full)
    return ("matmul" if operator is None else operator.cost), full.split(".")[1]
