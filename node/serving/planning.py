"""Into which stages a model is cut to be served, by the planner: the fewest milliseconds a token."""

from collections.abc import Sequence

from crypto.identity import PeerId
from node.errors import RunFailed, UsageError
from node.placement.leases import Offer
from node.serving.stage import CACHE_SHARE, SERVE
from partition.model.graph import Graph
from partition.plan.layer_costs import layer_costs
from partition.plan.problem import Constraints, Infeasible, Problem, uniform_peers
from partition.plan.solver import solve

PLANNED_TOKENS = 8
"""Tokens of a step that a plan is made for: what some sessions decode together."""


def check_served(graph: Graph, name: str) -> None:
    """Raise UsageError where a graph cannot be served."""
    if graph.entries[0].name != SERVE:
        raise UsageError(
            f"{name}: the model was captured to be trained, not to be served",
            "docs/serving.md says how to capture one to be served",
        )


def plan_service(
    graph: Graph, offers: Sequence[Offer], stages: int
) -> tuple[list[tuple[int, int]], list[PeerId]]:
    """Return the layers of each stage and the peer that suits it best. With `stages` 0 the model is cut only
    where that is quicker, or where it fits no peer. Raises RunFailed: nothing fits."""
    layers = layer_costs(graph, (PLANNED_TOKENS,) * len(graph.symbols))
    free = [each for each in offers if each.has_slot]
    peers = uniform_peers(
        layers,
        [
            (each.peer.hex(), int(each.flops_per_second), int(each.memory_bytes * (1 - CACHE_SHARE)))
            for each in free
        ],
    )
    rules = Constraints(stages=stages, replicas=1)
    try:
        split = solve(Problem(tuple(layers), peers, objective="latency", trains=False, constraints=rules))
    except Infeasible as error:
        raise RunFailed(f"the service cannot be placed: {error}", error.do or None) from None
    names = sorted(each.peer.hex() for each in free)
    return list(split.ranges), [PeerId(bytes.fromhex(names[group[0]])) for group in split.groups]
