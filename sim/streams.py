"""Streams of the simulated network: in memory, ordered, with latency, bandwidth and back-pressure.

Loss is not modelled: a stream is TCP below, which hides it. A side that closes is noticed by the
other one trip later, after everything that was sent before.
"""

import math
from collections import deque

import trio

from crypto.errors import LocalProtocolError
from crypto.identity import PeerId
from crypto.noise import Data
from node.errors import StreamClosed
from node.transport.records import MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX
from sim.network.instants import after, instant, nearest_instant
from sim.network.links import Links

WINDOW_BYTES_MAX = 4 * 1024 * 1024
"""How much may be on its way or unread in one direction before `send` waits, as a kernel's buffers."""


class Alarm:
    """One task sleeps on it; others can move the end of its sleep forward."""

    def __init__(self) -> None:
        self._scope: trio.CancelScope | None = None
        self._rung = False

    async def sleep_until(self, until: float) -> None:
        """Sleep to the instant `until`, or until rung. Always a checkpoint."""
        if self._scope is not None:
            raise LocalProtocolError("two tasks wait for the same thing")
        if self._rung:
            until = -math.inf
        with trio.CancelScope(deadline=instant(until)) as self._scope:
            try:
                await trio.sleep_forever()
            finally:
                self._scope = None
                self._rung = False

    def no_later_than(self, until: float) -> None:
        """Shorten the sleep, if somebody sleeps."""
        if self._scope is not None and until < self._scope.deadline:
            self._scope.deadline = until

    def ring(self) -> None:
        """End the sleep now; if nobody sleeps, the next one ends at once."""
        self._rung = True
        if self._scope is not None:
            self._scope.cancel()


class _Pipe:
    """One direction of a stream: messages with the instants they are due."""

    def __init__(self, latency_seconds: float, bytes_per_second: float) -> None:
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second
        self._queue: deque[tuple[float, bytes, bytes]] = deque()
        self._queued_bytes = 0
        self._free_at = 0.0
        self._ends_at = math.inf
        self._broken_at = math.inf
        self._reader = Alarm()
        self._writers = trio.lowlevel.ParkingLot()

    async def put(self, message: bytes, payload: bytes) -> None:
        """The writer sends; waits while the window is full."""
        await trio.lowlevel.checkpoint()
        while self._queued_bytes >= WINDOW_BYTES_MAX and self._ends_at == math.inf:
            await self._writers.park()
        now = _now()
        if self._ends_at < math.inf or self._broken_at <= now:
            raise StreamClosed("the stream is closed")
        if self._broken_at < math.inf:
            return  # on its way to a reader that has gone, which the writer cannot know yet
        # The link carries one message after the other, so due times never go back.
        size_bytes = len(message) + len(payload)
        self._free_at = max(self._free_at, now) + size_bytes / self._bytes_per_second
        due = after(instant(self._free_at), self._latency_seconds)
        self._queue.append((due, message, payload))
        self._queued_bytes += size_bytes
        self._reader.no_later_than(due)

    async def get(self) -> tuple[bytes, bytes]:
        """The reader takes the next message and its payload when they are due."""
        while True:
            # Always a checkpoint, also when a message waits already.
            await self._reader.sleep_until(self._queue[0][0] if self._queue else self._ends_at)
            now = _now()
            if self._broken_at < math.inf or (not self._queue and self._ends_at <= now):
                raise StreamClosed("the stream is closed")
            if self._queue and self._queue[0][0] <= now:
                _, message, payload = self._queue.popleft()
                self._queued_bytes -= len(message) + len(payload)
                self._writers.unpark_all()
                return message, payload

    def end(self) -> None:
        """The writer closes: the reader finds out after the last message."""
        if self._ends_at == math.inf:
            self._ends_at = after(instant(max(self._free_at, _now())), self._latency_seconds)
            self._reader.no_later_than(self._ends_at)
            self._writers.unpark_all()

    def drop(self) -> None:
        """The reader closes: what is under way is lost; the writer finds out one trip later."""
        if self._broken_at == math.inf:
            self._broken_at = after(_now(), self._latency_seconds)
            self._queue.clear()
            self._queued_bytes = 0
            self._reader.ring()
            self._writers.unpark_all()


class SimStream:
    """`node.seams.Stream` of the simulation: one end of it."""

    def __init__(self, peer: PeerId, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._peer = peer
        self._incoming = incoming
        self._outgoing = outgoing

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def send(self, message: Data, *payload: Data) -> None:
        whole = b"".join(payload)
        if len(message) > MESSAGE_BYTES_MAX or len(whole) > PAYLOAD_BYTES_MAX:
            raise LocalProtocolError(
                f"a message of {len(message)} bytes and a payload of {len(whole)}, at most"
                f" {MESSAGE_BYTES_MAX} and {PAYLOAD_BYTES_MAX} allowed"
            )
        await self._outgoing.put(bytes(message), whole)

    async def receive(self) -> bytes:
        message, _ = await self.receive_with_payload(0)
        return message

    async def receive_with_payload(self, payload_bytes_max: int) -> tuple[bytes, memoryview]:
        message, payload = await self._incoming.get()
        if len(payload) > payload_bytes_max:
            self.close()
            raise StreamClosed(f"a payload of {len(payload)} bytes, at most {payload_bytes_max} allowed")
        return message, memoryview(payload)

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """As `aclose`, where nothing can be awaited: a peer that dies."""
        self._outgoing.end()
        self._incoming.drop()


def stream_pair(one: PeerId, other: PeerId, links: Links) -> tuple[SimStream, SimStream]:
    """Both ends of a new stream: the one `one` holds, and the one `other` holds."""
    latency_seconds = links.latency_seconds(one, other)
    bytes_per_second = links.model.bytes_per_second
    there = _Pipe(latency_seconds, bytes_per_second)
    back = _Pipe(latency_seconds, bytes_per_second)
    return SimStream(other, back, there), SimStream(one, there, back)


def _now() -> float:
    return nearest_instant(trio.current_time())
