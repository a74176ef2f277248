"""One stream of all events of a simulated world, and its watchers.

A world publishes each event once, with its instant and its subject. Watchers are functions of that
stream: checkers that stop a run where something is wrong, measures, files. None of them can change
what happens.
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
"""Events that a broken invariant is shown with."""
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Observed:
    """`event` became known to `peer`; to the whole world if None. `time` is virtual seconds."""

    time: float
    peer: PeerId | None
    event: Any


class World(Protocol):
    """The part of a world that watchers may look at, in a world of cores as in one of whole nodes."""

    @property
    def now(self) -> float:
        """Return virtual seconds since the beginning."""

    @property
    def peers(self) -> Sequence[PeerId]:
        """Return every peer that ever takes part, by number."""

    def name(self, peer: PeerId) -> str:
        """Short and readable: n17."""

    def is_up(self, peer: PeerId) -> bool: ...

    def up_since(self, peer: PeerId) -> float:
        """Return when the present life of a peer that is up began."""

    def region(self, peer: PeerId) -> str: ...

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        """Return whether what `one` sends now may arrive at `other`: no split lies between them."""

    def in_scope(self, one: PeerId, other: PeerId) -> bool:
        """Return whether `one` is to list `other` as a member."""

    def believes(self, peer: PeerId) -> Mapping[PeerId, Status]:
        """The member list that a peer which is up holds. Costs its size: not for every event."""

    def sizes(self, peer: PeerId) -> Mapping[str, tuple[int, int]]:
        """Return what a stranger could make grow at this peer: how much it is now, and its limit."""

    def counters(self) -> Mapping[str, int]:
        """Since the beginning: messages and bytes by protocol, what was lost, missed, refused."""


class Broken(Exception):
    """An invariant does not hold. `invariant` is the checker's name."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
        self.what = what


class Watcher(Protocol):
    """Sees everything. A checker raises `Broken`."""

    def see(self, observed: Observed, world: World) -> None: ...

    def sample(self, world: World) -> None:
        """Now and then in virtual time, for what is too costly to look at with every event."""

    def end(self, world: World) -> None:
        """The last event has been seen."""


class Watch:
    """Hands everything to the watchers; keeps the last events and the digest of all.

    The digest does not depend on how different peers are interleaved within one instant, which no
    driver promises: each peer has its own chain.
    """

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.count = 0
        self.recent: deque[Observed] = deque(maxlen=RECENT_MAX)
        self._watchers = tuple(watchers)
        self._chains: dict[PeerId | None, Any] = {}

    def publish(self, observed: Observed, world: World) -> None:
        """Raises Broken, from a watcher."""
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
        """One hash over everything that happened, in hexadecimal."""
        total = blake2b(digest_size=_DIGEST_BYTES)
        for peer in sorted(self._chains, key=lambda peer: peer or b""):
            total.update((peer or b"") + b"\0" + self._chains[peer].digest())
        return total.hexdigest()
