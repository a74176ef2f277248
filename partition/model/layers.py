"""The choice of a graph's layers: the boundaries at which a plan may cut, and their names. No torch.

A solver's time grows with the square of the number of positions, and nearly all of the hundreds of legal
positions are worse than a neighbouring one. So between two modules with parameters one position is kept:
where the fewest bytes cross, preferably at a border of modules, and rather late. Then positions on a hill are
dropped: those with clearly fewer bytes crossing nearby on both sides. From the rest the best are taken, best
first, as long as they are far enough apart: at least one part in `layers_max` of the model's cost must be
between two of them. So there are about `layers_max` layers, none of them negligible. Half of the cost is time
and half is parameters, because parameters take memory even if they take no time.

The result is the beginnings of a transformer's attention and feed-forward blocks, of a residual network's
blocks, and of a plain network's layers.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from partition.model.cut import crossing_bytes, follow, legal_positions, reference_sizes
from partition.model.dataflow import Flow, flow_of
from partition.model.graph import LAYERS_MAX, Entry, Graph, GraphNode, Name, ParameterValue, arguments_of
from partition.model.min_cut import FLOP_COST, TOUCHED_BYTE_COST
from partition.model.work import EntryWork

LAYERS_WANTED_MAX = 128
HILL_SHARE = 6
"""The feet of a hill are searched within one part in this many of the model's cost, on both sides."""
HILL_PERCENT = 125
"""A position is on a hill if it exceeds the feet by this percentage. The slow rise towards the middle of a
U-Net does not count."""


def with_layers(
    graph: Graph,
    *,
    split: Sequence[str] = (),
    together: Sequence[Sequence[str]] = (),
    layers_max: int = LAYERS_WANTED_MAX,
) -> Graph:
    """Return the graph with new layers, at most `layers_max`.

    With `split`, the boundaries are exactly the beginnings of the modules named there. There is no boundary
    between the first and the last node of each group of modules in `together`.

    Raises:
        ValueError: no node belongs to a named module, no cut is possible at a split, or `together` forbids
            it.
    """
    if not 1 <= layers_max <= LAYERS_MAX:
        raise ValueError(f"a model has 1 to {LAYERS_MAX} layers, not {layers_max}")
    entry = graph.entries[0]
    last = _first_labelled(graph, entry)
    legal = [position for position in legal_positions(graph) if position <= last]
    spans = [_span(graph, entry, modules) for modules in together]
    if split:
        positions = sorted({_beginning(graph, entry, module, legal) for module in split})
        for position in positions:
            if any(low < position <= high for low, high in spans):
                raise ValueError(f"a split at node {position} would divide modules that belong together")
        if len(positions) >= layers_max:
            raise ValueError(f"{len(positions)} splits would make more than {layers_max} layers")
    else:
        free = [position for position in legal if not any(low < position <= high for low, high in spans)]
        positions = _chosen(graph, entry, free, layers_max)
    entries = tuple(
        msgspec.structs.replace(other, boundaries=boundaries)
        for other, boundaries in zip(graph.entries, follow(graph, positions), strict=True)
    )
    return msgspec.structs.replace(graph, layers=_names(graph, entry, positions), entries=entries)


def _first_labelled(graph: Graph, entry: Entry) -> int:
    """Return the first node that depends on a label: the format allows no layer to begin after it."""
    flow = flow_of(graph, entry)
    for number, (floats, needs_label) in enumerate(zip(flow.floats, flow.needs_label, strict=True)):
        if floats or needs_label:
            return number
    return len(entry.nodes)


# Requests of the user


def _is_in(owner: str, module: str) -> bool:
    return owner == module or owner.startswith(f"{module}.")


def _nodes_of(graph: Graph, entry: Entry, module: str) -> list[int]:
    nodes = [number for number, node in enumerate(entry.nodes) if _is_in(graph.owners[node.owner], module)]
    if not nodes:
        known = sorted({graph.owners[node.owner].split(".")[0] for node in entry.nodes} - {""})
        raise ValueError(f"no module '{module[:60]}' in the model; at the top are {', '.join(known)[:200]}")
    return nodes


def _span(graph: Graph, entry: Entry, modules: Sequence[str]) -> tuple[int, int]:
    nodes = [number for module in modules for number in _nodes_of(graph, entry, module)]
    return (min(nodes), max(nodes)) if nodes else (0, 0)


def _beginning(graph: Graph, entry: Entry, module: str, legal: Sequence[int]) -> int:
    """Return the first legal position at or after the module's first node and not after its last."""
    nodes = _nodes_of(graph, entry, module)
    place = bisect_left(legal, nodes[0])
    if place == len(legal) or legal[place] > nodes[-1]:
        raise ValueError(f"no cut is possible at the beginning of '{module}'")
    return legal[place]


# Properties of the graph


@dataclass(frozen=True)
class _Candidate:
    """A position; a lower `rank` is better."""

    position: int
    crossing_bytes: int
    border: int
    cost: int
    """The cost of all nodes before the position."""

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.crossing_bytes, self.border, -self.position


