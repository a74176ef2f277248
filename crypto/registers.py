"""A register of the holders of a bounded number of places: connections, streams, links, rows of a queue. No
I/O.

As in libp2p's resource manager, there are budgets for each peer, each network and each protocol, and for all
together. Unlike libp2p's, a full budget does not simply refuse newcomers: idle holders are evicted. Peers
that have not completed anything here yet (strangers) are evicted before peers that have. Within each of these
classes, the greediest source comes first, then the greediest peer, and among its holders the one that has
been silent for longest. If no holder is silent, a source or peer with fewer places takes one from the source
or peer with the most. A peer that has no place may also take the place of a slow stranger.

The budget per network (/24 of IPv4, /48 of IPv6) does not count machines of a local network or this one,
because many honest peers there look like one owner of many addresses.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Generic, Protocol, TypeVar

from crypto.crowds import Crowd, is_local, network_of

STRANGER_PATIENCE_SECONDS = 1.5
"""How long a peer that has not completed anything here yet may be silent before it can be evicted. An honest
call takes a few round trips, and a call that waits for the place should be answered within two seconds."""
SLOW_SECONDS = 0.3
"""If nothing else can be evicted, a stranger that has been silent for this long makes room for a peer without
a place. This is longer than a round trip, but short compared with the two seconds within which a caller
should be answered."""
KNOWN_MAX = 4_096
"""Maximum number of remembered peers that have completed something. Beyond it, those of the greediest source
are forgotten."""


class Silence:
    """Records how long a peer has moved no bytes that this node waits for. `since` is inf while this node
    waits for nothing: a peer does not count as silent while this node works."""

    __slots__ = ("_waits", "since")

    def __init__(self) -> None:
        self.since = inf
        self._waits = 0

    def begin(self, now: float) -> None:
        """Begin to wait for the peer. Several waits may overlap, and each must be ended."""
        self._waits += 1
        if self._waits == 1:
            self.since = now

    def end(self, now: float) -> None:
        """End one wait, because the peer has moved bytes."""
        self._waits -= 1
        self.since = now if self._waits else inf

    @contextmanager
    def waiting(self, clock: Callable[[], float]) -> Iterator[None]:
        """Count as waiting for the peer while the context lasts. `clock` is read at its start and end."""
        self.begin(clock())
        try:
            yield
        finally:
            self.end(clock())

    def moved(self, now: float) -> None:
        """Record that bytes were moved in either direction."""
        if self._waits:
            self.since = now


class PlaceHolder(Protocol):
    """The holder of a place, with the time since which it has been silent."""

    @property
    def silent_since(self) -> float:
        """The time since which the holder has moved no bytes; inf while this node is working for it, -inf if
        it is unused."""


@dataclass(frozen=True)
class Budget:
    """Limits on places: `places_max` in total. A holder that has been silent for `patience_seconds` is
    evicted if others need its place. A stranger is evicted after `stranger_seconds`, or after `slow_seconds`
    if the newcomer's peer has no place yet."""

    places_max: int
    per_peer_max: int
    per_network_max: int
    patience_seconds: float
    stranger_seconds: float = STRANGER_PATIENCE_SECONDS
    slow_seconds: float = SLOW_SECONDS


H = TypeVar("H", bound=PlaceHolder)


@dataclass(slots=True)
class _Row:
    peer: bytes
    source: bytes
    network: bytes
    scope: str = ""


class _Scope(Generic[H]):
    """The holders of one protocol, or all holders."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        # Newest last.
        self.rows: dict[H, _Row] = {}
        self.by_peer: Counter[bytes] = Counter()
        self.by_source: Counter[bytes] = Counter()
        self.by_network: Counter[bytes] = Counter()

    def add(self, holder: H, row: _Row) -> None:
        self.rows[holder] = row
        self.by_peer[row.peer] += 1
        self.by_source[row.source] += 1
        self.by_network[row.network] += 1

    def remove(self, holder: H) -> None:
        row = self.rows.pop(holder, None)
        if row is not None:
            _take_one(self.by_peer, row.peer)
            _take_one(self.by_source, row.source)
            _take_one(self.by_network, row.network)

    def greed(self, row: _Row) -> tuple[int, int, int]:
        """Return how many places the holder's source, network and peer have."""
        return self.by_source[row.source], self.by_network[row.network], self.by_peer[row.peer]


