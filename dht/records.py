"""Records: signed, expiring, sequence-numbered values, one per publisher under each key.

A record is a `crypto.facts.Fact` of purpose "dht-record", so any holder can pass it on and none can alter it.
Each publisher has its own entry under a key, so nobody can overwrite another publisher's record. An immutable
value has no publisher: its key is the hash of its value, so anybody can verify it and may store it again with
a later expiry. Records are not meant for values above 900 bytes (publish their hash instead), nor as locks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Annotated

import msgspec

from crypto.crowds import Crowd
from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PEER_ID_BYTES, PeerId
from dht.keys import KEY_BYTES, Key, content_key, distance
from dht.messages import KeyBytes
from dht.settings import KademliaSettings

RECORD_PURPOSE = "dht-record"

VALUE_BYTES_MAX = 900
"""Maximum size of a value. With key, publisher and signature, this makes a message that fits into one
datagram, or nearly."""

BODY_BYTES_MAX = VALUE_BYTES_MAX + 64
"""Maximum size of a record's body: the value plus key, sequence number, expiry and encoding overhead."""

CLOCK_SLACK_SECONDS = 600.0
"""How far apart the wall clocks of two honest nodes may be (ARCHITECTURE law 2)."""

LIFETIME_SECONDS_MAX = 48 * 3600.0
"""Maximum validity. A publisher that needs a record for longer publishes it again."""


Rank = tuple[int, int, bytes]
"""Sort key of one publisher's records: sequence number, expiry, and the bytes themselves."""


