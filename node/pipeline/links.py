"""Ordered message links to peers, reliable while connected: one outgoing stream each, opened when needed.

A broken link is reopened while its peer is wanted. In that case `on_reconnected` is called, and the protocol
above repeats messages that may have been lost (all are idempotent). Messages to this node itself pass through
the same queue without a socket, so that there is only one code path.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf

import trio

from crypto.identity import PeerId
from crypto.noise import Data
from node.containment import contain
from node.errors import NotListening, StreamClosed, Unreachable
from node.protocols.moving import MOVE_SECONDS, move
from node.seams import Clock, Network, Stream

QUEUE_BYTES_MAX = 8 * 1024**3
"""Maximum bytes waiting for one peer. A step's frames (64 of 48 MiB) and a reduction's parts (at most 4 GiB)
fit; a peer with more waiting is considered stuck."""
RATE_BYTES = 8 << 20
"""A link's rate is measured over at least this many of its latest bytes, and at most twice as many."""
RETRY_SECONDS_MIN = 0.05
RETRY_SECONDS_MAX = 2.0


@dataclass(frozen=True)
class FormerVersion:
    """The previous version of a protocol, for peers that know no newer version.

    `translate` converts a message into that version's form; `found` is called for each peer that speaks that
    version.
    """

    protocol: str
    translate: Callable[[bytes], bytes]
    found: Callable[[PeerId], None]


class Links:
    """All outgoing links of one protocol. `run` owns their tasks.

    `deliver(peer, message)`, or `deliver(peer, message, payload)` with a payload, receives this node's
    messages to itself, in the form in which a stream's receiver gets them.
    """

    def __init__(
        self,
        network: Network,
        protocol: str,
        clock: Clock,
        *,
        deliver: Callable[..., Awaitable[None]],
        on_reconnected: Callable[[PeerId], None],
        on_stuck: Callable[[PeerId], None],
        on_broken: Callable[[PeerId], None] | None = None,
        on_unopened: Callable[[PeerId], None] | None = None,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        former: FormerVersion | None = None,
    ) -> None:
        """`on_stuck` is called for a peer with too many bytes waiting. `on_broken` is called for a peer whose
        stream has ended or could not be reopened, and `on_unopened` for a peer to which no stream could be
        opened yet."""
        self._network = network
        self._clock = clock
        self._deliver = deliver
        self._on_reconnected = on_reconnected
        self._on_stuck = on_stuck
        self._on_broken = on_broken
        self._on_unopened = on_unopened
        self._queue_bytes_max = queue_bytes_max
        self._former = former
        self._names = (protocol,) if former is None else (protocol, former.protocol)
        self._links: dict[PeerId, _Link] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the links alive until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def send(self, peer: PeerId, message: bytes, *payload: Data) -> None:
        """Queue a message, optionally with a payload in any number of pieces; they are sent in order.

        Nothing is copied, so the payload's memory must not change from now on.
        """
        link = self._links.get(peer)
        if link is None:
            assert self._nursery is not None, "Links.run was not started"
            link = self._links[peer] = _Link(self._clock)
            self._nursery.start_soon(self._serve, peer, link)
        # As bytes, because the length of a tensor's view counts elements.
        queued: tuple[Data, ...] = (message, *[memoryview(piece).cast("B") for piece in payload])
        size_bytes = sum(map(len, queued))
        if link.waiting_bytes + size_bytes > self._queue_bytes_max:
            # Never drop a single message silently, because its receiver would wait for it. A broken link is
            # reopened.
            link.break_off()
            self._on_stuck(peer)
            return
        link.queue.append(queued)
        link.waiting_bytes += size_bytes
        link.more.set()

    def rate(self, peer: PeerId) -> float | None:
        """Return the recent bytes per second of the link to a peer; None if too little data was sent.

        The kernel's buffers absorb a burst immediately, so only much longer messages count.
        """
        if peer == self._network.peer:
            return inf
        link = self._links.get(peer)
        if link is None or link.bytes_measured < RATE_BYTES or link.seconds_measured <= 0:
            return None
        return link.bytes_measured / link.seconds_measured

    def rates(self) -> Iterator[tuple[PeerId, float, bool]]:
        """Yield the recent rates of links: peer, bytes per second, and whether the link was the bottleneck.
        If it was not, its rate may be higher or lower."""
        for peer, link in self._links.items():
            rate = self.rate(peer)
            if rate is not None and rate < inf:
                yield peer, rate, link.seconds_measured > link.idle_seconds

    def is_closed(self, peer: PeerId, *, news: bool = False) -> bool:
        """Return whether a stream to the peer ended and could not be reopened, and the peer's host has since
        reported that nothing listens there. `news`: the host reports it now."""
        link = self._links.get(peer)
        if link is None:
            return False
        link.is_closed |= news
        return link.is_closed and link.has_failed

    def forget(self, peer: PeerId) -> None:
        """Drop a peer's queue and close its stream.

        Do not call this for a peer that is only believed dead: it may be wrongly accused, and wait for queued
        messages.
        """
        link = self._links.pop(peer, None)
        if link is not None:
            link.scope.cancel()

    async def _serve(self, peer: PeerId, link: "_Link") -> None:
        with link.scope:
            if peer == self._network.peer:
                await link.drain(partial(self._deliver_here, peer))
            while True:
                # A failure caused by our own bug is treated like a broken stream.
                with contain("link") as part:
                    await self._keep_open(peer, link)
                if part.error is not None:
                    await trio.sleep(RETRY_SECONDS_MAX)

    async def _keep_open(self, peer: PeerId, link: "_Link") -> None:
        pause = RETRY_SECONDS_MIN
        while True:
            try:
                stream = await self._network.open(peer, *self._names)
            except (Unreachable, StreamClosed) as error:
                link.has_failed = link.has_lost
                link.is_closed |= link.has_lost and isinstance(error, NotListening)
                if link.has_lost:
                    self._tell_broken(peer, link)
                elif self._on_unopened is not None:
                    self._on_unopened(peer)
                await trio.sleep(pause)
                pause = min(RETRY_SECONDS_MAX, pause * 2)
                continue
            pause = RETRY_SECONDS_MIN
            try:
                if link.has_lost:
                    self._on_reconnected(peer)
                link.has_lost, link.has_failed, link.is_closed = True, False, False
                while await _drain_until_closed(link, stream, self._sending_on(peer, stream)):
                    stream = await self._move(peer, link, stream)
                self._tell_broken(peer, link)
                await trio.sleep(RETRY_SECONDS_MIN)
            finally:
                with trio.move_on_after(1) as scope:
                    scope.shield = True
                    await stream.aclose()

    async def _move(self, peer: PeerId, link: "_Link", stream: Stream) -> Stream:
        """Return a stream on a better path, if one can be opened, after everything sent was read. If a stream
        breaks meanwhile, it is returned closed, and reopened like any other."""
        link.moves_at = self._clock.monotonic() + MOVE_SECONDS
        link.stream_scope = trio.CancelScope()
        with link.stream_scope, suppress(StreamClosed):
            return await move(stream, partial(self._network.open, peer, *self._names))
        await stream.aclose()
        return stream

    def _sending_on(self, peer: PeerId, stream: Stream) -> Callable[..., Awaitable[None]]:
        """Return the sender for a stream, in the protocol version with which the stream was opened."""
        former = self._former
        if former is None or stream.protocol != former.protocol:
            return stream.send
        former.found(peer)
        translate = former.translate

        async def send(message: bytes, *payload: Data) -> None:
            await stream.send(translate(message), *payload)

        return send

    def _tell_broken(self, peer: PeerId, link: "_Link") -> None:
        if link.has_lost and self._on_broken is not None:
            self._on_broken(peer)

    async def _deliver_here(self, peer: PeerId, message: Data, *payload: Data) -> None:
        with contain("a message to this node itself"):
            if payload:
                whole = payload[0] if len(payload) == 1 else b"".join(payload)
                await self._deliver(peer, message, memoryview(whole).toreadonly())
            else:
                await self._deliver(peer, message)


