"""Streams of the simulated network: in memory, ordered, with latency, bandwidth and back-pressure.

A stream stands for TCP, which hides loss: it loses nothing and has no jitter. The remote side notices a
close, or an end of sending, one trip later, after everything that was sent before.

If the access of either peer is limited, a message travels as segments through the same queues as datagrams
(`sim.network.queues`), and all streams of a peer share these queues. A stream keeps in flight only enough to
fill its path, plus two segments, like a congestion control that has found its rate. Where a datagram would be
lost, a stream waits, and it keeps queues short. Over a split a stream stalls: segments in flight arrive,
later ones wait.

The kernel of a frozen peer continues: it sends what it was given and keeps what arrives, up to the window.
The peer itself sends, reads and closes nothing before the thaw.
"""

import math
from collections import Counter, deque
from collections.abc import Callable

import trio

from crypto.contact import Address
from crypto.errors import LocalProtocolError
from crypto.identity import PeerId, short_peer
from crypto.noise import Data
from crypto.registers import Register, Silence
from crypto.token_buckets import prefix_of
from node.errors import StreamClosed, StreamEnded, Unreachable
from node.locks import Turn
from node.transport.records import MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX
from sim.executor import stand_still
from sim.network.instants import TICKS_PER_SECOND, after, nearest_instant
from sim.network.pace import PeerPace
from sim.network.places import Place
from sim.network.queues import Parcel
from sim.network.sizes import STREAM_OVERHEAD
from sim.wakeup import SimAlarm

WINDOW_BYTES_MAX = 4 * 1024 * 1024
"""Maximum number of bytes in flight or unread in one direction; beyond it `send` waits, as with a kernel's
buffers."""
SEGMENT_BYTES_MIN = 1_220
"""Minimum size of a segment: one packet's worth of a stream."""
SEGMENT_SECONDS = 0.01
"""Duration of a segment on the slower access: short compared with a queue, but long enough that segments are
few."""


