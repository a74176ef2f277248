"""The values to send over one cut and the nodes to compute again after it, at the least cost. No torch.

The cost model: a tensor that is sent costs its bytes over a link of 1 Gbit/s, twice if its gradient comes
back, plus a small fixed cost. A node that is computed again costs the bytes it touches in a memory of 10 GB/s
and its FLOPs at 50 GFLOP/s, three times if it has a backward pass. Only nodes without trainable parameters,
states and random numbers are ever computed again. Among nodes that depend on inputs these are views,
elementwise operators and reductions; among nodes that depend on constants alone (masks, positions), any.

So x and relu(x) cross as x, two views as their tensor, an expanded mask as the mask, and a causal mask not at
all. A value that depends on constants is computed again if that costs less in total than sending it. For the
rest the cheapest choice is a minimum cut (Ford and Fulkerson 1956, along shortest paths as in Edmonds and
Karp 1972): sources are nodes that cannot be computed again, the sink is the demand of the later stage, and
cutting a value's edge means sending it. Among equally cheap cuts the one nearest the sink is taken, so the
choice is unique.
"""

from collections import deque
from collections.abc import Callable, Sequence

from partition.model.dataflow import Flow
from partition.model.graph import Graph
from partition.model.operators import OPERATORS
from partition.model.work import EntryWork

FLOP_COST = 1
"""One unit of cost is 20 picoseconds."""
TOUCHED_BYTE_COST = 5
SENT_BYTE_COST = 400
TENSOR_COST = 64 * SENT_BYTE_COST
UNSENDABLE = 1 << 80
REGION_NODES_MAX = 96
"""Maximum number of nodes examined on the way back from one cut. Nodes further back count as not
repeatable."""
SEARCH_MAX = 2_000_000
"""Maximum number of edges created and followed for all cuts of a graph together, about a second. A cut of a
transformer takes about 3,000, and a table of costs as many for each layer. Only a graph made to be slow needs
more."""

_AGAIN = ("free", "elementwise", "reduction")


