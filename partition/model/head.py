"""The head of a language model: the product that computes logits from hidden states. No torch."""

from partition.model.graph import (
    SERVE,
    Entry,
    Graph,
    Size,
    StageEntry,
    StageGraph,
    TensorType,
    Value,
    values_of,
)
from partition.model.serving import is_whole

_PRODUCTS = {
    "aten.linear.default": 0,
    "aten.mm.default": 0,
    "aten.matmul.default": 0,
    "aten.addmm.default": 1,
}
"""Operators that can be a head, and which of their arguments are the hidden states."""
_ROWS = Size(1)
"""The side of a tensor that has one row for each wanted token."""


def head_input(graph: Graph | StageGraph) -> tuple[int, TensorType] | None:
    """Return the value from which a served model's head computes logits, and its type: the final hidden
    states, one row for each row of logits. Operators after the head (a cap, a scale) are elementwise. None if
    the model has no such head, or if the stage is not the last."""
    entry = next((each for each in graph.entries if each.name == SERVE), None)
    if entry is None or is_whole(graph, entry) or len(entry.outputs) != 1:
        return None
    makers = {value: node for node in entry.nodes for value in node.outputs}
    value = entry.outputs[0]
    while (node := makers.get(value)) is not None:
        place = _PRODUCTS.get(graph.operators[node.operator])
        if place is None:
            before = next(values_of(node), None)
            if before is None:
                return None
            value = before
            continue
        hidden = node.arguments[place]
        if not isinstance(hidden, Value):
            return None
        kind = graph.types[_types(entry)[hidden.id]]
        *sides, width = kind.shape
        is_by_row = isinstance(width, int) and sides.count(_ROWS) == 1 and sides.count(1) == len(sides) - 1
        return (hidden.id, kind) if is_by_row else None
    return None


def hidden_width(kind: TensorType) -> int:
    """Return the number of values in a row of hidden states."""
    width = kind.shape[-1]
    assert isinstance(width, int)
    return width


def read_values(graph: StageGraph) -> tuple[int, ...]:
    """Return the value from which hidden states are read; empty if the stage has none."""
    head = head_input(graph) if graph.is_last else None
    return () if head is None else (head[0],)


def answered_kind(kind: TensorType) -> TensorType:
    """Return the type of a stage's answer with hidden states: float64 if they are, otherwise float32, as for
    logits."""
    return TensorType("float64" if kind.dtype == "float64" else "float32", (_ROWS, hidden_width(kind)))


def _types(entry: Entry | StageEntry) -> dict[int, int]:
    return dict(entry.types) if isinstance(entry, StageEntry) else dict(enumerate(entry.types))
