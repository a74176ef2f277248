"""What is where: the Kademlia core driven over datagrams, with its lookups as awaitable calls."""

from collections.abc import Callable, Sequence
from random import Random

import trio

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from dht.events import Event, NodesFound, PeerHeard, RecordsFound, RecordStored
from dht.kademlia import Kademlia, Sends
from dht.keys import Key, record_key
from dht.messages import MESSAGE_BYTES_MAX, PROTOCOL, Message
from dht.records import Record, sign_record
from dht.settings import Settings
from node.containment import contain
from node.seams import Clock, Network
from node.services.driver import Driver

RECORD_SECONDS = 24 * 3_600
"""How long a record stays valid; the core stores it again meanwhile, where its holders have gone."""
RENEW_SECONDS = RECORD_SECONDS / 3
OWN_RECORDS_MAX = 256
"""Other nodes hold no more of one publisher either."""
LOOKUP_SECONDS_MAX = 30.0
SOUGHT_MAX = 16
"""Searches for neighbours at once; membership asks for one at a time."""


class Discovery:
    """The service. `run` drives; `publish` and `find` may be awaited once it does."""

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
    ) -> None:
        """`observe` is told of every event of the core as it is; `make` makes the core."""
        self._network = network
        self._clock = clock
        self._signer = signer
        self._observe = observe
        self._core = make(signer, Settings(), rng, network.addresses)
        self._core.wall_offset = clock.wall() - clock.monotonic()
        self._core.origins.host_of = network.host_of
        self._waiting: dict[int, _Answer] = {}
        self._sought: dict[int, Callable[[Sequence[PeerId]], None]] = {}
        self._own: dict[tuple[str, bytes], bytes] = {}
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
        """Drive until cancelled, signing this node's own records anew before they expire."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._driver.run)
            task_status.started()
            while True:
                await trio.sleep(RENEW_SECONDS)
                for (purpose, name), value in list(self._own.items()):
                    with contain("renewing of a record"):
                        await self._store(purpose, name, value)

    def command(self, order: Callable[[Kademlia, float], Sends]) -> None:
        """Let local code act on the core: `order(core, now)` returns what to send."""
        self._driver.command(lambda now: order(self._core, now))

    def appear(self, addresses: Sequence[Address], *, client: bool) -> None:
        """Where this node is, or that others cannot reach it."""
        self._core.appear(addresses, client=client)

    def join(self, peers: Sequence[PeerId]) -> None:
        """Enter the DHT by these peers."""
        self._driver.command(lambda now: self._core.join(now, peers))

    def met(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Membership found a peer and watches over it: it may stand in the routing table once it answers."""
        self._driver.command(lambda now: self._core.add(now, peer, addresses))

    def gone(self, peer: PeerId) -> None:
        """Membership lost a peer: lookups need not wait for it."""
        self._driver.command(lambda now: self._core.remove(now, peer))

    def forgotten(self, peer: PeerId) -> None:
        """Membership watches over a peer no more."""
        self._core.unwatch(peer)

    def locate(self, key: bytes, found: Callable[[Sequence[PeerId]], None]) -> None:
        """Look up the peers nearest to `key`, and hand them on when they are found."""

        def begin(now: float) -> Sends:
            number, sends = self._core.locate(now, Key(key))
            self._sought[number] = found
            return sends

        if len(self._sought) < SOUGHT_MAX:
            self._driver.command(begin)

    async def publish(self, purpose: str, name: bytes, value: bytes) -> int:
        """Store this node's record under (purpose, name); how many nodes keep it, this one included.

        It is kept alive as long as this node runs, the newest OWN_RECORDS_MAX of them.
        """
        self._own.pop((purpose, name), None)
        self._own[purpose, name] = value
        while len(self._own) > OWN_RECORDS_MAX:
            del self._own[next(iter(self._own))]
        return await self._store(purpose, name, value)

    async def _store(self, purpose: str, name: bytes, value: bytes) -> int:
        wall = self._clock.wall()
        fact = sign_record(
            self._signer,
            record_key(purpose, name),
            value,
            sequence=int(wall * 1000),
            expires=int(wall) + RECORD_SECONDS,
        )
        stored = await self._ask(lambda now: self._core.store(now, fact))
        return stored.acknowledged if isinstance(stored, RecordStored) else 0

    async def find(self, purpose: str, name: bytes) -> tuple[Record, ...]:
        """The newest record of each publisher under (purpose, name)."""
        found = await self._ask(lambda now: self._core.find(now, record_key(purpose, name)))
        return found.records if isinstance(found, RecordsFound) else ()

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
            self._network.learn(event.peer, event.addresses)
            return
        if isinstance(event, NodesFound) and (found := self._sought.pop(event.request, None)) is not None:
            found(event.peers)
            return
        waiting = self._waiting.get(getattr(event, "request", -1))
        if waiting is not None:
            waiting.event = event
            waiting.ready.set()


class _Answer:
    """One lookup that somebody awaits."""

    def __init__(self) -> None:
        self.number = -1
        self.event: Event | None = None
        self.ready = trio.Event()
