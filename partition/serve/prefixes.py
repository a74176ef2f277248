"""Sessions from which other sessions of the same owner may begin: a radix tree of their tokens, at the door
(the node that asks).

If another session of the door has already computed the first tokens of a new session, every stage begins the
new one with those (`OpenSession.base`), so they are not read again. The shared tokens are kept by the stages
of one route, so they belong to one graph, and have the same weights and the same bits. Response times can
reveal earlier prompts, so only sessions of one door and one owner share.

A session in use can serve as a base as long as it lasts. A finished session may *rest*: its stages keep its
pages until they need the room. The number of resting sessions is limited here, and the one unused for longest
is dropped first. The radix tree follows SGLang (arXiv 2312.07104), whose tree holds the pages; here the
stages hold them.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from crypto.identity import PeerId
from partition.serve.routes import StageReplica, Way, price_route

PREFIX_TOKENS_MIN = 64
"""Minimum number of shared tokens. Fewer are read again: a stage keeps tokens in pages of this many, and
reads them within one call."""
RESTS_MAX = 32
"""Maximum number of resting sessions of one door, over all services."""
RESTS_PER_SERVICE_MAX = 8
"""Maximum number of resting sessions of one service. A stage keeps as many for one door
(`partition.serve.session_places`)."""
REST_SECONDS_MAX = 300.0
"""How long a session rests without being used: long enough for a person to read an answer and ask again."""
BASES_MAX = 8
"""Maximum number of base sessions that are compared with the best route, those that share most."""
BASE_SESSIONS = 8
"""Number of additional sessions that a route may have if it has already read a part of the prompt. Sessions
that are decoded together take little more time than one."""

V = TypeVar("V", bound=Hashable)


class _Node(Generic[V]):
    """A node of the tree: the tokens between it and its parent, and the values whose tokens end here."""

    __slots__ = ("children", "edge", "parent", "values")

    def __init__(self, edge: tuple[int, ...], parent: "_Node[V] | None") -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, _Node[V]] = {}
        self.values: dict[V, None] = {}

    def below(self) -> Iterator[V]:
        """Yield all values of this node and its descendants."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield from node.values
            nodes += node.children.values()


