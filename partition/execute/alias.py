"""The states that an entry point may change in place, instead of making a changed copy. No torch.

Decoding writes one row of a KV cache that holds thousands. The graph says `new = index_copy(cache, ...)` and
names `new` the state's next value. If nothing reads the old cache after that node, the in-place form of the
operator (`Operator.state_twin`) gives the same values without the copy. Memory is shared through operators
that may return a view of an argument, so everything that they make from the old cache counts as the old
cache.
"""

from collections.abc import Mapping, Sequence

from partition.model.graph import GraphNode, StageEntry, StateValue, Value, arguments_of
from partition.model.operators import OPERATORS

Key = tuple[type, int]
"""A state's old value, or a value of the entry point."""


def writable_in_place(entry: StageEntry, operators: Sequence[str]) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return the rows of states that are updated in place, and the ids of nodes that run as their operator's
    in-place twin.

    The time is linear in the entry point, because its author may be hostile.
    """
    makers = {number: node for node in entry.nodes for number in node.outputs}
    roots = _roots(entry, operators)
    memory = _Memory(entry, operators)
    rows: list[int] = []
    twins: set[int] = set()
    for row, number in entry.updates:
        # Only the chain of the value's own state is followed, so no node is visited twice.
        chain = _chain(number, makers) if roots.get(number) == row else []
        if chain and all(memory.is_free_after(node) for node in chain):
            rows.append(row)
            twins.update(node.id for node in chain)
    return tuple(rows), frozenset(twins)


def _roots(entry: StageEntry, operators: Sequence[str]) -> dict[int, int]:
    """Return, for each value that is a later form of a state, that state. Such a value comes from the state
    through operators with twins only, each applied to its first argument."""
    roots: dict[int, int] = {}
    for node in entry.nodes:
        if OPERATORS[operators[node.operator]].state_twin is None:
            continue
        match node.arguments:
            case (StateValue(row), *_):
                roots.update(dict.fromkeys(node.outputs, row))
            case (Value(earlier), *_) if earlier in roots:
                roots.update(dict.fromkeys(node.outputs, roots[earlier]))
            case _:
                pass
    return roots


def _chain(number: int, makers: Mapping[int, GraphNode]) -> list[GraphNode]:
    """Return the nodes that lead from the old state to its next value, the last node first."""
    chain = [makers[number]]
    while isinstance(earlier := chain[-1].arguments[0], Value):
        chain.append(makers[earlier.id])
    return chain


def _keys(node: GraphNode) -> list[Key]:
    return [
        (Value, argument.id) if isinstance(argument, Value) else (StateValue, argument.row)
        for argument in arguments_of(node)
        if isinstance(argument, Value | StateValue)
    ]


class _Memory:
    """The values that may share memory, and the last reads of that memory.

    All arguments of an operator that may return a view form one group with its results; this overestimates
    the sharing.
    """

    def __init__(self, entry: StageEntry, operators: Sequence[str]) -> None:
        self._above: dict[Key, Key] = {}
        self._views: set[int] = set()
        for node in entry.nodes:
            if OPERATORS[operators[node.operator]].view:
                self._views.update(node.outputs)
                self._join([*_keys(node), *((Value, number) for number in node.outputs)])
        self._last: dict[Key, int] = {}
        """By group, the last node that reads it."""
        for node in entry.nodes:
            for key in _keys(node):
                self._last[self._group(key)] = node.id
        ends = [*entry.outputs, *(number for _, number in entry.updates)]
        ends += [number for number in (entry.loss, entry.count) if number is not None]
        ends += [metric.value for metric in entry.metrics]
        self._kept = {self._group((Value, number)) for number in ends}

    def is_free_after(self, writer: GraphNode) -> bool:
        """Return whether nothing else reads the memory that `writer` overwrites (its first argument), neither
        a later node nor its own other arguments."""
        first, *beside = _keys(writer)
        # A view shares memory with its base, and with the base's other views.
        if first[0] is Value and first[1] in self._views:
            return False
        group = self._group(first)
        is_last = self._last[group] == writer.id and group not in self._kept
        return is_last and all(self._group(key) != group for key in beside)

    def _join(self, keys: Sequence[Key]) -> None:
        group = self._group(keys[0])
        for key in keys[1:]:
            other = self._group(key)
            if other != group:
                self._above[other] = group

    def _group(self, key: Key) -> Key:
        """Return the key that stands for the group. The search halves the paths it follows, so they stay
        short."""
        while (above := self._above.get(key, key)) != key:
            self._above[key] = key = self._above.get(above, above)
        return key