async def _drain_until_closed(link: "_Link", stream: Stream, send: Callable[..., Awaitable[None]]) -> bool:
    """Send until the stream breaks or should move to a better path. The other side never answers on it, so a
    waiting `receive` detects a break even while there is nothing to send. Return whether the stream is still
    open, and the rest should be sent on another one."""

    def is_to_move() -> bool:
        return stream.has_better_path and link.clock.monotonic() >= link.moves_at

    stands = False
    async with trio.open_nursery() as nursery:
        link.stream_scope = nursery.cancel_scope

        async def watch() -> None:
            with suppress(StreamClosed):
                await stream.receive()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        with suppress(StreamClosed):
            await link.drain(send, is_to_move)
            stands = True
        nursery.cancel_scope.cancel()
    return stands


class _Link:
    """The queue and state of the link to one peer."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.queue: deque[tuple[Data, ...]] = deque()
        self.waiting_bytes = 0
        self.more = trio.Event()
        self.scope = trio.CancelScope()
        self.stream_scope = trio.CancelScope()
        self.moves_at = -inf
        self.has_lost = False
        self.has_failed = self.is_closed = False
        self.bytes_measured = 0.0
        self.seconds_measured = 0.0
        self.idle_seconds = 0.0

    def break_off(self) -> None:
        """Drop the queue and the stream; after reopening, lost messages are sent again."""
        self.queue.clear()
        self.waiting_bytes = 0
        self.has_lost = True
        self.stream_scope.cancel()

    def measured(self, size_bytes: int, seconds: float) -> None:
        """Add `size_bytes` sent in `seconds` to the measured rate; data was waiting during all that time."""
        self.bytes_measured += size_bytes
        self.seconds_measured += seconds
        if self.bytes_measured > 2 * RATE_BYTES:
            self.bytes_measured /= 2
            self.seconds_measured /= 2
            self.idle_seconds /= 2

    async def drain(
        self, send: Callable[..., Awaitable[None]], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Send the queue, until it `is_over`; a message leaves the queue once it has been sent."""
        while True:
            while self.queue:
                if is_over():
                    return
                queued = self.queue[0]
                began = self.clock.monotonic()
                await send(*queued)
                self.measured(sum(map(len, queued)), self.clock.monotonic() - began)
                if self.queue and self.queue[0] is queued:
                    self.waiting_bytes -= sum(map(len, self.queue.popleft()))
                del queued  # an idle link must not hold the last payload's memory
            self.more = trio.Event()
            if not self.queue:
                began = self.clock.monotonic()
                await self.more.wait()
                self.idle_seconds += self.clock.monotonic() - began