class Line:
    """The path of one direction of a stream, between two places with their paces. `trips` are the times to
    the receiver and back. `carry` sends a parcel, and is None if bandwidth is unlimited; `later` runs an
    action at an instant."""

    def __init__(
        self,
        places: tuple[Place, Place],
        paces: tuple[PeerPace, PeerPace],
        trips: tuple[int, int],
        protocol: str,
        carry: Callable[[Parcel], None] | None,
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.sender, self.receiver = places
        self.sender_pace, self.receiver_pace = paces
        self.trip, self.trip_back = trips
        self.protocol = protocol
        self.carry = carry
        self.later = later
        up = self.sender.up
        queues = (up.fifo if up is not None else None, self.receiver.down)
        rate = min((queue.bytes_per_second for queue in queues if queue is not None), default=math.inf)
        # Without a bandwidth limit, a message is one segment and any number may be in flight.
        self.segment_bytes = self.segments_max = math.inf
        if rate < math.inf:
            self.segment_bytes = max(SEGMENT_BYTES_MIN, round(rate * SEGMENT_SECONDS))
            path_bytes = rate * sum(trips) / TICKS_PER_SECOND
            self.segments_max = 2 + math.ceil(path_bytes / self.segment_bytes)


_Message = tuple[bytes, bytes]


class _Pipe:
    """One direction of a stream. `_outbox` holds messages that wait to be transmitted, and None at the end;
    `_queue` holds those in flight or unread, with the instants at which they are due."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._outbox: deque[_Message | None] = deque()
        self._left_bytes = 0.0
        self._segments = 0
        self._queue: deque[tuple[float, bytes, bytes]] = deque()
        self._queued_bytes = 0
        self._is_ended = self._is_dropped = self._is_stalled = False
        self._is_cut = self._is_leaving = False
        self._why = ""
        self._ends_at = math.inf
        self._broken_at = math.inf
        self._reader = SimAlarm()
        self._writers = trio.lowlevel.ParkingLot()

    async def put(self, message: bytes, payload: bytes) -> None:
        """Send; wait while the window is full or the writer's peer is frozen."""
        await trio.lowlevel.checkpoint()
        await stand_still(self._line.sender_pace)
        while self._queued_bytes >= WINDOW_BYTES_MAX and not self._is_ended and not self._is_dropped:
            await self._writers.park()
        if self._is_ended or self.is_broken:
            raise StreamClosed("this side sends no more" if self._is_ended else "the other side closed it")
        if self._is_dropped:
            return  # in flight to a reader that has gone, which the writer cannot know yet
        self._queued_bytes += len(message) + len(payload)
        self._outbox.append((message, payload))
        self._flow()

    async def get(self) -> tuple[bytes, bytes]:
        """Return the next message and its payload when they are due."""
        pace = self._line.receiver_pace
        while True:
            due = self._queue[0][0] if self._queue else self._ends_at
            # Always a checkpoint, even if a message is already waiting.
            is_over = self._is_dropped or self._is_leaving
            await self._reader.sleep_until(max(-math.inf if is_over else due, pace.still_until))
            now = _now()
            if pace.still_until > now:
                continue
            if self._is_dropped or self._is_leaving:
                raise StreamClosed("this side closed it" if self._is_dropped else "this node is leaving")
            if not self._queue and self._ends_at <= now:
                raise StreamClosed("the connection broke") if self._is_cut else StreamEnded(self._why)
            if self._queue and self._queue[0][0] <= now:
                _, message, payload = self._queue.popleft()
                self._queued_bytes -= len(message) + len(payload)
                self._writers.unpark_all()
                return message, payload

    @property
    def is_broken(self) -> bool:
        """Return whether the writer can already know that the reader has closed."""
        return self._broken_at <= _now()

    def end(self, why: str, *, is_cut: bool = False) -> None:
        """End sending. After the last message the reader learns `why`, and whether the stream was cut."""
        self._why, self._is_cut = why, self._is_cut or is_cut
        if not self._is_ended:
            self._is_ended = True
            self._writers.unpark_all()
            self._outbox.append(None)
            self._flow()

    def drop(self) -> None:
        """Close the reader's end. Messages in flight are lost; the writer finds out one trip later."""
        if not self._is_dropped:
            self._is_dropped = True
            self._outbox.clear()
            self._queue.clear()
            self._queued_bytes = 0
            self._reader.ring()
            self._writers.unpark_all()
            self._give_notice()

    def leave(self) -> None:
        """Stop reading, without closing."""
        self._is_leaving = True
        self._reader.ring()

    def stall(self) -> None:
        """Hold back all further messages, in both directions."""
        self._is_stalled = True

    def resume(self) -> None:
        """Send the messages that waited."""
        self._is_stalled = False
        if self._is_dropped:
            self._give_notice()
        self._flow()

    def _give_notice(self) -> None:
        if not self._is_stalled and self._broken_at == math.inf:
            begin = max(_now(), self._line.receiver_pace.still_until)
            self._broken_at = after(begin, self._line.trip_back / TICKS_PER_SECOND)

    def _flow(self) -> None:
        """Transmit what the window allows."""
        line = self._line
        while self._outbox and not self._is_stalled and self._segments < line.segments_max:
            item = self._outbox[0]
            if item is None and line.sender_pace.still_until > _now():
                line.later(line.sender_pace.still_until, self._flow)
                return
            if line.carry is None:
                self._outbox.popleft()
                self._expect((round(_now() * TICKS_PER_SECOND) + line.trip) / TICKS_PER_SECOND, item)
                continue
            # An end is a segment without bytes.
            whole = 1 if item is None else max(1, len(item[0]) + len(item[1]))
            left_bytes = self._left_bytes or whole
            segment_bytes = min(left_bytes, line.segment_bytes)
            self._left_bytes = left_bytes - segment_bytes
            if not self._left_bytes:
                self._outbox.popleft()
            self._segments += 1
            line.carry(
                Parcel(
                    line.sender.peer,
                    line.protocol,
                    line.receiver.down,
                    math.ceil(segment_bytes * STREAM_OVERHEAD),
                    (line.trip,),
                    self._landed,
                    (not self._left_bytes, item),
                    waits=True,
                )
            )

    def _landed(self, due: float, parcel: Parcel) -> None:
        is_last, item = parcel.item
        if is_last:
            self._expect(due, item)
        self._line.later(after(due, self._line.trip_back / TICKS_PER_SECOND), self._acknowledged)

    def _acknowledged(self) -> None:
        self._segments -= 1
        self._flow()

    def _expect(self, due: float, item: _Message | None) -> None:
        if item is None:
            self._ends_at = due
        elif not self._is_dropped:
            self._queue.append((due, *item))
        self._reader.no_later_than(due)


class SimStream:
    """The `node.seams.Stream` of the simulation: one end. `count` is called with the traffic that each
    message adds to its peer."""

    def __init__(
        self, peer: PeerId, protocol: str, incoming: _Pipe, outgoing: _Pipe, count: Callable[[int], None]
    ) -> None:
        self._peer = peer
        self._protocol = protocol
        self._incoming = incoming
        self._outgoing = outgoing
        self._count = count
        self.source: Address | None = None
        self.has_better_path = False
        self._receiving = Turn()
        self._is_closed = False
        self.message_bytes_max = MESSAGE_BYTES_MAX
        """Maximum length of a message accepted at this end."""
        self.offended: Callable[[], None] = lambda: None
        """Called if the remote side violates the protocol."""
        self.is_stalled = False
        self.stalls = 0
        self._silence = Silence()

    @property
    def silent_since(self) -> float:
        """Return the time since which the remote side has sent none of the data it owes; see
        `crypto.registers.PlaceHolder`."""
        return self._silence.since

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def protocol(self) -> str:
        return self._protocol

    async def send(self, message: Data, *payload: Data) -> None:
        whole = b"".join(payload)
        if len(message) > MESSAGE_BYTES_MAX or len(whole) > PAYLOAD_BYTES_MAX:
            raise LocalProtocolError(
                f"a message of {len(message)} bytes and a payload of {len(whole)}, at most"
                f" {MESSAGE_BYTES_MAX} and {PAYLOAD_BYTES_MAX} allowed"
            )
        self._check_open()
        with self._silence.waiting(_now):
            await self._outgoing.put(bytes(message), whole)
        self._count(math.ceil((len(message) + len(whole)) * STREAM_OVERHEAD))

    async def receive(self) -> bytes:
        message, _ = await self.receive_with_payload(0)
        return message

    async def receive_with_payload(self, payload_bytes_max: int) -> tuple[bytes, memoryview]:
        await self._receiving.take()
        try:
            with self._silence.waiting(_now):
                message, payload = await self._incoming.get()
        finally:
            self._receiving.give()
        if len(message) > self.message_bytes_max or len(payload) > payload_bytes_max:
            self.close(is_cut=True)
            self.offended()
            raise StreamClosed(
                f"a message of {len(message)} bytes and a payload of {len(payload)}, at most"
                f" {self.message_bytes_max} and {payload_bytes_max} allowed"
            )
        return message, memoryview(payload)

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        self._check_open()
        if self._outgoing.is_broken:
            raise StreamClosed("the other side closed it")
        self._outgoing.end("the other side sends no more")

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamClosed("this side closed it")

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self, *, is_cut: bool = False) -> None:
        """Close like `aclose`, but without awaiting. `is_cut`: abruptly, as when a peer dies."""
        self._is_closed = True
        self._outgoing.end("the other side closed it", is_cut=is_cut)
        self._incoming.drop()

    def leave(self) -> None:
        """Accept no new message, but let the peer finish its answer before it leaves."""
        self._incoming.leave()

    def stall(self) -> None:
        """Stall the stream, because a split lies between its ends. `stalls` counts how often."""
        self.is_stalled = True
        self.stalls += 1
        self._incoming.stall()
        self._outgoing.stall()

    def resume(self) -> None:
        """Continue after a stall."""
        self.is_stalled = False
        self._incoming.resume()
        self._outgoing.resume()