def _chosen(graph: Graph, entry: Entry, legal: Sequence[int], layers_max: int) -> list[int]:
    """Return boundaries if the user gave none."""
    sizes = reference_sizes(graph)
    crossing = crossing_bytes(graph, sizes)
    flow = flow_of(graph, entry)
    before = list(accumulate(_costs(graph, flow, sizes), initial=0))
    best: dict[int, _Candidate] = {}
    gaps = _gaps(graph, entry, flow.is_live)
    for position in legal:
        candidate = _Candidate(
            position, crossing[position], _border(graph, entry, position), before[position]
        )
        gap = bisect_left(gaps, position)
        # Before the first parameter and after the last there would be nothing to hold.
        if 0 < gap < len(gaps) and (gap not in best or candidate.rank < best[gap].rank):
            best[gap] = candidate
    candidates = _without_hills(list(best.values()), before[-1] // HILL_SHARE)
    return _apart(candidates, -(-before[-1] // layers_max), layers_max - 1)


def _costs(graph: Graph, flow: Flow, sizes: Sequence[int]) -> list[int]:
    """Return the cost of each node: its share of the time, plus the share of the parameters that it is the
    first to use."""
    work = EntryWork(graph, flow.entry, sizes)
    times, parameters = [], []
    seen: set[int] = set()
    for node, is_live, keys in zip(flow.entry.nodes, flow.is_live, flow.keys, strict=True):
        flops = work.flops(node) if is_live else 0
        times.append(flops * FLOP_COST + work.touched_bytes(node) * TOUCHED_BYTE_COST if flops else 0)
        rows = {row for table, row in keys if table == "p"} - seen
        seen |= rows
        parameters.append(sum(work.type_bytes(graph.parameters[row].type) for row in rows))
    all_time, all_bytes = max(1, sum(times)), max(1, sum(parameters))
    # Two shares with a common denominator, so that everything stays an integer.
    return [time * all_bytes + size * all_time for time, size in zip(times, parameters, strict=True)]


def _gaps(graph: Graph, entry: Entry, is_live: Sequence[bool]) -> list[int]:
    """Return the nodes at which a new module begins to use its parameters."""
    found = []
    last = -1
    for number, node in enumerate(entry.nodes):
        if is_live[number] and any(isinstance(argument, ParameterValue) for argument in arguments_of(node)):
            if node.owner != last or not graph.owners[node.owner]:
                found.append(number)
            last = node.owner
    return found


def _border(graph: Graph, entry: Entry, position: int) -> int:
    """Return the nesting depth of modules at a position: the common path of the nodes before and after it."""
    before = _path(graph, entry.nodes[position - 1])
    after = _path(graph, entry.nodes[position])
    if before == after:
        return 1 << 20
    return _common(before, after)


def _path(graph: Graph, node: GraphNode) -> list[str]:
    owner = graph.owners[node.owner]
    return owner.split(".") if owner else []


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _without_hills(candidates: Sequence[_Candidate], reach: int) -> list[_Candidate]:
    kept = []
    costs = [candidate.cost for candidate in candidates]
    for place, candidate in enumerate(candidates):
        left = candidates[bisect_left(costs, candidate.cost - reach) : place]
        right = candidates[place + 1 : bisect_right(costs, candidate.cost + reach)]
        foot = 100 * candidate.crossing_bytes // HILL_PERCENT
        if not all(any(other.crossing_bytes <= foot for other in side) for side in (left, right)):
            kept.append(candidate)
    return kept


def _apart(candidates: Sequence[_Candidate], distance: int, count_max: int) -> list[int]:
    """Return the positions of the best candidates such that any two are at least a cost of `distance`
    apart."""
    taken: list[tuple[int, int]] = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.rank):
        place = bisect_left(taken, (candidate.cost, candidate.position))
        beside = taken[max(0, place - 1) : place + 1]
        is_apart = all(abs(candidate.cost - cost) >= distance for cost, _ in beside)
        if is_apart and len(taken) < count_max:
            taken.insert(place, (candidate.cost, candidate.position))
    return sorted(position for _, position in taken)


# Names


def _names(graph: Graph, entry: Entry, positions: Sequence[int]) -> tuple[Name, ...]:
    names: list[str] = []
    used: set[str] = set()
    for first in (0, *positions):
        wanted = _name(graph, entry, first) or "model"
        name, count = wanted, 1
        while name in used:
            count += 1
            name = f"{wanted}:{count}"
        used.add(name)
        names.append(name)
    return tuple(names)


def _name(graph: Graph, entry: Entry, first: int) -> str:
    """Return the outermost module of the first parameter after the boundary that does not contain the last
    parameter before it."""
    path = _parameter_path(graph, entry.nodes[first:])
    if not first:
        return ".".join(path)
    length = _common(_parameter_path(graph, entry.nodes[first - 1 :: -1]), path) + 1
    # In a list of modules, name the element that begins, not the list.
    while length < len(path) and path[length].isdigit():
        length += 1
    return ".".join(path[:length])


def _parameter_path(graph: Graph, nodes: Sequence[GraphNode]) -> list[str]:
    """Return the path of the module with the first parameter in these nodes. If it has no owner, use the path
    in its name."""
    for node in nodes:
        for argument in arguments_of(node):
            if isinstance(argument, ParameterValue):
                return _path(graph, node) or graph.parameters[argument.row].names[0].split(".")[:-1]
    return []
