"""Dataflow of a graph: the facts on which a cut is based. No torch.

For each entry point (`Flow`): which node makes a value, which nodes are needed at all, which need a label,
which need only constants, and through which nodes a gradient flows. All of it is static: shapes and random
values have no influence.

For the graph as a whole (`places`): where each node belongs, as a position in the node numbering of the
*first* entry point (its place). Cuts are positions in the first entry point; the other entry points are cut
so that a node is in the stage that holds its parameters and states. In the first entry point a node's place
is its own number. Elsewhere the place is the highest number that follows from the parameters and states used
by the node or by nodes before it: each counts with the node of the first entry point that uses it first. A
node's stage number is the number of cut positions that are at most its place, so all peers compute the same
stages.
"""

from dataclasses import dataclass

from partition.model.graph import (
    FLOATING,
    PAIRS,
    Entry,
    Graph,
    GraphNode,
    ParameterValue,
    StateValue,
    Value,
    arguments_of,
    values_of,
)
from partition.model.operators import BATCH_NORM, OPERATORS

SHARED_ROW_BYTES_MAX = 1 << 20
"""Maximum size of a frozen parameter (a table of frequencies) that every stage may hold if it needs a result
computed from it. A larger parameter stays in one stage, and the result is sent."""
RUNNING_MEAN, TRAINING, MOMENTUM = 3, 5, 6
"""Positions among the arguments of batch norm."""

_NO_GRADIENT = """
    detach argmax argmin argsort zeros_like ones_like full_like rand_like randn_like randint_like new_zeros
    new_ones new_full bucketize searchsorted one_hot count_nonzero
"""
_STOPS = frozenset(_NO_GRADIENT.split())

Key = tuple[str, int]
"""A row of a table: of parameters ("p") or of states ("s")."""


@dataclass(frozen=True)
class Flow:
    """The facts of one entry point, by value id or by node number.

    - `producers`: the node that makes a value, -1 for inputs and labels.
    - `takes`: the values a node takes, each once. `keys`: the parameters and states it uses.
    - `final`: the values that the last stage must have in the end. `rooted`: nodes that run in any case.
    - `is_live`: a final value needs the node.
    - `is_constant`: the node needs no input, label, trainable or large parameter, state or random number.
    - `floats`: the node needs labels and constants only, so it goes to the last stage wherever it stands;
      `needs_label`: it needs a label and also what only one stage has, so no cut comes after it.
    - `has_gradient`: a floating-point value that depends on a trainable parameter through differentiable
      operators.
    """

    entry: Entry
    producers: tuple[int, ...]
    takes: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[Key, ...], ...]
    final: tuple[int, ...]
    rooted: tuple[int, ...]
    is_live: tuple[bool, ...]
    is_constant: tuple[bool, ...]
    floats: tuple[bool, ...]
    needs_label: tuple[bool, ...]
    has_gradient: tuple[bool, ...]

    @property
    def trains(self) -> bool:
        return self.entry.loss is not None


def flow_of(graph: Graph, entry: Entry) -> Flow:
    """Return the facts of one entry point of a checked graph."""
    producers = [-1] * len(entry.types)
    for number, node in enumerate(entry.nodes):
        for value in node.outputs:
            producers[value] = number
    takes = tuple(tuple(dict.fromkeys(values_of(node))) for node in entry.nodes)
    keys = tuple(_keys(node) for node in entry.nodes)
    last = [entry.loss, entry.count, *(metric.value for metric in entry.metrics)]
    wanted = last if entry.loss is not None else [*last, *entry.outputs]
    final = tuple(dict.fromkeys(value for value in wanted if value is not None))
    rooted = tuple(number for number, node in enumerate(entry.nodes) if _moves_statistics(graph, entry, node))
    constant, floats, needs_label = _dependence(graph, entry, takes)
    live = _live(takes, producers, [*final, *(value for _, value in entry.updates)], rooted)
    return Flow(
        entry,
        tuple(producers),
        takes,
        keys,
        final,
        rooted,
        live,
        constant,
        floats,
        needs_label,
        _gradients(graph, entry),
    )


def _keys(node: GraphNode) -> tuple[Key, ...]:
    found: dict[Key, None] = {}
    for argument in arguments_of(node):
        if isinstance(argument, ParameterValue):
            found["p", argument.row] = None
        elif isinstance(argument, StateValue):
            found["s", argument.row] = None
    return tuple(found)


def _moves_statistics(graph: Graph, entry: Entry, node: GraphNode) -> bool:
    """Return whether the node is a batch norm whose running statistics a training step updates."""
    if entry.loss is None or graph.operators[node.operator] != BATCH_NORM:
        return False
    if len(node.arguments) <= TRAINING or node.arguments[TRAINING] is False:
        return False
    mean = node.arguments[RUNNING_MEAN]
    return isinstance(mean, ParameterValue) and graph.parameters[mean.row].kind == "statistic"


