"""The six seams of a simulated node, to run the real `node` under trio's MockClock.

    clock = trio.testing.MockClock(autojump_threshold=0)
    medium = Medium(Links(LinkModel(), seed))
    trio.run(scenario, clock=clock)

Time is virtual: when every task waits, the clock jumps. A message is put into its receiver's inbox
when it is sent, with the instant it is due, so the order within one instant is the inbox's and not
the scheduler's: the same order as in `sim.engine`. Between tasks of one instant trio's scheduler
decides, so local commands that must repeat exactly should not fall on the instant of a delivery.

Streams are in memory (`sim.streams`). Not modelled: NAT, cookies, rekeying, and that a datagram too
large for a packet travels by a stream.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path

import trio

from crypto.contact import Address
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from crypto.noise import Data
from node.errors import StreamClosed, Unreachable, WrongPeer
from node.seams import Handler, Seams
from node.transport.router import ONE_SHOT_BYTES_MAX
from sim.executor import SimExecutor, sleep_for
from sim.network.instants import nearest_instant
from sim.network.links import Links
from sim.seeds import seeded_entropy, seeded_rng
from sim.streams import Alarm, SimStream, stream_pair

EPOCH_SECONDS = 1_800_000_000.0
"""What the wall clock shows when a simulation begins."""
INBOX_MAX = 65_536
"""Datagrams on their way to one inbox; more can only mean that nobody reads it."""
HANDSHAKE_TRIPS = 4
"""One-way trips before a stream can be used: TCP's two, and two for Noise XX."""
_PORT = 9747


class SimClock:
    """Trio's clock in whole microseconds; the wall clock runs beside it from `EPOCH_SECONDS`."""

    def monotonic(self) -> float:
        return nearest_instant(trio.current_time())

    def wall(self) -> float:
        return EPOCH_SECONDS + self.monotonic()


class SimInbox:
    """Datagrams of one protocol on their way to one peer, a heap by (due, sender, number)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, PeerId, int, bytes]] = []
        self._alarm = Alarm()
        self.ties = 0

    def put(self, due: float, sender: PeerId, sequence: int, data: bytes) -> bool:
        """A message that will have come at `due`; False if the inbox is full."""
        if len(self._heap) >= INBOX_MAX:
            return False
        heappush(self._heap, (due, sender, sequence, data))
        self._alarm.no_later_than(due)
        return True

    async def take(self, until: float) -> list[tuple[PeerId, bytes]]:
        """All that is due at the first instant when anything is, or nothing at `until`."""
        due = self._heap[0][0] if self._heap else math.inf
        await self._alarm.sleep_until(min(due, until))
        now = nearest_instant(trio.current_time())
        taken = []
        while self._heap and self._heap[0][0] <= now:
            _, sender, _, data = heappop(self._heap)
            taken.append((sender, data))
        # Counted so that a test can show that there were simultaneous ticks to put in order.
        self.ties += max(0, len(taken) - 1) + (1 if taken and until <= now else 0)
        return taken

    def wake(self) -> None:
        self._alarm.ring()


class Medium:
    """What all simulated networks of one simulation share: who is there, at which address."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._networks: dict[PeerId, SimNetwork] = {}
        self._places: dict[tuple[str, int], PeerId] = {}
        self._sides: dict[PeerId, int] = {}

    def attach(self, peer: PeerId) -> "SimNetwork":
        """A network for `peer`, at an address of its own; a peer that was killed gets its old one back."""
        old = self._networks.get(peer)
        if old is not None and old.alive:
            raise LocalProtocolError("this peer has a network already")
        if old is not None:
            address = old.addresses[0]
        else:
            number = len(self._networks) + 1
            host = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
            address = Address("ip4", host, _PORT, peer)
        network = self._networks[peer] = SimNetwork(self, peer, address)
        self._places[address.host, address.port] = peer
        return network

    def kill(self, peer: PeerId) -> None:
        """`peer` is gone, without a word: its streams break, what comes for it is lost."""
        network = self._networks.get(peer)
        if network is not None:
            network.die()

    def split(self, *sides: Collection[PeerId]) -> None:
        """Nothing passes from one side to another any more until `heal`; whoever is in none is with its
        like. Streams over the split break: what a kernel would notice late is noticed at once."""
        self._sides = {peer: number for number, side in enumerate(sides) for peer in side}
        for network in self._networks.values():
            network.break_streams()

    def heal(self) -> None:
        """All can reach each other again."""
        self._sides = {}

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        """Whether no split lies between the two."""
        return self._sides.get(one) == self._sides.get(other)

    def living(self, peer: PeerId) -> "SimNetwork | None":
        """The network of `peer`, if it is there and alive."""
        network = self._networks.get(peer)
        return network if network is not None and network.alive else None

    def peer_at(self, address: Address) -> PeerId | None:
        """Who was ever attached at an address."""
        return self._places.get((address.host, address.port))


