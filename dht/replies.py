"""Replies to FindNode and FindValue, cut to the nearest that fit one payload."""

from crypto.identity import PeerId
from dht.keys import Key
from dht.messages import (
    RECORDS_MAX,
    FindNode,
    FindValue,
    Hint,
    Nodes,
    Values,
    cut_to_fit,
    encoded_bytes,
    hints_to_fit,
)
from dht.records import Record, RecordStore
from dht.routing import Table
from dht.settings import Settings

HINTS_ROOM_BYTES = 200
"""Of a reply with records, what is kept for hints: some three, so that the asker's lookup goes on."""

ARRAY_HEADS_BYTES = 4
"""The head of an array grows by up to two bytes when it is filled, and a reply has at most two."""


def nodes_reply(
    message: FindNode,
    sender: PeerId,
    *,
    addresses: tuple[str, ...],
    token: bytes,
    table: Table,
    settings: Settings,
) -> Nodes:
    """The contacts nearest to the key, without `sender` itself."""
    empty = Nodes(message.id, addresses, (), token)
    room = settings.payload_bytes_max - encoded_bytes(empty) - ARRAY_HEADS_BYTES
    contacts = table.nearest(Key(message.key), settings.k, without=sender)
    return Nodes(message.id, addresses, hints_to_fit((contact.hint for contact in contacts), room), token)


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
    settings: Settings,
) -> Values:
    """A page of the records under the key, with `copies` that are kept for a short time; the first page names
    the nearest contacts too."""
    held = records.get(wall, Key(message.key))
    known = {record.publisher: record for record in copies}
    for record in held:
        known[record.publisher] = max(record, known.get(record.publisher, record), key=lambda each: each.rank)
    held = [known[publisher] for publisher in sorted(known)] if copies else held
    facts = [record.fact for record in held if record.publisher > message.after]
    empty = Values(message.id, addresses, (), False, (), token)
    room = settings.payload_bytes_max - encoded_bytes(empty) - ARRAY_HEADS_BYTES
    # One record always goes, or one of full size could never be handed out.
    page = cut_to_fit(facts[:RECORDS_MAX], room - HINTS_ROOM_BYTES) or tuple(facts[:1])
    hints: tuple[Hint, ...] = ()
    if not message.after:
        room -= sum(encoded_bytes(fact) for fact in page)
        contacts = table.nearest(Key(message.key), settings.k, without=sender)
        hints = hints_to_fit((contact.hint for contact in contacts), max(room, HINTS_ROOM_BYTES))
    return Values(message.id, addresses, page, len(page) < len(facts), hints, token)