class RecordBody(msgspec.Struct, frozen=True, array_like=True):
    """The body that the publisher signs. `expires` is in unix seconds; a higher `sequence` replaces a lower
    one."""

    key: KeyBytes
    value: Annotated[bytes, msgspec.Meta(max_length=VALUE_BYTES_MAX)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    expires: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


NOBODY = PeerId(bytes(PEER_ID_BYTES))
"""The publisher of immutable values. No key pair has this public key."""

OWN_SOURCE = b"own"
"""The source name of our own records, which have no network address."""

EVICTION_CANDIDATES_MAX = 32
"""Number of oldest records considered for eviction; the one farthest from us is evicted."""

_ZERO = Key(bytes(KEY_BYTES))


class Refusal(StrEnum):
    """The reasons for which a holder does not keep a record."""

    DISTANT = "too far from the key"
    UNPROVEN = "no valid token"
    OLD = "a newer one is kept"
    EXPIRED = "expired"
    FAR = "expires too late"
    FULL = "full"
    KEY_FULL = "key is full"
    PUBLISHER_FULL = "too many of yours"


@dataclass(frozen=True)
class Record:
    """A record whose signature was verified. `fact` is the signed form, to be passed on."""

    publisher: PeerId
    key: Key
    value: bytes
    sequence: int
    expires: int
    fact: Fact = field(repr=False)

    @property
    def rank(self) -> Rank:
        """The order of one publisher's records: on every node, the record with the higher rank wins.

        With the same sequence number, the later expiry wins. Two values with the same sequence number are the
        publisher's fault; the last element only makes all nodes choose the same one.
        """
        return (self.sequence, self.expires, self.fact.body)

    def expired(self, wall: float) -> bool:
        """Return whether the record has expired at the wall-clock time `wall`, allowing for clocks that
        differ."""
        return wall > self.expires + CLOCK_SLACK_SECONDS


def sign_record(signer: Signer, key: Key, value: bytes, *, sequence: int, expires: int) -> Fact:
    """Return a record signed by this peer, ready for `Kademlia.store`; `expires` is in unix seconds.

    Raises:
        LocalProtocolError: a key, value or number out of bounds.
    """
    if len(key) != KEY_BYTES or len(value) > VALUE_BYTES_MAX:
        raise LocalProtocolError(f"a record has {KEY_BYTES} bytes of key, at most {VALUE_BYTES_MAX} of value")
    if not (0 <= sequence < 2**63 and 0 <= expires < 2**63):
        raise LocalProtocolError("a record's sequence and expiry are 63-bit numbers")
    return signer.sign(RECORD_PURPOSE, encode(RecordBody(key, value, sequence, expires)))


def make_immutable(value: bytes, *, expires: int) -> Fact:
    """Return an immutable value, ready for `Kademlia.store`; its key is `dht.keys.content_key`.

    Raises:
        LocalProtocolError: a value or number out of bounds.
    """
    if len(value) > VALUE_BYTES_MAX or not 0 <= expires < 2**63:
        raise LocalProtocolError(f"an immutable value has at most {VALUE_BYTES_MAX} bytes")
    return Fact(NOBODY, encode(RecordBody(content_key(value), value, 0, expires)), b"")


def check_record(signer: Signer, fact: Fact) -> Record:
    """Return the record in `fact`. Raises RemoteProtocolError if its form, or its signature (for an immutable
    value its key), is invalid."""
    body: RecordBody = decode(fact.body, RecordBody, bytes_max=BODY_BYTES_MAX)
    if fact.author == NOBODY:
        if fact.signature or body.sequence or body.key != content_key(body.value):
            raise RemoteProtocolError("an immutable value under another key than its own")
        return Record(NOBODY, Key(body.key), body.value, 0, body.expires, fact)
    publisher = signer.check(RECORD_PURPOSE, fact)
    return Record(publisher, Key(body.key), body.value, body.sequence, body.expires, fact)


class RecordStore:
    """The records that one node holds, limited in total, per key, per publisher and per source.

    A source is the address that a record came from (`groups.source_of`): publishers can be invented, but
    addresses cannot. If the store is full, the source with the most records loses one that is far from `own`,
    the node's key.
    """

    def __init__(self, settings: KademliaSettings, own: Key = _ZERO) -> None:
        self._settings = settings
        self._own = own
        self._sources: Crowd[tuple[Key, PeerId]] = Crowd()
        self._by_key: dict[Key, dict[PeerId, Record]] = {}
        self._of_publisher: dict[PeerId, int] = {}
        self._count = 0
        # The changes since the latest `take_changes`; None until `watch_changes` is called.
        self._changed: dict[tuple[Key, PeerId], None] | None = None

    def __len__(self) -> int:
        return self._count

    def holds(self, record: Record) -> bool:
        """Return whether any record with this key and publisher is kept."""
        return record.publisher in self._by_key.get(record.key, {})

    def __iter__(self) -> Iterator[Record]:
        """Iterate over all records, in the order in which their keys were first stored."""
        for records in self._by_key.values():
            yield from records.values()

    def kept(self, key: Key, publisher: PeerId) -> Record | None:
        """Return the record of this key and publisher, even if it has expired."""
        return self._by_key.get(key, {}).get(publisher)

    def watch_changes(self) -> None:
        """Remember changes from now on, for `take_changes`."""
        self._changed = {}

    def take_changes(self) -> dict[tuple[Key, PeerId], Record | None]:
        """Return the changes since the previous call: the current record, or None if it was removed."""
        changed, self._changed = self._changed, None if self._changed is None else {}
        return {place: self.kept(*place) for place in changed or ()}

    def put(
        self,
        wall: float,
        record: Record,
        *,
        source: bytes = OWN_SOURCE,
        is_publisher: bool = False,
        has_quota: bool = False,
    ) -> Refusal | None:
        """Keep `record`, which came from `source`, or return why not. A record that is already held counts as
        kept. With `has_quota`, at most `records_per_source_max` records of that source are kept.
        """
        if record.expired(wall):
            return Refusal.EXPIRED
        if record.expires > wall + LIFETIME_SECONDS_MAX + CLOCK_SLACK_SECONDS:
            return Refusal.FAR
        kept = self._by_key.get(record.key, {}).get(record.publisher)
        if kept is not None:
            if record.rank < kept.rank:
                return Refusal.OLD
            self._by_key[record.key][record.publisher] = record
            if record.rank > kept.rank:
                self._note(record)
            # A peer that passes on another publisher's record does not become its source.
            if is_publisher:
                self._sources.add((record.key, record.publisher), source)
            return None
        refusal = self._make_room(record, source, has_quota=has_quota)
        if refusal is not None:
            return refusal
        self._sources.add((record.key, record.publisher), source)
        self._by_key.setdefault(record.key, {})[record.publisher] = record
        self._of_publisher[record.publisher] = self._of_publisher.get(record.publisher, 0) + 1
        self._count += 1
        self._note(record)
        return None

    def get(self, wall: float, key: Key) -> list[Record]:
        """Return the live records under `key`, in the order of their publishers' ids."""
        records = self._by_key.get(key, {})
        return [records[publisher] for publisher in sorted(records) if not records[publisher].expired(wall)]

    def expire(self, wall: float) -> int:
        """Drop expired records; return how many were dropped."""
        over = [
            record for records in self._by_key.values() for record in records.values() if record.expired(wall)
        ]
        for record in over:
            self._drop(record)
        return len(over)

    def _make_room(self, record: Record, source: bytes, *, has_quota: bool) -> Refusal | None:
        """Drop records to make room for a new one, or return why there is no room for it."""
        settings = self._settings
        # Immutable values have no publisher with a quota; the quota of their source limits them.
        of_publisher = 0 if record.publisher == NOBODY else self._of_publisher.get(record.publisher, 0)
        if of_publisher >= settings.records_per_publisher_max:
            return Refusal.PUBLISHER_FULL
        same_key = self._by_key.get(record.key, {})
        if len(same_key) >= settings.records_per_key_max:
            crowd = Crowd[PeerId]()
            for publisher in same_key:
                crowd.add(publisher, self._sources.source((record.key, publisher)))
            greedier = crowd.greedier(source)
            if not greedier:
                return Refusal.KEY_FULL
            self._drop(same_key[next(iter(greedier))])
        elif has_quota and self._sources.size(source) >= settings.records_per_source_max:
            return self._displace(record, self._sources.members(source), must_be_farther=True)
        elif self._count >= settings.records_max:
            greedier_ones = self._sources.greedier(source)
            candidates = greedier_ones or self._sources.equals(source)
            return self._displace(record, candidates, must_be_farther=not greedier_ones)
        return None

    def _displace(
        self, record: Record, candidates: Iterable[tuple[Key, PeerId]], *, must_be_farther: bool
    ) -> Refusal | None:
        """Drop the record farthest from us among the oldest candidates. With `must_be_farther`, do so only if
        the new record is nearer to us than that one."""
        oldest = islice(candidates, EVICTION_CANDIDATES_MAX)
        key, publisher = max(oldest, key=lambda each: distance(each[0], self._own))
        if must_be_farther and distance(key, self._own) <= distance(record.key, self._own):
            return Refusal.FULL
        self._drop(self._by_key[key][publisher])
        return None

    def _note(self, record: Record) -> None:
        if self._changed is not None:
            self._changed[record.key, record.publisher] = None

    def _drop(self, record: Record) -> None:
        self._note(record)
        self._sources.remove((record.key, record.publisher))
        records = self._by_key[record.key]
        del records[record.publisher]
        if not records:
            del self._by_key[record.key]
        self._of_publisher[record.publisher] -= 1
        if not self._of_publisher[record.publisher]:
            del self._of_publisher[record.publisher]
        self._count -= 1
