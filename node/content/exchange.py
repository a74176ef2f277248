"""The shell of `gossip.pieces`: exchanges data sets with other peers over streams, using this node's blobs.

One outgoing stream per peer carries all data sets: small messages first, then one piece at a time. The
executor hashes and writes the pieces that arrive. A complete data set is served to any peer that knows its
hash.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from crypto.registers import Budget, Register, Silence
from crypto.token_buckets import prefix_of
from gossip.pieces.messages import (
    DATA_PROTOCOL,
    MESSAGE_BYTES_MAX,
    Message,
    Piece,
    PieceRequest,
    PiecesHeld,
    Unknown,
)
from gossip.pieces.swarm import PeerDropped, PieceArrived, PieceSwarm, Sends
from gossip.pieces.uploads import UploadDue
from node.containment import contain
from node.errors import StreamClosed, Unreachable
from node.protocols.moving import MOVE_SECONDS, move
from node.seams import Clock, Seams, Stream, StreamLimits, own_rng
from node.storage.blobs import Blobs
from node.waker import Waker

STREAMS = StreamLimits(message_bytes_max=MESSAGE_BYTES_MAX, streams_per_peer_max=4)
EXCHANGES_MAX = 16
"""Maximum number of data sets exchanged at the same time; the least recently used one is closed."""
LINKS_MAX = 64
"""Maximum number of peers to which something is on its way. One more displaces a peer that reads nothing,
strangers first."""
LINKS = Budget(LINKS_MAX, 1, LINKS_MAX // 2, 30.0)
"""Link places. A peer to which a piece was sent, or that this node asks for pieces, keeps its place for half
a minute without reading."""
ROOM_SECONDS_MAX = 2.0
"""How long a request waits for a link on which it can be answered."""
ROOM_LOOK_SECONDS = 0.1
QUEUE_MAX = 4_096
"""Maximum number of small messages queued for one peer. A peer with more counts as lost."""
OPEN_SECONDS_MAX = 10.0
SEND_SECONDS_MAX = 120.0
"""Time limit for sending one message, which has at most 256 KiB: 18 kbit/s."""
IDLE_SECONDS = 30.0
"""An idle stream is closed after this long."""
MEET_SECONDS = 3.0
"""Seconds after which possible holders of missing pieces are asked again."""
NO_SOURCE_SECONDS = 12.0
"""How long a missing piece may have no known holder."""
STILL_SECONDS_MAX = 180.0
"""How long to wait if no pieces arrive at all."""
_CLOSE_SECONDS = 1.0

Refuse = Callable[[PeerId, RemoteProtocolError], None]
Hashes = Sequence[bytes]
"""The hashes of all pieces of a data set by number. A hash is empty if the list of its shard is missing."""


class DataExchange:
    """All exchanges of one node. `known` returns the hashes of a data set on this node, or None if it is not
    here."""

    def __init__(
        self,
        seams: Seams,
        blobs: Blobs,
        *,
        refuse: Refuse,
        known: Callable[[bytes], Awaitable[Hashes | None]],
        start_task: Callable[..., None],
        came: Callable[[bytes, PeerId, int], None] = lambda _data, _peer, _size: None,
        served: Callable[[PeerId, int], None] = lambda _peer, _size: None,
    ) -> None:
        """`start_task(task, *arguments)` runs a task concurrently with the node's other tasks. `came` is
        called with the verified bytes of a data set that came from a peer, `served` with the bytes sent to a
        peer."""
        self.came = came
        self.uploaded_bytes = 0
        self.downloaded_bytes = 0
        self._seams = seams
        self._blobs = blobs
        self._refuse = refuse
        self._known = known
        self._start_task = start_task
        self._served = served
        self._open: dict[bytes, PieceExchange] = {}
        self._links: dict[PeerId, _Link] = {}
        self._places: Register[_Link] = Register(LINKS)
        self._turn = trio.Lock()

    def serve(self) -> None:
        """Start answering peers."""
        self._seams.network.handle(DATA_PROTOCOL, self._serve, STREAMS)

    def open(self, data: bytes, hashes: Hashes) -> "PieceExchange":
        """Return the exchange of the data set with this hash. If it is already open, add `hashes`."""
        found = self._open.pop(data, None)
        if found is None:
            here = [number for number, name in enumerate(hashes) if name and self._blobs.has(name)]
            rng = own_rng(self._seams.rng)
            core = self._seams.core(PieceSwarm, self._seams.network.peer, data, len(hashes), here, rng)
            found = PieceExchange(self, core, list(hashes), self._seams.clock)
            self._start_task(found.run)
        else:
            found.learn(hashes)
        self._open[data] = found
        idle = [each for each in self._open.values() if not each.waiters and each is not found]
        for each in idle[: max(0, len(self._open) - EXCHANGES_MAX)]:
            self.close(each)
        return found

    def close(self, exchange: "PieceExchange") -> None:
        """Close an exchange: this node no longer takes part in it."""
        if self._open.get(exchange.core.data) is exchange:
            del self._open[exchange.core.data]
        exchange.scope.cancel()

    async def _serve(self, stream: Stream) -> None:
        peer = stream.peer
        try:
            while True:
                message: Message = decode(await stream.receive(), Message, bytes_max=MESSAGE_BYTES_MAX)
                exchange = await self._find(message)
                if isinstance(message, PiecesHeld) and message.is_question:
                    await self._await_link(peer)
                if exchange is not None:
                    exchange.act(exchange.core.receive(self._seams.clock.monotonic(), peer, message))
                elif isinstance(message, PiecesHeld) and message.is_question:
                    self.send([(peer, Unknown(message.data))])
        except StreamClosed:
            return
        except RemoteProtocolError as error:
            self._refuse(peer, error)

    async def _find(self, message: Message) -> "PieceExchange | None":
        exchange = self._open.get(message.data)
        if exchange is None and isinstance(message, PiecesHeld) and message.is_question:
            async with self._turn:  # disk checks for strangers run one at a time
                hashes = await self._known(message.data)
                if hashes is not None:
                    return self.open(message.data, hashes)
        return exchange

    def send(self, sends: Sends) -> None:
        """Queue messages."""
        for peer, message in sends:
            link = self._link(peer)
            if link is None or len(link.queue) >= QUEUE_MAX:
                self._lost(peer)
                continue
            if isinstance(message, PieceRequest) or (isinstance(message, PiecesHeld) and message.is_question):
                self._places.credit(link)  # this node itself wants something from the peer
            link.queue.append(message)
            link.more.set()

    def upload(self, exchange: "PieceExchange", due: UploadDue) -> None:
        """Queue a piece for a peer."""
        link = self._link(due.peer)
        if link is None:
            self._lost(due.peer)
            return
        link.uploads.append((exchange, due.number))
        link.more.set()

    def _link(self, peer: PeerId) -> "_Link | None":
        link = self._links.get(peer)
        if link is None:
            link, now = _Link(), self._seams.clock.monotonic()
            host = self._seams.network.host_of(peer)
            evicted = self._places.admit(now, link, peer, prefix_of(host) if host is not None else peer)
            if evicted is None:
                return None
            for each in evicted:
                each.scope.cancel()
            self._links[peer] = link
            self._start_task(self._keep_link, peer, link)
        return link

    async def _await_link(self, peer: PeerId) -> None:
        """Wait briefly for a link to a peer. Peers that read nothing make room for the link."""
        with trio.move_on_after(ROOM_SECONDS_MAX):
            while self._link(peer) is None:  # noqa: ASYNC110 - silence is found by looking
                await trio.sleep(ROOM_LOOK_SECONDS)

    async def _keep_link(self, peer: PeerId, link: "_Link") -> None:
        try:
            with contain("link of data"), link.scope:
                await self._drain(peer, link)
        finally:
            self._places.leave(link)
            if self._links.get(peer) is link:
                del self._links[peer]
            if link.queue or link.uploads or link.is_broken:
                self._lost(peer)

    async def _drain(self, peer: PeerId, link: "_Link") -> None:
        stream: Stream | None = None
        link.is_broken = True
        network, now = self._seams.network, self._seams.clock.monotonic
        open_stream = partial(network.open, peer, DATA_PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX)
        try:
            with trio.move_on_after(OPEN_SECONDS_MAX), link.silence.waiting(now):
                stream = await open_stream()
            if stream is None:
                return
            while True:
                while (item := link.take()) is not None:
                    if stream.has_better_path and now() >= link.moves_at:
                        link.moves_at = now() + MOVE_SECONDS
                        with trio.fail_after(SEND_SECONDS_MAX), link.silence.waiting(now):
                            stream = await move(stream, open_stream)
                    exchange, number = item if isinstance(item, tuple) else (None, 0)
                    message = item if not isinstance(item, tuple) else await item[0].read(number)
                    if message is not None:
                        with trio.fail_after(SEND_SECONDS_MAX), link.silence.waiting(now):
                            await stream.send(encode(message))
                    if exchange is not None:
                        size = len(message.body) if isinstance(message, Piece) else 0
                        self.uploaded_bytes += size
                        self._served(peer, size)
                        exchange.on_uploaded(peer, number, was_sent=message is not None)
                        self._places.credit(link)
                link.more = trio.Event()
                if link.queue or link.uploads:
                    continue
                with trio.move_on_after(IDLE_SECONDS) as idle:
                    link.is_spare = True
                    await link.more.wait()
                link.is_spare = False
                if idle.cancelled_caught and not link.queue and not link.uploads:
                    link.is_broken = False
                    return
        except (Unreachable, StreamClosed, trio.TooSlowError):
            return
        finally:
            if stream is not None:
                with trio.move_on_after(_CLOSE_SECONDS) as scope:
                    scope.shield = True
                    await stream.aclose()

    def _lost(self, peer: PeerId) -> None:
        for exchange in list(self._open.values()):
            exchange.act(exchange.core.lost(self._seams.clock.monotonic(), peer))

    # For exchanges

    def refuse(self, dropped: PeerDropped) -> None:
        """Record that a peer broke the protocol."""
        self._refuse(dropped.peer, RemoteProtocolError(dropped.reason))

    def start(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run a task concurrently with the node's other tasks."""
        self._start_task(task, *arguments)

    async def run_disk(self, function: Callable[[], object]) -> object:
        """Call a function that accesses the disk, in the executor."""
        return await self._seams.executor.run(function)

    @property
    def blobs(self) -> Blobs:
        """Return the storage of pieces."""
        return self._blobs


