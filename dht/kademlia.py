"""The Kademlia core: it answers peers, maintains the table, runs lookups, and stores and finds records.

A pure state machine with the methods of every core, after Maymounkov & Mazieres 2002. The docstrings of
`routing` and `lookup` list the differences from the paper. The core opens no session; it knows the sender of
a message only from the session beneath. It promises no consistency between publishers: a find only returns
the highest sequence number that it found for each publisher.
"""

from collections.abc import Sequence
from random import Random

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from dht import messages
from dht.advertising import Advertising
from dht.capabilities import Advert, Query, estimate_nodes
from dht.contacts import Contacts
from dht.entry import NetworkEntry
from dht.events import Event, PeerHeard, PeerPinged
from dht.groups import Origins
from dht.hunt import Estimate, Hunts, unknown
from dht.keys import KEY_BITS, Key, distance, node_key
from dht.messages import CLIENT_ADDRESSES, Message, address_texts, readable_addresses
from dht.records import NOBODY, Record, RecordStore, check_record
from dht.replication import Replication
from dht.replies import reply
from dht.requests import Inquiry, PendingRequest, Publication, Requests, Search, checked_page
from dht.routing import WAITING_MAX, Contact, Table
from dht.searches import Searches
from dht.settings import KademliaSettings
from dht.timers import Timers
from dht.tokens import SECRET_BYTES, WriteTokens
from dht.upkeep import Upkeep
from dht.work import has_work

Sends = list[tuple[PeerId, Message]]


