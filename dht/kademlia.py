"""The Kademlia core: answers peers, keeps the table, runs lookups, stores and finds records.

A pure state machine with the shape of every core, after Maymounkov & Mazieres 2002. What
differs from the paper stands in the docstrings of `routing` and `lookup`. What it is not: it opens
no session and knows no sender but by the session beneath; and it promises no consistency between
publishers, only that of each publisher's records the highest sequence found is returned.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from dht import messages
from dht.events import Event, Joined, NodesFound, PeerHeard, RecordsFound, RecordStored
from dht.groups import Origins
from dht.keys import KEY_BITS, Key, distance, node_key, random_key
from dht.lookup import Lookup
from dht.messages import CLIENT_ADDRESSES, Message, address_texts, readable_addresses
from dht.records import OWN_SOURCE, Record, RecordStore, Refusal, check_record
from dht.requests import Pending, Publication, Requests, Search, checked_page
from dht.routing import WAITING_MAX, Bucket, Contact, Table
from dht.serving import nodes_reply, values_reply
from dht.settings import Settings
from dht.timers import Timer, Timers

Sends = list[tuple[PeerId, Message]]

WATCHED_PATIENCE = 4
"""Whom somebody else watches is asked for a sign of life so many times more seldom: it lives, but it may have
become a client, or its DHT be mute. And where all of a bucket are watched, whoever stood there beside them
would have been named too: so many times more seldom it is looked into."""
HOLDERS_SLACK = 2
"""A record is kept for others if this node knows fewer than so many times k that are nearer to its key. Its
publisher looks for the k nearest alive; half of those that stand in a table may be dead or passed over."""
SEEDS_MAX = 32
"""Peers of the last `join`, asked again when the table has run empty."""


class Kademlia:
    """One node of the DHT.

    `wall_offset` is the wall clock minus the monotonic one, in seconds; the shell sets it and may
    correct it at any time, as it sets `origins.host_of`. Events are to be drained after each call, before its
    messages are sent: they tell the network where the receivers are.
    """

    __slots__ = (
        "_addresses", "_checking", "_expiry_due", "_is_client", "_own_records", "_refresh_due",
        "_rejoin_due", "_requests", "_rng", "_searches", "_seeds", "_sends", "_signer", "_timers", "events",
        "key", "origins", "peer", "records", "settings", "table", "wall_offset"
    )  # fmt: skip

    def __init__(
        self, signer: Signer, settings: Settings, rng: Random, addresses: tuple[Address, ...]
    ) -> None:
        self.peer = signer.peer
        self.key = node_key(signer.peer)
        self.settings = settings
        self.wall_offset = 0.0
        self.origins = Origins(settings.groups_local)
        self.events: list[Event] = []
        self.table = Table(
            self.key, k=settings.k, failures_max=settings.failures_max, group_max=settings.group_max
        )
        self.records = RecordStore(settings, self.key)
        self._signer = signer
        self._rng = rng
        self._addresses = address_texts(addresses)
        self._is_client = False
        self._searches: dict[int, Search] = {}
        self._own_records: dict[Key, tuple[Record, Timer]] = {}
        self._seeds: tuple[PeerId, ...] = ()
        # Those with a ping in flight that no lookup asked for.
        self._checking: dict[PeerId, Contact] = {}
        self._sends: Sends = []
        self._timers = Timers()
        self._requests = Requests(
            settings, rng, self._timers, send=self._send, slow=self._slow, silent=self._silent
        )
        self._rejoin_due = inf
        self._refresh_due = inf
        self._expiry_due = inf

    # The core shape.

    @property
    def deadline(self) -> float:
        """When `wake` wants to be called, in monotonic seconds; inf for never."""
        return min(self._timers.due, self._rejoin_due, self._refresh_due, self._expiry_due)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """What others could make grow here: how much it is, and its limit."""
        waiting = sum(len(bucket.replacement_nodes) for bucket in self.table.buckets)
        return {
            "contacts": (len(self.table) + waiting, (self.settings.k + WAITING_MAX) * KEY_BITS),
            "records": (len(self.records), self.settings.records_max),
            "checks": (len(self._checking), self.settings.checks_max),
        }

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Take one message. Raises RemoteProtocolError, without effect, for what no correct peer sends."""
        if sender == self.peer:
            raise RemoteProtocolError("a message from ourselves")
        if isinstance(message, messages.Answer):
            self._take_answer(now, sender, message)
        else:
            self._send(sender, self._reply(now, sender, message))
            self._meet(now, sender, message.addresses)
        return self._drain()

    def wake(self, now: float) -> Sends:
        """Do what is due."""
        self._timers.run(now)
        if self._rejoin_due <= now:
            self._join(now)
        if self._refresh_due <= now:
            self._refresh(now)
        if self._expiry_due <= now:
            self.records.expire(self._wall(now))
            self._expiry_due = now + self.settings.expiry_check_seconds if len(self.records) else inf
        return self._drain()

    # What local code asks for.

    def appear(self, addresses: Sequence[Address], *, client: bool = False) -> None:
        """From now on this node is at `addresses`; a `client`, whom others cannot reach, only asks: it stands
        in no table, and keeps nothing for others."""
        self._is_client = client
        self._addresses = CLIENT_ADDRESSES if client else address_texts(addresses)

    def join(self, now: float, peers: Sequence[PeerId]) -> Sends:
        """Enter the network by `peers`, whose addresses the network knows. Ends in `Joined`."""
        self._seeds = tuple(peers[:SEEDS_MAX])
        self._join(now)
        return self._drain()

    def add(self, now: float, peer: PeerId, addresses: Sequence[Address]) -> Sends:
        """Somebody else watches over `peer`, and will say `remove` if it dies or `unwatch` if it looks away.
        It is pinged if there is room, and is a contact once it answers.

        Not for a place among those who wait: whoever hears of all peers would ping half of them, and have
        them ping back, only to be ready for a loss that the next hint makes good.
        """
        known, texts = self.table.get(peer), address_texts(addresses)
        if (asked := self._checking.get(peer)) is not None:
            asked.watched = True
        if known is not None:
            known.watched = True
            if known.silence is not None or (texts and texts != known.addresses):
                self._check(now, known)  # where it is now it is to say itself
        elif self.table.wants(peer, waiting=False, group=(group := self.origins.group(peer, texts))):
            contact = Contact(peer, texts, group)
            contact.watched = True
            self._check(now, contact)
        return self._drain()

    def unwatch(self, peer: PeerId) -> None:
        """Nobody else watches over `peer` any more: from now on its silence is ours to notice."""
        for contact in (self.table.get(peer), self._checking.get(peer)):
            if contact is not None:
                contact.watched = False

    def remove(self, now: float, peer: PeerId) -> Sends:
        """`peer` is known to be dead: it loses its place at once, and no lookup waits for it."""
        self.unwatch(peer)
        self._verify(now, self.table.remove(peer))
        for search in list(self._searches.values()):
            search.lookup.passed_over(peer)
            self._advance(now, search)
        return self._drain()

    def find(self, now: float, key: Key) -> tuple[int, Sends]:
        """Look for the records under `key`. Ends in `RecordsFound`, at once if we are alone."""
        search = self._search(now, key, self._report_records, values=True)
        return search.number, self._drain()

    def locate(self, now: float, key: Key) -> tuple[int, Sends]:
        """Look for the nodes nearest to `key`. Ends in `NodesFound`, at once if we are alone."""
        search = self._search(now, key, self._report_nodes)
        return search.number, self._drain()

    def store(self, now: float, fact: Fact) -> tuple[int, Sends]:
        """Store a signed record with the k nearest alive, ourselves among them if we are.

        Ends in `RecordStored`. A record of our own is stored again every `republish_seconds` until
        it expires, a newer one of ours comes, or `forget`.

        Raises:
            RemoteProtocolError: the record is malformed or its signature does not hold.
        """
        record = check_record(self._signer, fact)
        if record.publisher == self.peer:
            self._remember(now, record)
        search = self._search(now, record.key, partial(self._publish, record, False))
        return search.number, self._drain()

    def forget(self, key: Key) -> None:
        """Store our own record under `key` no more; its replicas go when it expires."""
        if key in self._own_records:
            self._own_records.pop(key)[1].call_off()

    # Others.

    def _reply(self, now: float, sender: PeerId, message: messages.Request) -> messages.Answer:
        ours = self._addresses
        match message:
            case messages.Ping():
                return messages.Pong(message.id, ours)
            case messages.FindNode():
                return nodes_reply(message, sender, addresses=ours, table=self.table, settings=self.settings)
            case messages.FindValue():
                return values_reply(
                    message,
                    sender,
                    self._wall(now),
                    addresses=ours,
                    table=self.table,
                    records=self.records,
                    settings=self.settings,
                )
            case messages.Store():
                record = check_record(self._signer, message.record)
                is_ours = self.records.holds(record) or self._is_near(record.key)
                refusal = self._keep(now, record, sender, message.addresses) if is_ours else Refusal.DISTANT
                return messages.Stored(message.id, ours, refusal or "")

    def _is_near(self, key: Key) -> bool:
        """Whether this node may be one of the k nearest to a key, as far as it knows."""
        count = HOLDERS_SLACK * self.settings.k
        nearer = self.table.nearest(key, count)
        return len(nearer) < count or distance(self.key, key) < distance(nearer[-1].id, key)

    def _keep(
        self, now: float, record: Record, sender: PeerId | None = None, texts: tuple[str, ...] = ()
    ) -> Refusal | None:
        """Keep a record of our own, or one that `sender` sent, who claims to be at `texts`."""
        source, has_quota = (OWN_SOURCE, False) if sender is None else self.origins.source(sender, texts)
        refusal = self.records.put(
            self._wall(now),
            record,
            source=source,
            is_publisher=sender in (None, record.publisher),
            has_quota=has_quota,
        )
        if refusal is None:
            self._expiry_due = min(self._expiry_due, now + self.settings.expiry_check_seconds)
        return refusal

    def _meet(self, now: float, sender: PeerId, texts: tuple[str, ...]) -> None:
        """`sender` asked us something: a known contact is alive, a stranger is worth a ping, and a client
        nothing."""
        if texts == CLIENT_ADDRESSES:
            self._verify(now, self.table.remove(sender))
            return
        contact = self.table.heard(now, sender)
        if contact is not None:
            self._take_claim(contact, texts)
        elif self.table.wants(sender, group=(group := self.origins.group(sender, texts))):
            self._check(now, Contact(sender, texts, group))

    def _take_claim(self, contact: Contact, texts: tuple[str, ...]) -> None:
        """A verified contact says where it is."""
        if not texts:
            return
        if texts == contact.addresses:
            contact.addresses = texts  # one object for all who were told by it, where messages are not copied
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
        self._checking[contact.peer] = contact
        self._ask(now, contact, messages.Ping(self._requests.new_id(), self._addresses), None)

    def _verify(self, now: float, contact: Contact | None) -> None:
        """Ping a contact, if there is one that nothing was heard of for a while."""
        if contact is not None and contact.heard + self.settings.fresh_seconds <= now:
            self._check(now, contact)

    # Requests of ours.

    def _ask(
        self,
        now: float,
        contact: Contact,
        message: messages.Request,
        purpose: Search | Publication | None,
        *,
        page: int = 0,
    ) -> None:
        if self.table.get(contact.peer) is not contact:
            texts = contact.addresses
            if isinstance(purpose, Search):
                texts = purpose.lookup.addresses.get(contact.peer, texts)
            addresses = readable_addresses(texts, contact.peer)
            readable = address_texts(addresses)
            contact.addresses = texts if readable == texts else readable  # one object, as above
            if addresses:
                self.events.append(PeerHeard(contact.peer, addresses))
        self._requests.open(Pending(contact, message, purpose, page, started=now))

    def _slow(self, now: float, pending: Pending) -> None:
        if isinstance(pending.purpose, Search):
            pending.purpose.lookup.slow(pending.contact.peer)
            self._advance(now, pending.purpose)

    def _silent(self, now: float, pending: Pending) -> None:
        """A peer has not answered in time."""
        peer = pending.contact.peer
        concerned = self.table.failed(now, peer, pending.started)
        if concerned is not None and concerned.peer == peer:
            self._timers.at(now + self.settings.recheck_seconds, partial(self._recheck, concerned))
        elif concerned is not None:
            self._verify(now, concerned)
        elif not len(self.table) and self._seeds:
            self._rejoin_due = min(self._rejoin_due, now + self.settings.rejoin_seconds)
        match pending.purpose:
            case None:
                self._checking.pop(peer, None)
                if self.table.get(peer) is None:
                    pending.contact.watched = False  # its answer may still come, when nobody watches any more
            case Search() as search:
                search.lookup.passed_over(peer)
                self._advance(now, search)
            case Publication() as publication:
                self._count(publication, None)

    def _recheck(self, contact: Contact, now: float) -> None:
        if contact.silence is not None and self.table.get(contact.peer) is contact:
            self._check(now, contact)

    def _take_answer(self, now: float, sender: PeerId, answer: messages.Answer) -> None:
        pending = self._requests.answered(sender, answer)
        if pending is None:
            return
        # All checks come before the first effect: a bad answer is no answer, and its request times out.
        records = checked_page(self._signer, pending, answer) if isinstance(answer, messages.Values) else []
        self._requests.close(now, pending)
        self._welcome(now, pending.contact, answer.addresses)
        match pending.purpose:
            case None if not pending.passed_over:
                self._checking.pop(sender, None)
            case Publication() as publication if not pending.passed_over:
                self._count(publication, answer.refused if isinstance(answer, messages.Stored) else None)
            case Search() as search if answer.addresses == CLIENT_ADDRESSES:
                # It may have become one since somebody named it; nothing is to be stored there.
                search.lookup.passed_over(sender)
                self._advance(now, search)
            case Search() as search if search.number in self._searches:
                if isinstance(answer, messages.Nodes | messages.Values):
                    self._take_hints(now, search, pending, answer, records)
                    self._advance(now, search)

    def _welcome(self, now: float, contact: Contact, texts: tuple[str, ...]) -> None:
        """A contact answered: it may stand in the table, unless it is a client."""
        if texts == CLIENT_ADDRESSES:
            self._verify(now, self.table.remove(contact.peer))
            return
        contact.group = self.origins.group(contact.peer, texts or contact.addresses)
        oldest = self.table.answered(now, contact)
        kept = self.table.get(contact.peer)
        if kept is not None:
            kept.watched = kept.watched or contact.watched  # it may have come by another way meanwhile
            self._take_claim(kept, texts)
        self._verify(now, oldest)
        if self._refresh_due == inf:
            self._refresh_due = now + self.settings.refresh_seconds

    # Lookups.

    def _search(
        self,
        now: float,
        key: Key,
        then: Callable[[float, Search], None],
        *,
        values: bool = False,
        seeds: Sequence[Contact] = (),
    ) -> Search:
        self._touch(now, self.table.bucket_of(key))
        # More than k, for answers name only the k nearest, and half of these may be dead.
        known = self.table.nearest(key, 2 * self.settings.k)
        if len(known) < self.settings.alpha:
            # After an outage of our own all seem to fail; better to ask them than to ask nobody.
            known = self.table.nearest(key, self.settings.k, failing=True)
        lookup = Lookup(key, self.peer, (*known, *seeds), self.settings, values=values)
        if values:
            for held in self.records.get(self._wall(now), key):
                lookup.learn(held)
        search = Search(self._requests.new_id(), lookup, then)
        self._searches[search.number] = search
        due = now + self.settings.lookup_seconds_max
        search.time_limit = self._timers.at(due, partial(self._stop, search))
        self._advance(now, search)
        return search

    def _advance(self, now: float, search: Search) -> None:
        """Ask whom the lookup names; end it when it is done."""
        if search.number not in self._searches:
            return
        lookup = search.lookup
        for contact in lookup.next():
            request = self._requests.new_id()
            message: messages.Request = messages.FindNode(request, self._addresses, lookup.key)
            if lookup.values:
                message = messages.FindValue(request, self._addresses, lookup.key, b"")
            self._ask(now, contact, message, search)
        if lookup.done:
            del self._searches[search.number]
            if search.time_limit is not None:
                search.time_limit.call_off()
            search.then(now, search)

    def _stop(self, search: Search, now: float) -> None:
        search.lookup.stop()
        self._advance(now, search)

    def _take_hints(
        self,
        now: float,
        search: Search,
        pending: Pending,
        answer: messages.Nodes | messages.Values,
        records: list[Record],
    ) -> None:
        lookup = search.lookup
        for record in records:
            if not record.expired(self._wall(now)):
                lookup.learn(record)
        # What a peer said of itself goes before what others say of it.
        hints = [self._hinted(lookup, hint) for hint in answer.hints[: self.settings.k]]
        lookup.named(pending.contact.peer, hints)
        more = isinstance(answer, messages.Values) and answer.more
        if more and pending.page + 1 < self.settings.pages_max:
            last = records[-1].publisher
            message = messages.FindValue(self._requests.new_id(), self._addresses, lookup.key, last)
            self._ask(now, pending.contact, message, search, page=pending.page + 1)
        else:
            lookup.answered(pending.contact)

    def _hinted(self, lookup: Lookup, hint: messages.Hint) -> Contact:
        peer = PeerId(hint.peer)
        known = lookup.candidates.get(peer)  # the same few are named again and again
        if known is None or known.addresses != hint.addresses:
            known = self.table.get(peer)
            known = known or Contact(peer, hint.addresses, self.origins.group(peer, hint.addresses))
        return known

    def _report_records(self, _now: float, search: Search) -> None:
        records = search.lookup.records
        found = tuple(records[publisher] for publisher in sorted(records))
        self.events.append(RecordsFound(search.number, search.lookup.key, found, search.lookup.rounds))

    def _report_nodes(self, _now: float, search: Search) -> None:
        peers = tuple(contact.peer for contact in search.lookup.nearest)
        self.events.append(NodesFound(search.number, search.lookup.key, peers))

    # Storing.

    def _publish(self, record: Record, quiet: bool, now: float, search: Search) -> None:
        nearest = search.lookup.nearest
        here = len(nearest) < self.settings.k
        here = here or distance(self.key, record.key) < distance(nearest[-1].id, record.key)
        here = here and not self._is_client
        if here:
            nearest = nearest[: self.settings.k - 1]
        tried = len(nearest) + here
        publication = Publication(search.number, tried, tried, quiet, search.lookup.rounds)
        for contact in nearest:
            message = messages.Store(self._requests.new_id(), self._addresses, record.fact)
            self._ask(now, contact, message, publication)
        if here:
            self._count(publication, self._keep(now, record) or "")

    def _count(self, publication: Publication, refused: str | None) -> None:
        publication.count(refused)
        if publication.waiting == 0 and not publication.quiet:
            self.events.append(
                RecordStored(
                    publication.number,
                    publication.acknowledged,
                    publication.tried,
                    publication.refusals,
                    publication.rounds,
                )
            )

    def _remember(self, now: float, record: Record) -> None:
        """Keep our own record to store it again."""
        self.forget(record.key)
        # A tenth of jitter: what was stored together must not come again together for ever.
        seconds = self.settings.republish_seconds * self._rng.uniform(0.9, 1.1)
        timer = self._timers.at(now + seconds, partial(self._republish, record))
        self._own_records[record.key] = (record, timer)

    def _republish(self, record: Record, now: float) -> None:
        if self._wall(now) >= record.expires:
            self.forget(record.key)
            return
        self._remember(now, record)
        self._search(now, record.key, partial(self._publish, record, True))

    # Upkeep.

    def _join(self, now: float) -> None:
        seeds = [Contact(peer) for peer in self._seeds if peer != self.peer]
        # Tried again then, unless somebody answers.
        self._rejoin_due = now + self.settings.rejoin_seconds if seeds else inf
        self._search(now, self.key, self._joined, seeds=seeds)

    def _joined(self, now: float, search: Search) -> None:
        self.events.append(Joined(len(self.table)))
        if not search.lookup.nearest:
            return
        self._rejoin_due = inf
        # The lookup of our own key went past the far buckets: refresh them, one after the other.
        for bucket in self.table.buckets:
            if bucket is not self.table.bucket_of(self.key):
                bucket.touch_last_updated(-inf)
        self._refresh_due = now + self.settings.refresh_gap_seconds

    def _refresh(self, now: float) -> None:
        """Refresh the bucket that was looked into least recently, if it is time, and ask those of its
        contacts whether they live of whom nothing was heard for so long."""
        settings = self.settings
        stalest = self._stalest()
        if stalest.last_updated + settings.refresh_seconds <= now:
            for contact in stalest.get_nodes():
                patience = WATCHED_PATIENCE if contact.watched else 1
                if contact.heard + patience * settings.refresh_seconds <= now:
                    self._check(now, contact)
            if self._is_worth_a_lookup(stalest):
                self._search(now, random_key(self._rng, *stalest.range), lambda _now, _search: None)
            else:
                self._touch(now, stalest)
        due = self._stalest().last_updated + settings.refresh_seconds
        self._refresh_due = max(due, now + settings.refresh_gap_seconds)

    def _is_worth_a_lookup(self, bucket: Bucket) -> bool:
        if bucket.full and bucket is not self.table.bucket_of(self.key):
            return False  # there is no room for whom it would find; whoever is lost makes room
        if not bucket.nodes or not all(contact.watched for contact in bucket.nodes.values()):
            return True
        return self._rng.random() * WATCHED_PATIENCE < 1  # as often on average: no bucket need remember when

    def _touch(self, now: float, bucket: Bucket) -> None:
        # Give or take a quarter: what was filled together must not be refreshed together for ever.
        bucket.touch_last_updated(now + self.settings.refresh_seconds * self._rng.uniform(-0.25, 0.25))

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
