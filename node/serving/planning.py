"""Into which stages a model is cut to be served, by the planner: the fewest milliseconds a token."""

from collections.abc import Sequence

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import RunFailed, UsageError
from node.placement.leases import Offer
from node.serving.stage import CACHE_SHARE, OF_UNITS, boundary_form
from partition.model.cut import crossings
from partition.model.graph import SERVE, TRAIN, Graph
from partition.model.serving import serving_graph
from partition.model.sizes import evaluate
from partition.plan.layer_costs import layer_costs
from partition.plan.problem import Constraints, Infeasible, Problem, uniform_peers
from partition.plan.solver import solve

PLANNED_TOKENS = 8
"""Tokens of a step that a plan is made for: what some sessions decode together."""


def served_graph(graph: Graph, name: str, context: int) -> Graph:
    """Return the graph that serves a model which was captured, be it to be trained or to be served. Raises
    UsageError: it cannot be served."""
    kind = graph.entries[0].name
    if kind == SERVE:
        return graph
    try:
        if kind != TRAIN:
            raise ValueError(f"its entry point is {kind}")
        return serving_graph(graph, min(context, _sample_length(graph)))
    except ValueError as error:
        raise UsageError(f"{name}: this model cannot be served: {error}") from None


def _together(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return the pairs of layers between which no stage may begin: what crosses there is not the tokens'."""
    entry = graph.entries[0]
    found = []
    for position, values in enumerate(crossings(graph, entry.boundaries), 1):
        try:
            for value in values:
                if value not in OF_UNITS:
                    boundary_form(graph.types[entry.types[value]])
        except RemoteProtocolError:
            found.append((position - 1, position + 1))
    return tuple(found)


def _sample_length(graph: Graph) -> int:
    """Return how many tokens a sequence has that a model was captured for: as many as it has places for.
    Raises ValueError: it takes no sequences."""
    entry = graph.entries[0]
    shape = graph.types[entry.inputs[0].type].shape
    if len(shape) != 2:
        raise ValueError("it takes no sequences of tokens")
    if isinstance(shape[1], int):
        return shape[1]
    return evaluate(graph.expressions, [symbol.maximum for symbol in graph.symbols])[shape[1].row]


def plan_service(
    graph: Graph, offers: Sequence[Offer], stages: int
) -> tuple[list[tuple[int, int]], list[PeerId]]:
    """Return the layers of each stage and the peer that suits it best. With `stages` 0 the model is cut only
    where that is quicker, or where it fits no peer. Raises RunFailed: nothing fits."""
    layers = layer_costs(graph, (PLANNED_TOKENS, PLANNED_TOKENS, graph.symbols[2].maximum))
    free = [each for each in offers if each.has_slot]
    peers = uniform_peers(
        layers,
        [
            (each.peer.hex(), int(each.flops_per_second), int(each.memory_bytes * (1 - CACHE_SHARE)))
            for each in free
        ],
    )
    rules = Constraints(stages=stages, replicas=1, together=_together(graph))
    try:
        split = solve(Problem(tuple(layers), peers, objective="latency", trains=False, constraints=rules))
    except Infeasible as error:
        raise RunFailed(f"the service cannot be placed: {error}", error.do or None) from None
    names = sorted(each.peer.hex() for each in free)
    return list(split.ranges), [PeerId(bytes.fromhex(names[group[0]])) for group in split.groups]
