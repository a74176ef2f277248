"""Replies to the four requests. A reply with contacts names as many of the nearest as fit one payload."""

from typing import Protocol

from crypto.identity import PeerId
from dht.keys import Key
from dht.messages import (
    RECORDS_MAX,
    Answer,
    FindNode,
    FindValue,
    Hint,
    Nodes,
    Ping,
    Pong,
    Request,
    Store,
    Stored,
    Values,
    cut_to_fit,
    encoded_bytes,
    hints_to_fit,
)
from dht.records import Record, RecordStore, Refusal
from dht.replication import Replication
from dht.routing import Table
from dht.settings import KademliaSettings
from dht.tokens import WriteTokens

HINTS_ROOM_BYTES = 200
"""Bytes that a reply with records reserves for hints: enough for about three, so that the asker's lookup can
go on."""

ARRAY_HEADS_BYTES = 4
"""Bytes reserved for array heads. The head of an array grows by up to two bytes when it is filled, and a
reply has at most two arrays."""


class ReplyCore(Protocol):
    """The parts of the core that `reply` uses."""

    addresses: tuple[str, ...]
    is_client: bool
    records: RecordStore
    replication: Replication
    settings: KademliaSettings
    table: Table
    tokens: WriteTokens

    def wall(self, now: float) -> float: ...


def reply(core: ReplyCore, now: float, sender: PeerId, message: Request) -> Answer:
    """Return the answer to a request. Raises RemoteProtocolError for an invalid record."""
    ours, token = core.addresses, b"" if core.is_client else core.tokens.make(now, sender)
    match message:
        case Ping():
            return Pong(message.id, ours, token)
        case FindNode():
            return nodes_reply(
                message, sender, addresses=ours, token=token, table=core.table, settings=core.settings
            )
        case FindValue():
            return values_reply(
                message,
                sender,
                core.wall(now),
                core.replication.copies(now, Key(message.key)),
                addresses=ours,
                token=token,
                table=core.table,
                records=core.records,
                settings=core.settings,
            )
        case Store():
            if core.is_client or not core.tokens.holds(now, sender, message.token):
                # Refused before the signature is verified, which costs a hundred times as much.
                return Stored(message.id, ours, Refusal.UNPROVEN, (), token if message.seeking else b"")
            key, refusal = core.replication.take(now, sender, message)
            if not message.seeking:
                return Stored(message.id, ours, refusal)
            empty = Stored(message.id, ours, refusal, (), token)
            hints = nearest_hints(key, sender, encoded_bytes(empty), table=core.table, settings=core.settings)
            return Stored(message.id, ours, refusal, hints, token)


def nearest_hints(
    key: Key, sender: PeerId, head_bytes: int, *, table: Table, settings: KademliaSettings
) -> tuple[Hint, ...]:
    """Return the contacts nearest to `key` except `sender`, as many as fit after a head of `head_bytes`."""
    room = settings.payload_bytes_max - head_bytes - ARRAY_HEADS_BYTES
    contacts = table.nearest(key, settings.k, without=sender)
    return hints_to_fit((contact.hint for contact in contacts), room)


def nodes_reply(
    message: FindNode,
    sender: PeerId,
    *,
    addresses: tuple[str, ...],
    token: bytes,
    table: Table,
    settings: KademliaSettings,
) -> Nodes:
    """Return the contacts nearest to the key, except `sender` itself."""
    empty = Nodes(message.id, addresses, (), token)
    hints = nearest_hints(Key(message.key), sender, encoded_bytes(empty), table=table, settings=settings)
    return Nodes(message.id, addresses, hints, token)


def values_reply(
    message: FindValue,
    sender: PeerId,
    wall: float,
    copies: list[Record],
    *,
    addresses: tuple[str, ...],
    token: bytes,
    table: Table,
    records: RecordStore,
    settings: KademliaSettings,
) -> Values:
    """Return a page of the records under the key, including short-lived `copies`. The first page also names
    the nearest contacts."""
    held = records.get(wall, Key(message.key))
    known = {record.publisher: record for record in copies}
    for record in held:
        known[record.publisher] = max(record, known.get(record.publisher, record), key=lambda each: each.rank)
    held = [known[publisher] for publisher in sorted(known)] if copies else held
    facts = [record.fact for record in held if record.publisher > message.after]
    empty = Values(message.id, addresses, (), False, (), token)
    room = settings.payload_bytes_max - encoded_bytes(empty) - ARRAY_HEADS_BYTES
    # At least one record is sent. Otherwise a record of the maximum size could never be returned.
    page = cut_to_fit(facts[:RECORDS_MAX], room - HINTS_ROOM_BYTES) or tuple(facts[:1])
    hints: tuple[Hint, ...] = ()
    if not message.after:
        room -= sum(encoded_bytes(fact) for fact in page)
        contacts = table.nearest(Key(message.key), settings.k, without=sender)
        hints = hints_to_fit((contact.hint for contact in contacts), max(room, HINTS_ROOM_BYTES))
    return Values(message.id, addresses, page, len(page) < len(facts), hints, token)
