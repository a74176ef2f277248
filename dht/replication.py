"""Replication: how records reach the nodes that should hold them, and stay there while nodes come and go.

- A store looks for the k nearest live nodes, gives each a copy with the write token from its latest answer,
  and counts the holders. It has failed if there are fewer than `holders_min`. If all the nearest known nodes
  gave us tokens within the last minutes, the Store requests themselves serve as the lookup: each holder also
  names the nearest contacts, and a lookup follows only if it names nearer ones. Usually one round trip is
  enough.
- The publisher stores its own records again every `republish_seconds`. If nobody has stored a record with a
  holder for longer than that, the holder does so in the publisher's place. So records outlive their
  publishers until they expire. The first holder to do so spares the others the work, since it stores with all
  of them (Kademlia 2.5).
- When a node is new to the neighbourhood of a key, the node nearest to the key sends it, once, the records
  that it should hold.
- A find leaves its newest records with the nearest nodes that answered without them. Future holders keep
  them; other nodes cache them for a short time.

Not here: quotas (`records`) and sending (`kademlia`).
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Protocol

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from dht import messages
from dht.caching import RecordCache
from dht.events import Event, RecordStored
from dht.groups import Origins
from dht.keys import Key, distance
from dht.records import NOBODY, OWN_SOURCE, Record, RecordStore, Refusal, check_record
from dht.requests import Inquiry, Publication, Search
from dht.routing import Contact, Table
from dht.settings import KademliaSettings
from dht.timers import Timer, Timers

HOLDERS_SLACK = 2
"""This node keeps a record for others if it knows fewer than this many times k nodes that are nearer to the
record's key. The factor is above 1 because the publisher looks for live nodes, and half of the nodes in a
table may be dead or passed over."""
HANDED_MAX = 1_024
"""Maximum number of remembered newcomers that have already received their records."""
REPAIRED_RECORDS_MAX = 4
"""Maximum number of publishers in a find that is still repaired. Beyond it, a repair would send more copies
than the find got answers."""

Place = tuple[Key, PeerId]
"""A record's key and publisher."""


class ReplicationCore(Protocol):
    """The parts of the core that `Replication` uses."""

    peer: PeerId
    key: Key
    settings: KademliaSettings
    table: Table
    records: RecordStore
    events: list[Event]
    timers: Timers
    origins: Origins
    signer: Signer
    rng: Random
    is_client: bool
    own_wall_offset: float | None

    def wall(self, now: float) -> float: ...
    def may_publish(self, publisher: PeerId) -> bool: ...
    def new_id(self) -> int: ...
    def search(
        self,
        now: float,
        key: Key,
        then: Callable[[float, Search], None],
        *,
        record: Record | None = None,
    ) -> Search: ...
    def ask(
        self, now: float, contact: Contact, message: messages.Request, purpose: Publication | Inquiry | None
    ) -> None: ...
    def store_message(
        self, record: Record, token: bytes, *, cached: bool = False, seeking: bool = False
    ) -> messages.Store: ...


