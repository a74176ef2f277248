"""Drives one averaging attempt, a `gossip.averaging.attempt.Attempt`, on real or simulated streams.

There is one stream per ordered pair of members, opened by the sender. Each message is a struct, and the data
of a chunk is its payload, so tensors are not copied on the way. The core encodes, hashes and reduces chunks,
so calls into it run in the executor, one at a time. Calls that arrive meanwhile are batched, because
switching to a thread costs as much as a small message.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.averaging.attempt import Attempt
from gossip.averaging.messages import CHUNK_BYTES_MAX, PROTOCOL, AttemptMessage, Chunk, Opening
from gossip.averaging.outcome import Averaged, NotAveraged, Reason
from node.errors import StreamClosed, StreamEnded, Unreachable
from node.seams import Clock, Executor, Network, Stream
from node.waker import Waker

MESSAGE_BYTES_MAX = 64 * 1024
"""Maximum message size without a chunk's data, which is a payload. A have-set of a full group takes less than
4 KiB."""
QUEUE_MAX = 4_096
"""Maximum number of small messages that wait for one stream; if more wait, the peer counts as lost."""

CALLS_MAX = 16
"""Maximum number of calls into the core in one batch. Their outgoing messages wait for the last call, for
some milliseconds."""
LAST_WORDS_SECONDS = 1.0
"""How long messages that are queued when an attempt is closed may still be sent."""
IDLE_SECONDS = 0.5
"""Idle time after which a stream is closed once there is a result."""

Sends = list[tuple[PeerId, AttemptMessage]]
NO_DATA = memoryview(b"")


class _Call:
    """A waiting call into the core. `error` is what it raised, once it is over."""

    def __init__(self, function: Callable[[], Sends]) -> None:
        self.function = function
        self.over = trio.Event()
        self.error: Exception | None = None


def _make(calls: list[_Call]) -> Sends:
    """Make the calls in order. If a call raises, its caller gets the exception, and the other calls are still
    made."""
    sends: Sends = []
    for call in calls:
        try:
            sends += call.function()
        except Exception as error:
            call.error = error
    return sends


class Runner:
    """The driver of one attempt until it is closed. `result` waits for its outcome."""

    def __init__(
        self,
        attempt: Attempt,
        network: Network,
        clock: Clock,
        executor: Executor,
        refuse: Callable[[PeerId, RemoteProtocolError], None],
    ) -> None:
        self.attempt = attempt
        self._network = network
        self._clock = clock
        self._executor = executor
        self._refuse = refuse
        self._calls: deque[_Call] = deque()
        self._called = trio.Event()
        self._has_ended = False
        self._queues: dict[PeerId, deque[AttemptMessage]] = {
            peer: deque() for peer in attempt.group.peers if peer != network.peer
        }
        self._changed: dict[PeerId, trio.Event] = {peer: trio.Event() for peer in self._queues}
        self._reading: dict[PeerId, trio.Lock] = {peer: trio.Lock() for peer in self._queues}
        self._waker = Waker(clock, lambda: attempt.deadline)
        self._finished = trio.Event()
        self._closed = trio.Event()

    async def run(self) -> None:
        """Drive the attempt until it is closed, which is some time after it has a result, or until
        cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._compute)
                await self._call(self.attempt.start)
                nursery.start_soon(self._wake)
                async with trio.open_nursery() as senders:
                    for peer in self._queues:
                        senders.start_soon(self._send_to, peer)
                    await self._closed.wait()
                    # The last message announces the withdrawal; without it the other members would wait for
                    # this one.
                    senders.cancel_scope.deadline = trio.current_time() + LAST_WORDS_SECONDS
                nursery.cancel_scope.cancel()
        finally:
            self._has_ended = True
            for call in self._calls:
                call.over.set()
            self._finished.set()

    async def result(self) -> Averaged | NotAveraged:
        """Return the outcome, once there is one. `run` must be running."""
        await self._finished.wait()
        return self.attempt.result or NotAveraged(Reason.CANCELLED)

    async def receive_from(self, stream: Stream) -> None:
        """Receive a member's messages on its stream, whose opening was already read. Only one stream of a
        member is read at a time, so at most one of its chunks waits here for the attempt."""
        if stream.peer not in self._reading:
            raise StreamClosed("not a member of this attempt")
        try:
            await self._call(self.attempt.opened, stream.peer)
            async with self._reading[stream.peer]:
                while True:
                    message = read_message(*await stream.receive_with_payload(CHUNK_BYTES_MAX))
                    await self._take(stream.peer, message)
        except StreamEnded:
            return  # the member has nothing more to send on this stream
        except StreamClosed:
            await self.lose(stream.peer)

    async def lose(self, peer: PeerId) -> None:
        """Handle a peer that membership reports as dead, or whose stream has broken."""
        if not self._closed.is_set() and peer in self._queues:
            await self._call(self.attempt.lost, peer)

    async def cancel(self) -> None:
        """Withdraw from the attempt."""
        if not self._closed.is_set():
            await self._call(self.attempt.cancel)

    async def _take(self, sender: PeerId, message: AttemptMessage) -> None:
        try:
            await self._call(self.attempt.receive, sender, message)
        except RemoteProtocolError as error:
            self._refuse(sender, error)

    async def _call(
        self, function: Callable[..., Sends], *arguments: object, not_before: float = 0.0
    ) -> None:
        """Queue a call into the core and send the messages it returns; do nothing once the attempt is closed.

        Raises the core's exceptions.
        """
        if self._has_ended:
            return
        call = _Call(partial(function, max(self._clock.monotonic(), not_before), *arguments))
        self._calls.append(call)
        self._called.set()
        await call.over.wait()
        if call.error is not None:
            raise call.error

    async def _compute(self) -> None:
        """Make the waiting calls in order, in batches."""
        while True:
            self._called = trio.Event()
            if not self._calls:
                await self._called.wait()
            calls = [self._calls.popleft() for _ in range(min(CALLS_MAX, len(self._calls)))]
            try:
                sends = await self._executor.run(partial(_make, calls))
            finally:
                for call in calls:
                    call.over.set()
            self._pass_on(sends)

    def _pass_on(self, sends: Sends) -> None:
        for peer, message in sends:
            queue = self._queues[peer]
            if len(queue) < QUEUE_MAX:
                queue.append(message)
        ready = set(self.attempt.ready)
        for peer in self._queues:
            if self._queues[peer] or peer in ready:
                self._changed[peer].set()
        if self.attempt.result is not None and not self._finished.is_set():
            self._finished.set()
            for event in self._changed.values():
                event.set()
        if self.attempt.is_closed:
            self._closed.set()
            for event in self._changed.values():
                event.set()
        self._waker.hasten()

    async def _wake(self) -> None:
        while True:
            now = await self._waker.wait()
            if now is not None:
                await self._call(self.attempt.wake, not_before=now)

    async def _send_to(self, peer: PeerId) -> None:
        """Send waiting messages on one stream. Once there is a result, an idle stream is closed, and a new
        one is opened if the peer asks for something later."""
        has_opened = False
        while not self._closed.is_set() or self._queues[peer]:
            if has_opened:  # the first stream is opened immediately, which shows that this member is present
                await self._wait_for_work(peer, inf)
            if self._closed.is_set() and not self._queues[peer]:
                return
            has_opened = True
            try:
                stream = await self._network.open(peer, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX)
            except Unreachable:
                await self.lose(peer)
                return
            try:
                await stream.send(encode(Opening(self.attempt.id)))
                while await self._send_one(stream, peer):
                    pass
            except StreamClosed:
                await self.lose(peer)
                return
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await stream.aclose()

    async def _send_one(self, stream: Stream, peer: PeerId) -> bool:
        """Send a message or a chunk, or wait for one; return False once the stream is no longer needed."""
        queue = self._queues[peer]
        if queue:
            await _send(stream, queue.popleft())
        elif peer in self.attempt.ready:
            await self._call(self.attempt.pull, peer)
        elif self._closed.is_set():
            return False
        elif self.attempt.result is None:
            await self._wait_for_work(peer, inf)
        else:
            return await self._wait_for_work(peer, IDLE_SECONDS)
        return True

    async def _wait_for_work(self, peer: PeerId, seconds: float) -> bool:
        """Wait until there may be something to send, or a result; return False after the time limit."""
        changed = self._changed[peer] = trio.Event()
        if self._queues[peer] or peer in self.attempt.ready or self._closed.is_set():
            return True
        with trio.move_on_after(seconds):
            await changed.wait()
        return changed.is_set()


async def _send(stream: Stream, message: AttemptMessage) -> None:
    if isinstance(message, Chunk):
        await stream.send(encode(msgspec.structs.replace(message, data=NO_DATA)), message.data)
    else:
        await stream.send(encode(message))


def read_message(data: bytes, payload: memoryview) -> AttemptMessage:
    """Return a received message; the data of a chunk comes from the payload. Raises RemoteProtocolError."""
    message: AttemptMessage = decode(data, AttemptMessage, bytes_max=MESSAGE_BYTES_MAX)
    if isinstance(message, Chunk):
        if message.data:
            raise RemoteProtocolError("a chunk has data outside its payload")
        return msgspec.structs.replace(message, data=payload)
    if payload:
        raise RemoteProtocolError("a message that is not a chunk has a payload")
    return message
