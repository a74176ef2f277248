"""The cut of a graph into stages, at any node of its first entry point. No torch.

A stage takes the nodes between two positions; the other entry points are cut according to the owners of
parameters (`partition.model.dataflow.places`). Values of an earlier stage that a later stage needs are sent
through every stage between, or computed again if that is cheaper (`partition.model.min_cut`). Sizes travel
with every payload, so they cost nothing. Unneeded nodes are dropped: if there is a loss, the model's outputs
are not sent.

Cutting is a pure function of graph and positions, so every peer makes the same stages by itself, and no
`StageGraph` is sent. A graph that cannot be cut as requested raises ValueError, even if it came from a peer.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from crypto.errors import RemoteProtocolError
from partition.model.dataflow import Flow, flow_of, places
from partition.model.graph import TENSORS_MAX, Graph, StageGraph
from partition.model.min_cut import Chooser
from partition.model.stages import EntryPart, assemble
from partition.model.work import EntryWork

REFERENCE_BATCH = 8
REFERENCE_SIZE = 512
"""The symbols' values used to estimate bytes, if their bounds allow, so that a cut does not depend on a
run."""


def legal_positions(graph: Graph) -> tuple[int, ...]:
    """Return the positions at which a checked graph may be cut, ascending; any of them may be combined.

    A stage begins with a node that matters: a later node needs it, and it takes more than constants. Nodes
    that need a label come after every position, except those that need nothing else. At least one tensor
    crosses; no more than fit into a bundle, and none without elements. No state is used on both sides.
    (Constants that cost more to compute again than to send are not counted here; `cut` raises if they exceed
    a bundle.)

    Raises:
        ValueError: the sizes do not fit the graph.
    """
    return _Cutter(graph).legal


def crossing_bytes(graph: Graph, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return, for every position of the first entry point, how many bytes of earlier values are needed after
    it in the forward pass.

    This is an estimate in which only constants are computed again; `cut` may find a smaller number.
    """
    return _Cutter(graph, sizes).crossing_bytes()


