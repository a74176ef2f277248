"""A lookup over disjoint paths (Baumgart & Mies 2007, S/Kademlia section 4.4).

Several lookups of one key start from different contacts, and no peer is asked on more than one path. A liar
can mislead only the path it is on, so a record is found as long as one path meets only honest peers. Each
path costs as many requests as a whole lookup. The class has the methods of `lookup.Lookup`.
"""

from collections.abc import Iterable

from kademlia.node import Node

from crypto.identity import PeerId
from dht.keys import Key
from dht.lookup import Lookup, nearest_spread
from dht.records import Rank, Record
from dht.routing import Contact
from dht.settings import KademliaSettings


class DisjointLookup:
    """`count` lookups of one key that share no peer. The nearest seeds are dealt to them in turn."""

    def __init__(
        self,
        key: Key,
        own: PeerId,
        seeds: Iterable[Contact],
        settings: KademliaSettings,
        *,
        values: bool,
        count: int,
    ) -> None:
        self.key = key
        self.values = values
        self._settings = settings
        self._asked: dict[PeerId, Lookup] = {}
        self._seeded = list(seeds)
        self._paths = [
            Lookup(key, own, self._seeded[place::count], settings, values=values, taken=self._asked)
            for place in range(count)
        ]

    def next(self) -> list[Contact]:
        """Return the contacts to ask now; each is asked once, on one path."""
        chosen: list[Contact] = []
        for path in self._paths:
            for contact in path.next():
                chosen.append(contact)
                for other in self._paths:
                    if other is not path:
                        other.exclude(contact.peer)
        return chosen

    def named(self, source: PeerId, hints: Iterable[Contact]) -> None:
        """Add the hints of `source`, only on the path that asked it."""
        if (path := self._asked.get(source)) is not None:
            path.named(source, hints)

    def answered(self, contact: Contact) -> None:
        """Record a full answer."""
        if (path := self._asked.get(contact.peer)) is not None:
            path.answered(contact)

    def slow(self, peer: PeerId) -> None:
        """Record that `peer` takes longer than usual."""
        if (path := self._asked.get(peer)) is not None:
            path.slow(peer)

    def passed_over(self, peer: PeerId) -> None:
        """Pass over a peer that took too long or is known to be dead, on all paths that have heard of it."""
        for path in self._paths:
            path.passed_over(peer)

    def show(self, peer: PeerId, record: Record) -> None:
        """Record that `peer` has handed out a record."""
        if (path := self._asked.get(peer)) is not None:
            path.show(peer, record)

    def learn(self, record: Record) -> None:
        """Keep a record that this node holds itself."""
        self._paths[0].learn(record)

    def stop(self) -> None:
        """End the lookup with the results so far, because time is up."""
        for path in self._paths:
            path.stop()

    @property
    def done(self) -> bool:
        """Whether all paths have ended."""
        return all(path.done for path in self._paths)

    @property
    def requests(self) -> int:
        return sum(path.requests for path in self._paths)

    @property
    def rounds(self) -> int:
        return max(path.rounds for path in self._paths)

    @property
    def records(self) -> dict[PeerId, Record]:
        """The newest record of each publisher, over all paths."""
        newest: dict[PeerId, Record] = {}
        for path in self._paths:
            for publisher, record in path.records.items():
                if publisher not in newest or newest[publisher].rank < record.rank:
                    newest[publisher] = record
        return dict(list(newest.items())[: self._settings.found_max])

    @property
    def answers(self) -> list[Contact]:
        """All peers that answered, nearest first."""
        found = [contact for path in self._paths for contact in path.answers]
        return sorted(found, key=Node(self.key).distance_to)

    @property
    def nearest(self) -> list[Contact]:
        """The k nearest of the peers that answered, nearest first, spread over address groups."""
        return nearest_spread(self.answers, self._settings.k, self._settings.group_max)

    @property
    def tokens(self) -> dict[PeerId, bytes]:
        return {peer: token for path in self._paths for peer, token in path.tokens.items()}

    @property
    def shown(self) -> dict[PeerId, dict[PeerId, Rank]]:
        return {peer: ranks for path in self._paths for peer, ranks in path.shown.items()}

    def candidate(self, peer: PeerId) -> Contact | None:
        """Return the contact of a candidate, as most recently named."""
        return next(filter(None, (path.candidate(peer) for path in self._paths)), None)

    def places(self, peer: PeerId) -> tuple[str, ...] | None:
        """Return the addresses under which a candidate was named on the path that asks it."""
        path = self._asked.get(peer)
        return None if path is None else path.places(peer)

    def give_token(self, peer: PeerId, token: bytes) -> None:
        """Record the write token that `peer` gave."""
        if (path := self._asked.get(peer)) is not None:
            path.give_token(peer, token)
