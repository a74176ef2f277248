"""Served graphs with parameters of half precision, converted as data from a float32 graph."""

from msgspec.structs import replace

from partition.model.graph import (
    SERVE,
    DataType,
    Graph,
    GraphNode,
    Parameter,
    TensorType,
    TypeName,
    Value,
    version_for,
)
from partition.model.serving import serving_graph
from tests.partition.hand_models import gpt_graph


def half_graph(dtype: DataType = "bfloat16") -> Graph:
    """Return a small gpt that serves. Everything is in `dtype` except its logits, which are float32."""
    graph = serving_graph(gpt_graph(16, 8, 8, 2, 1, 0.0), 8)
    (entry,) = graph.entries
    assert entry.name == SERVE
    types = [_narrow(kind, dtype) for kind in graph.types]
    (output,) = entry.outputs
    types.append(TensorType("float32", graph.types[entry.types[output]].shape))
    widened = GraphNode(
        len(entry.nodes), len(graph.operators), (Value(output), TypeName("float32")), (), (len(entry.types),)
    )
    parameters = tuple(narrowed(row, dtype) for row in graph.parameters)
    return replace(
        graph,
        version=version_for(parameters),
        types=tuple(types),
        operators=(*graph.operators, "aten.to.dtype"),
        parameters=parameters,
        constants=tuple(each for each in graph.constants if each.type.dtype != "float32"),
        entries=(
            replace(
                entry,
                nodes=(*entry.nodes, widened),
                types=(*entry.types, len(types) - 1),
                outputs=(len(entry.types),),
            ),
        ),
    )


def narrowed(row: Parameter, dtype: DataType) -> Parameter:
    return replace(row, type=_narrow(row.type, dtype), kind="frozen")


def _narrow(kind: TensorType, dtype: DataType) -> TensorType:
    return replace(kind, dtype=dtype) if kind.dtype == "float32" else kind
