"""Drives the Kademlia core over datagrams, and offers its lookups as awaitable calls."""

from collections.abc import Callable, Sequence
from math import ceil
from random import Random

import trio

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from dht.capabilities import Advert, CapabilityOffer, Query
from dht.events import CapabilitiesFound, Event, NodesFound, PeerHeard, RecordsFound, RecordStored
from dht.kademlia import Kademlia, Sends
from dht.keys import Key, record_key
from dht.messages import MESSAGE_BYTES_MAX, PROTOCOL, Message, readable_addresses
from dht.records import Record, make_immutable, sign_record
from dht.settings import KademliaSettings
from dht.tokens import SECRET_BYTES, WriteTokens
from gossip.clocks import is_plausible
from node import events
from node.containment import contain
from node.seams import Clock, Network, Seams
from node.services.driver import Driver
from node.services.membership import CLOCK_NEWS_SECONDS
from node.storage.records_file import RecordsFile

RECORD_SECONDS = 24 * 3_600
"""How long a record stays valid. Until then the core stores it again if its holders have gone."""
RENEW_SECONDS = RECORD_SECONDS / 3
OWN_RECORDS_MAX = 256
"""Maximum number of this node's records; other nodes hold no more of one publisher."""
LOOKUP_SECONDS_MAX = 30.0
SOUGHT_MAX = 16
"""Maximum number of simultaneous searches for neighbours; membership asks for one at a time."""
SAVE_SECONDS = 5.0
"""Seconds between saves. A crash loses the changes since the latest save, which other holders still have."""
CONTACTS_SAVED_EVERY = 12
"""Number of saves of records for each save of contacts, so that contacts are saved once a minute."""


