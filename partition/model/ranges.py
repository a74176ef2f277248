"""The ranges of integers that a model accepts: the classes of its loss, the rows of its embedding.

They are derived from the graph, without torch: an input or label that reaches an indexing operator only
through reshapes and casts must be below the length of what it indexes. A value that is first used in
arithmetic has no bound here. If a stage cannot use such a value, it reports that
(`partition.execute.interpret.LabelOutOfRange`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partition.model.graph import Entry, Graph, GraphNode, ParameterValue, Size, TensorType, Value
from partition.model.sizes import evaluate

INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8"})
IGNORED = -100
"""The label that torch's losses ignore by default."""

_RESHAPES = """
    view.default reshape.default view_as.default reshape_as.default flatten.using_ints unflatten.int
    permute.default transpose.int t.default squeeze.default squeeze.dim squeeze.dims unsqueeze.default
    expand.default expand_as.default detach.default alias.default contiguous.default ravel.default
    clone.default to.dtype to.other _to_copy.default type_as.default
"""
_SAME_VALUES = frozenset(f"aten.{name}" for name in _RESHAPES.split())
"""Operators whose result has exactly the values of their first argument."""
_LOSSES = frozenset(f"aten.{name}.default" for name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"))
_LOSSES_2D = frozenset({"aten.nll_loss2d.default"})
_ONE_HOT = "aten.one_hot.default"
_EMBEDDING = "aten.embedding.default"
_ALONG = frozenset({"aten.gather.default", "aten.index_select.default"})


@dataclass(frozen=True)
class Bound:
    """A bound: values are from 0 to `count` - 1, or `ignored`. It is required by `operator`, in the module
    `owner`."""

    count: int
    ignored: int | None
    operator: str
    owner: str


def bounds(graph: Graph, entry: Entry, sizes: Sequence[int]) -> Mapping[int, Bound]:
    """Return the tightest bound of each input and label that has one, by its value id, at the given values of
    the symbols."""
    rows = evaluate(graph.expressions, tuple(sizes))
    # Inputs and labels are the first values; each value here maps to the port that has the same values.
    origins = {
        number: number
        for number, port in enumerate((*entry.inputs, *entry.labels))
        if graph.types[port.type].dtype in INTEGERS
    }
    found: dict[int, Bound] = {}
    for node in entry.nodes:
        operator = graph.operators[node.operator]
        first = node.arguments[0] if node.arguments else None
        if operator in _SAME_VALUES and isinstance(first, Value) and first.id in origins:
            kinds = [graph.types[entry.types[number]].dtype for number in node.outputs]
            if len(kinds) == 1 and kinds[0] in INTEGERS:
                origins[node.outputs[0]] = origins[first.id]
            continue
        asked = _asked(graph, entry, node, operator, rows)
        if asked is None or asked[0] not in origins:
            continue
        value, count, ignored = asked
        bound = Bound(count, ignored, operator, graph.owners[node.owner])
        port = origins[value]
        if port not in found or count < found[port].count:
            found[port] = bound
    return found


def _asked(
    graph: Graph, entry: Entry, node: GraphNode, operator: str, rows: Sequence[int]
) -> tuple[int, int, int | None] | None:
    """Return (value id, count, ignored value) for an operator that uses a value as an index."""
    arguments = node.arguments
    if operator in _LOSSES | _LOSSES_2D and len(arguments) >= 2 and isinstance(arguments[1], Value):
        shape = _shape(graph, entry, arguments[0], rows)
        ignored = arguments[4] if len(arguments) > 4 else IGNORED
        if shape and isinstance(ignored, int):
            return arguments[1].id, shape[1] if len(shape) > 1 else shape[0], ignored
    elif operator == _EMBEDDING and len(arguments) >= 2 and isinstance(arguments[1], Value):
        shape = _shape(graph, entry, arguments[0], rows)
        if shape:
            return arguments[1].id, shape[0], None
    elif operator == _ONE_HOT and len(arguments) >= 2 and isinstance(arguments[0], Value):
        count = arguments[1]
        if isinstance(count, int) and count > 0:
            return arguments[0].id, count, None
    elif operator in _ALONG and len(arguments) >= 3 and isinstance(arguments[2], Value):
        shape, along = _shape(graph, entry, arguments[0], rows), arguments[1]
        if shape and isinstance(along, int) and -len(shape) <= along < len(shape):
            return arguments[2].id, shape[along], None
    return None


def _shape(graph: Graph, entry: Entry, argument: object, rows: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a value or parameter; empty if the argument is neither."""
    kind: TensorType
    match argument:
        case Value(number):
            kind = graph.types[entry.types[number]]
        case ParameterValue(row):
            kind = graph.parameters[row].type
        case _:
            return ()
    return tuple(rows[side.row] if isinstance(side, Size) else side for side in kind.shape)
