"""Layer costs of a model, computed once for all the plans that are tried of it."""

from collections.abc import Sequence
from functools import cached_property

from partition.model.graph import Graph
from partition.plan.cost import LayerCost
from partition.plan.layer_costs import layer_costs
from partition.plan.operations import Operations, layer_operations


class ModelCosts:
    """Costs of one micro-batch whose symbols have the values `sizes`, computed on demand."""

    def __init__(self, graph: Graph, sizes: Sequence[int]) -> None:
        self._graph = graph
        self._sizes = sizes

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """Return one row per layer. Raises ValueError: sizes that do not fit the graph."""
        return tuple(layer_costs(self._graph, self._sizes))

    @cached_property
    def operations(self) -> tuple[Operations, ...]:
        """Return one row per layer. Raises RemoteProtocolError: sizes that do not fit the graph."""
        return tuple(layer_operations(self._graph, self._sizes))
