"""Declarations under one name in the DHT, by more peers than one key can hold.

A node keeps a limited number of publishers' records under one key and refuses the rest, and records of
departed peers stay until they expire. So declarations are stored in shards of their name. A shard is for the
peers whose own keys begin with the same bits; the first shard has no bits and is for all. If a shard is
nearly full, a reader continues with its two halves, and a publisher with the half of its own key. This needs
no agreement, because all peers see how full a shard is.
"""

from functools import partial

import trio

from crypto.identity import PeerId
from dht.capabilities import prefix_of
from dht.keys import node_key
from dht.records import Record
from node.services.discovery import Discovery

FULL_SHARE = 0.75
"""A shard with this share of the records that a key holds is split. It is below one because all peers that
find a shard full may come at once."""
DEPTH_MAX = 16
READS_MAX = 16
"""Maximum number of shards read by one search; with 48 records in each, they name more peers than one peer
can use."""


class Declarations:
    """The declarations under one name, and this node's own."""

    def __init__(self, discovery: Discovery, peer: PeerId, purpose: str, name: bytes) -> None:
        self._discovery = discovery
        self._peer = peer
        self._purpose = purpose
        self._name = name
        self._depth = 0
        self._stored: set[int] = set()

    async def declare(self, value: bytes, seconds: float | None = None) -> None:
        """Store this node's record for `seconds` (None: as long as the node runs) in the shard that the
        latest search found for it, unless it is already there."""
        depth = self._depth
        if depth in self._stored:
            return
        self._stored.add(depth)
        name = self._shard(depth, self._own(depth))
        stored = await self._discovery.publish_for(self._purpose, name, value, seconds)
        if stored.acknowledged <= 1:  # kept by this node alone, because there was no room or no answer
            self._stored.discard(depth)

    async def look(self) -> list[PeerId]:
        """Return the peers that have declared, as found in at most READS_MAX shards."""
        found: dict[PeerId, None] = {}
        read, has_place = 0, False
        shards = [(0, 0)]
        while shards:
            records: dict[tuple[int, int], tuple[Record, ...]] = {}
            async with trio.open_nursery() as nursery:
                for shard in shards:
                    nursery.start_soon(partial(self._read, shard, records))
            read += len(shards)
            split: list[tuple[int, int]] = []
            for (depth, prefix), there in records.items():
                publishers = [record.publisher for record in there]
                found.update(dict.fromkeys(publishers))
                is_full = len(publishers) >= FULL_SHARE * self._discovery.publishers_max
                is_full = is_full and depth < DEPTH_MAX
                if prefix == self._own(depth) and not has_place:
                    has_place = not is_full or self._peer in publishers
                    self._depth = depth if has_place else depth + 1
                if is_full:
                    split += [(depth + 1, 2 * prefix), (depth + 1, 2 * prefix + 1)]
            # Its own half first, because it must read the shard in which it declares.
            split.sort(key=lambda shard: shard[1] != self._own(shard[0]))
            shards = split[: READS_MAX - read]
        return list(found)

    async def _read(self, shard: tuple[int, int], records: dict[tuple[int, int], tuple[Record, ...]]) -> None:
        records[shard] = await self._discovery.find(self._purpose, self._shard(*shard))

    def _own(self, depth: int) -> int:
        return prefix_of(node_key(self._peer), depth)

    def _shard(self, depth: int, prefix: int) -> bytes:
        return self._name + f"/{depth}/{prefix:x}".encode() if depth else self._name