class Discovery:
    """The DHT service of a node. `run` drives it; `publish` and `find` may be awaited while it does."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        rng: Random,
        signer: Signer,
        *,
        refuse: Callable[[PeerId, RemoteProtocolError], None],
        observe: Callable[[Event], None],
        make: Callable[..., Kademlia] = Kademlia,
        seams: Seams | None = None,
        settings: KademliaSettings | None = None,
        work_bits: int = 0,
        publish: Callable[[events.Event], None] = lambda _event: None,
    ) -> None:
        """`observe` is called with every event of the core, and `publish` with events for people; `make`
        makes the core. With `seams`, the records are kept on disk, and the tokens are unguessable. Ids need
        `work_bits` of proof of work, unless `settings` say otherwise."""
        self._network = network
        self._clock = clock
        self._signer = signer
        self._observe = observe
        self._publish = publish
        self._seams = seams
        self._core = make(signer, settings or KademliaSettings(work_bits=work_bits), rng, network.addresses)
        self.follow_clock()
        self._core.origins.host_of = network.host_of
        if seams is not None:
            self._core.tokens = WriteTokens(seams.entropy(SECRET_BYTES))
        self._file: RecordsFile | None = None
        self._saving = trio.Lock()
        self._told: tuple[int, ...] = ()
        self._short = 0
        self._waiting: dict[int, _Answer] = {}
        self._sought: dict[int, Callable[[Sequence[PeerId]], None]] = {}
        self._own: dict[tuple[str, bytes], tuple[bytes, float | None]] = {}
        self._driver = Driver(
            self._core,
            PROTOCOL,
            Message,
            message_bytes_max=MESSAGE_BYTES_MAX,
            network=network,
            clock=clock,
            publish=self._on_event,
            refuse=refuse,
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drive until cancelled. This node's own records are signed again before they expire, and all its
        records are saved to disk."""
        try:
            async with trio.open_nursery() as nursery:
                with contain("reading of kept records"):
                    await self._load()
                await nursery.start(self._driver.run)
                nursery.start_soon(self._keep)
                task_status.started()
                await self._renew_own()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None

    async def _renew_own(self) -> None:
        while True:
            await trio.sleep(RENEW_SECONDS)
            for (purpose, name), (value, until) in list(self._own.items()):
                with contain("renewing of a record"):
                    await self._renew(purpose, name, value, until)

    def follow_clock(self) -> None:
        """Follow a jump of the clock, so that records are signed and checked by the new time."""
        offset = self._clock.wall() - self._clock.monotonic()
        if abs(offset - self._core.wall_offset) > CLOCK_NEWS_SECONDS:
            self._core.wall_offset = offset
        own, told = self._at - self._clock.monotonic(), self._core.own_wall_offset
        if not is_plausible(self._at):
            self._core.own_wall_offset = None
        elif told is None or abs(own - told) > CLOCK_NEWS_SECONDS:
            self._core.own_wall_offset = own

    @property
    def _at(self) -> float:
        """The present time according to this machine's own clock, for people."""
        return (self._clock if self._seams is None else self._seams.clock).wall()

    # The disk.

    async def _load(self) -> None:
        if self._seams is None:
            return
        storage, wall = self._seams.storage, self._clock.wall()
        self._file = file = await self._seams.executor.run(lambda: RecordsFile(storage))
        records, contacts = await self._seams.executor.run(lambda: file.load(self._signer, wall))
        self._core.records.watch_changes()
        now = self._clock.monotonic()
        for record in records:
            self._core.adopt(now, record)
        known = [(peer, readable_addresses(texts, peer)) for peer, texts in contacts]
        self._driver.command(lambda now: self._core.restore(now, known))

    async def _keep(self) -> None:
        count = 0
        while True:
            await trio.sleep(SAVE_SECONDS)
            count += 1
            with contain("keeping of records"):
                await self.save(contacts=count % CONTACTS_SAVED_EVERY == 0)
            self._tell()

    async def save(self, *, contacts: bool = True) -> None:
        """Save the changes since the last call."""
        file = self._file
        if file is None or self._seams is None:
            return
        async with self._saving:
            changes = self._core.records.take_changes()
            saved = self._core.saved if contacts else None
            if changes or saved:
                await self._seams.executor.run(lambda: file.save(changes, saved))

    def _tell(self) -> None:
        """Publish an event with the state of the DHT if it has changed."""
        core = self._core
        figures = (len(core.table), len(core.records), len(self._own), round(core.network_size), self._short)
        if figures != self._told:
            self._told = figures
            contacts, records, own, nodes, short = figures
            self._publish(
                events.TableMeasured(
                    at=self._at,
                    contacts=contacts,
                    records=records,
                    own_records=own,
                    nodes_estimated=nodes,
                    records_short=short,
                    is_client=core.is_client,
                )
            )

    def document(self) -> dict[str, object]:
        """Return this node's part of the DHT, for `dht stat`."""
        core = self._core
        return {
            "key": core.key.hex(),
            "contacts": len(core.table),
            "records": len(core.records),
            "own_records": len(self._own),
            "nodes_estimated": round(core.network_size),
            "records_short": self._short,
            "is_client": core.is_client,
            "limits": {name: list(size) for name, size in core.sizes.items()},
        }

    def command(self, order: Callable[[Kademlia, float], Sends]) -> None:
        """Let local code act on the core. `order(core, now)` returns what to send."""
        self._driver.command(lambda now: order(self._core, now))

    def appear(self, addresses: Sequence[Address], *, client: bool) -> None:
        """Set this node's contact; with `client`, others cannot reach it."""
        self._core.appear(addresses, client=client)

    def join(self, peers: Sequence[PeerId]) -> None:
        """Enter the DHT through these peers."""
        self._driver.command(lambda now: self._core.join(now, peers))

    def met(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Note a peer that membership has found and monitors. It may enter the routing table once it
        answers."""
        self._driver.command(lambda now: self._core.add(now, peer, addresses))

    def gone(self, peer: PeerId) -> None:
        """Note a peer that membership has lost, so that lookups need not wait for it."""
        self._driver.command(lambda now: self._core.remove(now, peer))

    def forgotten(self, peer: PeerId) -> None:
        """Note a peer that membership no longer monitors."""
        self._core.unwatch(peer)

    def locate(self, key: bytes, found: Callable[[Sequence[PeerId]], None]) -> None:
        """Look up the peers nearest to `key`, and call `found` with them."""

        def begin(now: float) -> Sends:
            number, sends = self._core.locate(now, Key(key))
            self._sought[number] = found
            return sends

        if len(self._sought) < SOUGHT_MAX:
            self._driver.command(begin)

    @property
    def publishers_max(self) -> int:
        """Maximum number of publishers whose records a node keeps under one key."""
        return self._core.settings.records_per_key_max

    @staticmethod
    def key(purpose: str, name: bytes) -> Key:
        """Return the key of a record with this purpose and name."""
        return record_key(purpose, name)

    def advertise(self, advert: Advert | None) -> None:
        """Publish this node's advert, replacing the previous one."""
        self._driver.command(lambda now: self._core.advertise(now, advert))

    async def publish(self, purpose: str, name: bytes, value: bytes) -> int:
        """Store this node's record under (purpose, name). Return how many nodes keep it, including this one.

        The record is kept alive as long as this node runs, for the newest OWN_RECORDS_MAX records. Too few
        holders are counted and reported.
        """
        return (await self.publish_for(purpose, name, value, None)).acknowledged

    async def publish_for(
        self, purpose: str, name: bytes, value: bytes, seconds: float | None
    ) -> RecordStored:
        """Store this node's record for `seconds` (None: as long as this node runs); return the outcome.
        Within that time it is stored again like other records, if the time is long enough."""
        wall = self._clock.wall()
        self._own.pop((purpose, name), None)
        if seconds is None or seconds > RENEW_SECONDS:
            self._own[purpose, name] = value, None if seconds is None else wall + seconds
        while len(self._own) > OWN_RECORDS_MAX:
            del self._own[next(iter(self._own))]
        return await self._store(purpose, name, value, wall + (seconds or RECORD_SECONDS))

    async def _renew(self, purpose: str, name: bytes, value: bytes, until: float | None) -> None:
        wall = self._clock.wall()
        if until is not None and until <= wall:
            self._own.pop((purpose, name), None)
            return
        await self._store(purpose, name, value, wall + RECORD_SECONDS if until is None else until)

    async def publish_immutable(self, value: bytes, seconds: float) -> RecordStored:
        """Store an immutable value for a time."""
        fact = make_immutable(value, expires=ceil(self._clock.wall() + seconds))
        return await self._stored("immutable", fact)

    async def _store(self, purpose: str, name: bytes, value: bytes, until: float) -> RecordStored:
        fact = sign_record(
            self._signer,
            record_key(purpose, name),
            value,
            sequence=self._core.next_sequence(self._clock.monotonic()),
            expires=ceil(until),
        )
        return await self._stored(purpose, fact)

    async def _stored(self, purpose: str, fact: Fact) -> RecordStored:
        stored = await self._ask(lambda now: self._core.store(now, fact))
        if not isinstance(stored, RecordStored):
            stored = RecordStored(-1, 0, 0, wanted=1)  # no answer within that time
        if not stored.is_safe:
            self._short += 1
            self._publish(
                events.RecordShort(
                    at=self._at, purpose=purpose, holders=stored.acknowledged, wanted=stored.wanted
                )
            )
        return stored

    async def find(self, purpose: str, name: bytes, *, careful: bool = False) -> tuple[Record, ...]:
        """Return the newest record of each publisher under (purpose, name). With `careful`, search over
        disjoint paths."""
        return await self.find_key(record_key(purpose, name), careful=careful)

    async def find_key(self, key: Key, *, careful: bool = False, first: bool = False) -> tuple[Record, ...]:
        """Return the newest record of each publisher under a key. With `first`, the first record found
        suffices."""
        paths = self._core.settings.paths if careful else 1
        found = await self._ask(lambda now: self._core.find(now, key, paths=paths, first=first))
        return found.records if isinstance(found, RecordsFound) else ()

    async def holders(self, purpose: str, name: bytes) -> tuple[tuple[Record, ...], int]:
        """Return the records under (purpose, name), and how many of the nearest nodes hold any."""
        key = record_key(purpose, name)
        found = await self._ask(lambda now: self._core.find(now, key, all_holders=True))
        own = bool(self._core.records.get(self._clock.wall(), key))
        return (found.records, found.holders + own) if isinstance(found, RecordsFound) else ((), int(own))

    async def hunt(self, query: Query) -> tuple[CapabilityOffer, ...]:
        """Return nodes that match a capability query, the nearest first."""
        found = await self._ask(lambda now: self._core.hunt(now, query))
        return found.offers if isinstance(found, CapabilitiesFound) else ()

    async def _ask(self, order: Callable[[float], tuple[int, Sends]]) -> Event | None:
        answer = _Answer()

        def begin(now: float) -> Sends:
            number, sends = order(now)
            answer.number = number
            self._waiting[number] = answer
            return sends

        self._driver.command(begin)
        try:
            with trio.move_on_after(LOOKUP_SECONDS_MAX):
                await answer.ready.wait()
        finally:
            self._waiting.pop(answer.number, None)
        return answer.event

    def _on_event(self, event: Event) -> None:
        self._observe(event)
        if isinstance(event, PeerHeard):
            self._network.learn(event.peer, event.addresses, is_hint=True)
            return
        if isinstance(event, NodesFound) and (found := self._sought.pop(event.request, None)) is not None:
            found(event.peers)
            return
        waiting = self._waiting.get(getattr(event, "request", -1))
        if waiting is not None:
            waiting.event = event
            waiting.ready.set()


class _Answer:
    """The result of one awaited lookup."""

    def __init__(self) -> None:
        self.number = -1
        self.event: Event | None = None
        self.ready = trio.Event()
