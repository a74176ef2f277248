"""The layer costs of a model, computed once for all plans that are tried for it."""

from collections.abc import Sequence
from functools import cached_property

from partition.model.graph import Graph
from partition.plan.cost import LayerCost
from partition.plan.layer_costs import layer_costs
from partition.plan.operations import Operations, layer_operations


class ModelCosts:
    """The costs of one micro-batch whose symbols have the values `sizes`, computed on demand."""

    def __init__(self, graph: Graph, sizes: Sequence[int]) -> None:
        self._graph = graph
        self._sizes = sizes

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """The costs of each layer. Raises ValueError if the sizes do not fit the graph."""
        return tuple(layer_costs(self._graph, self._sizes))

    @cached_property
    def operations(self) -> tuple[Operations, ...]:
        """The operations of each layer. Raises RemoteProtocolError if the sizes do not fit the graph."""
        return tuple(layer_operations(self._graph, self._sizes))