class Chooser:
    """Chooses for one entry point, at one value of every symbol."""

    def __init__(self, graph: Graph, flow: Flow, work: EntryWork) -> None:
        self._graph = graph
        self._flow = flow
        self._work = work
        self._budget = SEARCH_MAX
        # Cached, because the same nodes and values come before several cuts.
        self._send_costs: dict[int, int] = {}
        self._repeat_costs: dict[int, int | None] = {}

    def may_repeat(self, node: int) -> bool:
        """Return whether a later stage may compute the node again; the node is not constant."""
        flow = self._flow
        operator = OPERATORS.get(self._graph.operators[flow.entry.nodes[node].operator])
        if operator is None or operator.random or flow.keys[node]:
            return False
        return operator.cost in _AGAIN and not flow.needs_label[node] and not flow.floats[node]

    def send_cost(self, value: int) -> int:
        """Return the cost of sending one value; UNSENDABLE if the tensor has no elements."""
        found = self._send_costs.get(value)
        if found is None:
            found = self._send_costs[value] = self._send_cost(value)
        return found

    def _send_cost(self, value: int) -> int:
        size = self._work.value_bytes(value)
        if not size:
            return UNSENDABLE
        return TENSOR_COST + size * SENT_BYTE_COST * (2 if self._comes_back(value) else 1)

    def repeat_cost(self, node: int) -> int:
        """Return the cost of computing one node again."""
        operator = self._flow.entry.nodes[node]
        flops = self._work.flops(operator)
        touched = self._work.touched_bytes(operator) if flops else 0
        passes = 3 if any(self._comes_back(value) for value in operator.outputs) else 1
        return 1 + passes * (flops * FLOP_COST + touched * TOUCHED_BYTE_COST)

    def _cost_again(self, node: int) -> int | None:
        """Return the cost of computing one node again; None if that is not allowed."""
        if node not in self._repeat_costs:
            self._repeat_costs[node] = self.repeat_cost(node) if self.may_repeat(node) else None
        return self._repeat_costs[node]

    def _comes_back(self, value: int) -> bool:
        return self._flow.trains and self._flow.has_gradient[value]

    def choose(self, demand: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the values to send and the nodes to compute again, both ascending, that supply `demand`.

        Raises:
            ValueError: a value can neither be sent nor be computed again, or the graph is too complex.
        """
        constant = [value for value in demand if self._is_constant(value)]
        placed = [value for value in demand if not self._is_constant(value)]
        sent, repeated, taken = self._flow_cut(placed)
        for value in sorted({*constant, *taken}):
            self._choose_constant(value, sent, repeated)
        return tuple(sorted(sent)), tuple(sorted(repeated))

    def _is_constant(self, value: int) -> bool:
        node = self._flow.producers[value]
        return node >= 0 and self._flow.is_constant[node]

    def _choose_constant(self, value: int, sent: set[int], repeated: set[int]) -> None:
        """Add the value to those to send, or the nodes it depends on to those computed again."""
        nodes: set[int] = set()
        waiting = [self._flow.producers[value]]
        while waiting:
            node = waiting.pop()
            if node not in repeated and node not in nodes:
                nodes.add(node)
                waiting.extend(self._flow.producers[taken] for taken in self._flow.takes[node])
                self._spend(len(self._flow.takes[node]) + 1)
        if sum(self.repeat_cost(node) for node in nodes) <= self.send_cost(value):
            repeated |= nodes
        else:
            sent.add(value)

    def _flow_cut(self, demand: Sequence[int]) -> tuple[set[int], set[int], set[int]]:
        """Return the values to send, the nodes to compute again, and the constants that these need."""
        network = self._network(demand)
        flow = 0
        while path := network.path(self._spend):
            flow += network.push(path)
            if flow >= UNSENDABLE:
                raise ValueError("a tensor without elements would have to be sent")
        needed = network.behind()
        sent: set[int] = set()
        repeated: set[int] = set()
        constant: set[int] = set()
        waiting = list(demand)
        while waiting:
            value = waiting.pop()
            node = self._flow.producers[value]
            if self._is_constant(value):
                constant.add(value)
            elif node not in repeated and value not in sent:
                if node >= 0 and _of_node(node) in needed:
                    repeated.add(node)
                    waiting.extend(self._flow.takes[node])
                else:
                    sent.add(value)
        return sent, repeated, constant

    def _spend(self, edges: int) -> None:
        self._budget -= edges
        if self._budget < 0:
            raise ValueError("the graph is too complex to be cut")

    def _network(self, demand: Sequence[int]) -> "_Network":
        """Build the network. Edges lead from the source to nodes that may be repeated and to values that can
        only be sent, and from the demand to the sink."""
        network = _Network()
        seen = set(demand)
        nodes: set[int] = set()
        waiting = deque(sorted(demand))
        self._spend(len(waiting))
        for value in waiting:
            network.connect(_of_value(value), _SINK, UNSENDABLE)
        while waiting:
            value = waiting.popleft()
            node = self._flow.producers[value]
            again = self._cost_again(node) if node >= 0 else None
            if again is None or (node not in nodes and len(nodes) >= REGION_NODES_MAX):
                network.connect(_SOURCE, _of_value(value), self.send_cost(value))
                continue
            network.connect(_of_node(node), _of_value(value), self.send_cost(value))
            if node in nodes:
                continue
            nodes.add(node)
            network.connect(_SOURCE, _of_node(node), again)
            self._spend(2 * len(self._flow.takes[node]) + 2)
            for taken in self._flow.takes[node]:
                if self._is_constant(taken):
                    continue
                network.connect(_of_value(taken), _of_node(node), UNSENDABLE)
                if taken not in seen:
                    seen.add(taken)
                    waiting.append(taken)
        return network


_SOURCE, _SINK = -1, -2


def _of_value(value: int) -> int:
    return 2 * value


def _of_node(node: int) -> int:
    return 2 * node + 1


class _Network:
    """A flow network: edges with their remaining capacity. An edge and its reverse are adjacent in the
    list."""

    def __init__(self) -> None:
        self._edges: dict[int, list[int]] = {_SOURCE: [], _SINK: []}
        self._ends: list[int] = []
        self._left: list[int] = []

    def connect(self, start: int, end: int, capacity: int) -> None:
        number = len(self._ends)
        self._edges.setdefault(start, []).append(number)
        self._edges.setdefault(end, []).append(number + 1)
        self._ends += (end, start)
        self._left += (capacity, 0)

    def path(self, spend: Callable[[int], None]) -> list[int]:
        """Return the edges of a shortest path with capacity from source to sink; [] if there is none. `spend`
        is called with the number of edges examined."""
        came = {_SOURCE: -1}
        waiting = deque([_SOURCE])
        ends, left = self._ends, self._left
        while waiting:
            edges = self._edges[waiting.popleft()]
            spend(len(edges))
            for edge in edges:
                end = ends[edge]
                if left[edge] and end not in came:
                    came[end] = edge
                    if end == _SINK:
                        return self._back(came)
                    waiting.append(end)
        return []

    def _back(self, came: dict[int, int]) -> list[int]:
        path = []
        vertex = _SINK
        while vertex != _SOURCE:
            edge = came[vertex]
            path.append(edge)
            vertex = self._ends[edge ^ 1]
        return path

    def push(self, path: list[int]) -> int:
        """Fill a path with flow. Return the added flow."""
        amount = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= amount
            self._left[edge ^ 1] += amount
        return amount

    def behind(self) -> set[int]:
        """Return the vertices that can still reach the sink."""
        found = {_SINK}
        waiting = [_SINK]
        while waiting:
            vertex = waiting.pop()
            for edge in self._edges[vertex]:
                start = self._ends[edge]
                if self._left[edge ^ 1] and start not in found:
                    found.add(start)
                    waiting.append(start)
        return found
