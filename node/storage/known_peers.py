"""Peers met earlier, so that a node finds its swarm again without any seed: a small JSON file.

They are only hints, because a peer that answers proves its identity again. A damaged file counts as an empty
list, because joining must never stop the process.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from crypto.contact import ADDRESS_LENGTH_MAX, ADDRESSES_MAX, Address, parse_address
from crypto.identity import parse_peer, peer_text
from node.seams import Storage

REMEMBERED_MAX = 64
"""Maximum number of remembered peers, enough even if most of the swarm has moved. All are dialled at a start
without seeds."""
_NAME = "peers.json"


class _File(msgspec.Struct, frozen=True):
    schema: str
    peers: tuple["_Entry", ...]


class _Entry(msgspec.Struct, frozen=True):
    peer: str
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=ADDRESS_LENGTH_MAX)], ...],
        msgspec.Meta(min_length=1, max_length=ADDRESSES_MAX),
    ]


_SCHEMA = "peerloom/remembered/1"


def read_remembered(storage: Storage) -> tuple[tuple[Address, ...], ...]:
    """Return the addresses of each peer, best first, including the peer id; empty if none are stored."""
    data = storage.read(_NAME)
    if data is None:
        return ()
    try:
        file = msgspec.json.decode(data, type=_File)
        return tuple(_addresses(entry) for entry in file.peers[:REMEMBERED_MAX])
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        return ()


def write_remembered(storage: Storage, peers: Sequence[Sequence[Address]]) -> None:
    """Store the first REMEMBERED_MAX peers of `peers`, best first; each address must include its peer."""
    entries = []
    for addresses in peers[:REMEMBERED_MAX]:
        if addresses and addresses[0].peer is not None:
            texts = tuple(str(address.of(None)) for address in addresses[:ADDRESSES_MAX])
            entries.append(_Entry(peer_text(addresses[0].peer), texts))
    storage.write(_NAME, msgspec.json.format(msgspec.json.encode(_File(_SCHEMA, tuple(entries)))))


def _addresses(entry: _Entry) -> tuple[Address, ...]:
    peer = parse_peer(entry.peer)
    return tuple(parse_address(text).of(peer) for text in entry.addresses)