def _dependence(
    graph: Graph, entry: Entry, takes: tuple[tuple[int, ...], ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...], tuple[bool, ...]]:
    """Return, by node: whether it is constant, whether it floats, and whether it needs a label and also what
    only one stage has."""
    inputs, ports = len(entry.inputs), len(entry.inputs) + len(entry.labels)
    # By value: whether it needs what only one stage has (an input, a weight), and whether it needs a label.
    placed = [value < inputs for value in range(len(entry.types))]
    labelled = [inputs <= value < ports for value in range(len(entry.types))]
    constant, floats, needs_label = [], [], []
    for node, values in zip(entry.nodes, takes, strict=True):
        is_placed = not _is_shareable(graph, node) or any(placed[value] for value in values)
        is_labelled = any(labelled[value] for value in values)
        for value in node.outputs:
            placed[value], labelled[value] = is_placed, is_labelled
        constant.append(not is_placed and not is_labelled)
        floats.append(is_labelled and not is_placed)
        needs_label.append(is_labelled and is_placed)
    return tuple(constant), tuple(floats), tuple(needs_label)


def _is_shareable(graph: Graph, node: GraphNode) -> bool:
    """Return whether each of several stages could run the node and get the same result from the same
    inputs."""
    operator = OPERATORS.get(graph.operators[node.operator])
    if operator is None or operator.random:
        return False
    for argument in arguments_of(node):
        if isinstance(argument, StateValue):
            return False
        if isinstance(argument, ParameterValue) and not _is_shareable_row(graph, argument.row):
            return False
    return True


def _is_shareable_row(graph: Graph, row: int) -> bool:
    parameter = graph.parameters[row]
    if parameter.kind != "frozen":
        return False
    size = 8
    for side in parameter.type.shape:
        size *= side if isinstance(side, int) else SHARED_ROW_BYTES_MAX + 1
    return size <= SHARED_ROW_BYTES_MAX


def _live(
    takes: tuple[tuple[int, ...], ...], producers: list[int], values: list[int], rooted: tuple[int, ...]
) -> tuple[bool, ...]:
    live = [False] * len(takes)
    for number in (*rooted, *(producers[value] for value in values)):
        if number >= 0:
            live[number] = True
    for number in reversed(range(len(takes))):
        if live[number]:
            for value in takes[number]:
                if producers[value] >= 0:
                    live[producers[value]] = True
    return tuple(live)


def passes_gradient(graph: Graph, node: GraphNode) -> bool:
    """Return whether a gradient of the node's floating-point results can be passed on to its arguments."""
    return graph.operators[node.operator].split(".")[1] not in _STOPS


def _gradients(graph: Graph, entry: Entry) -> tuple[bool, ...]:
    found = [False] * len(entry.types)
    floating = [graph.types[row].dtype in (*FLOATING, *PAIRS) for row in entry.types]
    for node in entry.nodes:
        if not passes_gradient(graph, node):
            continue
        if any(_brings_gradient(graph, argument, found) for argument in arguments_of(node)):
            for value in node.outputs:
                found[value] = floating[value]
    return tuple(found)


def _brings_gradient(graph: Graph, argument: object, found: list[bool]) -> bool:
    if isinstance(argument, Value):
        return found[argument.id]
    return isinstance(argument, ParameterValue) and graph.parameters[argument.row].kind == "parameter"


@dataclass(frozen=True)
class NodePlaces:
    """The places of nodes and states, in node numbers of the first entry point; the very end is `end`.

    `nodes[e][i]` is the place of node i of entry point e; -1 is the very beginning. `homes` has the place of
    each parameter and state that a node uses. `torn` are pairs (low, high): a cut at a position in (low,
    high] would divide a state.
    """

    end: int
    nodes: tuple[tuple[int, ...], ...]
    homes: dict[Key, int]
    torn: tuple[tuple[int, int], ...]


def places(graph: Graph, flows: tuple[Flow, ...]) -> NodePlaces:
    """Return the place of every node and state."""
    end = len(graph.entries[0].nodes)
    found: dict[Key, int] = {}
    torn: list[tuple[int, int]] = []
    nodes = []
    for number, flow in enumerate(flows):
        makes: dict[int, list[Key]] = {}
        for state, value in flow.entry.updates:
            if flow.producers[value] >= 0:
                makes.setdefault(flow.producers[value], []).append(("s", state))
        row = []
        place = -1
        for index, keys in enumerate(flow.keys):
            keys = (*keys, *makes.get(index, ()))
            place = index if number == 0 else max([place, *(found.get(key, -1) for key in keys)])
            for key in keys:
                owner = found.setdefault(key, place)
                if key[0] == "s" and owner != place:
                    torn.append((min(owner, place), max(owner, place)))
            row.append(end if flow.floats[index] else place)
        nodes.append(tuple(row))
        for state, _ in flow.entry.updates:
            found.setdefault(("s", state), -1)
    return NodePlaces(end, tuple(nodes), found, tuple(torn))
