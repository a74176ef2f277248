"""The planner's split of a model for serving: the split with the fewest milliseconds per token. If the cost
is low, it prefers machines for which another machine of the same kind is free.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import RunFailed, UsageError
from node.placement.leases import Offer, whole_rate
from node.planning.peers import LINKED_PEERS_MAX
from node.serving.recruiting import MachineKind, kind_of
from node.serving.stage import CACHE_SHARE, OF_UNITS, boundary_form
from partition.model.cut import crossings
from partition.model.graph import SERVE, TRAIN, Graph
from partition.model.serving import serving_graph
from partition.model.sizes import evaluate
from partition.plan.layer_costs import layer_costs
from partition.plan.observed import NOTHING, Knowledge
from partition.plan.operations import Operations, layer_operations
from partition.plan.problem import Constraints, Infeasible, PeerCost, Problem
from partition.plan.rates import assumed, equivalent_rate
from partition.plan.solver import solve

READ_TOKENS = 128
"""Number of tokens in a chunk of a prompt, as doors send it."""
KIND_COST_MAX = 1.25
"""How many times as long a token may take if each stage is then on a machine for which another of the same
kind is free. When the machine dies, answers continue on the other machine with the same bits."""
KINDS_TRIED_MAX = 8
"""Maximum number of kinds of machines for which plans are made, the most frequent kinds first. Each kind
needs one more solution."""
READ_TOKENS_A_TOKEN = 4
"""Number of tokens in the prompt for each token of the answer, in the typical answer for which plans are
made. According to each peer's measurements, reading a token in a chunk costs less than generating one."""


def served_graph(graph: Graph, name: str, context: int) -> Graph:
    """Return the serving graph of a model that was captured for training or serving. Raises UsageError if it
    cannot be served."""
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
    """Return the pairs of layers between which no stage may begin, because the tensors that cross there do
    not have one row per token."""
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
    """Return the sequence length for which a model was captured, that is, its number of positions. Raises
    ValueError if it does not take sequences."""
    entry = graph.entries[0]
    shape = graph.types[entry.inputs[0].type].shape
    if len(shape) != 2:
        raise ValueError("it does not take sequences of tokens")
    if isinstance(shape[1], int):
        return shape[1]
    return evaluate(graph.expressions, [symbol.maximum for symbol in graph.symbols])[shape[1].row]


def plan_service(
    graph: Graph, offers: Sequence[Offer], stages: int, knowledge: Knowledge = NOTHING
) -> tuple[list[tuple[int, int]], list[PeerId]]:
    """Return the layers of each stage and the best peer for it, given the measured speed of peers and links.
    With `stages` 0, the model is split only if that is faster, or if it fits no single peer. Machines for
    which another of the same kind is free are preferred, up to a cost of `KIND_COST_MAX`. Raises RunFailed if
    nothing fits."""
    context = graph.symbols[2].maximum
    decode = layer_operations(graph, (1, 1, context))
    read = layer_operations(graph, (READ_TOKENS, 1, context))
    free = [each for each in offers if each.has_slot]
    peers = [_cost(each, decode, read, knowledge) for each in free]
    known = knowledge.links([each.peer for each in free]) if len(free) <= LINKED_PEERS_MAX else {}
    rules = Constraints(stages=stages, replicas=1, together=_together(graph))
    problem = Problem(
        tuple(layer_costs(graph, (1, 1, context))),
        tuple(peers),
        links={(one.hex(), other.hex()): link for (one, other), link in known.items()},
        objective="latency",
        trains=False,
        constraints=rules,
    )
    try:
        found = _solve(problem)
    except Infeasible as error:
        raise RunFailed(f"the service cannot be placed: {error}", error.do or None) from None
    kinds = {each.peer: kind for each in free if (kind := kind_of(knowledge, each.peer)) is not None}
    return _with_spares(problem, found, kinds)[1:]


_Placed = tuple[int, list[tuple[int, int]], list[PeerId]]
"""The time per token, the layers of each stage, and the peer that holds each stage."""


def _solve(problem: Problem) -> _Placed:
    """Solve a placement problem. Raises Infeasible if nothing fits."""
    split = solve(problem)
    names = sorted(each.name for each in problem.peers)
    return split.score, list(split.ranges), [PeerId(bytes.fromhex(names[group[0]])) for group in split.groups]


def _with_spares(problem: Problem, found: _Placed, kinds: Mapping[PeerId, MachineKind]) -> _Placed:
    """Return the fastest split among machines of one kind that leaves one of them free, if it is not much
    slower than the found split; otherwise the found split."""
    counts = Counter(kinds.values())

    def has_spares(peers: Sequence[PeerId]) -> bool:
        used = Counter(kinds[peer] for peer in peers if peer in kinds)
        return used.total() == len(peers) and all(counts[kind] > used[kind] for kind in used)

    if has_spares(found[2]):
        return found
    others = []
    for kind, count in sorted(counts.items(), key=lambda row: (-row[1], row[0]))[:KINDS_TRIED_MAX]:
        alike = tuple(each for each in problem.peers if kinds.get(PeerId(bytes.fromhex(each.name))) == kind)
        if count < 2:
            continue
        try:
            others.append(_solve(replace(problem, peers=alike)))
        except Infeasible:
            continue
    able = [each for each in others if has_spares(each[2]) and each[0] <= KIND_COST_MAX * found[0]]
    return min(able, key=lambda each: each[0], default=found)


def _cost(
    offer: Offer, decode: Sequence[Operations], read: Sequence[Operations], knowledge: Knowledge
) -> PeerCost:
    """Return a layer's time on a peer for each token of a typical answer: the time for the token itself plus
    its share of the prompt."""
    rate = whole_rate(knowledge.flops_per_second(offer.peer, whole_rate(offer.flops_per_second)))
    if (calibration := knowledge.calibrations.get(offer.peer)) is None:
        device = assumed(rate)
    else:
        device = calibration.scaled(rate * 1000 // max(1, equivalent_rate(calibration, read)))
    one, chunk = device.model_nanoseconds(decode)[0], device.model_nanoseconds(read)[0]
    forward = tuple(
        each + READ_TOKENS_A_TOKEN * many // READ_TOKENS for each, many in zip(one, chunk, strict=True)
    )
    memory = int(offer.memory_bytes * (1 - CACHE_SHARE))
    return PeerCost(offer.peer.hex(), memory, forward, tuple(0 for _ in forward))