class SimNetwork:
    """`node.seams.Network` of one simulated peer. Made by `Medium.attach`; streams need `run`."""

    def __init__(self, medium: Medium, peer: PeerId, address: Address) -> None:
        self.alive = True
        self._medium = medium
        self._peer = peer
        self._address = address
        self._counters: Counter[str] = Counter()
        self._inboxes: dict[str, SimInbox] = {}
        self._handlers: dict[str, Handler] = {}
        self._known: dict[PeerId, None] = {}
        self._streams: dict[SimStream, None] = {}
        self._nursery: trio.Nursery | None = None

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def addresses(self) -> tuple[Address, ...]:
        return (self._address,)

    @property
    def counters(self) -> Mapping[str, int]:
        return self._counters

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve streams until cancelled; then the peer is dead."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self.die()

    def learn(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Only an address that is really the peer's makes it reachable."""
        if peer != self._peer and any(self._medium.peer_at(address) == peer for address in addresses):
            self._known[peer] = None

    def send(self, peer: PeerId, protocol: str, message: bytes) -> None:
        if len(message) > ONE_SHOT_BYTES_MAX:
            raise LocalProtocolError(f"{len(message)} bytes of {protocol}: open a stream for so much")
        if not self.alive:
            return
        if peer not in self._known:
            self._counters["messages_without_address"] += 1
            return
        now = nearest_instant(trio.current_time())
        sequence, due = self._medium.links.link(self._peer, peer, protocol).post(now)
        target = self._medium.living(peer)
        if target is not None and due < math.inf and self._medium.reaches(self._peer, peer):
            target.expect(self._peer, protocol, due, sequence, bytes(message))

    def expect(self, sender: PeerId, protocol: str, due: float, sequence: int, data: bytes) -> None:
        """A datagram of another network is on its way here."""
        inbox = self._inboxes.get(protocol)
        if inbox is None:
            self._counters["messages_refused_protocol"] += 1
        elif not inbox.put(due, sender, sequence, data):
            self._counters["inbox_full"] += 1
        # Who reaches us can be answered: the real transport has a session with it then.
        self._known[sender] = None

    def inbox(self, protocol: str) -> SimInbox:
        return self._inboxes.setdefault(protocol, SimInbox())

    def handle(self, protocol: str, handler: Handler) -> None:
        if protocol in self._handlers:
            raise LocalProtocolError(f"{protocol} has a handler already")
        self._handlers[protocol] = handler

    async def open(self, peer: PeerId, protocol: str) -> SimStream:
        if peer not in self._known:
            await trio.lowlevel.checkpoint()
            raise Unreachable("unknown", "no address of this peer is known")
        target = await self._meet(peer)
        if not self.alive or target._nursery is None or protocol not in target._handlers:
            raise Unreachable("refused", f"the peer does not speak {protocol}")
        target._known[self._peer] = None
        near, far = stream_pair(self._peer, peer, self._medium.links)
        self._streams[near] = None
        target._streams[far] = None
        target._nursery.start_soon(target._serve, target._handlers[protocol], far)
        return near

    async def identify(self, address: Address) -> PeerId:
        peer = self._medium.peer_at(address)
        if peer is None:
            await trio.lowlevel.checkpoint()
            raise Unreachable("refused", f"nobody answers at {address.short}")
        await self._meet(peer)
        if address.peer not in (None, peer):
            raise WrongPeer("wrong key", f"another peer answers at {address.short}")
        self._known[peer] = None
        return peer

    def break_streams(self) -> None:
        """Those that go over a split."""
        for stream in [s for s in self._streams if not self._medium.reaches(self._peer, s.peer)]:
            del self._streams[stream]
            stream.close()

    def die(self) -> None:
        """See `Medium.kill`."""
        self.alive = False
        for stream in list(self._streams):
            stream.close()
        self._streams.clear()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def _meet(self, peer: PeerId) -> "SimNetwork":
        """Wait for the handshake; the network at the other end."""
        latency_seconds = self._medium.links.latency_seconds(self._peer, peer)
        await sleep_for(HANDSHAKE_TRIPS * latency_seconds)
        if not self._medium.reaches(self._peer, peer):
            raise Unreachable("timeout", "nothing comes back from the peer")
        target = self._medium.living(peer)
        if target is None:
            raise Unreachable("refused", "the peer is not running")
        return target

    async def _serve(self, handler: Handler, stream: SimStream) -> None:
        # As the real router: what a stranger can cause is counted, our own bugs come out.
        try:
            await handler(stream)
        except* RemoteProtocolError:
            self._counters["streams_broken"] += 1
        except* Unreachable:
            self._counters["streams_ended_early"] += 1
        except* StreamClosed:
            pass  # how a conversation ends
        finally:
            self._streams.pop(stream, None)
            stream.close()


class MemoryStorage:
    """Storage that lives as long as this object: keep it to restart a peer with its memory."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def read(self, name: str) -> bytes | None:
        return self._blobs.get(name)

    def write(self, name: str, data: bytes) -> None:
        self._blobs[name] = bytes(data)

    def delete(self, name: str) -> None:
        self._blobs.pop(name, None)

    def read_part(self, name: str, offset: int, length: int) -> bytes | None:
        blob = self._blobs.get(name)
        return None if blob is None else blob[offset : offset + length]

    def copy_in(self, name: str, path: Path) -> None:
        self._blobs[name] = path.read_bytes()

    def write_soon(self, name: str, data: bytes | memoryview) -> None:
        self._blobs[name] = bytes(data)

    def sync(self, names: Iterable[str]) -> None:
        """What it holds survives as long as it does."""

    def spill(self, data: Data) -> memoryview:
        return memoryview(bytes(data))

    def sizes(self, under: str) -> dict[str, int]:
        return {name: len(blob) for name, blob in self._blobs.items() if name.startswith(f"{under}/")}


def simulated_seams(medium: Medium, peer: PeerId, seed: int, storage: MemoryStorage | None = None) -> Seams:
    """All six for one peer attached to `medium`. The caller runs `seams.network.run`."""
    return Seams(
        network=medium.attach(peer),
        clock=SimClock(),
        rng=seeded_rng(seed, peer),
        entropy=seeded_entropy(seed, peer),
        executor=SimExecutor(),
        storage=storage or MemoryStorage(),
    )
