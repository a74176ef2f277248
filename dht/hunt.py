"""A search by capability: from a query to nodes that answer, nearest first.

1. In each of a few suitable classes, read one path of shards from a random prefix, at all likely depths
   simultaneously. This reveals the class's depth and spreads the queries of different nodes over its shards.
2. Read more shards at the depth that was found, a few at a time, until there are twice as many candidates as
   wanted, the class is exhausted or time is up. Then continue with the next classes.
3. Ping the candidates that are estimated to be near (by coordinates, if both sides have them). The result is
   the nodes that answer, because an advert may outlive its node by minutes.

A pure part of the core, like `replication`. It verifies only the signature of an advert; the code that places
work on a node checks the node's claims.
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
"""Maximum number of shards read in parallel after the first path: some 250 requests in flight."""
CLASSES_AT_ONCE = 5
"""Maximum number of classes whose first paths are read in parallel: all sizes of memory for one kind of
device."""
WIDTH = 6
"""How many of the nodes nearest to a shard's key must answer. Each of the k nearest should hold the whole
shard."""
WIDTH_PROBED = 3
"""The same on the first path, where most shards are empty: half the requests of a search are spent there."""
UNLIKELY_DEPTHS = 2
"""Number of deepest levels that are read last, if at all. Only the most common classes have adverts there,
and those classes have more adverts at shallower levels."""
HUNT_SECONDS_MAX = 2.0
"""How long shards are read. After this time the candidates found so far are pinged."""
CANDIDATES_FACTOR = 2
"""Number of candidates collected per wanted peer. The surplus lets us choose near peers and replace dead
ones."""
HUNTS_MAX = 64
"""Maximum number of simultaneous searches of one node; each needs some hundred requests."""

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
        """Begin to read the first shards."""
        self._limit = self._ground.timers.at(now + HUNT_SECONDS_MAX, self._stop_reading)
        self._next_classes(now)

    # Reading shards.

    def _paths(self) -> Iterator[list[tuple[str, int]]]:
        """Yield the classes and depths of each batch of first paths: all likely depths before the others."""
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
        """Read the next shards, once a read has ended or the first path is complete."""
        if self._is_probing:
            self._is_probing = False
            self._shards = self._others()
        following = list(islice(self._shards, SHARDS_AT_ONCE - self._waiting))
        if following:
            self._read(now, following, WIDTH)
        elif not self._waiting:
            self._next_classes(now)

    def _others(self) -> Iterator[tuple[str, int, int]]:
        """Yield all remaining shards at the depths where adverts were found: the fullest depth first, in
        random order."""
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
            search.lookup.stop()  # the lookup asks no further peer, and ends with the next answer
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
    """The searches of one core that are in progress."""

    def __init__(self, ground: HuntCore) -> None:
        self._ground = ground
        self._hunts: dict[int, Hunt] = {}

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The number of searches in progress, and its limit."""
        return {"searches by capability": (len(self._hunts), HUNTS_MAX)}

    def begin(self, now: float, query: Query) -> int:
        """Begin a search; return its number. A search beyond the limit immediately ends without a result."""
        number = self._ground.new_id()
        if len(self._hunts) < HUNTS_MAX:
            self._hunts[number] = Hunt(self._ground, number, query, lambda done: self._hunts.pop(done, None))
            self._hunts[number].begin(now)
        else:
            self._ground.events.append(CapabilitiesFound(number, ()))
        return number


def unknown(coordinates: Sequence[float]) -> float | None:
    """Return None: there is no estimate of the round trip to a peer that was never pinged."""
    del coordinates
    return None
