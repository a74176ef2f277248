"""The DHT for programs: values under keys, providers of content, and nodes by what they offer.

    await me.dht.put("weather/berlin", b"rain", ttl_seconds=3600)
    print(await me.dht.get("weather/berlin"))
    await me.dht.put("weather", b"rain", subkey="berlin")           # one of this node's values under the key
    await me.dht.find(device="cuda", memory_bytes=8e9, flops_per_second=50e9, near="eu-west", count=20)

`docs/dht.md` specifies the types of records on the wire, for other programs. A value that does not fit into a
record is kept here as a blob, and the record holds the blob's hash. No node owns a key: each node has its own
value under it, or several values by sub-keys. So a program that must rely on a particular value names its
publisher.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, isfinite
from typing import Annotated

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, parse_peer, peer_text
from dht.capabilities import DEVICES, CapabilityOffer, Query
from dht.events import RecordStored
from dht.keys import Key, content_key
from dht.records import LIFETIME_SECONDS_MAX, NOBODY, VALUE_BYTES_MAX, Record
from node.content.blobs import fetch_all
from node.errors import PeerloomError, Unreachable, UsageError
from node.seams import Seams
from node.services.discovery import Discovery
from node.services.swarm_clock import skew_text
from node.storage.blobs import BLOB_BYTES_MAX, HASH_BYTES, Blobs, hash_of

USER_PURPOSE = "user"
PROVIDER_PURPOSE = "provider"
KEY_BYTES_MAX = 512
FOUND_MAX = 256
"""Maximum number of nodes that one search returns."""
SUBKEYS_MAX = 256
"""Maximum number of sub-keys of one node under one key: as many as the node may have records."""
_PLAIN, _BLOB, _ROWS, _ROWS_BLOB = b"\x00", b"\x01", b"\x02", b"\x03"
_SIZE_BYTES = 8


class SubkeyRow(msgspec.Struct, frozen=True, array_like=True):
    """One value of a node that has several under a key. `expires` is in Unix seconds."""

    subkey: Annotated[str, msgspec.Meta(max_length=KEY_BYTES_MAX)]
    value: bytes
    expires: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


Rows = Annotated[tuple[SubkeyRow, ...], msgspec.Meta(max_length=SUBKEYS_MAX)]


class NotStored(PeerloomError):
    """Too few nodes keep a record for others to rely on it."""


@dataclass(frozen=True)
class DirectoryEntry:
    """One node's value under a key. `expires` is in Unix seconds. Of two values of one publisher, the one
    with the higher `sequence` is newer. `publisher` is empty for an immutable value, and `subkey` if the node
    has only one value."""

    publisher: str
    value: bytes
    sequence: int
    expires: float
    subkey: str = ""


@dataclass(frozen=True)
class StoredEntry:
    """The result of storing a value: its key in hexadecimal, how many nodes keep it, and how many were
    wanted."""

    key: str
    holders: int
    wanted: int


@dataclass(frozen=True)
class FoundNode:
    """A node that matches a search, with its advertised offer. `seconds` is how long it took to answer just
    now."""

    peer: str
    device: str
    memory_bytes: int
    flops_per_second: float
    has_slot: bool
    region: str
    seconds: float


class Directory:
    """A node's interface to the DHT: `node.runtime.Node.dht`, or in blocking form `node.sync(...).dht`."""

    def __init__(self, discovery: Discovery, seams: Seams, blobs: Blobs, peer: PeerId) -> None:
        self._discovery = discovery
        self._seams = seams
        self._blobs = blobs
        self._peer = peer
        self._rows: dict[bytes, dict[str, SubkeyRow]] = {}
        self._putting = trio.Lock()

    async def put(self, key: str, value: bytes, ttl_seconds: float = 3600.0, subkey: str = "") -> StoredEntry:
        """Store this node's value under a key. It expires after `ttl_seconds`. Until then its holders keep it
        alive, and so does this node while it runs.

        With a `subkey`, the value is stored in addition to this node's values under other sub-keys. Without
        one, it replaces them.

        Raises:
            NotStored: too few nodes keep it for others to rely on it.
            UsageError: a key, value or time is out of bounds.
        """
        name = _name(key)
        _check(ttl_seconds)
        if subkey:
            return await self._put_row(name, key, value, ttl_seconds, subkey)
        self._rows.pop(name, None)
        data = _PLAIN + value
        if len(data) > VALUE_BYTES_MAX:
            data = _BLOB + await self._put_blob(key, value)
        stored = await self._discovery.publish_for(USER_PURPOSE, name, data, ttl_seconds)
        return _told(self._discovery.key(USER_PURPOSE, name), stored, self._seams)

    async def _put_row(
        self, name: bytes, key: str, value: bytes, ttl_seconds: float, subkey: str
    ) -> StoredEntry:
        if len(subkey.encode()) > KEY_BYTES_MAX:
            raise UsageError(f"dht: a sub-key has 1 to {KEY_BYTES_MAX} bytes")
        async with self._putting:
            wall = self._seams.swarm_clock.wall()
            known = self._rows.get(name)
            if known is None:  # written before this node was restarted
                own = [entry for entry in await self.get_all(key) if entry.publisher == peer_text(self._peer)]
                rows = [SubkeyRow(each.subkey, each.value[1:], int(each.expires)) for each in own]
                known = {row.subkey: row for row in rows if row.subkey}
            row = SubkeyRow(subkey, value, ceil(wall + ttl_seconds))
            found = {each.subkey: each for each in known.values() if each.expires > wall} | {subkey: row}
            if len(found) > SUBKEYS_MAX:
                raise UsageError(f"dht: a node may have at most {SUBKEYS_MAX} sub-keys under one key")
            packed = encode(tuple(found.values()))
            data = _ROWS + packed
            if len(data) > VALUE_BYTES_MAX:
                data = _ROWS_BLOB + await self._put_blob(key, packed)
            self._rows[name] = found
            seconds = max(each.expires for each in found.values()) - wall
            stored = await self._discovery.publish_for(USER_PURPOSE, name, data, seconds)
        return _told(self._discovery.key(USER_PURPOSE, name), stored, self._seams)

    async def put_immutable(self, value: bytes, ttl_seconds: float = 3600.0) -> StoredEntry:
        """Store a value of at most 900 bytes under its own hash. Every reader can verify the value, and
        nobody can change it.

        Raises NotStored or UsageError, like `put`.
        """
        _check(ttl_seconds)
        if len(value) > VALUE_BYTES_MAX:
            raise UsageError(f"dht: an immutable value has {len(value)} bytes; at most {VALUE_BYTES_MAX}")
        stored = await self._discovery.publish_immutable(value, ttl_seconds)
        return _told(content_key(value), stored, self._seams)

    async def get(self, key: str, publisher: str = "", subkey: str = "") -> bytes | None:
        """Return the newest value under a key and sub-key, or None if there is none. If `publisher` is given,
        only its value counts.

        Raises UsageError if the publisher is malformed; PeerloomError if the value is a blob that no peer
        delivers.
        """
        wanted = peer_text(_peer(publisher)) if publisher else ""
        entries = [
            entry
            for entry in await self.get_all(key)
            if entry.subkey == subkey and wanted in ("", entry.publisher)
        ]
        if not entries:
            return None
        newest = max(entries, key=lambda entry: (entry.sequence, entry.publisher))
        return await self._value(newest)

    async def get_all(self, key: str) -> list[DirectoryEntry]:
        """Return every node's values under a key, by publisher. For a value too large for a record, return
        its hash and length."""
        records = await self._discovery.find(USER_PURPOSE, _name(key), careful=True)
        found: list[DirectoryEntry] = []
        for record in self._live(records):
            if record.publisher != NOBODY:
                found += await self._entries(_entry(record))
        return found

    async def read_all(self, key: str, bytes_max: int) -> list[bytes]:
        """Return the available values of all nodes under a key. Values of more than `bytes_max` bytes are not
        fetched, and values under sub-keys are left out."""
        found = []
        for record in self._live(await self._discovery.find(USER_PURPOSE, _name(key), careful=True)):
            entry = _entry(record)
            kind, data = entry.value[:1], entry.value[1:]
            size_bytes = int.from_bytes(data[HASH_BYTES:], "big") if kind == _BLOB else len(data)
            if record.publisher == NOBODY or kind not in (_PLAIN, _BLOB) or size_bytes > bytes_max:
                continue
            try:
                found.append(await self._value(entry))
            except PeerloomError:
                continue  # its holders are gone, or it is malformed; other nodes' values remain
        return found

    def _live(self, records: Iterable[Record]) -> list[Record]:
        """Return the records that have not expired according to the swarm's clock. Holders keep records
        longer, because their clocks may differ from the publisher's."""
        wall = self._seams.swarm_clock.wall()
        return [record for record in records if record.expires > wall]

    async def _entries(self, entry: DirectoryEntry) -> list[DirectoryEntry]:
        """Return the values in a record: one, or one for each sub-key that has not expired."""
        kind, data = entry.value[:1], entry.value[1:]
        if kind not in (_ROWS, _ROWS_BLOB):
            return [entry]
        try:
            packed = data if kind == _ROWS else await self._blob(entry.publisher, data)
            rows: tuple[SubkeyRow, ...] = decode(packed, Rows, bytes_max=BLOB_BYTES_MAX)
        except (PeerloomError, RemoteProtocolError):
            return []  # malformed, or its publisher is gone; other nodes' values remain
        wall = self._seams.swarm_clock.wall()
        return [
            replace(entry, value=_PLAIN + row.value, expires=float(row.expires), subkey=row.subkey)
            for row in rows
            if row.expires > wall
        ]

    async def get_immutable(self, key: str) -> bytes | None:
        """Return an immutable value by its key in hexadecimal, or None if no peer has it."""
        records = await self._discovery.find_key(_content_key(key), first=True)
        return next((each.value for each in self._live(records) if each.publisher == NOBODY), None)

    async def provide(self, name: str) -> StoredEntry:
        """Announce, while this node runs, that it has the content with this hash (hexadecimal).

        Raises NotStored.
        """
        digest = _digest(name)
        stored = await self._discovery.publish_for(PROVIDER_PURPOSE, digest, b"", None)
        return _told(self._discovery.key(PROVIDER_PURPOSE, digest), stored, self._seams)

    async def providers(self, name: str) -> tuple[str, ...]:
        """Return the peers that announce the content with this hash (hexadecimal)."""
        records = await self._discovery.find(PROVIDER_PURPOSE, _digest(name))
        return tuple(peer_text(each.publisher) for each in self._live(records) if each.publisher != NOBODY)

    async def find(
        self,
        device: str = "",
        memory_bytes: float = 0,
        near: str = "",
        count: int = 20,
        needs_slot: bool = False,
        flops_per_second: float = 0.0,
    ) -> tuple[FoundNode, ...]:
        """Search the whole swarm for nodes with at least this memory and measured speed. Return those that
        answer, the nearest first.

        Raises UsageError for a device that no node advertises, or a number out of bounds.
        """
        if device and device not in DEVICES:
            raise UsageError(f"dht: there is no device '{device}'; choose one of {', '.join(DEVICES)}")
        if not 1 <= count <= FOUND_MAX or not 0 <= memory_bytes < 2**62 or not 0 <= flops_per_second < 1e18:
            raise UsageError(
                f"dht: count must be 1 to {FOUND_MAX}, memory_bytes and flops_per_second 0 or more"
            )
        query = Query(device, int(memory_bytes), near, count, needs_slot, flops_per_second)
        return tuple(_found(offer) for offer in await self._discovery.hunt(query))

    async def stat(self, key: str = "") -> dict[str, object]:
        """Return statistics of this node's DHT or, for a key, how many nodes hold it."""
        if not key:
            return self._discovery.document()
        records, holders = await self._discovery.holders(USER_PURPOSE, _name(key))
        return {
            "key": self._discovery.key(USER_PURPOSE, _name(key)).hex(),
            "values": len(self._live(records)),
            "holders": holders,
        }

    async def _put_blob(self, key: str, value: bytes) -> bytes:
        if len(value) > BLOB_BYTES_MAX:
            raise UsageError(f"dht: a value has {len(value)} bytes; at most {BLOB_BYTES_MAX}")
        digest = await self._seams.executor.run(partial(self._keep_blob, key, value))
        await self.provide(digest.hex())
        return digest + len(value).to_bytes(_SIZE_BYTES, "big")

    def _keep_blob(self, key: str, value: bytes) -> bytes:
        with self._blobs.hold():
            digest = self._blobs.put(value)
            self._blobs.pin(f"dht-{content_key(key.encode()).hex()}", {digest: len(value)})
            return digest

    async def _value(self, entry: DirectoryEntry) -> bytes:
        kind, data = entry.value[:1], entry.value[1:]
        return await self._blob(entry.publisher, data) if kind == _BLOB else data

    async def _blob(self, publisher: str, data: bytes) -> bytes:
        """Fetch the blob whose hash and length a record holds. Raises PeerloomError."""
        digest, size = data[:HASH_BYTES], int.from_bytes(data[HASH_BYTES:], "big")
        if len(digest) != HASH_BYTES or not 0 < size <= BLOB_BYTES_MAX:
            raise PeerloomError("dht: the value under this key is malformed")
        sink = _OneBlob(await self._seams.executor.run(lambda: self._blobs.get(digest)))
        holders = [_peer(publisher), *(_peer(text) for text in await self.providers(digest.hex()))]
        try:
            await fetch_all(
                self._seams.network,
                {digest: size},
                holders,
                sink=sink,
                refuse=_refuse,
                clock=self._seams.clock,
            )
        except Unreachable as error:
            raise PeerloomError(f"dht: no peer delivers the value: {error.detail}") from None
        assert sink.data is not None, "the fetch succeeded without the blob"
        return sink.data


