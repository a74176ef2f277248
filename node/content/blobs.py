"""`/peerloom/blobs/1`: blobs by hash, served to any peer that asks, and fetched from several peers in
parallel.

A stream carries pipelined requests, and their answers in the same order. A peer that knows a hash may have
its blob. So blobs are not secret, but a peer cannot learn about blobs whose hash it does not know.

`fetch_all` adapts to the speed of each holder: a fast holder is asked for the next blob sooner. If a holder
sends a wrong blob, disconnects or is silent, it is dropped, and the other holders deliver its share. An
overdue blob is also requested from another holder, so that the last blobs do not wait for the slowest one.
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Protocol, TypeVar

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import StreamClosed, Unreachable
from node.protocols.permits import Permit, Permits
from node.seams import Clock, Executor, Network, Seams, Stream
from node.storage.blobs import BLOB_BYTES_MAX, HASH_BYTES, Blobs

BLOBS_PROTOCOL = "/peerloom/blobs/1"
REQUEST_BYTES_MAX = 64
REPLY_BYTES_MAX = 64
UPLOADS_MAX = 32
"""Maximum number of streams served at the same time. Each has one blob in memory."""
UPLOADS_PER_PEER_MAX = 4
"""Maximum number of streams served to one peer. A fetch opens one stream, and a node may have several
fetches."""
IDLE_SECONDS_MAX = 60.0
"""A stream without a request for this long is closed, so that another stream may have its place."""
SEND_SECONDS_MAX = 60.0
"""Time limit for sending one blob to a slow reader: 35 kB/s."""
PATIENCE_SECONDS = 5.0
"""How long a peer that neither requests nor reads keeps a place that another peer wants."""
BUSY_SECONDS_MAX = 5.0
"""Time limit for sending the answer Busy."""
HOLDERS_MAX = 64
"""Maximum number of holders tried in one fetch."""
PARALLEL_MAX = 8
"""Maximum number of holders used in parallel by one fetch. Each has a blob in memory."""
IN_FLIGHT_MAX = 4
"""Maximum number of blobs requested from one holder and not yet delivered. 4 MiB cover 100 ms at 40 MB/s, and
even a slow peer never owes more."""
OPEN_SECONDS_MAX = 10.0
STALL_SECONDS_MAX = 30.0
"""Time limit for receiving one blob. A holder slower than 35 kB/s is useless."""
HEDGE_SECONDS = 2.0
"""A blob that one holder has not delivered after this long is also requested from another, idle holder."""
MISSES_MAX = 256
"""Number of misses after which a holder that has not delivered any blob is dropped."""
_CLOSE_SECONDS = 1.0

T = TypeVar("T")

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Refuse = Callable[[PeerId, RemoteProtocolError], None]


class Want(msgspec.Struct, frozen=True, tag="want", array_like=True):
    """Requests the blob with this hash. The answer is Found, Absent, or Busy and the end of the stream."""

    name: Hash


class Found(msgspec.Struct, frozen=True, tag="found", array_like=True):
    """Answer: the next message is the blob, with this many bytes. The blob is a separate message so that
    neither peer has to copy it."""

    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=BLOB_BYTES_MAX)]


class BlobAbsent(msgspec.Struct, frozen=True, tag="absent", array_like=True):
    """Answer: the blob is not here."""


class Busy(msgspec.Struct, frozen=True, tag="busy", array_like=True):
    """Answer: too many peers are fetching now."""


Reply = Found | BlobAbsent | Busy


class BlobsMissing(Unreachable):
    """Some blobs are not here, and no holder delivered them. `missing` are their hashes."""

    def __init__(self, missing: Sequence[bytes], reasons: str) -> None:
        what = f"blob {missing[0].hex()[:16]}" if len(missing) == 1 else f"{len(missing)} blobs"
        super().__init__("unknown", f"{what} could not be fetched: {reasons}")
        self.missing = tuple(missing)


class BlobServer:
    """Serves this node's blobs to peers. `refuse` is called with peers that broke the protocol, `served` with
    the number of bytes sent to each peer."""

    def __init__(
        self,
        seams: Seams,
        blobs: Blobs,
        *,
        refuse: Refuse,
        served: Callable[[PeerId, int], None] = lambda _peer, _size: None,
    ) -> None:
        self._executor = seams.executor
        self._served = served
        self._blobs = blobs
        self._refuse = refuse
        self._permits = Permits(
            UPLOADS_MAX, UPLOADS_PER_PEER_MAX, patience_seconds=PATIENCE_SECONDS, clock=seams.clock
        )
        seams.network.handle(BLOBS_PROTOCOL, self.serve)

    async def serve(self, stream: Stream) -> None:
        """Answer the requests of a stream until it ends."""
        peer = stream.peer
        with self._permits.take(peer) as permit:
            if permit is None:
                with suppress(StreamClosed), trio.move_on_after(BUSY_SECONDS_MAX):
                    await stream.receive()  # an answer that is sent before its question may get lost
                    await stream.send(encode(Busy()))
                return
            try:
                await self._answer(stream, peer, permit)
            except StreamClosed:
                return  # the end of a fetch
            except RemoteProtocolError as error:
                self._refuse(peer, error)

    async def _answer(self, stream: Stream, peer: PeerId, permit: Permit) -> None:
        while True:
            permit.waits(IDLE_SECONDS_MAX)
            want: Want = decode(await stream.receive(), Want, bytes_max=REQUEST_BYTES_MAX)
            permit.works()
            data = await self._executor.run(partial(self._blobs.get, want.name))
            permit.waits(SEND_SECONDS_MAX)
            await stream.send(encode(BlobAbsent() if data is None else Found(len(data))))
            if data is not None:
                await stream.send(data)
                self._served(peer, len(data))
            del data  # do not keep the blob in memory while waiting for the next request


class Sink(Protocol):
    """The destination of fetched blobs."""

    def has(self, name: bytes) -> bool:
        """Return whether the blob need not be fetched."""

    async def take(self, name: bytes, data: bytes) -> bool:
        """Keep a blob; return False if it does not have this hash. Raises OSError."""


class BlobSink:
    """Stores blobs in this node's storage, in the executor."""

    def __init__(self, blobs: Blobs, executor: Executor) -> None:
        self._blobs = blobs
        self._executor = executor

    def has(self, name: bytes) -> bool:
        return self._blobs.has(name)

    async def take(self, name: bytes, data: bytes) -> bool:
        return await self._executor.run(partial(self._blobs.take, name, data))


