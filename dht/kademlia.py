"""The Kademlia core: answers peers, keeps the table, runs lookups, stores and finds records.

A pure state machine with the core shape of DESIGN section 2, after Maymounkov & Mazieres 2002. What
differs from the paper stands in the docstrings of `routing` and `lookup`. What it is not: it opens
no session and knows no sender but by the session beneath; and it promises no consistency between
publishers, only that of each publisher's records the highest sequence found is returned.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from dht.events import Event, Joined, NodesFound, PeerHeard, RecordsFound, RecordStored
from dht.keys import KEY_MAX, Key, distance, node_key, random_key
from dht.lookup import Lookup
from dht.messages import (
    RECORDS_MAX,
    Answer,
    FindNode,
    FindValue,
    Message,
    Nodes,
    Ping,
    Pong,
    Request,
    Store,
    Stored,
    Values,
    address_texts,
    cut_to_fit,
    encoded_bytes,
    readable_addresses,
)
from dht.records import Record, RecordStore, check_record
from dht.requests import Pending, Publication, Requests, Search
from dht.routing import Bucket, Contact, Table
from dht.settings import Settings

Sends = list[tuple[PeerId, Message]]

SEEDS_MAX = 32
"""Peers of the last `join`, asked again when the table has run empty."""

HINTS_KEPT_ROOM_BYTES = 200
"""Of a reply with records, what is kept for hints: some three of them, so that the lookup goes on."""


class Kademlia:
    """One node of the DHT.

    `wall_offset` is the wall clock minus the monotonic one, in seconds; the shell sets it and may
    correct it at any time. `events` is drained by the shell; of one call, before its messages are sent.
    """

    def __init__(
        self, signer: Signer, settings: Settings, rng: Random, addresses: tuple[Address, ...]
    ) -> None:
        self.peer = signer.peer
        self.key = node_key(signer.peer)
        self.wall_offset = 0.0
        self.events: list[Event] = []
        self.settings = settings
        self.table = Table(self.key, k=settings.k, failures_max=settings.failures_max)
        self.records = RecordStore(settings)
        self._signer = signer
        self._rng = rng
        self._addresses = address_texts(addresses)
        self._requests = Requests(rng)
        self._searches: dict[int, Search] = {}
        self._own_records: dict[Key, Record] = {}
        self._seeds: tuple[PeerId, ...] = ()
        # Peers with a ping in flight that no lookup asked for; the value is always None (an ordered set).
        self._checking: dict[PeerId, None] = {}
        self._sends: Sends = []
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timers_made = 0
        self._refresh_due = inf
        self._expiry_due = inf

    # The core shape.

    @property
    def deadline(self) -> float:
        """When `wake` wants to be called, in monotonic seconds; inf for never."""
        first = self._timers[0][0] if self._timers else inf
        return min(first, self._refresh_due, self._expiry_due)

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Take one message. Raises RemoteProtocolError, without effect, for what no correct peer sends."""
        if sender == self.peer:
            raise RemoteProtocolError("a message from ourselves")
        if isinstance(message, Answer):
            self._take_answer(now, sender, message)
        else:
            self._serve(now, sender, message)
            self._meet(now, sender, message.addresses)
        return self._drain()

    def wake(self, now: float) -> Sends:
        """Do what is due."""
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2](now)
        if self._refresh_due <= now:
            self._refresh(now)
        if self._expiry_due <= now:
            self.records.expire(self._wall(now))
            self._expiry_due = now + self.settings.expiry_check_seconds if len(self.records) else inf
        return self._drain()

    # What local code asks for.

    def join(self, now: float, peers: Sequence[PeerId]) -> Sends:
        """Enter the network by `peers`, whose addresses the network knows. Ends in `Joined`."""
        self._seeds = tuple(peers[:SEEDS_MAX])
        self._join(now)
        return self._drain()

    def add(self, now: float, peer: PeerId, addresses: Sequence[Address]) -> Sends:
        """A hint from elsewhere: `peer` is pinged, and a contact once it answers."""
        if peer != self.peer:
            self._meet(now, peer, address_texts(addresses), told_us=False)
        return self._drain()

    def remove(self, now: float, peer: PeerId) -> Sends:
        """`peer` is known to be dead: it loses its place at once, and lookups do not wait for it."""
        self.table.remove(peer)
        for search in list(self._searches.values()):
            search.lookup.passed_over(Contact(peer))
            self._advance(now, search)
        return self._drain()

    def find(self, now: float, key: Key) -> tuple[int, Sends]:
        """Look for the records under `key`. Ends in `RecordsFound`, at once if we are alone."""
        search = self._search(now, key, values=True, reports=True)
        return search.number, self._drain()

    def locate(self, now: float, key: Key) -> tuple[int, Sends]:
        """Look for the nodes nearest to `key`. Ends in `NodesFound`."""
        search = self._search(now, key, reports=True)
        return search.number, self._drain()

    def store(self, now: float, fact: Fact) -> tuple[int, Sends]:
        """Store a signed record with the k nearest alive, ourselves among them if we are. Ends in
        `RecordStored`.

        A record of our own is stored again until it expires, a newer one comes, or `forget`.

        Raises:
            RemoteProtocolError: the record is malformed or its signature does not hold.
        """
        record = check_record(self._signer, fact)
        if record.publisher == self.peer:
            self._own_records[record.key] = record
            self._republish_later(now, record)
        search = self._search(now, record.key, record=record)
        return search.number, self._drain()

    def forget(self, key: Key) -> None:
        """Store our own record under `key` no more; the replicas go when it expires."""
        self._own_records.pop(key, None)

    # Serving others.

    def _serve(self, now: float, sender: PeerId, message: Request) -> None:
        match message:
            case Ping():
                self._send(sender, Pong(message.id, self._addresses))
            case FindNode():
                room = self._room_after(Nodes(message.id, self._addresses, ()))
                contacts = self.table.nearest(Key(message.key), self.settings.k, without=sender)
                hints = cut_to_fit((contact.hint for contact in contacts), room)
                self._send(sender, Nodes(message.id, self._addresses, hints))
            case FindValue():
                self._send(sender, self._values(now, sender, message))
            case Store():
                record = check_record(self._signer, message.record)
                refusal = self._keep(now, record)
                self._send(sender, Stored(message.id, self._addresses, refusal or ""))

    def _values(self, now: float, sender: PeerId, message: FindValue) -> Values:
        held = self.records.get(self._wall(now), Key(message.key))
        facts = [record.fact for record in held if record.publisher > message.after]
        room = self._room_after(Values(message.id, self._addresses, (), False, ()))
        # One record always fits, or a full-sized one could never be handed out.
        page = cut_to_fit(facts[:RECORDS_MAX], room - HINTS_KEPT_ROOM_BYTES) or tuple(facts[:1])
        hints = ()
        if not message.after:
            contacts = self.table.nearest(Key(message.key), self.settings.k, without=sender)
            room -= sum(encoded_bytes(fact) for fact in page)
            hints = cut_to_fit((c.hint for c in contacts), max(room, HINTS_KEPT_ROOM_BYTES))
        return Values(message.id, self._addresses, page, len(page) < len(facts), hints)

    def _room_after(self, empty: Message) -> int:
        # An array's head grows by up to two bytes when it is filled; a message has at most two.
        return self.settings.payload_bytes_max - encoded_bytes(empty) - 4

    def _keep(self, now: float, record: Record) -> str | None:
        refusal = self.records.put(self._wall(now), record)
        if refusal is None:
            self._expiry_due = min(self._expiry_due, now + self.settings.expiry_check_seconds)
        return refusal

    # Meeting peers.

    def _meet(self, now: float, peer: PeerId, texts: tuple[str, ...], *, told_us: bool = True) -> None:
        """`peer` sent us something (`told_us`) or was named by local code, with these addresses."""
        contact = self.table.heard(now, peer) if told_us else self.table.get(peer)
        if contact is not None:
            self._update_addresses(contact, texts)
            if told_us:
                return
        if contact is None and not self.table.wants(peer):
            return
        self._check(now, contact or Contact(peer, texts))

    def _update_addresses(self, contact: Contact, texts: tuple[str, ...]) -> None:
        if not texts or texts == contact.addresses:
            return
        addresses = readable_addresses(texts, contact.peer)
        readable = address_texts(addresses)
        if readable and readable != contact.addresses:
            contact.addresses = readable
            self.events.append(PeerHeard(contact.peer, addresses))

    def _check(self, now: float, contact: Contact) -> None:
        """Ping a contact, if that is not being done already and not too many others are."""
        if contact.peer in self._checking or len(self._checking) >= self.settings.checks_max:
            return
        self._checking[contact.peer] = None
        self._ask(now, contact, Ping(self._requests.new_id(), self._addresses), None)

    # Requests of ours.

    def _ask(
        self, now: float, contact: Contact, message: Request, purpose: Search | Publication | None
    ) -> Pending:
        texts = contact.addresses
        if isinstance(purpose, Search):
            texts = purpose.lookup.addresses.get(contact.peer, texts)
        if self.table.get(contact.peer) is None:
            addresses = readable_addresses(texts, contact.peer)
            if addresses:
                self.events.append(PeerHeard(contact.peer, addresses))
        attempts = self.settings.store_attempts if isinstance(message, Store) else 1
        pending = Pending(contact, message, purpose, attempts - 1)
        self._requests.open(pending)
        self._send(contact.peer, message)
        self._at(now + self.settings.request_seconds, partial(self._overdue, pending))
        return pending

    def _overdue(self, pending: Pending, now: float) -> None:
        """The time of a request is up: send it again, or pass its peer over and forget it later."""
        if pending.passed_over or self._requests.get(pending.message.id) is not pending:
            return
        if pending.attempts_left:
            pending.attempts_left -= 1
            self._send(pending.contact.peer, pending.message)
            self._at(now + self.settings.request_seconds, partial(self._overdue, pending))
            return
        pending.passed_over = True
        request = pending.message.id
        self._at(now + self.settings.late_seconds, lambda _: self._requests.close(request))
        if pending.purpose is None:
            self._checking.pop(pending.contact.peer, None)
        still_there = self.table.failed(pending.contact.peer)
        if still_there is not None:
            self._at(now + self.settings.recheck_seconds, partial(self._recheck, still_there))
        if isinstance(pending.purpose, Search):
            pending.purpose.lookup.passed_over(pending.contact)
            self._advance(now, pending.purpose)
        elif isinstance(pending.purpose, Publication):
            self._count(pending.purpose, None)

    def _recheck(self, contact: Contact, now: float) -> None:
        if contact.failures and self.table.get(contact.peer) is contact:
            self._check(now, contact)

    def _take_answer(self, now: float, sender: PeerId, answer: Answer) -> None:
        pending = self._requests.answered(sender, answer)
        if pending is None:
            return
        # All checks come before the first effect: a bad answer is no answer, and times out.
        records = self._checked_records(pending, answer) if isinstance(answer, Values) else []
        self._requests.close(answer.id)
        self._welcome(now, pending.contact, answer.addresses)
        match answer:
            case Pong():
                if not pending.passed_over:
                    self._checking.pop(sender, None)
            case Stored() if isinstance(pending.purpose, Publication) and not pending.passed_over:
                self._count(pending.purpose, answer.refused)
            case Nodes() | Values() if isinstance(pending.purpose, Search):
                self._take_hints(now, pending, answer, records)

    def _welcome(self, now: float, contact: Contact, texts: tuple[str, ...]) -> None:
        """A contact answered: it may stand in the table."""
        oldest = self.table.answered(now, contact)
        kept = self.table.get(contact.peer)
        if kept is not None:
            self._update_addresses(kept, texts)
        if oldest is not None and oldest.heard + self.settings.fresh_seconds <= now:
            self._check(now, oldest)
        if self._refresh_due == inf:
            self._refresh_due = now + self.settings.refresh_seconds

    def _checked_records(self, pending: Pending, answer: Values) -> list[Record]:
        search = pending.purpose
        if not isinstance(search, Search) or not isinstance(pending.message, FindValue):
            return []
        records = []
        last = pending.message.after
        for fact in answer.records:
            if fact.author <= last:
                raise RemoteProtocolError("a page of records out of order")
            last = fact.author
            known = search.lookup.records.get(PeerId(fact.author))
            # Most holders hold the same: what was checked once is not checked again.
            record = known if known and known.fact == fact else check_record(self._signer, fact)
            if record.key != search.lookup.key:
                raise RemoteProtocolError("a record of another key than asked for")
            records.append(record)
        if answer.more and not records:
            raise RemoteProtocolError("an empty page with more behind it")
        return records

    def _take_hints(
        self, now: float, pending: Pending, answer: Nodes | Values, records: list[Record]
    ) -> None:
        search = pending.purpose
        if not isinstance(search, Search) or search.number not in self._searches:
            return
        lookup = search.lookup
        for record in records:
            if not record.expired(self._wall(now)):
                lookup.learn(record)
        named = [PeerId(hint.peer) for hint in answer.hints[: self.settings.k]]
        addresses = [hint.addresses for hint in answer.hints]
        # What we know of a peer from itself goes before what others say of it.
        hints = [self.table.get(peer) or Contact(peer, texts) for peer, texts in zip(named, addresses)]
        if isinstance(answer, Values) and answer.more and pending.page + 1 < self.settings.pages_max:
            lookup.heard(hints, pending.contact)
            message = FindValue(
                self._requests.new_id(), self._addresses, lookup.key, records[-1].publisher
            )
            page = self._ask(now, pending.contact, message, search)
            page.page = pending.page + 1
        else:
            lookup.answered(pending.contact, hints)
        self._advance(now, search)

    # Lookups.

    def _search(
        self,
        now: float,
        key: Key,
        *,
        values: bool = False,
        reports: bool = False,
        record: Record | None = None,
        quiet: bool = False,
        seeds: Sequence[Contact] = (),
        joins: bool = False,
    ) -> Search:
        bucket = self.table.bucket_of(key)
        bucket.touch_last_updated(now)
        known = self.table.nearest(key, self.settings.k)
        lookup = Lookup(key, self.peer, (*known, *seeds), self.settings, values=values)
        search = Search(self._requests.new_id(), lookup, reports, joins, record, quiet)
        self._searches[search.number] = search
        if values:
            for held in self.records.get(self._wall(now), key):
                lookup.learn(held)
        self._at(now + self.settings.lookup_seconds_max, partial(self._stop, search))
        self._advance(now, search)
        return search

    def _stop(self, search: Search, now: float) -> None:
        search.lookup.stop()
        self._advance(now, search)

    def _advance(self, now: float, search: Search) -> None:
        """Ask whom the lookup names; end it when it is done."""
        if search.number not in self._searches:
            return
        lookup = search.lookup
        for contact in lookup.next():
            request = self._requests.new_id()
            message: Request = FindNode(request, self._addresses, lookup.key)
            if lookup.values:
                message = FindValue(request, self._addresses, lookup.key, b"")
            self._ask(now, contact, message, search)
        if lookup.done:
            del self._searches[search.number]
            self._end(now, search)

    def _end(self, now: float, search: Search) -> None:
        lookup = search.lookup
        if search.joins:
            self.events.append(Joined(len(self.table)))
            self._refresh_all(now)
        elif search.record is not None:
            self._publish(now, search, search.record)
        elif search.reports and lookup.values:
            found = tuple(lookup.records[publisher] for publisher in sorted(lookup.records))
            self.events.append(RecordsFound(search.number, lookup.key, found))
        elif search.reports:
            peers = tuple(contact.peer for contact in lookup.nearest)
            self.events.append(NodesFound(search.number, lookup.key, peers))

    # Storing.

    def _publish(self, now: float, search: Search, record: Record) -> None:
        nearest = search.lookup.nearest
        ours = distance(self.key, record.key)
        here = len(nearest) < self.settings.k or ours < distance(nearest[-1].id, record.key)
        if here:
            nearest = nearest[: self.settings.k - 1]
        tried = len(nearest) + here
        publication = Publication(search.number, tried, tried, quiet=search.quiet)
        for contact in nearest:
            message = Store(self._requests.new_id(), self._addresses, record.fact)
            self._ask(now, contact, message, publication)
        if here:
            self._count(publication, self._keep(now, record) or "")

    def _count(self, publication: Publication, refused: str | None) -> None:
        publication.count(refused)
        if publication.waiting == 0 and not publication.quiet:
            self.events.append(
                RecordStored(
                    publication.number, publication.acknowledged, publication.tried, publication.refusals
                )
            )

    def _republish_later(self, now: float, record: Record) -> None:
        # A tenth of jitter, so that what was stored together does not come again together for ever.
        seconds = self.settings.republish_seconds * self._rng.uniform(0.9, 1.1)
        self._at(now + seconds, partial(self._republish, record))

    def _republish(self, record: Record, now: float) -> None:
        if self._own_records.get(record.key) is not record:
            return
        if self._wall(now) >= record.expires:
            del self._own_records[record.key]
            return
        self._search(now, record.key, record=record, quiet=True)
        self._republish_later(now, record)

    # Upkeep.

    def _join(self, now: float) -> None:
        seeds = [Contact(peer) for peer in self._seeds if peer != self.peer]
        self._search(now, self.key, seeds=seeds, joins=True)
        self._refresh_due = min(self._refresh_due, now + self.settings.refresh_seconds)

    def _refresh_all(self, now: float) -> None:
        """After joining: fill the buckets that the lookup of our own key went past."""
        for bucket in self.table.buckets:
            if not bucket.has_in_range(Contact(self.peer)):
                bucket.touch_last_updated(-inf)
        if len(self.table):
            self._refresh_due = now + self.settings.refresh_gap_seconds

    def _refresh(self, now: float) -> None:
        """Refresh the bucket that was looked into least recently, if it is time, and its silent contacts."""
        settings = self.settings
        if not len(self.table) and self._seeds:
            self._join(now)
        stalest = self._stalest()
        if stalest.last_updated + settings.refresh_seconds <= now:
            for contact in list(stalest.nodes.values()):
                if contact.heard + settings.refresh_seconds <= now:
                    self._check(now, contact)
            stalest.touch_last_updated(now)
            lower, upper = stalest.range
            self._search(now, random_key(self._rng, lower, min(upper, KEY_MAX)))
        due = self._stalest().last_updated + settings.refresh_seconds
        self._refresh_due = max(due, now + settings.refresh_gap_seconds)

    def _stalest(self) -> Bucket:
        return min(self.table.buckets, key=lambda bucket: bucket.last_updated)

    # Small things.

    def _wall(self, now: float) -> float:
        return now + self.wall_offset

    def _send(self, peer: PeerId, message: Message) -> None:
        self._sends.append((peer, message))

    def _drain(self) -> Sends:
        sends, self._sends = self._sends, []
        return sends

    def _at(self, due: float, action: Callable[[float], None]) -> None:
        # The count breaks ties in the order of making, and actions are never compared.
        self._timers_made += 1
        heapq.heappush(self._timers, (due, self._timers_made, action))
