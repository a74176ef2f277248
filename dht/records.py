"""Records: signed, expiring, sequence-numbered values, one per publisher under each key.

A record is a `crypto.facts.Fact` of purpose "dht-record", so any holder may pass it on and no
holder can alter it. The key's publishers are its sub-keys: nobody can overwrite another's record.
What this is not: a place for values above 900 bytes (publish their hash), or a lock.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from dht.keys import KEY_BYTES, Key
from dht.messages import KeyBytes
from dht.settings import Settings

RECORD_PURPOSE = "dht-record"

VALUE_BYTES_MAX = 900
"""With key, publisher and signature this makes a message that still fits one datagram or nearly."""

BODY_BYTES_MAX = VALUE_BYTES_MAX + 64
"""Key, sequence, expiry and the encoding's own bytes."""

CLOCK_SLACK_SECONDS = 600.0
"""How far two honest wall clocks may stand apart (ARCHITECTURE law 2)."""

LIFETIME_SECONDS_MAX = 48 * 3600.0
"""Who still cares for a record publishes it again; what nobody cares for goes."""


class RecordBody(msgspec.Struct, frozen=True, array_like=True):
    """What the publisher signs. `expires` is in unix seconds; a higher `sequence` replaces a lower."""

    key: KeyBytes
    value: Annotated[bytes, msgspec.Meta(max_length=VALUE_BYTES_MAX)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    expires: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Refusal(StrEnum):
    """Why a holder does not keep a record."""

    OLD = "a newer one is kept"
    EXPIRED = "expired"
    FAR = "expires too late"
    FULL = "full"
    KEY_FULL = "key is full"
    PUBLISHER_FULL = "too many of yours"


@dataclass(frozen=True)
class Record:
    """A record whose signature holds. `fact` is what to pass on."""

    publisher: PeerId
    key: Key
    value: bytes
    sequence: int
    expires: int
    fact: Fact = field(repr=False)

    @property
    def rank(self) -> tuple[int, int, bytes]:
        """Of two records of one publisher the higher rank wins, on every node alike.

        Under one sequence that is the later expiry; two values under one sequence are the
        publisher's fault, and the last element only makes all nodes choose the same.
        """
        return (self.sequence, self.expires, self.fact.body)

    def expired(self, wall: float) -> bool:
        """Whether it is over at the wall clock `wall`, with slack for clocks that differ."""
        return wall > self.expires + CLOCK_SLACK_SECONDS


def sign_record(signer: Signer, key: Key, value: bytes, *, sequence: int, expires: int) -> Fact:
    """A record of this peer, ready for `Kademlia.store`; `expires` in unix seconds.

    Raises:
        LocalProtocolError: a key, value or number out of bounds.
    """
    if len(key) != KEY_BYTES or len(value) > VALUE_BYTES_MAX:
        raise LocalProtocolError(f"a record has {KEY_BYTES} bytes of key, at most {VALUE_BYTES_MAX} of value")
    if not (0 <= sequence < 2**63 and 0 <= expires < 2**63):
        raise LocalProtocolError("a record's sequence and expiry are 63-bit numbers")
    return signer.sign(RECORD_PURPOSE, encode(RecordBody(key, value, sequence, expires)))


def check_record(signer: Signer, fact: Fact) -> Record:
    """The record in `fact`, if its form and signature hold; else RemoteProtocolError."""
    body: RecordBody = decode(fact.body, RecordBody, bytes_max=BODY_BYTES_MAX)
    publisher = signer.check(RECORD_PURPOSE, fact)
    return Record(publisher, Key(body.key), body.value, body.sequence, body.expires, fact)


class RecordStore:
    """The records one node holds: bounded in all, per key and per publisher."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_key: dict[Key, dict[PeerId, Record]] = {}
        self._of_publisher: dict[PeerId, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, wall: float, record: Record) -> Refusal | None:
        """Keep `record`, or say why not. One that is kept already counts as kept."""
        if record.expired(wall):
            return Refusal.EXPIRED
        if record.expires > wall + LIFETIME_SECONDS_MAX + CLOCK_SLACK_SECONDS:
            return Refusal.FAR
        kept = self._by_key.get(record.key, {}).get(record.publisher)
        if kept is not None:
            if record.rank < kept.rank:
                return Refusal.OLD
            self._by_key[record.key][record.publisher] = record
            return None
        refusal = self._no_room(record)
        if refusal is not None:
            return refusal
        self._by_key.setdefault(record.key, {})[record.publisher] = record
        self._of_publisher[record.publisher] = self._of_publisher.get(record.publisher, 0) + 1
        self._count += 1
        return None

    def get(self, wall: float, key: Key) -> list[Record]:
        """The live records under `key`, in the order of their publishers' ids."""
        records = self._by_key.get(key, {})
        return [records[publisher] for publisher in sorted(records) if not records[publisher].expired(wall)]

    def expire(self, wall: float) -> int:
        """Drop what is over; how many that were."""
        over = [
            record for records in self._by_key.values() for record in records.values() if record.expired(wall)
        ]
        for record in over:
            self._drop(record)
        return len(over)

    def _no_room(self, record: Record) -> Refusal | None:
        if len(self._by_key.get(record.key, {})) >= self._settings.records_per_key_max:
            return Refusal.KEY_FULL
        if self._of_publisher.get(record.publisher, 0) >= self._settings.records_per_publisher_max:
            return Refusal.PUBLISHER_FULL
        return Refusal.FULL if self._count >= self._settings.records_max else None

    def _drop(self, record: Record) -> None:
        records = self._by_key[record.key]
        del records[record.publisher]
        if not records:
            del self._by_key[record.key]
        self._of_publisher[record.publisher] -= 1
        if not self._of_publisher[record.publisher]:
            del self._of_publisher[record.publisher]
        self._count -= 1