async def fetch_all(
    network: Network,
    wanted: Mapping[bytes, int],
    holders: Sequence[PeerId],
    *,
    sink: Sink,
    refuse: Refuse,
    clock: Clock,
) -> Mapping[PeerId, int]:
    """Fetch all of `wanted` (hash: maximal length) into `sink`, from several holders at once.

    Blobs that the sink already has are not fetched. Returns how many bytes each holder delivered.

    Raises:
        BlobsMissing: no holder delivered these; the rest is in the sink.
        OSError: the sink could not keep one.
    """
    missing = [name for name in wanted if not sink.has(name)]
    fetch = _Fetch(network, {name: wanted[name] for name in missing}, sink, refuse, clock)
    if missing:
        others = [peer for peer in dict.fromkeys(holders) if peer != network.peer]
        await fetch.run(others[:HOLDERS_MAX])
    return fetch.delivered


class _Dropped(Exception):
    """The fetch drops this holder. The message is for a person."""


class _Holder:
    """One peer during one fetch: the blobs for which it may still be asked, and the blobs requested from it,
    oldest first."""

    def __init__(self, peer: PeerId, queue: Sequence[bytes]) -> None:
        self.peer = peer
        self.queue = deque(queue)
        self.owes: deque[bytes] = deque()
        self.misses = 0


class _Asked:
    """A requested blob: the time of the request, and the peers that were asked."""

    def __init__(self, since: float, peer: PeerId) -> None:
        self.since = since
        self.peers = {peer}