class PieceExchange:
    """The exchange of one data set: the core, and the tasks that wait for its pieces."""

    def __init__(self, owner: DataExchange, core: PieceSwarm, hashes: list[bytes], clock: Clock) -> None:
        self.core = core
        self.scope = trio.CancelScope()
        self.waiters = 0
        self._owner = owner
        self._hashes = hashes
        self._changed = trio.Event()
        self._clock = clock
        self._waker = Waker(clock, lambda: core.deadline)
        self._arrived_at = -inf
        self._failure: OSError | None = None

    def learn(self, hashes: Hashes) -> None:
        """Add the lists of further shards."""
        for number, name in enumerate(hashes):
            if name and not self._hashes[number]:
                self._hashes[number] = name
                if self._owner.blobs.has(name):
                    self.core.found(number)

    async def run(self) -> None:
        """Wake the core at its deadlines until this is closed."""
        with self.scope:
            await self._waker.run(self.core, self.act)

    def act(self, sends: Sends) -> None:
        """Carry out the core's events, and queue its messages."""
        events = self.core.events[:]
        self.core.events.clear()
        for event in events:
            match event:
                case PieceArrived():
                    self._owner.start(self._keep, event)
                case UploadDue():
                    self._owner.upload(self, event)
                case PeerDropped():
                    self._owner.refuse(event)
        self._owner.send(sends)
        self._waker.stir()

    async def _keep(self, arrived: PieceArrived) -> None:
        name, number = self._hashes[arrived.number], arrived.number
        try:
            is_right = await self._owner.run_disk(partial(self._owner.blobs.take, name, arrived.body))
        except OSError as error:
            self._failure = error
            self._tell()
            self.act(self.core.not_stored(self._clock.monotonic(), number))
            return
        if is_right:
            self._arrived_at = self._clock.monotonic()
            self._owner.downloaded_bytes += len(arrived.body)
            self._owner.came(self.core.data, arrived.sender, len(arrived.body))
        self.act(self.core.stored(self._clock.monotonic(), arrived.sender, number, is_right=bool(is_right)))
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def read(self, number: int) -> Piece | None:
        """Return a piece to send; None if it is missing or damaged."""
        body = await self._owner.run_disk(partial(self._owner.blobs.get, self._hashes[number]))
        return Piece(self.core.data, number, body) if isinstance(body, bytes) else None

    def on_uploaded(self, peer: PeerId, number: int, *, was_sent: bool) -> None:
        """Record that a queued piece was sent, or is missing here."""
        self.act(self.core.uploaded(self._clock.monotonic(), peer, number, was_sent=was_sent))

    def want(self, numbers: Sequence[int], urgency: int) -> None:
        """Fetch these pieces in the background."""
        self.act(self.core.want(self._clock.monotonic(), numbers, urgency))

    def meet(self, peers: Sequence[PeerId]) -> None:
        """Add peers that may have the data, or may want it."""
        self.act(self.core.meet(self._clock.monotonic(), peers))

    def recheck(self, numbers: Sequence[int]) -> None:
        """Check again whether pieces that seemed to be here are missing."""
        self.core.forget(
            [number for number in numbers if not self._owner.blobs.has(self._hashes[number] or b"")]
        )

    async def wait(
        self, numbers: Sequence[int], holders: Callable[[], Sequence[PeerId]], urgency: int
    ) -> None:
        """Wait for these pieces.

        Raises:
            Unreachable: no peer has one of them, or none arrives.
            OSError: there is no room.
        """
        self.waiters += 1
        try:
            self.want(numbers, urgency)
            began = sourceless_since = self._clock.monotonic()
            while self.core.lacks(numbers):
                self._failure = None
                self.meet(holders())
                changed = self._changed
                with trio.move_on_after(MEET_SECONDS):
                    await changed.wait()
                if self._failure is not None:
                    raise self._failure
                now = self._clock.monotonic()
                if not self.core.is_sourceless(numbers):
                    sourceless_since = now
                if now - sourceless_since > NO_SOURCE_SECONDS:
                    raise Unreachable("unknown", "no reachable peer has all of the run's data")
                if now - max(began, self._arrived_at) > STILL_SECONDS_MAX:
                    raise Unreachable(
                        "timeout", f"none of the run's data arrived within {STILL_SECONDS_MAX:.0f} s"
                    )
        finally:
            self.waiters -= 1


class _Link:
    """The queue for one peer. Small messages are sent before pieces."""

    def __init__(self) -> None:
        self.queue: deque[Message] = deque()
        self.uploads: deque[tuple[PieceExchange, int]] = deque()
        self.more = trio.Event()
        self.is_broken = False
        self.moves_at = -inf
        self.scope = trio.CancelScope()
        self.silence = Silence()
        self.is_spare = False
        """Whether there is nothing to send now."""

    @property
    def silent_since(self) -> float:
        return -inf if self.is_spare else self.silence.since

    def take(self) -> "Message | tuple[PieceExchange, int] | None":
        """Return the next item."""
        if self.queue:
            return self.queue.popleft()
        return self.uploads.popleft() if self.uploads else None
