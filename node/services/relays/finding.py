"""Relays in the DHT: lists this node as a relay, and finds nearby relays.

A relay stores a record under one of `SHARDS` keys, which is determined by its id. A node that needs relays
reads some of these keys, dials a few relays of different networks, and measures a round trip to each. A relay
signs its own record; the addresses in it are tried like any claimed address, rarely and within bounds.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Annotated

import msgspec
import trio

from crypto.contact import Address
from crypto.crowds import is_local, network_of
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from crypto.token_buckets import prefix_of
from dht.keys import node_key
from dht.messages import AddressTexts, address_texts, readable_addresses
from dht.records import VALUE_BYTES_MAX, Record
from node.containment import contain, keep_running
from node.errors import Unreachable
from node.seams import Clock
from node.services.discovery import Discovery
from node.services.relays.settings import RELAYS, RelaySettings
from node.transport.address_policy import is_global
from node.transport.network import RealNetwork

RELAY_PURPOSE = "relay"
RECORD_VERSION = 1
SHARDS = 8
"""Number of keys under which relays are listed. There are several because a holder keeps a bounded number of
publishers under each key."""
SHARDS_READ = 3
"""Least number of random keys that a search reads, so that an attacker who fills one key does not hide the
relays under the others."""
RECORD_SECONDS = 3_600.0
"""How long a relay is listed after its latest announcement."""
RENEW_SECONDS = 1_200.0
TRIED_MAX = 8
"""Maximum number of relays that a search dials, each of a different public network."""
FOUND_MAX = 16
"""Maximum number of relays remembered, the nearest."""
MEASURED_SECONDS = 1_800.0
"""How long a measured round trip counts as valid."""
TRY_SECONDS = 8.0
"""Time limit for a handshake with one relay, followed by a round trip."""


class RelayRecord(msgspec.Struct, frozen=True, array_like=True):
    """A relay's record: the addresses at which to dial the relay. The publisher of the record is the
    relay."""

    version: Annotated[int, msgspec.Meta(ge=0, le=255)]
    addresses: AddressTexts


def shard_of(relay: PeerId) -> int:
    """Return the shard of a relay."""
    return node_key(relay)[0] % SHARDS


def shard_name(shard: int) -> bytes:
    """Return the name of a shard, under `RELAY_PURPOSE`."""
    return bytes([shard])


def listed(
    records: Iterable[Record], shard: int, *, own: PeerId, admits: Callable[[Address], bool]
) -> dict[PeerId, tuple[Address, ...]]:
    """Return the relays of one shard and the addresses at which each may be dialled. Unreadable records,
    relays of other shards, and addresses that may not be tried are left out."""
    found: dict[PeerId, tuple[Address, ...]] = {}
    for record in records:
        if record.publisher == own or shard_of(record.publisher) != shard:
            continue
        try:
            told: RelayRecord = decode(record.value, RelayRecord, bytes_max=VALUE_BYTES_MAX)
        except RemoteProtocolError:
            continue
        addresses = tuple(
            each
            for each in readable_addresses(told.addresses, record.publisher)
            if each.kind in ("ip4", "ip6") and each.relay is None and admits(each)
        )
        if told.version == RECORD_VERSION and addresses:
            found[record.publisher] = addresses
    return found


def of_different_networks(
    relays: Mapping[PeerId, Sequence[Address]], rng: Random
) -> dict[PeerId, Sequence[Address]]:
    """Return up to `TRIED_MAX` of these relays in random order, one for each public network, so that an owner
    of many ids is tried only once."""
    chosen: dict[PeerId, Sequence[Address]] = {}
    seen: set[bytes] = set()
    for relay in rng.sample(sorted(relays), len(relays)):
        source = prefix_of(relays[relay][0].host)
        network = b"" if is_local(source) else network_of(source)
        if len(chosen) < TRIED_MAX and network not in seen:
            chosen[relay] = relays[relay]
            seen |= {network} if network else set()
    return chosen


class FoundRelays:
    """The relays that were measured, and the round trip to each. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._found: dict[PeerId, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def note(self, now: float, relay: PeerId, seconds: float) -> None:
        """Record a round trip to a relay."""
        self._found[relay] = now, seconds
        if len(self._found) > FOUND_MAX:
            del self._found[max(self._found, key=lambda each: self._found[each][1])]

    def seconds(self, now: float) -> dict[PeerId, float]:
        """Return the round trips that were measured recently, the shortest first."""
        self._found = {relay: at for relay, at in self._found.items() if now - at[0] <= MEASURED_SECONDS}
        seconds = {relay: found for relay, (_, found) in self._found.items()}
        return dict(sorted(seconds.items(), key=lambda each: each[1]))


class RelayFinder:
    """The relay search of one node. `is_relay` returns whether to list this node as a relay, `is_wanted`
    whether to look for more relays."""

    def __init__(
        self,
        network: RealNetwork,
        clock: Clock,
        discovery: Discovery,
        rng: Random,
        *,
        is_relay: Callable[[], bool],
        is_wanted: Callable[[], bool],
        counters: Counter[str],
        settings: RelaySettings = RELAYS,
    ) -> None:
        self._network = network
        self._settings = settings
        self._clock = clock
        self._discovery = discovery
        self._rng = rng
        self._is_relay = is_relay
        self._is_wanted = is_wanted
        self._counters = counters
        self._found = FoundRelays()

    @property
    def seconds(self) -> dict[PeerId, float]:
        """The relays that were found, the nearest first, and the round trip to each."""
        return self._found.seconds(self._clock.monotonic())

    async def run(self) -> None:
        """List this node as a relay and search for relays, while each is wanted, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_running, "a relay's record", self._be_listed)
            nursery.start_soon(keep_running, "the search for relays", self._search_often)

    async def _be_listed(self) -> None:
        told, at = b"", 0.0
        while True:
            await trio.sleep(self._settings.publish_look_seconds)
            value = self._own_record() if self._is_relay() else b""
            now = self._clock.monotonic()
            if value and (value != told or now - at >= RENEW_SECONDS):
                name = shard_name(shard_of(self._network.peer))
                await self._discovery.publish_for(RELAY_PURPOSE, name, value, RECORD_SECONDS)
                at = now
            told = value

    def _own_record(self) -> bytes:
        own = [each for each in self._network.addresses if each.relay is None]
        own.sort(key=lambda each: not is_global(each.host))
        return encode(RelayRecord(RECORD_VERSION, address_texts(own)))

    async def _search_often(self) -> None:
        pause_seconds = self._settings.search_seconds
        while True:
            await trio.sleep(self._settings.look_seconds)
            if not self._is_wanted():
                pause_seconds = self._settings.search_seconds
                continue
            await self.search()
            await trio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, self._settings.search_seconds_max)

    async def search(self) -> None:
        """Read relays from the DHT, and measure the round trips to some of them."""
        self._counters["relay_searches"] += 1
        relays: dict[PeerId, tuple[Address, ...]] = {}
        for count, shard in enumerate(self._rng.sample(range(SHARDS), SHARDS), start=1):
            records = await self._discovery.find(RELAY_PURPOSE, shard_name(shard), careful=True)
            relays |= listed(records, shard, own=self._network.peer, admits=self._network.admits)
            if count >= SHARDS_READ and len(relays) >= TRIED_MAX:
                break
        async with trio.open_nursery() as nursery:
            for relay, addresses in of_different_networks(relays, self._rng).items():
                nursery.start_soon(self._measure, relay, addresses)

    async def _measure(self, relay: PeerId, addresses: Sequence[Address]) -> None:
        with contain("a relay that the DHT lists"):
            self._network.learn(relay, addresses, is_hint=True)
            for address in addresses:
                with trio.move_on_after(TRY_SECONDS):
                    try:
                        await self._network.keep_ready(relay, address)
                        began = self._clock.monotonic()
                        await self._network.keep_ready(relay, address)
                    except Unreachable:
                        continue
                    now = self._clock.monotonic()
                    self._found.note(now, relay, now - began)
                    self._counters["relays_measured"] += 1
                    return
            self._counters["relays_not_reached"] += 1