class Replication:
    """The part of a core that stores records on other nodes."""

    def __init__(self, ground: ReplicationCore) -> None:
        self._ground = ground
        self._own: dict[Place, tuple[Record, Timer]] = {}
        self._handed: dict[PeerId, None] = {}
        # When each held record is stored again, unless another node does it first. The queue may have an
        # earlier time.
        self._due: dict[Place, float] = {}
        self._queue: list[tuple[float, Key, PeerId]] = []
        self._timer: Timer | None = None
        self._last = 0.0
        self._sweeping: Timer | None = None
        self._cache = RecordCache(ground.settings.cache_max, ground.settings.cache_seconds)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The size and limit of each table whose growth other peers can cause."""
        return {"cached records": (len(self._cache), self._ground.settings.cache_max)}

    # Storing.

    def store(self, now: float, record: Record, *, quiet: bool = False) -> int:
        """Store a record; return the number of the request. It ends in `RecordStored` unless it is
        `quiet`."""
        if record.publisher in (self._ground.peer, NOBODY):
            self.own(now, record)
        return self._ground.search(
            now, record.key, partial(self._publish, record, quiet), record=record
        ).number

    def forget(self, key: Key) -> None:
        """Stop republishing our own records under `key`; the replicas disappear when they expire."""
        for publisher in (self._ground.peer, NOBODY):
            if (key, publisher) in self._own:
                self._own.pop((key, publisher))[1].call_off()

    def count(self, publication: Publication, refused: str | None) -> None:
        """Count one node's answer to a store; `refused` is None if the node was silent."""
        publication.count(refused)
        if publication.waiting == 0 and not publication.quiet:
            self._ground.events.append(
                RecordStored(
                    publication.number,
                    publication.acknowledged,
                    publication.tried,
                    publication.refusals,
                    publication.rounds,
                    publication.wanted,
                )
            )

    def _publish(self, record: Record, quiet: bool, now: float, search: Search) -> None:
        ground, settings = self._ground, self._ground.settings
        answered, tokens = search.lookup.nearest, search.lookup.tokens
        nearest = self.others(record.key, answered)
        here = not ground.is_client and (len(nearest) < len(answered) or len(answered) < settings.k)
        tried = len(nearest) + here
        wanted = min(settings.holders_min, settings.k, len(ground.table) + (not ground.is_client))
        publication = Publication(
            search.number, tried, tried, quiet, wanted=max(wanted, 1), rounds=search.lookup.rounds
        )
        told: list[str] = []
        for contact in nearest:
            # Only an outdated token justifies another try, with the token from the node's latest answer.
            if (refused := search.told.get(contact.peer, Refusal.UNPROVEN)) != Refusal.UNPROVEN:
                told.append(refused)
                continue
            message = ground.store_message(record, tokens.get(contact.peer, b""))
            ground.ask(now, contact, message, publication)
        for refused in told:
            self.count(publication, refused)
        if here:
            self.count(publication, self.keep(now, record))
        elif not tried:
            publication.waiting = 1  # there is no node at all; a reported silence ends the store
            self.count(publication, None)

    def others(self, key: Key, nearest: list[Contact]) -> list[Contact]:
        """Return which of the k `nearest` to a key hold its records. If this node is a holder too, it takes
        one of the k places."""
        ground, k = self._ground, self._ground.settings.k
        if ground.is_client or len(nearest) < k:
            return nearest
        is_holder = distance(ground.key, key) < distance(nearest[-1].id, key)
        return nearest[: k - is_holder]

    def own(self, now: float, record: Record) -> None:
        """Remember a record of our own, to store it again later."""
        place = record.key, record.publisher
        if place in self._own:
            self._own.pop(place)[1].call_off()
        # A tenth of jitter keeps records that were stored together from being republished together for ever.
        seconds = self._ground.settings.republish_seconds * self._ground.rng.uniform(0.9, 1.1)
        timer = self._ground.timers.at(now + seconds, partial(self._republish, record))
        self._own[place] = (record, timer)

    def _republish(self, record: Record, now: float) -> None:
        del self._own[record.key, record.publisher]
        if self._ground.wall(now) < record.expires:
            self.own(now, record)
            self._ground.search(now, record.key, partial(self._publish, record, True), record=record)

    # Holding.

    def take(self, now: float, sender: PeerId, message: messages.Store) -> tuple[Key, str]:
        """Keep a record for a peer with a valid token; return its key and "", or its key and the reason for a
        refusal. Raises RemoteProtocolError."""
        ground = self._ground
        if not ground.may_publish(PeerId(message.record.author)):
            raise RemoteProtocolError("a record by an id without the swarm's proof of work")
        record = check_record(ground.signer, message.record)
        if ground.records.holds(record) or self._is_near(record.key):
            return record.key, self.keep(now, record, sender, message.addresses)
        is_cached = message.cached and not record.expired(ground.wall(now)) and self._cache.put(now, record)
        return record.key, "" if is_cached else Refusal.DISTANT

    def keep(
        self, now: float, record: Record, sender: PeerId | None = None, texts: tuple[str, ...] = ()
    ) -> str:
        """Keep our own record, or one of `sender`, which claims to be at `texts`; return "", or the reason
        for a refusal."""
        ground = self._ground
        source, has_quota = (OWN_SOURCE, False) if sender is None else ground.origins.source(sender, texts)
        refusal = ground.records.put(
            ground.wall(now),
            record,
            source=source,
            is_publisher=sender in (None, record.publisher),
            has_quota=has_quota,
        )
        if refusal is None:
            self._hold(now, record)
        return refusal or ""

    def copies(self, now: float, key: Key) -> list[Record]:
        """Return the short-lived copies under `key`, held in addition to the replicas."""
        return self._cache.get(now, self._ground.wall(now), key)

    def _is_near(self, key: Key) -> bool:
        """Return whether this node may be one of the k nearest to a key, as far as it can tell from its
        table."""
        count = HOLDERS_SLACK * self._ground.settings.k
        nearer = self._ground.table.nearest(key, count)
        return len(nearer) < count or distance(self._ground.key, key) < distance(nearer[-1].id, key)

    def _sweep(self, now: float) -> None:
        """Drop records that have expired by both clocks. The swarm's clock may be wrong, and it moves only
        one of the two."""
        wall, own_offset = self._ground.wall(now), self._ground.own_wall_offset
        self._ground.records.expire(wall if own_offset is None else min(wall, now + own_offset))
        pause = self._ground.settings.expiry_check_seconds
        self._sweeping = (
            self._ground.timers.at(now + pause, self._sweep) if len(self._ground.records) else None
        )

    def _hold(self, now: float, record: Record) -> None:
        """Record that `record` was just stored with us, and so with the other holders too."""
        if self._sweeping is None:
            pause = self._ground.settings.expiry_check_seconds
            self._sweeping = self._ground.timers.at(now + pause, self._sweep)
        place = record.key, record.publisher
        is_new = place not in self._due
        self._due[place] = now + self._ground.settings.republish_seconds * self._ground.rng.uniform(1.1, 1.6)
        if is_new:
            heapq.heappush(self._queue, (self._due[place], *place))
            self._plan()

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.call_off()
        self._timer = None
        if self._queue:
            due = max(self._queue[0][0], self._last + self._ground.settings.republish_gap_seconds)
            self._timer = self._ground.timers.at(due, self._store_again)

    def _store_again(self, now: float) -> None:
        """Store again the one held record that is most overdue."""
        self._timer = None
        ground = self._ground
        while self._queue and self._queue[0][0] <= now:
            _, key, publisher = self._queue[0]
            record = ground.records.kept(key, publisher)
            due = self._due[key, publisher]
            if record is None or ground.wall(now) >= record.expires:
                del self._due[key, publisher]
                heapq.heappop(self._queue)
            elif due > now:
                heapq.heapreplace(self._queue, (due, key, publisher))
            else:
                due = now + ground.settings.republish_seconds * ground.rng.uniform(1.1, 1.6)
                self._due[key, publisher] = due
                heapq.heapreplace(self._queue, (due, key, publisher))
                if (key, publisher) not in self._own and not ground.is_client:
                    self._last = now
                    ground.search(now, key, partial(self._publish, record, True), record=record)
                    break
        self._plan()

    # Handing over.

    def welcome(self, now: float, newcomer: Contact, token: bytes) -> None:
        """Send a contact that is new to the table the records that it should hold and to which we are the
        nearest. This happens once per contact."""
        ground, settings = self._ground, self._ground.settings
        if ground.is_client or not len(ground.records) or not settings.handover_max:
            return
        if newcomer.peer in self._handed:
            return
        near = ground.table.nearest(ground.key, 2 * settings.k)
        if newcomer not in near:
            return  # the newcomer is too far from us to hold any of our records
        self._handed[newcomer.peer] = None
        while len(self._handed) > HANDED_MAX:
            del self._handed[next(iter(self._handed))]
        shares = self._shares(newcomer, [contact for contact in near if contact is not newcomer], now)
        for record in shares[: settings.handover_max]:
            message = ground.store_message(record, token)
            ground.ask(now, newcomer, message, Inquiry(_ignore))

    def _shares(self, newcomer: Contact, others: Sequence[Contact], now: float) -> list[Record]:
        """Return the live records of which this node is the nearest holder and the newcomer one of the k
        nearest, those nearest to the newcomer first."""
        ground = self._ground
        wall, own = ground.wall(now), int.from_bytes(ground.key, "big")
        shares = []
        for record in ground.records:
            key = int.from_bytes(record.key, "big")
            bound, place = own ^ key, newcomer.long_id ^ key
            if record.expired(wall) or any(other.long_id ^ key < bound for other in others):
                continue
            if sum(other.long_id ^ key < place for other in others) < ground.settings.k:
                shares.append((place, record))
        return [record for _, record in sorted(shares, key=lambda share: share[0])]

    # Copies left by a find.

    def repair(self, now: float, search: Search) -> None:
        """Give the newest records of a find to the nearest nodes that answered without them."""
        ground, lookup = self._ground, search.lookup
        records = lookup.records
        if not records or len(records) > REPAIRED_RECORDS_MAX:
            return
        shown, tokens = lookup.shown, lookup.tokens
        lacking: list[tuple[Contact, Record]] = []
        for contact in lookup.answers:
            known = shown.get(contact.peer, {})
            for publisher in sorted(records):
                record = records[publisher]
                if contact.peer in tokens and (publisher not in known or known[publisher] < record.rank):
                    lacking.append((contact, record))
            if len(lacking) >= ground.settings.repairs_max:
                break
        for contact, record in lacking[: ground.settings.repairs_max]:
            message = ground.store_message(record, tokens[contact.peer], cached=True)
            ground.ask(now, contact, message, Inquiry(_ignore))


def _ignore(now: float, token: bytes | None, seconds: float) -> None:
    """Ignore the outcome: the next republishing replaces lost copies."""
    del now, token, seconds
