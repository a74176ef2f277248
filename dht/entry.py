"""How a node enters the DHT, and enters again once its table has become empty."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from crypto.identity import PeerId
from dht.events import Event, Joined
from dht.keys import Key
from dht.requests import Search
from dht.routing import Contact, Table
from dht.settings import KademliaSettings
from dht.upkeep import Upkeep

SEEDS_MAX = 32
"""Maximum number of peers of the latest `begin` that are kept, to ask them again if the table becomes
empty."""


class NetworkEntryCore(Protocol):
    """The parts of the core that `NetworkEntry` uses."""

    events: list[Event]
    key: Key
    peer: PeerId
    settings: KademliaSettings
    table: Table
    upkeep: Upkeep

    def may_ask(self, now: float, peer: PeerId) -> bool: ...

    def search(
        self,
        now: float,
        key: Key,
        then: Callable[[float, Search], None],
        *,
        seeds: Sequence[Contact],
    ) -> Search: ...


class NetworkEntry:
    """The part of a core that enters the network through the peers passed to the latest `begin`. It tries
    again at `due`, in monotonic seconds, unless a peer has answered. `due` is inf once the node has entered,
    or if it knows no peer."""

    def __init__(self, core: NetworkEntryCore) -> None:
        self._core = core
        self._seeds: tuple[PeerId, ...] = ()
        self.due = inf

    def begin(self, now: float, peers: Sequence[PeerId]) -> None:
        """Enter the network through `peers`. Ends in `Joined`."""
        self._seeds = tuple(peers[:SEEDS_MAX])
        self._enter(now)

    def hurry(self, now: float) -> None:
        """Schedule a new entry soon, because the table has become empty."""
        if self._seeds:
            self.due = min(self.due, now + self._core.settings.rejoin_seconds)

    def wake(self, now: float) -> None:
        """Enter again if it is time."""
        if self.due <= now:
            self._enter(now)

    def _enter(self, now: float) -> None:
        core = self._core
        others = (peer for peer in self._seeds if peer != core.peer and core.may_ask(now, peer))
        seeds = [Contact(peer) for peer in others]
        # The time of the next try, unless a peer answers.
        self.due = now + core.settings.rejoin_seconds if seeds else inf
        core.search(now, core.key, self._entered, seeds=seeds)

    def _entered(self, now: float, search: Search) -> None:
        core = self._core
        core.events.append(Joined(len(core.table)))
        if not search.lookup.nearest:
            return
        self.due = inf
        core.upkeep.refresh_all(now)
