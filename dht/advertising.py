"""A node's own adverts: which shards hold them, and when they are signed again.

The search for a class's depth starts where its shards should be empty. It uses one bit less if a key has
fewer than SHARD_ADVERTS_MIN adverts and one bit more if it has more than SHARD_ADVERTS_MAX, and it never
turns back. So each class finds the depth that fits its size, and nobody has to count the class. Adverts are
signed again every `advert_renew_seconds` and expire soon after, so the adverts of a dead node are gone within
minutes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Protocol

from crypto.facts import Signer
from crypto.identity import PeerId
from dht.capabilities import (
    DEPTH_MAX,
    DEVICES,
    SHARD_ADVERTS_MAX,
    SHARD_ADVERTS_MIN,
    Advert,
    classes_of,
    encode_advert,
    first_depth,
    prefix_of,
    shard_key,
)
from dht.keys import Key
from dht.lookup import Enough
from dht.records import Record, check_record, sign_record
from dht.replication import Replication
from dht.requests import Search
from dht.settings import KademliaSettings
from dht.timers import Timer, Timers


class AdvertisingCore(Protocol):
    """The parts of the core that advertising uses."""

    peer: PeerId
    key: Key
    settings: KademliaSettings
    replication: Replication
    timers: Timers
    rng: Random
    signer: Signer

    @property
    def network_size(self) -> float: ...
    def wall(self, now: float) -> float: ...
    def next_sequence(self, now: float) -> int: ...
    def search(
        self,
        now: float,
        key: Key,
        then: Callable[[float, Search], None],
        *,
        values: bool = False,
        enough: Enough | None = None,
    ) -> Search: ...


class Advertising:
    """The part of a core that advertises the node's offer."""

    def __init__(self, ground: AdvertisingCore) -> None:
        self._ground = ground
        self._advert: Advert | None = None
        self._depths: dict[str, int] = {}
        self._keys: dict[str, Key] = {}
        self._timer: Timer | None = None
        # Number of the current renewal. Results of searches that an earlier renewal started are ignored.
        self._turn = 0

    def advertise(self, now: float, advert: Advert | None) -> None:
        """Advertise `advert` from now on, in place of the previous one; None stops advertising."""
        self._advert = advert if advert is not None and advert.device in DEVICES else None
        self._renew(now)

    @property
    def depths(self) -> dict[str, int]:
        """The depth, in bits, of each class in which this node advertises itself."""
        return dict(self._depths)

    def _renew(self, now: float) -> None:
        self._turn += 1
        if self._timer is not None:
            self._timer.call_off()
            self._timer = None
        names = [] if self._advert is None else classes_of(self._advert)
        for name in [name for name in self._depths if name not in names]:
            del self._depths[name]
            self._forget(name)
        for name in names:
            depth = self._depths.get(name, first_depth(self._ground.network_size))
            self._look(now, name, depth, 0)
        if names:
            pause = self._ground.settings.advert_renew_seconds * self._ground.rng.uniform(0.8, 1.0)
            self._timer = self._ground.timers.at(now + pause, self._renew)

    def _look(self, now: float, name: str, depth: int, direction: int) -> None:
        key = shard_key(name, depth, prefix_of(self._ground.key, depth))
        then = partial(self._settle, name, depth, direction, self._turn)

        def is_crowded(records: Mapping[PeerId, Record]) -> bool:
            return self._others(now, records) + 1 > SHARD_ADVERTS_MAX

        # When a large swarm starts, all nodes read the same key simultaneously. So the search stops once it
        # has seen that the key is crowded, and the holders need not send all their records.
        self._ground.search(now, key, then, values=True, enough=is_crowded)

    def _settle(self, name: str, depth: int, direction: int, turn: int, now: float, search: Search) -> None:
        """Publish the advert at this depth, or try one bit more or less, depending on how many adverts the
        key holds."""
        if turn != self._turn:
            return
        others = self._others(now, search.lookup.records)
        if others + 1 > SHARD_ADVERTS_MAX and depth < DEPTH_MAX and direction >= 0:
            self._look(now, name, depth + 1, 1)
        elif others + 1 < SHARD_ADVERTS_MIN and depth > 0 and direction <= 0:
            self._look(now, name, depth - 1, -1)
        else:
            self._publish(now, name, depth)

    def _others(self, now: float, records: Mapping[PeerId, Record]) -> int:
        """Return how many of these records are other nodes' adverts that have not expired."""
        wall, own = self._ground.wall(now), self._ground.peer
        # `expired` allows for wrong clocks, so it would count dead nodes for another ten minutes.
        return sum(each.publisher != own and wall < each.expires for each in records.values())

    def _publish(self, now: float, name: str, depth: int) -> None:
        ground = self._ground
        if self._advert is None:
            return
        key = shard_key(name, depth, prefix_of(ground.key, depth))
        if self._keys.get(name) != key:
            self._forget(name)
        self._depths[name], self._keys[name] = depth, key
        wall = ground.wall(now)
        fact = sign_record(
            ground.signer,
            key,
            encode_advert(self._advert),
            sequence=ground.next_sequence(now),
            expires=int(wall + ground.settings.advert_seconds),
        )
        ground.replication.store(now, check_record(ground.signer, fact), quiet=True)

    def _forget(self, name: str) -> None:
        key = self._keys.pop(name, None)
        if key is not None:
            self._ground.replication.forget(key)
