"""A search by capability: from a query to nodes that answer, the nearest first.

1. In each of a few suitable classes, read one path of shards from a random prefix, at all likely depths at
once. This reveals the class's depth and spreads askers over its shards.
2. More shards of the depth that was found, some at a time, until there are twice as many candidates as
   wanted, the class is exhausted or time is up; then the next class.
3. Candidates estimated to be near (by coordinates, where both sides have some) are pinged, and those that
   answer are the result: an advert may be minutes older than its node's death.

A pure part of the core, as `replication` is. It trusts no advert beyond its signature: the code that places
work at a node checks its claims.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from random import Random
from typing import Protocol

from crypto.identity import PeerId
from dht import messages
from dht.capabilities import (
    DEPTH_MAX,
    Advert,
    CapabilityOffer,
    Query,
    first_depth,
    newest,
    read_advert,
    shard_key,
)
from dht.events import CapabilitiesFound, Event
from dht.keys import Key
from dht.records import Record
from dht.requests import Inquiry, Search
from dht.routing import Contact, Table
from dht.settings import KademliaSettings
from dht.timers import Timer, Timers

SHARDS_AT_ONCE = 8
"""Shards read at one time beyond the first path: some 250 requests under way."""
CLASSES_AT_ONCE = 5
"""Classes whose paths are read at one time: all sizes of memory of one kind of device."""
WIDTH = 6
"""How many of the nearest to a shard's key have to answer; each of the k nearest should hold the whole
shard."""
WIDTH_PROBED = 3
"""The same on the first path, where most shards are empty: half the requests of a search go there."""
UNLIKELY_DEPTHS = 2
"""The deepest levels, where only the most common classes have adverts, and those have more above. They are
read last, if at all."""
HUNT_SECONDS_MAX = 2.0
"""After this no further shard is read: the candidates found are pinged."""
CANDIDATES_FACTOR = 2
"""Candidates collected per peer asked for: the spares let us choose near ones and replace dead ones."""
HUNTS_MAX = 64
"""Searches of one node at a time; each is some hundred requests."""

Estimate = Callable[[Sequence[float]], float | None]


class HuntCore(Protocol):
    """The parts of the core that a search uses."""

    peer: PeerId
    settings: KademliaSettings
    table: Table
    events: list[Event]
    timers: Timers
    rng: Random
    estimate: Estimate

    @property
    def network_size(self) -> float: ...
    def wall(self, now: float) -> float: ...
    def new_id(self) -> int: ...
    def search(
        self,
        now: float,
        key: Key,
        then: Callable[[float, Search], None],
        *,
        values: bool = False,
        width: int | None = None,
    ) -> Search: ...
    def ask(self, now: float, contact: Contact, message: messages.Request, purpose: Inquiry) -> None: ...
    def ping_message(self) -> messages.Ping: ...


class Hunt:
    """One search. It ends in `CapabilitiesFound`."""

    def __init__(self, ground: HuntCore, number: int, query: Query, done: Callable[[int], object]) -> None:
        self._ground = ground
        self._number = number
        self._query = query
        self._done = done
        self._batches = self._paths()
        self._shards: Iterator[tuple[str, int, int]] = iter(())
        self._records: dict[PeerId, Record] = {}
        self._fitting: dict[PeerId, Advert] = {}
        self._waiting = 0
        self._is_probing = False
        # The number of adverts found in each class at each depth.
        self._met: dict[tuple[str, int], int] = {}
        self._probed_prefix = 0
        self._reading: list[Search] = []
        self._is_collected = False
        self._candidates: Iterator[PeerId] = iter(())
        self._offers: list[CapabilityOffer] = []
        self._limit: Timer | None = None

    def begin(self, now: float) -> None:
        """Ask the first shards."""
        self._limit = self._ground.timers.at(now + HUNT_SECONDS_MAX, self._stop_reading)
        self._next_classes(now)

    # Reading shards.

    def _paths(self) -> Iterator[list[tuple[str, int]]]:
        """The classes and depths of each first path: all likely depths before the others."""
        deepest = first_depth(self._ground.network_size)
        likely = max(deepest + 1 - UNLIKELY_DEPTHS, 1)
        for depths in (range(likely), range(likely, deepest + 1)):
            names = iter(self._query.classes)
            while depths and (some := list(islice(names, CLASSES_AT_ONCE))):
                yield [(name, depth) for name in some for depth in depths]

    def _next_classes(self, now: float) -> None:
        path = next(self._batches, None)
        if path is None:
            self._collected(now)
            return
        self._is_probing, self._met, self._shards = True, {}, iter(())
        self._probed_prefix = self._ground.rng.getrandbits(DEPTH_MAX)
        self._read(
            now,
            [(name, depth, self._probed_prefix >> (DEPTH_MAX - depth)) for name, depth in path],
            WIDTH_PROBED,
        )

    def _read(self, now: float, shards: Sequence[tuple[str, int, int]], width: int) -> None:
        self._waiting += len(shards)
        for name, depth, prefix in shards:
            then = partial(self._take, name, depth)
            search = self._ground.search(now, shard_key(name, depth, prefix), then, values=True, width=width)
            self._reading.append(search)

    def _take(self, name: str, depth: int, now: float, search: Search) -> None:
        if self._is_collected:
            return
        self._waiting -= 1
        records = search.lookup.records
        if records:
            self._met[name, depth] = self._met.get((name, depth), 0) + len(records)
        self._records = newest((*self._records.values(), *records.values()))
        wall = self._ground.wall(now)
        for publisher in sorted(records):
            record = self._records[publisher]
            advert = read_advert(record)
            is_live = advert is not None and wall < record.expires and publisher != self._ground.peer
            if advert is not None and is_live and self._query.fits(advert):
                self._fitting[publisher] = advert
        if self._is_enough:
            self._collected(now)
        elif not self._waiting or (not self._is_probing and self._waiting < SHARDS_AT_ONCE):
            self._go_on(now)

    @property
    def _is_enough(self) -> bool:
        return len(self._fitting) >= CANDIDATES_FACTOR * self._query.count

    def _go_on(self, now: float) -> None:
        """Read the next shards, once a place is free or the first path has been read."""
        if self._is_probing:
            self._is_probing = False
            self._shards = self._others()
        following = list(islice(self._shards, SHARDS_AT_ONCE - self._waiting))
        if following:
            self._read(now, following, WIDTH)
        elif not self._waiting:
            self._next_classes(now)

    def _others(self) -> Iterator[tuple[str, int, int]]:
        """All other shards of the depths at which adverts were met, the fullest depth first, in random
        order."""
        rng = self._ground.rng
        for name, depth in sorted(self._met, key=lambda place: -self._met[place]):
            mask = rng.getrandbits(depth) if depth else 0
            read = self._probed_prefix >> (DEPTH_MAX - depth)
            for count in range(1 << depth):
                if (count ^ mask) != read:
                    yield name, depth, count ^ mask

    def _stop_reading(self, now: float) -> None:
        if not self._is_collected:
            self._collected(now)

    # Liveness checks.

    def _collected(self, now: float) -> None:
        self._is_collected = True
        if self._limit is not None:
            self._limit.call_off()
        for search in self._reading:
            search.lookup.stop()  # it asks no further peer, and ends with the next answer
        guessed = {
            peer: self._ground.estimate(advert.coordinates) if advert.coordinates else None
            for peer, advert in self._fitting.items()
        }
        peers = sorted(self._fitting)
        self._ground.rng.shuffle(peers)
        peers.sort(key=lambda peer: (guessed[peer] is None, guessed[peer] or 0.0))
        self._candidates = iter(peers)
        self._waiting = 0
        self._ping(now, self._query.count + self._query.count // 4)

    def _ping(self, now: float, count: int) -> None:
        chosen = list(islice(self._candidates, count))
        self._waiting += len(chosen)
        for peer in chosen:
            texts = self._fitting[peer].addresses
            contact = self._ground.table.get(peer) or Contact(peer, texts)
            self._ground.ask(
                now, contact, self._ground.ping_message(), Inquiry(partial(self._answered, peer))
            )
        if not self._waiting:
            self._end()

    def _answered(self, peer: PeerId, now: float, token: bytes | None, seconds: float) -> None:
        self._waiting -= 1
        if token is not None:
            self._offers.append(CapabilityOffer(peer, self._fitting[peer], seconds))
        if self._waiting:
            return
        missing = self._query.count - len(self._offers)
        self._ping(now, missing + missing // 4 if missing > 0 else 0)

    def _end(self) -> None:
        nearest = sorted(self._offers, key=lambda offer: (offer.seconds, offer.peer))
        self._ground.events.append(CapabilitiesFound(self._number, tuple(nearest[: self._query.count])))
        self._done(self._number)


class Hunts:
    """The searches of one core that are under way."""

    def __init__(self, ground: HuntCore) -> None:
        self._ground = ground
        self._hunts: dict[int, Hunt] = {}

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The number of searches under way, and its limit."""
        return {"searches by capability": (len(self._hunts), HUNTS_MAX)}

    def begin(self, now: float, query: Query) -> int:
        """Begin a search; return its number. A search beyond the limit finds nothing, at once."""
        number = self._ground.new_id()
        if len(self._hunts) < HUNTS_MAX:
            self._hunts[number] = Hunt(self._ground, number, query, lambda done: self._hunts.pop(done, None))
            self._hunts[number].begin(now)
        else:
            self._ground.events.append(CapabilitiesFound(number, ()))
        return number


def unknown(coordinates: Sequence[float]) -> float | None:
    """Estimate no round trip to peers that were never pinged: return None."""
    del coordinates
    return None