def crossings(graph: Graph, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return, for each position, the values of the first entry point that are sent if that is the only cut.

    Raises:
        ValueError: a value there can neither be sent nor be computed again.
    """
    return _Cutter(graph).crossings(positions)


def follow(graph: Graph, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return, for every entry point, the nodes before which cuts fall if the first entry point is cut at
    `positions`."""
    cutter = _Cutter(graph)
    found = []
    for flow, row in zip(cutter.flows, cutter.places.nodes, strict=True):
        # Floating nodes are at the end in any case; the row without them is ascending.
        settled = list(
            accumulate((-1 if floats else place for place, floats in zip(row, flow.floats, strict=True)), max)
        )
        found.append(tuple(bisect_right(settled, position - 1) for position in positions))
    return tuple(found)


def cut(graph: Graph, name: bytes, positions: Sequence[int]) -> tuple[StageGraph, ...]:
    """Return the stages of a checked graph named `name` (its hash), one more than there are positions.

    Positions are node numbers of the first entry point, ascending.

    Raises:
        ValueError: the positions are not ascending or not legal, or the sizes do not fit the graph.
    """
    return _Cutter(graph).cut(name, tuple(positions))


def cut_layers(graph: Graph, name: bytes, ranges: Sequence[tuple[int, int]]) -> tuple[StageGraph, ...]:
    """Cut like `cut`, but by half-open ranges of layers, which must be consecutive and cover all layers.

    Raises:
        ValueError: the ranges are not, or `cut` raises it.
    """
    reached = 0
    for first, last in ranges:
        if first != reached or last <= first:
            raise ValueError(f"layers {first} to {last}, but layer {reached} should come next")
        reached = last
    if reached != len(graph.layers):
        raise ValueError(f"stages with {reached} layers for a model with {len(graph.layers)}")
    boundaries = graph.entries[0].boundaries
    if len(boundaries) != len(graph.layers) - 1:
        raise ValueError(f"{len(boundaries)} boundaries between {len(graph.layers)} layers")
    return cut(graph, name, [boundaries[first - 1] for first, _ in ranges[1:]])


class _Cutter:
    """One graph, analysed once."""

    def __init__(self, graph: Graph, sizes: Sequence[int] | None = None) -> None:
        self.graph = graph
        self.flows = tuple(flow_of(graph, entry) for entry in graph.entries)
        self.places = places(graph, self.flows)
        if sizes is None:
            sizes = reference_sizes(graph)
        try:
            self.work = tuple(EntryWork(graph, entry, sizes) for entry in graph.entries)
        except RemoteProtocolError as error:
            raise ValueError(f"the graph has no valid shapes at its sizes: {error}") from None
        self.legal = self._legal()

    # Positions

    def _legal(self) -> tuple[int, ...]:
        first, end = self.flows[0], self.places.end
        counts = [first.is_live[i] and not first.is_constant[i] and not first.floats[i] for i in range(end)]
        forbidden = _Sweep(end)
        for low, high in self.places.torn:
            forbidden.add(low, high)
        enough = [0] * (end + 1)
        for number, flow in enumerate(self.flows):
            crossing = _Sweep(end)
            for value, low, high in self._spans(number):
                crossing.add(low, high)
                if not self.work[number].value_bytes(value):
                    forbidden.add(low, high)
            for node, needs_label in enumerate(flow.needs_label):
                if needs_label and flow.is_live[node]:
                    forbidden.add(self.places.nodes[number][node], end)
            for position, count in enumerate(crossing.counts()):
                enough[position] += 1 <= count <= TENSORS_MAX
        begin = counts.index(True) if True in counts else end
        return tuple(
            position
            for position, not_here in enumerate(forbidden.counts()[:end])
            if position > begin and counts[position] and not not_here and enough[position] == len(self.flows)
        )

    def _spans(self, number: int) -> list[tuple[int, int, int]]:
        """Return (value, low, high): the value is needed after any cut at a position in (low, high].
        Constants and labels are left out."""
        flow, row, end = self.flows[number], self.places.nodes[number], self.places.end
        inputs, ports = len(flow.entry.inputs), len(flow.entry.inputs) + len(flow.entry.labels)
        last = [-1] * len(flow.producers)
        for node, values in enumerate(flow.takes):
            if flow.is_live[node] and not flow.is_constant[node]:
                for value in values:
                    last[value] = max(last[value], row[node])
        for value in flow.final:
            last[value] = end
        for state, value in flow.entry.updates:
            last[value] = max(last[value], self.places.homes["s", state])
        spans = []
        for value, producer in enumerate(flow.producers):
            if inputs <= value < ports:
                continue
            if producer >= 0 and (flow.is_constant[producer] or flow.floats[producer]):
                continue
            made = row[producer] if producer >= 0 else -1
            if last[value] > made:
                spans.append((value, made, last[value]))
        return spans

    def crossing_bytes(self) -> tuple[int, ...]:
        total = _Sweep(self.places.end)
        for value, low, high in self._spans(0):
            total.add(low, high, self.work[0].value_bytes(value))
        return tuple(total.counts()[: self.places.end])

    def crossings(self, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        chooser = Chooser(self.graph, self.flows[0], self.work[0])
        order = sorted(set(positions))
        wanted: dict[int, list[int]] = {position: [] for position in order}
        for value, low, high in self._spans(0):
            for position in order[bisect_right(order, low) : bisect_right(order, high)]:
                wanted[position].append(value)
        sent = {position: chooser.choose(values)[0] for position, values in wanted.items()}
        return tuple(sent[position] for position in positions)

    # Contents of stages

    def cut(self, name: bytes, positions: tuple[int, ...]) -> tuple[StageGraph, ...]:
        legal = set(self.legal)
        for before, position in zip((0, *positions), positions, strict=False):
            if position <= before:
                raise ValueError(f"cut positions {before} and {position} are not ascending")
            if position not in legal:
                raise ValueError(f"no cut may be made before node {position}")
        parts = [self._parts(number, positions) for number in range(len(self.flows))]
        return assemble(self.graph, name, self.flows, self.places, positions, parts)

    def _parts(self, number: int, positions: tuple[int, ...]) -> list[EntryPart]:
        """Return the parts of one entry point, computed from the last stage to the first: each stage's needed
        values, nodes, and gradients."""
        flow = self.flows[number]
        stage_of = [bisect_right(positions, place) for place in self.places.nodes[number]]
        chooser = Chooser(self.graph, flow, self.work[number])
        last = len(positions)
        updated = self._updated(flow, positions)
        rooted: list[list[int]] = [[] for _ in range(last + 1)]
        for node in flow.rooted:
            rooted[stage_of[node]].append(node)
        outputs = flow.final
        parts: list[EntryPart] = []
        for stage in range(last, -1, -1):
            roots = [*outputs, *updated[stage]]
            nodes, wanted = _needed(flow, stage_of, stage, rooted[stage], roots)
            sent: tuple[int, ...] = tuple(range(len(flow.entry.inputs)))
            repeated: tuple[int, ...] = ()
            if stage > 0:
                sent, repeated = chooser.choose(wanted)
                if len(sent) > TENSORS_MAX:
                    raise ValueError(f"{len(sent)} tensors would cross a cut, but at most {TENSORS_MAX} can")
            if stage == last:
                outputs = () if flow.trains else flow.entry.outputs
            parts.append(EntryPart(sent, outputs, tuple(sorted((*nodes, *repeated)))))
            outputs = sent
        parts.reverse()
        if flow.trains:
            _mark_gradients(flow, parts)
        return parts

    def _updated(self, flow: Flow, positions: tuple[int, ...]) -> list[list[int]]:
        """Return, for each stage, the values that become its own states."""
        found: list[list[int]] = [[] for _ in range(len(positions) + 1)]
        for row, value in flow.entry.updates:
            found[bisect_right(positions, self.places.homes["s", row])].append(value)
        return found


class _Sweep:
    """Sums amounts over half-open spans (low, high] of positions, for every position at once."""

    def __init__(self, end: int) -> None:
        self._changes = [0] * (end + 2)

    def add(self, low: int, high: int, amount: int = 1) -> None:
        self._changes[low + 1] += amount
        self._changes[min(high + 1, len(self._changes) - 1)] -= amount

    def counts(self) -> list[int]:
        """Return the sums by position, from 0 to `end`."""
        return list(accumulate(self._changes))[:-1]


def reference_sizes(graph: Graph) -> tuple[int, ...]:
    """Return the symbols' values that are used to evaluate cuts."""
    return tuple(
        max(symbol.minimum, min(symbol.maximum, REFERENCE_SIZE if row else REFERENCE_BATCH))
        for row, symbol in enumerate(graph.symbols)
    )


def _needed(
    flow: Flow, stage_of: Sequence[int], stage: int, rooted: Sequence[int], roots: Sequence[int]
) -> tuple[list[int], tuple[int, ...]]:
    """Return the nodes of the stage that run (the `rooted` ones and those that `roots` need), and the values
    that they need from earlier stages. Both are ascending."""
    ports = len(flow.entry.inputs) + len(flow.entry.labels)
    nodes = set(rooted)
    waiting = [*roots, *(value for node in rooted for value in flow.takes[node])]
    wanted: set[int] = set()
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        node = flow.producers[value]
        if node < 0:
            # Labels are given to the last stage, which has all nodes that need them.
            if stage > 0 and not len(flow.entry.inputs) <= value < ports:
                wanted.add(value)
        elif stage_of[node] == stage:
            if node not in nodes:
                nodes.add(node)
                waiting.extend(flow.takes[node])
        elif stage_of[node] < stage:
            wanted.add(value)
        else:
            raise ValueError(f"node {node} would be needed before its stage")
    return sorted(nodes), tuple(sorted(wanted))


def _mark_gradients(flow: Flow, parts: list[EntryPart]) -> None:
    """Mark, from the last stage back, the inputs through which the loss depends on parameters of earlier
    stages."""
    arriving: tuple[int, ...] = ()
    leads = {value for value in (flow.entry.loss,) if value is not None and flow.has_gradient[value]}
    for part in reversed(parts):
        part.backward_outputs = arriving
        for number in reversed(part.nodes):
            node = flow.entry.nodes[number]
            # A value that leads to the loss has a gradient, and the node that made it passes the gradient on.
            if leads.intersection(node.outputs):
                leads.update(value for value in flow.takes[number] if flow.has_gradient[value])
        arriving = tuple(value for value in part.inputs if value in leads and flow.has_gradient[value])
        part.backward_inputs = arriving
        leads = set(arriving)