class Kademlia:
    """One node of the DHT.

    The shell sets `wall_offset`, the wall clock minus the monotonic one in seconds, and may correct it at any
    time. It also sets `own_wall_offset`, the same for the machine's own clock (None if that clock is
    unusable), `origins.host_of`, and `estimate`, which returns the round-trip time to given coordinates.
    Records are dropped once they have expired by both clocks. Drain the events after each call and before
    sending its messages, because the events tell the network where the receivers are.
    """

    __slots__ = (
        "_advertising", "_contacts", "_entry", "_hunts", "_requests", "_searches", "_sends",
        "_sequence", "addresses", "estimate", "events", "is_client", "key", "origins", "own_wall_offset",
        "peer", "records", "replication", "rng", "search", "settings", "signer", "table", "timers", "tokens",
        "upkeep", "wall_offset",
    )  # fmt: skip

    def __init__(
        self,
        signer: Signer,
        settings: KademliaSettings,
        rng: Random,
        addresses: tuple[Address, ...],
    ) -> None:
        self.peer = signer.peer
        self.key = node_key(signer.peer)
        self.settings = settings
        self.wall_offset = 0.0
        self.own_wall_offset: float | None = None
        self._sequence = 0
        self.origins = Origins(settings.groups_local)
        self.events: list[Event] = []
        self.table = Table(
            self.key, k=settings.k, failures_max=settings.failures_max, group_max=settings.group_max
        )
        self.records = RecordStore(settings, self.key)
        self.rng = rng
        self.is_client = False
        self.signer = signer
        # The shell replaces these with tokens from its own entropy; in an experiment they suffice.
        self.tokens = WriteTokens(rng.randbytes(SECRET_BYTES))
        self.addresses = address_texts(addresses)
        self._sends: Sends = []
        self.timers = Timers()
        self._requests = Requests(
            settings, rng, self.timers, send=self._send, slow=self._slow, silent=self._silent
        )
        self.replication = Replication(self)
        self.estimate: Estimate = unknown
        self._advertising = Advertising(self)
        self._hunts = Hunts(self)
        self._searches = Searches(self)
        self.search = self._searches.begin
        self._entry = NetworkEntry(self)
        self._contacts = Contacts(self)
        self.upkeep = Upkeep(self, self._contacts.check)

    # The core shape.

    @property
    def deadline(self) -> float:
        """When `wake` must be called, in monotonic seconds; inf for never."""
        return min(self.timers.due, self.upkeep.deadline, self._entry.due)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The size and limit of each table whose growth other peers can cause."""
        waiting = sum(len(bucket.replacement_nodes) for bucket in self.table.buckets)
        return {
            "contacts": (len(self.table) + waiting, (self.settings.k + WAITING_MAX) * KEY_BITS),
            "records": (len(self.records), self.settings.records_max),
            "checks": (len(self._contacts), self.settings.checks_max),
            **self.replication.sizes,
            **self.upkeep.sizes,
            **self._hunts.sizes,
        }

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Handle one message. Raises RemoteProtocolError, without effect, if no correct peer would send
        it."""
        if sender == self.peer:
            raise RemoteProtocolError("a message from ourselves")
        if not has_work(sender, self.settings.work_bits):
            raise RemoteProtocolError("a node id without the swarm's proof of work")
        if isinstance(message, messages.Answer):
            self._take_answer(now, sender, message)
        else:
            self._send(sender, reply(self, now, sender, message))
            self._contacts.meet(now, sender, message.addresses)
        return self._drain()

    def wake(self, now: float) -> Sends:
        """Run the timers that are due."""
        self.timers.run(now)
        self._entry.wake(now)
        self.upkeep.wake(now)
        return self._drain()

    # Requests of local code.

    def appear(self, addresses: Sequence[Address], *, client: bool = False) -> None:
        """Announce this node at `addresses` from now on. A `client` cannot be reached, so it only sends
        requests: it is in no routing table and keeps no records for others."""
        self.is_client = client
        self.addresses = CLIENT_ADDRESSES if client else address_texts(addresses)

    def join(self, now: float, peers: Sequence[PeerId]) -> Sends:
        """Enter the network through `peers`, whose addresses the network knows. Ends in `Joined`."""
        self._entry.begin(now, peers)
        return self._drain()

    def add(self, now: float, peer: PeerId, addresses: Sequence[Address]) -> Sends:
        """Consider a peer that another part of the node monitors. That part will call `remove` if the peer
        dies, or `unwatch` when it stops monitoring. The peer is pinged if there is room, and is a contact
        once it answers.

        It is not added to the waiting contacts. A node that hears of all peers would otherwise exchange pings
        with half of them, to prepare for a loss that the next hint repairs anyway.
        """
        if not has_work(peer, self.settings.work_bits):
            return []
        self._contacts.add(now, peer, address_texts(addresses))
        return self._drain()

    def unwatch(self, peer: PeerId) -> None:
        """Monitor `peer` here from now on, because no other part of the node does."""
        self._contacts.unwatch(peer)

    def remove(self, now: float, peer: PeerId) -> Sends:
        """Remove a dead peer immediately from the table and from all lookups."""
        self.unwatch(peer)
        self.upkeep.lose(now, self.table.get(peer))
        self._contacts.remove(now, peer)
        self._searches.pass_over(now, peer)
        return self._drain()

    def restore(self, now: float, contacts: Sequence[tuple[PeerId, Sequence[Address]]]) -> Sends:
        """Ping the contacts of an earlier process (`saved`), the nearest to us first."""
        nearest = sorted(contacts, key=lambda each: distance(node_key(each[0]), self.key))
        for peer, addresses in nearest:
            self.add(now, peer, addresses)
            self.unwatch(peer)
        return self._drain()

    @property
    def saved(self) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Return the contacts to store for the next start: those that answered our latest request."""
        return [(contact.peer, contact.addresses) for contact in self.table if contact.silence is None]

    def find(
        self, now: float, key: Key, *, paths: int = 1, first: bool = False, all_holders: bool = False
    ) -> tuple[int, Sends]:
        """Look for the records under `key`, over `paths` disjoint paths. `first`: stop at the first record,
        which suffices for an immutable value. `all_holders`: go on until the k nearest have answered. Ends in
        `RecordsFound`, immediately if this node knows no other."""
        width = self.settings.k if all_holders else None
        then, enough = self._searches.report_records, bool if first else None
        search = self.search(now, key, then, values=True, paths=paths, enough=enough, width=width)
        return search.number, self._drain()

    def locate(self, now: float, key: Key) -> tuple[int, Sends]:
        """Look for the nodes nearest to `key`. Ends in `NodesFound`, immediately if this node knows no
        other."""
        search = self.search(now, key, self._searches.report_nodes)
        return search.number, self._drain()

    def store(self, now: float, fact: Fact) -> tuple[int, Sends]:
        """Store a signed record on the k nearest live nodes, including this one if it is among them.

        Ends in `RecordStored`. A record of our own, or an immutable value, is stored again every
        `republish_seconds` until it expires, a newer one replaces it, or `forget` is called.

        Raises:
            RemoteProtocolError: the record is malformed or its signature is invalid.
        """
        return self.replication.store(now, check_record(self.signer, fact)), self._drain()

    def adopt(self, now: float, record: Record) -> None:
        """Hold a checked record of an earlier process; a record of our own is also scheduled for
        republishing."""
        if not self.may_publish(record.publisher):
            return
        if record.publisher == self.peer:
            self._sequence = max(self._sequence, record.sequence)
        if not self.replication.keep(now, record) and record.publisher == self.peer:
            self.replication.own(now, record)

    def advertise(self, now: float, advert: Advert | None) -> Sends:
        """Advertise what this node offers from now on, in place of its previous advert."""
        self._advertising.advertise(now, advert)
        return self._drain()

    def hunt(self, now: float, query: Query) -> tuple[int, Sends]:
        """Search for nodes by what they offer. Ends in `CapabilitiesFound`."""
        return self._hunts.begin(now, query), self._drain()

    @property
    def network_size(self) -> float:
        """The number of nodes, estimated from the density of those nearest to us."""
        return estimate_nodes(self.key, self.table.nearest(self.key, self.settings.k), self.settings.k)

    def forget(self, key: Key) -> None:
        """Stop republishing our own records under `key`; the replicas disappear when they expire."""
        self.replication.forget(key)

    def ping(self, now: float, peer: PeerId, addresses: Sequence[Address] = ()) -> tuple[int, Sends]:
        """Ask a peer whether it is alive. Ends in `PeerPinged`."""
        number = self.new_id()

        def tell(_now: float, token: bytes | None, seconds: float) -> None:
            self.events.append(PeerPinged(number, peer, None if token is None else seconds))

        contact = self.table.get(peer) or Contact(peer, address_texts(addresses))
        if self.may_ask(now, peer) and peer != self.peer:
            self.ask(now, contact, self.ping_message(), Inquiry(tell))
        else:
            tell(now, None, 0.0)
        return number, self._drain()

    # Requests of ours.

    def ask(
        self,
        now: float,
        contact: Contact,
        message: messages.Request,
        purpose: Search | Publication | Inquiry | None,
        *,
        page: int = 0,
    ) -> None:
        """Send a request, and report its outcome to `purpose`."""
        if self.table.get(contact.peer) is not contact:
            texts = contact.addresses
            if isinstance(purpose, Search):
                texts = purpose.lookup.places(contact.peer) or texts
            addresses = readable_addresses(texts, contact.peer)
            readable = address_texts(addresses)
            contact.addresses = texts if readable == texts else readable  # one shared object, see `Contacts`
            if addresses:
                self.events.append(PeerHeard(contact.peer, addresses))
        self._requests.open(PendingRequest(contact, message, purpose, page, started=now))

    def _slow(self, now: float, pending: PendingRequest) -> None:
        if isinstance(pending.purpose, Search):
            pending.purpose.lookup.slow(pending.contact.peer)
            self._searches.advance(now, pending.purpose)

    def _silent(self, now: float, pending: PendingRequest) -> None:
        """Handle a request that was not answered in time."""
        peer = pending.contact.peer
        if self._contacts.fail(now, pending) and not len(self.table):
            self._entry.hurry(now)
        match pending.purpose:
            case None:
                self._contacts.fail_check(pending.contact)
            case Search() as search:
                search.lookup.passed_over(peer)
                self._searches.advance(now, search)
            case Publication() as publication:
                self.replication.count(publication, None)
            case Inquiry() as inquiry:
                inquiry.then(now, None, now - pending.started)

    def _take_answer(self, now: float, sender: PeerId, answer: messages.Answer) -> None:
        pending = self._requests.answered(sender, answer)
        if pending is None:
            return
        # All checks come before the first change of state. A bad answer counts as a timeout.
        records = self._checked(now, sender, pending, answer)
        self._requests.close(now, pending)
        self._contacts.welcome(now, pending.contact, answer.addresses, answer.token)
        match pending.purpose:
            case None if not pending.passed_over:
                self._contacts.end_check(sender)
            case Publication() as publication if not pending.passed_over:
                refused = answer.refused if isinstance(answer, messages.Stored) else None
                self.replication.count(publication, refused)
            case Inquiry() as inquiry if not pending.passed_over:
                inquiry.then(now, answer.token, now - pending.started)
            case Search() as search if answer.addresses == CLIENT_ADDRESSES:
                # The peer may have become a client since it was named, so nothing must be stored there.
                search.lookup.passed_over(sender)
                self._searches.advance(now, search)
            case Search() as search if search in self._searches:
                if isinstance(answer, messages.Stored):
                    search.told[sender] = answer.refused
                if not isinstance(answer, messages.Pong):
                    search.lookup.give_token(sender, answer.token)
                    self._searches.take_hints(now, search, pending, answer, records)
                    self._searches.advance(now, search)

    def _checked(
        self, now: float, sender: PeerId, pending: PendingRequest, answer: messages.Answer
    ) -> list[Record]:
        """Return the records of an answer. If the answer is bad, remove its sender from the table and end the
        request."""
        if not isinstance(answer, messages.Values):
            return []
        try:
            return checked_page(self.signer, pending, answer)
        except RemoteProtocolError:
            self._requests.spoil(now, pending)
            self.upkeep.distrust(now, sender)
            raise

    # Helper functions.

    def may_ask(self, now: float, peer: PeerId) -> bool:
        """Return whether a peer may be asked: its id has the required proof of work, and it gave no bad
        answer lately."""
        return not self.upkeep.is_liar(now, peer) and has_work(peer, self.settings.work_bits)

    def may_publish(self, publisher: PeerId) -> bool:
        """Return whether records of this publisher are kept and returned: its id has the required proof of
        work, or the records are immutable values, which need none."""
        return publisher == NOBODY or has_work(publisher, self.settings.work_bits)

    def wall(self, now: float) -> float:
        """The wall-clock time at the monotonic time `now`."""
        return now + self.wall_offset

    def next_sequence(self, now: float) -> int:
        """Return the sequence number of this node's next record: the unix time in milliseconds, or more if
        that is needed to exceed all earlier numbers. So records stay new even after a clock is set back."""
        self._sequence = max(self._sequence + 1, int(self.wall(now) * 1000))
        return self._sequence

    def new_id(self) -> int:
        """Return the number of a new request or search."""
        return self._requests.new_id()

    def ping_message(self) -> messages.Ping:
        """A Ping from this node."""
        return messages.Ping(self.new_id(), self.addresses)

    def store_message(
        self, record: Record, token: bytes, *, cached: bool = False, seeking: bool = False
    ) -> messages.Store:
        """A Store from this node."""
        return messages.Store(self.new_id(), self.addresses, record.fact, token, cached, seeking)

    def _send(self, peer: PeerId, message: Message) -> None:
        self._sends.append((peer, message))

    def _drain(self) -> Sends:
        sends, self._sends = self._sends, []
        return sends
