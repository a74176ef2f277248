"""Lookups in progress, as a part of the Kademlia core: which peers they ask, and what they take from answers.

`dht.lookup` and `dht.paths` choose the next peer to ask. Like `replication`, this is pure.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from crypto.identity import PeerId
from dht import messages
from dht.events import Event, NodesFound, RecordsFound
from dht.groups import Origins
from dht.keys import Key
from dht.lookup import Enough, Lookup
from dht.paths import DisjointLookup
from dht.records import Record, RecordStore
from dht.replication import Replication
from dht.requests import Inquiry, PendingRequest, Publication, Search
from dht.routing import Contact, Table
from dht.settings import KademliaSettings
from dht.timers import Timers
from dht.tokens import TOKEN_SECONDS
from dht.upkeep import Upkeep


class SearchingCore(Protocol):
    """The parts of the core that `Searches` uses."""

    peer: PeerId
    settings: KademliaSettings
    table: Table
    records: RecordStore
    events: list[Event]
    timers: Timers
    origins: Origins
    replication: Replication
    upkeep: Upkeep
    addresses: tuple[str, ...]
    is_client: bool

    def wall(self, now: float) -> float: ...
    def new_id(self) -> int: ...
    def may_ask(self, now: float, peer: PeerId) -> bool: ...
    def may_publish(self, publisher: PeerId) -> bool: ...
    def ask(
        self,
        now: float,
        contact: Contact,
        message: messages.Request,
        purpose: Search | Publication | Inquiry | None,
        *,
        page: int = 0,
    ) -> None: ...
    def store_message(
        self, record: Record, token: bytes, *, cached: bool = False, seeking: bool = False
    ) -> messages.Store: ...


class Searches:
    """All lookups of one core."""

    __slots__ = ("_core", "_open")

    def __init__(self, core: SearchingCore) -> None:
        self._core = core
        self._open: dict[int, Search] = {}

    def __contains__(self, search: Search) -> bool:
        return search.number in self._open

    def pass_over(self, now: float, peer: PeerId) -> None:
        """Stop waiting for this peer in all lookups."""
        for search in list(self._open.values()):
            search.lookup.passed_over(peer)
            self.advance(now, search)

    def begin(
        self,
        now: float,
        key: Key,
        then: Callable[[float, Search], None],
        *,
        values: bool = False,
        seeds: Sequence[Contact] = (),
        paths: int = 1,
        enough: Enough | None = None,
        width: int | None = None,
        record: Record | None = None,
    ) -> Search:
        """Begin a lookup that calls `then` at its end. `width` and `enough` are as in `Lookup`. `record` is
        the record that the lookup itself stores, if any."""
        self._core.upkeep.touch(now, self._core.table.bucket_of(key))
        # More than k, because answers name only the k nearest, and half of those may be dead.
        known = self._core.table.nearest(key, 2 * self._core.settings.k, waiting_since=now - TOKEN_SECONDS)
        if len(known) < self._core.settings.alpha:
            # After an outage of our own, all contacts seem to have failed. To ask them anyway is better than
            # to ask nobody.
            known = self._core.table.nearest(key, self._core.settings.k, failing=True)
        seeded = (*known, *seeds)
        lookup: Lookup | DisjointLookup
        if paths > 1:
            lookup = DisjointLookup(
                key, self._core.peer, seeded, self._core.settings, values=values, count=paths
            )
        else:
            near = known[: width or (self._core.settings.find_width if values else self._core.settings.k)]
            if not all(contact.answered + TOKEN_SECONDS > now for contact in near):
                near = []
            lookup = Lookup(
                key,
                self._core.peer,
                seeded,
                self._core.settings,
                values=values,
                enough=enough,
                width=width,
                at_once=len(near),
                counts_own=record is not None and not self._core.is_client,
            )
        if values:
            for held in self._core.records.get(self._core.wall(now), key):
                lookup.learn(held)
        search = Search(self._core.new_id(), lookup, then)
        if record is not None and paths == 1:
            search.gives = record, {contact.peer for contact in self._core.replication.others(key, near)}
        self._open[search.number] = search
        due = now + self._core.settings.lookup_seconds_max
        search.time_limit = self._core.timers.at(due, partial(self._stop, search))
        self.advance(now, search)
        return search

    def advance(self, now: float, search: Search) -> None:
        """Ask the contacts that the lookup names; end it when it is done."""
        if search.number not in self._open:
            return
        lookup = search.lookup
        for contact in lookup.next():
            self._core.ask(now, contact, self._question(search, contact), search)
        if lookup.done:
            del self._open[search.number]
            if search.time_limit is not None:
                search.time_limit.call_off()
            search.then(now, search)

    def _question(self, search: Search, contact: Contact) -> messages.Request:
        """Return the request that a lookup sends to a contact."""
        key = search.lookup.key
        if search.lookup.values:
            return messages.FindValue(self._core.new_id(), self._core.addresses, key, b"")
        record, receivers = search.gives
        if record is not None and contact.peer in receivers:
            return self._core.store_message(record, contact.token, seeking=True)
        return messages.FindNode(self._core.new_id(), self._core.addresses, key)

    def _stop(self, search: Search, now: float) -> None:
        search.lookup.stop()
        self.advance(now, search)

    def take_hints(
        self,
        now: float,
        search: Search,
        pending: PendingRequest,
        answer: messages.Nodes | messages.Values | messages.Stored,
        records: list[Record],
    ) -> None:
        """Take the contacts and the verified records of an answer."""
        lookup = search.lookup
        for record in records:
            if not record.expired(self._core.wall(now)) and self._core.may_publish(record.publisher):
                lookup.show(pending.contact.peer, record)
        # A peer's own claim takes precedence over other peers' hints.
        hints = [self._hinted(lookup, hint) for hint in answer.hints[: self._core.settings.k]]
        hints = [hint for hint in hints if self._core.may_ask(now, hint.peer)]
        lookup.named(pending.contact.peer, hints)
        more = isinstance(answer, messages.Values) and answer.more
        if more and pending.page + 1 < self._core.settings.pages_max and not lookup.done:
            last = records[-1].publisher
            message = messages.FindValue(self._core.new_id(), self._core.addresses, lookup.key, last)
            self._core.ask(now, pending.contact, message, search, page=pending.page + 1)
        else:
            lookup.answered(pending.contact)

    def _hinted(self, lookup: Lookup | DisjointLookup, hint: messages.Hint) -> Contact:
        peer = PeerId(hint.peer)
        known = lookup.candidate(peer)  # the same few peers are named again and again
        if known is None or known.addresses != hint.addresses:
            known = self._core.table.get(peer)
            known = known or Contact(peer, hint.addresses, self._core.origins.group(peer, hint.addresses))
        return known

    def report_records(self, now: float, search: Search) -> None:
        """Report the records that were found, and send them to holders that lack them."""
        self._core.replication.repair(now, search)
        records = search.lookup.records
        found = tuple(records[publisher] for publisher in sorted(records))
        lookup = search.lookup
        self._core.events.append(
            RecordsFound(search.number, lookup.key, found, lookup.rounds, len(lookup.shown))
        )

    def report_nodes(self, _now: float, search: Search) -> None:
        """Report the nearest nodes that were found."""
        peers = tuple(contact.peer for contact in search.lookup.nearest)
        self._core.events.append(NodesFound(search.number, search.lookup.key, peers))
