"""The single stream of all events of a simulated world, and its watchers.

A world publishes each event once, with its instant and its subject. There are three kinds of watcher:
checkers, which stop a run if an invariant breaks; meters, which compute statistics; and file writers. A
watcher cannot influence the world.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from crypto.encoding import encode
from crypto.identity import PeerId
from gossip.member import Status

RECENT_MAX = 50
"""Number of previous events that are shown with a broken invariant."""
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Observation:
    """An event reported by `peer`, or by the whole world if None. `time` is in virtual seconds."""

    time: float
    peer: PeerId | None
    event: Any


class World(Protocol):
    """The part of a world that watchers may read. Both kinds of world have it: worlds of whole nodes, and
    worlds of protocol state machines alone (cores)."""

    @property
    def now(self) -> float:
        """Return virtual seconds since the beginning."""

    @property
    def peers(self) -> Sequence[PeerId]:
        """Return every peer that takes part at any time, by number."""

    def name(self, peer: PeerId) -> str:
        """Return a short readable name, such as n17."""

    def is_up(self, peer: PeerId) -> bool: ...

    def up_since(self, peer: PeerId) -> float:
        """Return when the current process of a running peer started."""

    def region(self, peer: PeerId) -> str: ...

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        """Return whether a message that `one` sends now may reach `other`, that is, no split lies between
        them."""

    def in_scope(self, one: PeerId, other: PeerId) -> bool:
        """Return whether `one` should list `other` as a member."""

    def believes(self, peer: PeerId) -> Mapping[PeerId, Status]:
        """Return the member list of a running peer. The cost grows with its length, so do not call this for
        every event."""

    def sizes(self, peer: PeerId) -> Mapping[str, tuple[int, int]]:
        """Return the size and the limit of each of this peer's tables that unknown peers could fill."""

    def counters(self) -> Mapping[str, int]:
        """Return totals since the start: messages and bytes by protocol, and the messages that were lost,
        missed or refused."""


class Broken(Exception):
    """An invariant does not hold. `invariant` is the checker's name."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
        self.what = what


class Watcher(Protocol):
    """A watcher of all events. A checker raises `Broken`."""

    def see(self, observed: Observation, world: World) -> None: ...

    def sample(self, world: World) -> None:
        """Check the world at intervals of virtual time, for checks that are too costly for every event."""

    def end(self, world: World) -> None:
        """Finish, after the last event."""


class Watch:
    """Passes all events to the watchers; keeps the newest events and a digest of all.

    The digest has a separate chain for each peer. So it does not depend on how the events of different peers
    are interleaved within one instant. No driver guarantees that order.
    """

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.count = 0
        self.recent: deque[Observation] = deque(maxlen=RECENT_MAX)
        self._watchers = tuple(watchers)
        self._chains: dict[PeerId | None, Any] = {}

    def publish(self, observed: Observation, world: World) -> None:
        """Pass an event to all watchers. Raises Broken, from a watcher."""
        self.count += 1
        self.recent.append(observed)
        chain = self._chains.get(observed.peer)
        if chain is None:
            chain = self._chains[observed.peer] = blake2b(digest_size=_DIGEST_BYTES)
        event = observed.event
        chain.update(f"{observed.time:.6f} {type(event).__name__} ".encode() + encode(event))
        for watcher in self._watchers:
            watcher.see(observed, world)

    def sample(self, world: World) -> None:
        for watcher in self._watchers:
            watcher.sample(world)

    def end(self, world: World) -> None:
        for watcher in self._watchers:
            watcher.end(world)

    def digest(self) -> str:
        """Return one hash over all events, in hexadecimal."""
        total = blake2b(digest_size=_DIGEST_BYTES)
        for peer in sorted(self._chains, key=lambda peer: peer or b""):
            total.update((peer or b"") + b"\0" + self._chains[peer].digest())
        return total.hexdigest()