class _OneBlob:
    """The destination of one fetched blob."""

    def __init__(self, data: bytes | None) -> None:
        self.data = data

    def has(self, name: bytes) -> bool:
        """Return whether the blob has arrived."""
        del name
        return self.data is not None

    async def take(self, name: bytes, data: bytes) -> bool:
        """Keep the blob if its hash is right."""
        if hash_of(data) != name:
            return False
        self.data = data
        return True


def _refuse(peer: PeerId, error: RemoteProtocolError) -> None:
    """Do nothing: the fetch continues with the next holder."""
    del peer, error


def _told(key: Key, stored: RecordStored, seams: Seams) -> StoredEntry:
    if stored.acknowledged < stored.wanted:
        why = [f"{stored.acknowledged} nodes keep it, at least {stored.wanted} are needed"]
        if stored.refusals:
            why.append("others say: " + ", ".join(stored.refusals))
        if skewed := skew_text(seams.clock, seams.swarm_clock):
            why.append(skewed)
        raise NotStored(
            f"dht: {'; '.join(why)}",
            "check with `peerloom doctor` that this node is connected and its clock is right",
        )
    return StoredEntry(key.hex(), stored.acknowledged, stored.wanted)


def _entry(record: Record) -> DirectoryEntry:
    return DirectoryEntry(peer_text(record.publisher), record.value, record.sequence, float(record.expires))


