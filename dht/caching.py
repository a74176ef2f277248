"""Short-lived copies of records that lookups leave on nodes they pass (Kademlia section 4.1).

These copies are not replicas: they are not counted, handed over or stored again. They answer passing lookups.
They are gone within minutes, so an old sequence number does not outlive a new one.
"""

from crypto.identity import PeerId
from dht.keys import Key
from dht.records import Record

CACHED_PER_KEY_MAX = 8
"""Maximum number of cached publishers per key. Longer lists must be read from the key's own holders."""


class RecordCache:
    """At most `cache_max` copies, each for `cache_seconds`. The oldest are evicted first."""

    def __init__(self, cache_max: int, cache_seconds: float) -> None:
        self._cache_max = cache_max
        self._cache_seconds = cache_seconds
        self._by_key: dict[Key, dict[PeerId, tuple[Record, float]]] = {}
        self._order: dict[tuple[Key, PeerId], None] = {}

    def __len__(self) -> int:
        return len(self._order)

    def put(self, now: float, record: Record) -> bool:
        """Keep a copy; return whether it is kept."""
        kept = self._by_key.get(record.key, {})
        known = kept.get(record.publisher)
        if known is None and len(kept) >= CACHED_PER_KEY_MAX:
            return False
        if known is not None and record.rank <= known[0].rank:
            return record.rank == known[0].rank  # storing the same copy again does not extend its lifetime
        self._order.pop((record.key, record.publisher), None)
        self._order[record.key, record.publisher] = None
        self._by_key.setdefault(record.key, {})[record.publisher] = (record, now + self._cache_seconds)
        while len(self._order) > self._cache_max:
            self._drop(*next(iter(self._order)))
        return (record.key, record.publisher) in self._order

    def get(self, now: float, wall: float, key: Key) -> list[Record]:
        """Return the copies under `key` that are still valid, and drop the others."""
        copies = self._by_key.get(key)
        if copies is None:
            return []
        for publisher, (record, until) in list(copies.items()):
            if until <= now or record.expired(wall):
                self._drop(key, publisher)
        return [record for record, _ in copies.values()]

    def _drop(self, key: Key, publisher: PeerId) -> None:
        del self._order[key, publisher]
        copies = self._by_key[key]
        del copies[publisher]
        if not copies:
            del self._by_key[key]
