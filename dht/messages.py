"""The messages of Kademlia: four requests and their answers (Maymounkov & Mazieres 2002, section 2.3).

    Ping      -> Pong
    FindNode  -> Nodes      the nearest contacts to a key
    FindValue -> Values     a page of records under a key, and the nearest contacts
    Store     -> Stored     kept, or the reason why not; and the nearest contacts, if requested

Answers carry a write token (`tokens`), which a Store to the answering node must include. Every message
carries its request's id and the sender's own addresses. So the address that a node passes on is the peer's
own claim, not a third party's. The sender of a message is known from the session beneath, never from the
message.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec

from crypto.contact import PARSED_MAX, Address, parse_address
from crypto.encoding import encode
from crypto.facts import Fact
from crypto.identity import PEER_ID_BYTES, PeerId
from dht.keys import KEY_BYTES

PROTOCOL = "/peerloom/dht/1"

MESSAGE_BYTES_MAX = 8_192
"""Maximum size of a message, checked before decoding. The largest honest message is a Store of about 1,200
bytes; payload_bytes_max may be set a little higher."""

HINTS_MAX = 32
"""Maximum number of hints in one reply: at least any k in use."""

HINT_ADDRESSES_MAX = 2
"""Maximum number of addresses in a hint. One per address family suffices to reach a peer, which then sends
its other addresses itself."""

HINT_ADDRESS_LENGTH_MAX = 64
"""Maximum length of an address in a hint. An IPv6 multiaddr needs at most 54 characters; longer host names
are left out of hints."""

RECORDS_MAX = 32
"""Maximum number of records in one page; payload_bytes_max sets a much lower limit in practice."""

REASON_LENGTH_MAX = 24

TOKEN_BYTES = 8
"""Size of a write token. It is valid for ten minutes and each guess costs a message, so 64 bits are
plenty."""

CLIENT_ADDRESSES = ("-",)
"""Sent in place of addresses by a client: it is unreachable, only sends requests, and must not enter a
routing table. No version can read this as an address; a version that does not know it treats it as a future
kind of address."""

AddressText = Annotated[str, msgspec.Meta(max_length=HINT_ADDRESS_LENGTH_MAX)]
AddressTexts = Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=HINT_ADDRESSES_MAX)]
PeerBytes = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
KeyBytes = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Token = Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)]
RequestId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Hint(msgspec.Struct, frozen=True, array_like=True):
    """A named peer and its addresses, all unconfirmed until the peer itself answers."""

    peer: PeerBytes
    addresses: AddressTexts


Hints = Annotated[tuple[Hint, ...], msgspec.Meta(max_length=HINTS_MAX)]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Ask whether the receiver is alive."""

    id: RequestId
    addresses: AddressTexts


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Confirm that the sender is alive."""

    id: RequestId
    addresses: AddressTexts
    token: Token = b""


class FindNode(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Ask for the contacts nearest to `key`."""

    id: RequestId
    addresses: AddressTexts
    key: KeyBytes


class Nodes(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The contacts nearest to the key, nearest first; fewer than k if they did not fit."""

    id: RequestId
    addresses: AddressTexts
    hints: Hints
    token: Token = b""


class FindValue(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Ask for the records under `key` whose publishers come after `after`, and for the contacts nearest to
    `key`."""

    id: RequestId
    addresses: AddressTexts
    key: KeyBytes
    after: Annotated[bytes, msgspec.Meta(max_length=PEER_ID_BYTES)]


class Values(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A page of records in the order of their publishers' ids; `more` if there is a next page."""

    id: RequestId
    addresses: AddressTexts
    records: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=RECORDS_MAX)]
    more: bool
    hints: Hints
    token: Token = b""


class Store(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Ask the receiver to keep a record. `token` is from the receiver's own answer. `cached`: a copy from a
    lookup, which a node that is not near the key may keep for a short time. `seeking`: also return the
    contacts nearest to the record's key, like a FindNode."""

    id: RequestId
    addresses: AddressTexts
    record: Fact
    token: Token = b""
    cached: bool = False
    seeking: bool = False


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """`refused` is empty if the record is kept, else one of `dht.records.Refusal`. Contacts and a token are
    sent only if the Store was `seeking`."""

    id: RequestId
    addresses: AddressTexts
    refused: Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]
    hints: Hints = ()
    token: Token = b""


Request = Ping | FindNode | FindValue | Store
Answer = Pong | Nodes | Values | Stored
Message = Ping | Pong | FindNode | Nodes | FindValue | Values | Store | Stored

ANSWER_OF: dict[type[Request], type[Answer]] = {
    Ping: Pong,
    FindNode: Nodes,
    FindValue: Values,
    Store: Stored,
}
"""The type of answer to each type of request."""

Item = TypeVar("Item")

_HINT_HEAD_BYTES = len(encode(Hint(bytes(PEER_ID_BYTES), ()))) - len(encode(()))


def cut_to_fit(items: Iterable[Item], room_bytes: int) -> tuple[Item, ...]:
    """Return as many of `items`, from the first on, as fit into `room_bytes` when encoded."""
    fitting: list[Item] = []
    for item in items:
        room_bytes -= len(encode(item))
        if room_bytes < 0:
            break
        fitting.append(item)
    return tuple(fitting)


def hints_to_fit(hints: Iterable[Hint], room_bytes: int) -> tuple[Hint, ...]:
    """Do the same for hints, but faster: each hint has the same number of bytes before its addresses."""
    fitting: list[Hint] = []
    for hint in hints:
        room_bytes -= _HINT_HEAD_BYTES + _texts_bytes(hint.addresses)
        if room_bytes < 0:
            break
        fitting.append(hint)
    return tuple(fitting)


@lru_cache(maxsize=PARSED_MAX)
def _texts_bytes(addresses: tuple[str, ...]) -> int:
    return len(encode(addresses))


def encoded_bytes(message: Any) -> int:
    """Return the encoded size of a message, in bytes."""
    return len(encode(message))


def address_texts(addresses: Iterable[Address]) -> tuple[str, ...]:
    """Return addresses in the form used in messages: `host:port` if that says everything, else the multiaddr.

    Only the first HINT_ADDRESSES_MAX that are short enough are returned.
    """
    return _address_texts(tuple(addresses))


@lru_cache(maxsize=PARSED_MAX)
def _address_texts(addresses: tuple[Address, ...]) -> tuple[str, ...]:
    texts = []
    for address in addresses:
        place = address.of(None)
        text = str(place)
        if place.kind in ("ip4", "ip6", "dns"):
            text = place.short
        if len(text) <= HINT_ADDRESS_LENGTH_MAX:
            texts.append(text)
    return tuple(texts[:HINT_ADDRESSES_MAX])


def readable_addresses(texts: Iterable[str], peer: PeerId) -> tuple[Address, ...]:
    """Return the addresses among `texts` that this version can read and that may belong to `peer`.

    Others are skipped without an error: a later version may know other kinds of address, and a link-local
    address is meaningless on our links.
    """
    return _readable_addresses(tuple(texts), peer)


@lru_cache(maxsize=PARSED_MAX)
def _readable_addresses(texts: tuple[str, ...], peer: PeerId) -> tuple[Address, ...]:
    addresses = []
    for text in texts:
        try:
            address = parse_address(text)
        except ValueError:
            continue
        if address.peer in (None, peer) and not address.is_link_local:
            addresses.append(address.of(peer))
    return tuple(addresses)