def _found(offer: CapabilityOffer) -> FoundNode:
    advert = offer.advert
    return FoundNode(
        peer_text(offer.peer),
        advert.device,
        advert.memory_bytes,
        advert.flops_per_second,
        advert.has_slot,
        advert.region,
        offer.seconds,
    )


def _name(key: str) -> bytes:
    name = key.encode()
    if not 0 < len(name) <= KEY_BYTES_MAX:
        raise UsageError(f"dht: a key has 1 to {KEY_BYTES_MAX} bytes")
    return name


def _check(ttl_seconds: float) -> None:
    if not isfinite(ttl_seconds) or not 1 <= ttl_seconds <= LIFETIME_SECONDS_MAX:
        raise UsageError(f"dht: ttl_seconds must be 1 second to {LIFETIME_SECONDS_MAX / 3600:g} hours")


def _digest(name: str) -> bytes:
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        digest = b""
    if not 0 < len(digest) <= KEY_BYTES_MAX:
        raise UsageError(f"dht: '{name[:40]}' is not a hash in hexadecimal")
    return digest


def _content_key(key: str) -> Key:
    digest = _digest(key)
    if len(digest) != len(content_key(b"")):
        raise UsageError(f"dht: the key of an immutable value has {len(content_key(b''))} bytes")
    return Key(digest)


def _peer(text: str) -> PeerId:
    try:
        return parse_peer(text)
    except ValueError as error:
        raise UsageError(f"dht: '{text[:60]}' is not a peer id: {error}") from None