class _Fetch:
    """One call of `fetch_all`. Shared state is only changed between two awaits."""

    def __init__(
        self, network: Network, sizes: Mapping[bytes, int], sink: Sink, refuse: Refuse, clock: Clock
    ) -> None:
        self._clock = clock
        self.delivered: Counter[PeerId] = Counter()
        self._network = network
        self._sink = sink
        self._refuse = refuse
        self._sizes = sizes
        # Missing blobs, and for each the holders that do not have it.
        self._open: dict[bytes, set[PeerId]] = {name: set() for name in sizes}
        self._asked: dict[bytes, _Asked] = {}
        self._active: list[_Holder] = []
        self._started = 0
        self._reasons: list[str] = []
        self._changed = trio.Event()
        self._failure: OSError | None = None
        self._scope = trio.CancelScope()

    async def run(self, holders: Sequence[PeerId]) -> None:
        slots = trio.CapacityLimiter(PARALLEL_MAX)
        with self._scope:
            async with trio.open_nursery() as nursery:
                for peer in holders:
                    nursery.start_soon(self._take_from, peer, slots, min(len(holders), PARALLEL_MAX))
        if self._failure is not None:
            raise self._failure
        if self._open:
            raise BlobsMissing(
                tuple(self._open), "; ".join(dict.fromkeys(self._reasons)) or "no peer is known to hold it"
            )

    async def _take_from(self, peer: PeerId, slots: trio.CapacityLimiter, shares: int) -> None:
        async with slots:
            if not self._open:
                return
            # Each holder begins at a different blob, so that two holders seldom reach the same one, and a
            # holder with only half of the blobs is soon noticed.
            names = list(self._open)
            begin = len(names) * (self._started % shares) // shares
            self._started += 1
            holder = _Holder(peer, names[begin:] + names[:begin])
            self._active.append(holder)
            try:
                await self._converse(holder)
            except (_Dropped, Unreachable, StreamClosed) as error:
                self._reasons.append(str(error))
            except RemoteProtocolError as error:
                self._refuse(peer, error)
                self._reasons.append(str(error))
            finally:
                self._active.remove(holder)
                for name in holder.owes:
                    self._release(name, peer)
                self._wake()

    async def _converse(self, holder: _Holder) -> None:
        opening = partial(self._network.open, holder.peer, BLOBS_PROTOCOL, message_bytes_max=BLOB_BYTES_MAX)
        stream = await _in_time(opening, OPEN_SECONDS_MAX)
        try:
            while self._open:
                await self._ask(holder, stream)
                if holder.owes:
                    await self._receive(holder, stream)
                elif self._asked:
                    with trio.move_on_after(HEDGE_SECONDS):
                        await self._changed.wait()
                else:
                    raise _Dropped("the rest is not there")
        finally:
            with trio.move_on_after(_CLOSE_SECONDS) as scope:
                scope.shield = True
                await stream.aclose()

    async def _ask(self, holder: _Holder, stream: Stream) -> None:
        while len(holder.owes) < IN_FLIGHT_MAX:
            name = self._next(holder)
            if name is None:
                return
            holder.owes.append(name)
            await _in_time(partial(stream.send, encode(Want(name))), STALL_SECONDS_MAX)

    def _next(self, holder: _Holder) -> bytes | None:
        """Return the next blob to request from this holder: one that was not requested yet, or else one that
        another holder has not delivered for long."""
        now = self._clock.monotonic()
        while holder.queue:
            name = holder.queue.popleft()
            if name not in self._asked and holder.peer not in self._open.get(name, {holder.peer}):
                self._asked[name] = _Asked(now, holder.peer)
                return name
        for name, asked in self._asked.items():  # oldest first
            if asked.since > now - HEDGE_SECONDS:
                return None
            if len(asked.peers) == 1 and not {holder.peer} & (asked.peers | self._open[name]):
                asked.peers.add(holder.peer)
                return name
        return None

    async def _receive(self, holder: _Holder, stream: Stream) -> None:
        """Receive the next answer, which is to the oldest request."""
        name, peer = holder.owes[0], holder.peer
        head = await _in_time(stream.receive, STALL_SECONDS_MAX)
        reply: Reply = decode(head, Reply, bytes_max=REPLY_BYTES_MAX)
        match reply:
            case Busy():
                raise _Dropped("busy: too many peers are fetching")
            case BlobAbsent():
                if name in self._open:
                    self._open[name].add(peer)
                holder.misses += 1
            case Found():
                data = await _in_time(stream.receive, STALL_SECONDS_MAX)
                if len(data) != reply.size_bytes:
                    raise RemoteProtocolError("the blob's size differs from the announced size")
                await self._on_found(name, peer, data)
        holder.owes.popleft()
        self._release(name, peer)
        self._wake()
        if not self._open:
            self._scope.cancel()
        if holder.misses >= MISSES_MAX and not self.delivered[peer]:
            raise _Dropped("it is not there")

    async def _on_found(self, name: bytes, peer: PeerId, data: bytes) -> None:
        if name not in self._open:
            return  # another holder was faster
        try:
            is_right = len(data) <= self._sizes[name] and await self._sink.take(name, data)
        except OSError as error:
            self._failure = error
            self._scope.cancel()
            raise _Dropped("no room for it here") from None
        if not is_right:
            raise RemoteProtocolError("a blob with a different hash than requested")
        self._open.pop(name, None)
        self.delivered[peer] += len(data)

    def _release(self, name: bytes, peer: PeerId) -> None:
        """Record that a blob is no longer requested from `peer`. If the blob is missing and not requested
        from any other holder, it may be requested again from any holder."""
        asked = self._asked.get(name)
        if asked is None:
            return
        asked.peers.discard(peer)
        if name not in self._open:
            del self._asked[name]
        elif not asked.peers:
            del self._asked[name]
            for holder in self._active:
                holder.queue.append(name)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


async def _in_time(wait: Callable[[], Awaitable[T]], seconds: float) -> T:
    with trio.move_on_after(seconds):
        return await wait()
    raise _Dropped(f"no answer in {seconds:.0f} s")