class Register(Generic[H]):
    """All holders of one kind. An evicted holder has already left the register; its owner must close it."""

    def __init__(self, budget: Budget) -> None:
        self._all: _Scope[H] = _Scope(budget)
        self._scopes: dict[str, _Scope[H]] = {}
        self._known: Crowd[bytes] = Crowd()

    def __len__(self) -> int:
        return len(self._all.rows)

    def __contains__(self, holder: object) -> bool:
        return holder in self._all.rows

    @property
    def scopes(self) -> Collection[str]:
        """The names of the protocols that have their own budget here."""
        return self._scopes.keys()

    @property
    def holders(self) -> Collection[H]:
        """All holders, the newest last."""
        return self._all.rows.keys()

    def budget(self, scope: str = "") -> Budget:
        """Return the budget of a protocol; with no argument, the budget of all together."""
        return self._scope(scope).budget

    def open(self, scope: str, budget: Budget) -> None:
        """Give a protocol its own budget, in addition to the one for all together."""
        self._scopes[scope] = _Scope(budget)

    def count(self, peer: bytes, scope: str = "") -> int:
        """Return how many places a peer has, in one protocol or in total."""
        return self._scope(scope).by_peer[peer]

    # --- entering and leaving ----------------------------------------------------------------------

    def has_room(self, now: float, source: bytes) -> bool:
        """Return whether a peer from this source that holds nothing yet would be admitted."""
        return self._make_room(now, self._all, _row(b"", source)) is not None

    def admit(self, now: float, holder: H, peer: bytes, source: bytes) -> tuple[H, ...] | None:
        """Give a place to a holder. Return the evicted holders, or None if there is no place for it."""
        return self._admit(now, holder, _row(peer, source), self._all)

    def enter(self, now: float, holder: H, scope: str) -> tuple[H, ...] | None:
        """Give a holder that already has a place a place in a protocol too. Return the same as `admit`. A
        holder is in one protocol at a time."""
        row = self._all.rows[holder]
        self.step_back(holder)
        evicted = self._admit(now, holder, row, self._scopes[scope])
        if evicted is not None:
            row.scope = scope
        return evicted

    def step_back(self, holder: H) -> None:
        """Remove a holder from its protocol; it keeps its place in the total."""
        row = self._all.rows.get(holder)
        if row is not None and row.scope:
            self._scopes[row.scope].remove(holder)
            row.scope = ""

    def rename(self, holder: H, peer: bytes) -> None:
        """Assign a holder to the peer that it has proved to be. Its place then counts as that peer's; its
        place in a protocol is unaffected."""
        row = self._all.rows.get(holder)
        if row is not None:
            self._all.remove(holder)
            self._all.add(holder, _Row(peer, row.source, row.network, row.scope))

    def leave(self, holder: H) -> None:
        """Remove a holder, if it still has a place."""
        self.step_back(holder)
        self._all.remove(holder)

    def credit(self, holder: H) -> None:
        """Record that a holder's peer has completed something here: from now on, strangers are evicted before
        it."""
        row = self._all.rows.get(holder)
        if row is None or row.peer in self._known:
            return
        if len(self._known) >= KNOWN_MAX:
            crowd = self._known.greedier(row.source) or self._known.equals(row.source)
            self._known.remove(next(iter(crowd)))
        self._known.add(row.peer, row.source)

    def is_known(self, peer: bytes) -> bool:
        """Return whether a peer has completed something here."""
        return peer in self._known

    # --- inside ------------------------------------------------------------------------------------

    def _scope(self, name: str) -> _Scope[H]:
        return self._scopes[name] if name else self._all

    def _admit(self, now: float, holder: H, row: _Row, scope: _Scope[H]) -> tuple[H, ...] | None:
        evicted = self._make_room(now, scope, row)
        if evicted is None:
            return None
        for each in evicted:
            self.leave(each)
        scope.add(holder, row)
        return evicted

    def _make_room(self, now: float, scope: _Scope[H], new: _Row) -> tuple[H, ...] | None:
        """Return the holders to evict to make room for one more; None if no room can be made."""
        budget = scope.budget
        if scope.by_peer[new.peer] >= budget.per_peer_max:
            # A peer knows what it has open. So only its unused holders make room for its own new ones.
            own = (e for e, row in scope.rows.items() if row.peer == new.peer and e.silent_since == -inf)
        elif not is_local(new.source) and scope.by_network[new.network] >= budget.per_network_max:
            own = (each for each, row in scope.rows.items() if row.network == new.network)
        elif len(scope.rows) < budget.places_max:
            return ()
        else:
            # Silent strangers go first, then holders of a larger source or peer, then silent peers that have
            # completed something, and last a slow stranger.
            strangers = (each for each, row in scope.rows.items() if row.peer not in self._known)
            found = self._silent(now, scope, strangers) or self._greedier(scope, new)
            found = found or self._silent(now, scope, scope.rows) or self._slow(now, scope, new)
            return found or None
        return self._silent(now, scope, own) or None

    def _silent(self, now: float, scope: _Scope[H], among: Iterable[H]) -> tuple[H, ...]:
        """Return the first to evict of the holders in `among` that have been silent for too long."""
        found: H | None = None
        first: tuple[object, ...] = ()
        for holder in among:
            row, since = scope.rows[holder], holder.silent_since
            is_known, budget = row.peer in self._known, self._scope(row.scope).budget
            if now - since < (budget.patience_seconds if is_known else budget.stranger_seconds):
                continue
            rank = (is_known, *(-count for count in scope.greed(row)), since)
            if found is None or rank < first:
                found, first = holder, rank
        return () if found is None else (found,)

    def _greedier(self, scope: _Scope[H], new: _Row) -> tuple[H, ...]:
        """Return the newest holder of the largest source, if that source has more than the new one's source
        would have. Otherwise return the newest holder of the largest peer at the new one's own source, by the
        same rule. The newest goes because a crowd has arrived recently, while an old connection works. Names
        cost nothing, so peers are compared only within one source, and a known peer need not make room for a
        stranger there."""
        most = max(scope.by_source.values())
        if scope.by_source[new.source] + 1 < most:
            return _newest(scope, lambda row: scope.by_source[row.source] == most)
        is_known = new.peer in self._known

        def count(row: _Row) -> int:
            is_safe = row.source != new.source or (row.peer in self._known and not is_known)
            return 0 if is_safe else scope.by_peer[row.peer]

        of_peer = max(map(count, scope.rows.values()))
        if scope.by_peer[new.peer] + 1 < of_peer:
            return _newest(scope, lambda row: count(row) == of_peer)
        return ()

    def _slow(self, now: float, scope: _Scope[H], new: _Row) -> tuple[H, ...]:
        """Return the stranger that has been silent for longest, if the new one's peer has no place yet. The
        stranger must come from a largest source: from the new one's own source, if that is one."""
        if scope.by_peer[new.peer]:
            return ()
        most = max(scope.by_source.values())
        is_own = scope.by_source[new.source] == most
        among = [
            (holder.silent_since, number, holder)
            for number, (holder, row) in enumerate(scope.rows.items())
            if row.peer not in self._known
            and now - holder.silent_since >= scope.budget.slow_seconds
            and (row.source == new.source if is_own else scope.by_source[row.source] == most)
        ]
        return (min(among)[2],) if among else ()


def _row(peer: bytes, source: bytes) -> _Row:
    return _Row(peer, source, source if is_local(source) else network_of(source))


def _newest(scope: _Scope[H], fits: Callable[[_Row], bool]) -> tuple[H, ...]:
    return (next(holder for holder in reversed(scope.rows) if fits(scope.rows[holder])),)


def _take_one(counts: Counter[bytes], key: bytes) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]  # do not keep a stranger's name