class RadixTree(Generic[V]):
    """A tree of values, each at one sequence of tokens. Sequences share their common prefixes."""

    def __init__(self) -> None:
        self._root: _Node[V] = _Node((), None)
        self._places: dict[V, _Node[V]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, value: object) -> bool:
        return value in self._places

    def put(self, tokens: Sequence[int], value: V) -> None:
        """Put a value at these tokens; if it was elsewhere, move it."""
        self.remove(value)
        rest = tuple(tokens)
        node = self._root
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                child = node.children[rest[0]] = _Node(rest, node)
            common = common_length(child.edge, rest)
            if common < len(child.edge):
                child = self._split(child, common)
            node, rest = child, rest[common:]
        node.values[value] = None
        self._places[value] = node

    def remove(self, value: V) -> None:
        """Remove a value, if it is in the tree."""
        node = self._places.pop(value, None)
        if node is None:
            return
        del node.values[value]
        while node.parent is not None and not node.values:
            parent = node.parent
            if len(node.children) > 1:
                return
            del parent.children[node.edge[0]]
            for child in node.children.values():  # there is at most one child, which takes this node's place
                child.edge = node.edge + child.edge
                child.parent = parent
                parent.children[child.edge[0]] = child
                return
            node = parent

    def shared(self, tokens: Sequence[int]) -> dict[V, int]:
        """Return how many leading tokens each value shares with these tokens. Values that share none are left
        out."""
        rest = tuple(tokens)
        found: dict[V, int] = {}
        node, depth = self._root, 0
        while True:
            if depth:
                found |= dict.fromkeys(node.values, depth)
            following = node.children.get(rest[0]) if rest else None
            for child in node.children.values() if depth else ():
                if child is not following:
                    found |= dict.fromkeys(child.below(), depth)
            if following is None:
                return found
            common = common_length(following.edge, rest)
            depth += common
            if common < len(following.edge):
                return found | dict.fromkeys(following.below(), depth)
            node, rest = following, rest[common:]

    def covered(self, tokens: Sequence[int]) -> set[V]:
        """Return the values whose whole sequence of tokens is a prefix of these tokens."""
        rest = tuple(tokens)
        node = self._root
        found = set(node.values)
        while rest and rest[0] in node.children:
            node = node.children[rest[0]]
            if common_length(node.edge, rest) < len(node.edge):
                break
            rest = rest[len(node.edge) :]
            found |= set(node.values)
        return found

    def _split(self, node: _Node[V], length: int) -> _Node[V]:
        """Insert a node before this one, `length` tokens after its parent."""
        parent = node.parent
        assert parent is not None
        middle: _Node[V] = _Node(node.edge[:length], parent)
        parent.children[middle.edge[0]] = middle
        node.edge, node.parent = node.edge[length:], middle
        middle.children[node.edge[0]] = node
        return middle


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences of the same type."""
    least, most = 0, min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    while most - least > 1:
        middle = (least + most) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle
    return least


@dataclass(frozen=True)
class PrefixKey:
    """The service and the owner of a session. Sessions with the same key may begin from each other."""

    service: bytes
    owner: str


@dataclass(frozen=True)
class KeptPrefix:
    """A session whose first tokens have been computed by every stage of a route."""

    session: bytes
    key: PrefixKey
    route: tuple[PeerId, ...]


class Prefixes:
    """The sessions of one door from which others may begin."""

    def __init__(self) -> None:
        self._trees: dict[PrefixKey, RadixTree[bytes]] = {}
        self._kept: dict[bytes, KeptPrefix] = {}
        self._resting: dict[bytes, float] = {}
        """The time when each resting session was last used; the one unused for longest comes first."""

    @property
    def resting(self) -> list[KeptPrefix]:
        """The resting sessions; the one unused for longest comes first."""
        return [self._kept[session] for session in self._resting]

    def resting_session(self, session: bytes) -> KeptPrefix | None:
        """Return a resting session, or None."""
        return self._kept[session] if session in self._resting else None

    def put(self, kept: KeptPrefix, tokens: Sequence[int]) -> None:
        """Note that these tokens of a session in use have been computed."""
        self._kept[kept.session] = kept
        self._trees.setdefault(kept.key, RadixTree()).put(tokens, kept.session)

    def rest(self, now: float, kept: KeptPrefix, tokens: Sequence[int]) -> list[KeptPrefix]:
        """Let a finished session rest; return the sessions that are dropped for it."""
        self.put(kept, tokens)
        self._resting.pop(kept.session, None)
        self._resting[kept.session] = now
        # Sessions whose tokens are a prefix of these tokens are no longer needed, if they have the same
        # route.
        covered = self._trees[kept.key].covered(tokens) - {kept.session}
        gone = [each for each in self.resting if each.session in covered and each.route == kept.route]
        for each in gone:
            self.drop(each.session)
        of_service = [each for each in self.resting if each.key.service == kept.key.service]
        while of_service and (len(of_service) > RESTS_PER_SERVICE_MAX or len(self._resting) > RESTS_MAX):
            victim = of_service[0] if len(of_service) > RESTS_PER_SERVICE_MAX else self.resting[0]
            gone.append(victim)
            self.drop(victim.session)
            of_service = [each for each in of_service if each is not victim]
        return gone

    def find(self, key: PrefixKey, tokens: Sequence[int]) -> list[tuple[KeptPrefix, int]]:
        """Return the sessions that share enough of these tokens, and how many they share; the longest
        first."""
        tree = self._trees.get(key)
        if tree is None:
            return []
        found = [(self._kept[session], n) for session, n in tree.shared(tokens).items()]
        return sorted(
            ((kept, n) for kept, n in found if n >= PREFIX_TOKENS_MIN),
            key=lambda row: (-row[1], row[0].session),
        )

    def use(self, now: float, session: bytes) -> None:
        """Note that another session has begun from this session."""
        if session in self._resting:
            del self._resting[session]
            self._resting[session] = now

    def drop(self, session: bytes) -> KeptPrefix | None:
        """Remove a session as a base; return it if it was one."""
        kept = self._kept.pop(session, None)
        self._resting.pop(session, None)
        if kept is not None:
            tree = self._trees[kept.key]
            tree.remove(session)
            if not len(tree):
                del self._trees[kept.key]
        return kept

    def drop_peer(self, peer: PeerId) -> list[KeptPrefix]:
        """Drop the sessions of a lost provider; return those that were resting."""
        gone = [each for each in self._kept.values() if peer in each.route]
        rested = [each for each in gone if each.session in self._resting]
        for each in gone:
            self.drop(each.session)
        return rested

    def expire(self, now: float) -> list[KeptPrefix]:
        """Remove sessions that have not been used for long; return them."""
        gone = [self._kept[session] for session, at in self._resting.items() if now - at >= REST_SECONDS_MAX]
        for each in gone:
            self.drop(each.session)
        return gone


def choose_beginning(
    prefixes: Prefixes,
    key: PrefixKey,
    tokens: Sequence[int],
    left: int,
    stages: Sequence[Sequence[StageReplica]],
    *,
    sessions: Callable[[PeerId], int],
    doubts: Mapping[PeerId, int],
) -> tuple[tuple[PeerId, ...], bytes, int]:
    """Return the route for a session that reads these tokens and generates `left` more, its base session, and
    the number of shared tokens. The route is empty if there is none; the base is empty if the session should
    begin by itself."""

    def price(rows: Sequence[Sequence[StageReplica]], read: int, spared: int = 0) -> Way | None:
        return price_route(rows, read, left, sessions=sessions, doubts=doubts, spared=spared)

    best, base, shared = price(stages, len(tokens)), b"", 0
    if best is None:
        return (), b"", 0
    # At least one token must be computed, because its logits are wanted.
    for kept, count in prefixes.find(key, tokens[:-1])[:BASES_MAX]:
        rows = [
            [each for each in replicas if each.peer == peer]
            for peer, replicas in zip(kept.route, stages, strict=True)
        ]
        way = price(rows, len(tokens) - count, BASE_SESSIONS) if all(rows) else None
        if way is not None and way[:2] <= best[:2] and (count > shared or way[:2] < best[:2]):
            best, base, shared = way, kept.session, count
    return best[2], base, shared
