"""The operations of each layer, by class of operator: calls, FLOPs and bytes, for both passes. No torch.

The classes are those that devices run at different speeds (`partition.plan.rates`). The backward pass counts
autograd's work: for a product, one more product for each factor that needs a gradient; for a lookup, the
whole table; and for every parameter, its addition to the gradient sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from partition.model.dataflow import Flow, flow_of
from partition.model.graph import Graph, GraphNode, Items, ParameterValue, Value, arguments_of
from partition.model.operators import OPERATORS
from partition.model.work import EntryWork

Kind = Literal[
    "matmul",
    "convolution",
    "depthwise",
    "attention",
    "attention_dropout",
    "normalization",
    "elementwise",
    "transcendental",
    "random",
    "reduction",
    "pooling",
    "gather",
    "view",
    "accumulate",
]
KINDS: tuple[Kind, ...] = (
    "matmul", "convolution", "depthwise", "attention", "attention_dropout", "normalization", "elementwise",
    "transcendental", "random", "reduction", "pooling", "gather", "view", "accumulate",
)  # fmt: skip

_SLOW = frozenset(
    [
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "erf",
        "erfc",
        "sin",
        "cos",
        "tan",
        "tanh",
        "sigmoid",
        "gelu",
        "silu",
        "mish",
        "softplus",
        "elu",
        "selu",
        "celu",
        "pow",
        "softmax",
        "log_softmax",
        "_softmax",
        "_log_softmax",
        "logsumexp",
        "atan2",
        "sinh",
        "cosh",
        "logit",
    ]
)
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "bernoulli", "rand", "randn", "rand_like")
_ATTENTION_DROPOUT = 4
_CONVOLUTION_GROUPS = {"conv1d": 6, "conv2d": 6, "conv3d": 6, "convolution": 8}


@dataclass(frozen=True)
class Amount:
    """The calls, FLOPs and bytes of one class of operators."""

    calls: int = 0
    flops: int = 0
    touched_bytes: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            self.calls + other.calls, self.flops + other.flops, self.touched_bytes + other.touched_bytes
        )


@dataclass(frozen=True)
class Operations:
    """The amounts of work of one layer for one micro-batch, by class. Classes without work are left out."""

    forward: tuple[tuple[Kind, Amount], ...]
    backward: tuple[tuple[Kind, Amount], ...]


def layer_operations(graph: Graph, sizes: Sequence[int]) -> list[Operations]:
    """Return one row per layer. Raises RemoteProtocolError if the sizes do not fit the graph."""
    entry = graph.entries[0]
    work, flow = EntryWork(graph, entry, sizes), flow_of(graph, entry)
    bounds = (0, *entry.boundaries, len(entry.nodes))
    return [
        _of_nodes(graph, work, flow, [number for number in range(first, end) if flow.is_live[number]])
        for first, end in pairwise(bounds)
    ]


def _of_nodes(graph: Graph, work: EntryWork, flow: Flow, numbers: Sequence[int]) -> Operations:
    forward: dict[Kind, Amount] = {}
    backward: dict[Kind, Amount] = {}
    rows: dict[int, None] = {}
    for number in numbers:
        node = flow.entry.nodes[number]
        kind = kind_of(graph, node)
        amount = Amount(1, work.flops(node), 0 if kind == "view" else work.touched_bytes(node))
        forward[kind] = forward.get(kind, Amount()) + amount
        if flow.trains and any(flow.has_gradient[value] for value in node.outputs):
            back = _backward(graph, work, flow, node, kind, amount)
            backward[kind] = backward.get(kind, Amount()) + back
            rows.update((row, None) for table, row in flow.keys[number] if table == "p")
    for row in rows:
        if graph.parameters[row].kind == "parameter":
            size = work.type_bytes(graph.parameters[row].type)
            backward["accumulate"] = backward.get("accumulate", Amount()) + Amount(1, 0, size)
    return Operations(_sorted(forward), _sorted(backward))


def _sorted(amounts: dict[Kind, Amount]) -> tuple[tuple[Kind, Amount], ...]:
    return tuple((kind, amounts[kind]) for kind in KINDS if kind in amounts)


def kind_of(graph: Graph, node: GraphNode) -> Kind:
    """Return the class of operators to which a node belongs."""
    full = graph.operators[node.operator]
    operator = OPERATORS.get(full)
    cost, name = ("matmul" if operator is None else operator.cost), full.split(".")[1]
    match cost:
        case "free":
            return "view"
        case "convolution":
            place = _CONVOLUTION_GROUPS.get(name, len(node.arguments))
            groups = node.arguments[place] if place < len(node.arguments) else 1
            return "depthwise" if isinstance(groups, int) and groups > 4 else "convolution"
        case "attention":
            drops = len(node.arguments) > _ATTENTION_DROPOUT and node.arguments[_ATTENTION_DROPOUT]
            return "attention_dropout" if drops else "attention"
        case "matmul" | "normalization" | "gather":
            return cost
        case "reduction" if "pool" in name:
            # Devices compute pooling to one value per channel as a mean.
            return "reduction" if name.startswith("adaptive_avg") and _is_one(node) else "pooling"
    if name in _DROPOUTS:
        return "random"
    return "transcendental" if name in _SLOW else ("reduction" if cost == "reduction" else "elementwise")


def _is_one(node: GraphNode) -> bool:
    wanted = node.arguments[1] if len(node.arguments) > 1 else None
    return isinstance(wanted, Items) and all(side == 1 for side in wanted.items)


def _backward(
    graph: Graph, work: EntryWork, flow: Flow, node: GraphNode, kind: Kind, amount: Amount
) -> Amount:
    """Return the work of the backward pass. For a product it is the forward work once for each factor that
    needs a gradient; for most other classes it equals the forward work."""
    factors = [argument for argument in arguments_of(node) if _is_matrix(graph, work, argument)]
    needed = sum(_needs(graph, flow, argument) for argument in factors)
    if kind in ("matmul", "convolution", "depthwise"):
        share = min(2, needed) if len(factors) > 1 else 1
        return Amount(share, amount.flops * share, amount.touched_bytes * max(1, share))
    if kind == "gather":
        tables = [argument for argument in arguments_of(node) if isinstance(argument, ParameterValue)]
        whole = sum(work.type_bytes(graph.parameters[table.row].type) for table in tables)
        return Amount(1, amount.flops, sum(map(work.value_bytes, node.outputs)) + whole)
    return amount


def _is_matrix(graph: Graph, work: EntryWork, argument: object) -> bool:
    if isinstance(argument, Value):
        return len(work.shape(argument.id)) > 1
    if isinstance(argument, ParameterValue):
        return len(graph.parameters[argument.row].type.shape) > 1
    return False


def _needs(graph: Graph, flow: Flow, argument: object) -> bool:
    if isinstance(argument, Value):
        return flow.has_gradient[argument.id]
    return isinstance(argument, ParameterValue) and graph.parameters[argument.row].kind == "parameter"
