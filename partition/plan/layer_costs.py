"""The cost of each layer of a graph for one micro-batch, by formulas over types: the solver's input. No
torch.

Forward FLOPs are those of `partition.model.work`. Memory kept for the backward pass is summed by storage: if
two nodes keep the same tensor, or two views of it, it counts once within a layer. The estimate errs upwards.
Parameters count in every layer that uses them. A tied weight is held by each stage that needs it, so counting
it in each layer is right for every plan that cuts between the layers. If both layers are in one stage, the
sum is too high by one copy.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from crypto.errors import RemoteProtocolError
from partition.model.cut import crossings
from partition.model.dataflow import Flow, flow_of
from partition.model.graph import ITEM_BYTES, Graph, Value
from partition.model.operators import OPERATORS
from partition.model.work import EntryWork
from partition.plan.cost import LayerCost

_MAY_COPY = ("aten.reshape.default", "aten.contiguous.default", "aten.flatten.using_ints")
"""Operators that are views in name, but copy a transposed tensor."""


def layer_costs(
    graph: Graph, sizes: Sequence[int], first_layer: int = 0, last_layer: int | None = None
) -> list[LayerCost]:
    """Return one row per layer for one micro-batch whose symbols have the values `sizes`, optionally for a
    half-open range of layers.

    `output_bytes` is the traffic if the only cut is at the layer's end; it is 0 for the last layer of a graph
    with a loss.

    Raises:
        ValueError: the sizes do not fit the graph.
    """
    entry = graph.entries[0]
    try:
        work = EntryWork(graph, entry, sizes)
    except RemoteProtocolError as error:
        raise ValueError(f"sizes {tuple(sizes)} do not fit the graph: {error}") from None
    flow = flow_of(graph, entry)
    roots = _roots(graph, flow)
    last_layer = len(entry.boundaries) + 1 if last_layer is None else last_layer
    sent = list(crossings(graph, entry.boundaries[first_layer:last_layer]))
    if last_layer > len(entry.boundaries):
        sent.append(() if flow.trains else entry.outputs)
    bounds = (0, *entry.boundaries, len(entry.nodes))[first_layer : last_layer + 1]
    costs = []
    for (first, end), values in zip(pairwise(bounds), sent, strict=True):
        nodes = [number for number in range(first, end) if flow.is_live[number]]
        rows = sorted({row for number in nodes for table, row in flow.keys[number] if table == "p"})
        costs.append(
            LayerCost(
                parameter_bytes=sum(_parameter_bytes(graph, row) for row in rows),
                forward_flops=sum(work.flops(entry.nodes[number]) for number in nodes),
                saved_bytes=_saved_bytes(flow, work, roots, nodes) if flow.trains else 0,
                output_bytes=sum(work.value_bytes(value) for value in values),
                parameters=len(rows),
                working_bytes=max((work.touched_bytes(entry.nodes[number]) for number in nodes), default=0),
            )
        )
    return costs


def _parameter_bytes(graph: Graph, row: int) -> int:
    kind = graph.parameters[row].type
    return prod(side for side in kind.shape if isinstance(side, int)) * ITEM_BYTES[kind.dtype]


def _roots(graph: Graph, flow: Flow) -> list[int]:
    """Return, for each value, the value whose storage it shares; usually itself."""
    roots = list(range(len(flow.producers)))
    for node in flow.entry.nodes:
        operator = OPERATORS.get(graph.operators[node.operator])
        first = node.arguments[0] if node.arguments else None
        if operator is None or not operator.view or operator.cost != "free":
            continue
        if isinstance(first, Value) and operator.name not in _MAY_COPY:
            for value in node.outputs:
                roots[value] = roots[first.id]
    return roots


def _saved_bytes(flow: Flow, work: EntryWork, roots: Sequence[int], nodes: Sequence[int]) -> int:
    kept: set[int] = set()
    alone = 0
    for number in nodes:
        node = flow.entry.nodes[number]
        if any(flow.has_gradient[value] for value in node.outputs):
            values, extra = work.saved(node)
            alone += extra
            # A view keeps the whole storage of the tensor that it shows.
            kept.update(roots[value] for value in values)
    return alone + sum(work.value_bytes(value) for value in kept)
