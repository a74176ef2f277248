"""Layers that a user wants in one stage: from modules and tied weights to ranges of layers. No torch.

A plan never cuts within such a range (`partition.plan.problem.Constraints.together`). The ranges do not
affect the computation, so the model's graph, and every value of a run, is the same with and without them.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from partition.model.dataflow import flow_of
from partition.model.graph import Entry, Graph

RANGES_MAX = 16
"""Maximum number of ranges of one run, because its manifest must stay small."""
Range = tuple[int, int]


def kept_ranges(graph: Graph, groups: Sequence[Sequence[str]], *, tied: bool = False) -> tuple[Range, ...]:
    """Return half-open ranges of layers, each of which stays in one stage; in order, none within another.

    A group names modules (`h.0`), layers by their names or numbers (`3`), or ranges of these (`3-5`). Its
    range is from the first to the last layer of what it names. With `tied`, all layers that use one weight
    form a range too.

    Raises:
        ValueError: a name is neither a module's nor a layer's, or there are too many ranges.
    """
    entry = graph.entries[0]
    found = [(min(layers), max(layers) + 1) for group in groups if (layers := _named(graph, entry, group))]
    if tied:
        found += _tied(graph, entry)
    ranges: list[Range] = []
    for first, last in sorted(found):
        if ranges and first < ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(last, ranges[-1][1])
        elif last - first > 1:
            ranges.append((first, last))
    if len(ranges) > RANGES_MAX:
        raise ValueError(
            f"{len(ranges)} ranges of layers to keep together, but at most {RANGES_MAX} are allowed"
        )
    return tuple(ranges)


def _named(graph: Graph, entry: Entry, group: Sequence[str]) -> list[int]:
    return [layer for name in group for layer in _layers_of(graph, entry, name)]


def _layers_of(graph: Graph, entry: Entry, name: str) -> list[int]:
    count = len(graph.layers)
    first, dash, last = name.partition("-")
    if first.isdecimal() and (last.isdecimal() or not dash):
        numbers = [int(first), int(last or first)]
        if not numbers[0] <= numbers[1] < count:
            raise ValueError(f"there are no layers '{name[:40]}': the model has 0 to {count - 1}")
        return numbers
    owned = [
        number for number, node in enumerate(entry.nodes) if name and _is_in(graph.owners[node.owner], name)
    ]
    layers = sorted({_layer(entry, number) for number in owned})
    if name in graph.layers:
        layers.append(graph.layers.index(name))
    if not layers:
        raise ValueError(
            f"there is no module and no layer '{name[:60]}'; layers are {', '.join(graph.layers)[:200]}"
        )
    return layers


def _is_in(owner: str, module: str) -> bool:
    return owner == module or owner.startswith(f"{module}.")


def _layer(entry: Entry, node: int) -> int:
    return bisect_right(entry.boundaries, node)


def _tied(graph: Graph, entry: Entry) -> Iterator[Range]:
    """Yield, for each parameter that several layers use, the range from the first to the last of them."""
    flow = flow_of(graph, entry)
    spans: dict[int, Range] = {}
    for number, keys in enumerate(flow.keys):
        layer = _layer(entry, number)
        for table, row in keys:
            if table == "p" and flow.is_live[number]:
                first, _ = spans.get(row, (layer, layer))
                spans[row] = first, layer
    yield from ((first, last + 1) for first, last in spans.values() if last > first)