def admit(register: Register[SimStream], at: PeerId, stream: SimStream, counters: Counter[str]) -> None:
    """Have the peer `at` serve a stream that another peer opens, and evict silent streams for it. Raises
    Unreachable."""
    now = _now()
    host = stream.source.host if stream.source is not None else ""
    evicted = register.admit(now, stream, stream.peer, prefix_of(host) if host else b"")
    more = None if evicted is None else register.enter(now, stream, stream.protocol)
    for each in (*(evicted or ()), *(more or ())):
        counters["connections_displaced"] += 1
        each.close(is_cut=True)
    if more is None:
        register.leave(stream)
        counters["streams_refused_busy"] += 1
        raise Unreachable("refused", f"{short_peer(at)} has too many streams of ours open")


def stream_pair(
    there: Line, back: Line, counts: tuple[Callable[[int], None], Callable[[int], None]]
) -> tuple[SimStream, SimStream]:
    """Return both ends of a new stream: the end at which `there` begins, then the end at which it arrives."""
    outgoing, incoming = _Pipe(there), _Pipe(back)
    return (
        SimStream(there.receiver.peer, there.protocol, incoming, outgoing, counts[0]),
        SimStream(there.sender.peer, there.protocol, outgoing, incoming, counts[1]),
    )


def _now() -> float:
    return nearest_instant(trio.current_time())
