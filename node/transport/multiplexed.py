"""The driver of a multiplexed path, which carries many channels over one secured connection. Each channel is
a socket of this process.

A user of a channel sees a connected socket, so everything built on connections works on a path too: messages,
marks, limits, pools. The path encrypts everything, so a channel is not encrypted again.
"""

import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import trio

from crypto.contact import Address
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from crypto.noise import TAG_BYTES, Data, HandshakeResult
from crypto.noise.ciphers import CipherState
from crypto.noise.suites import SUITES
from node.containment import contain
from node.errors import StreamClosed
from node.forks import keep_from_children
from node.transport.multiplexer import (
    FRAME_BYTES_MAX,
    QUEUED_BYTES_MAX,
    ChannelClosed,
    ChannelData,
    ChannelOpened,
    Multiplexer,
)
from node.transport.settings import PathSettings
from node.transport.tcp import Connection

UNSENT_BYTES_MAX = 2**15
"""Bytes that the kernel queues in addition to those in flight. A small message waits behind no more than
this."""
SILENCE = "nothing came on the path any more"
"""The reason with which a dead path ends."""

Way = Literal["direct", "punched", "relayed"]
"""How a path came about. "direct": the peer, which cannot be dialled, has dialled this node. "punched": both
have dialled simultaneously through their routers. "relayed": a third node carries the path."""


class SealedBelow(CipherState):
    """A cipher that only adds a tag of zeros, because the path underneath encrypts the bytes before they
    leave this machine."""

    def __init__(self) -> None:
        pass

    def encrypt(self, plaintext: Data, associated: bytes = b"") -> bytes:  # noqa: ARG002 - no key
        """Return the plaintext and an empty tag."""
        return bytes(plaintext) + bytes(TAG_BYTES)

    def encrypt_into(self, plaintext: Data, buffer: Data) -> None:
        """Encrypt into a buffer of exactly that length."""
        view = memoryview(buffer)
        view[:-TAG_BYTES] = memoryview(plaintext).cast("B")
        view[-TAG_BYTES:] = bytes(TAG_BYTES)

    def decrypt(self, ciphertext: Data, associated: bytes = b"") -> bytes:  # noqa: ARG002 - no key
        """Return the input of `encrypt`."""
        if len(ciphertext) < TAG_BYTES:
            raise RemoteProtocolError("a record without a tag")
        return bytes(memoryview(ciphertext)[:-TAG_BYTES])

    def decrypt_into(self, ciphertext: Data, buffer: Data) -> None:
        """Decrypt into a buffer of exactly that length."""
        memoryview(buffer)[:] = memoryview(ciphertext)[:-TAG_BYTES]


def channel_session(peer: PeerId) -> HandshakeResult:
    """Return a substitute for a handshake result on a channel; the path has already shaken hands."""
    return HandshakeResult(peer, SUITES[0], SealedBelow(), SealedBelow(), b"")


@dataclass(eq=False)
class _End:
    """The path's end of a channel: its half of a socket pair, and bytes not yet read."""

    socket: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    """Received bytes in a single buffer. With one object for each frame, a peer could fill far more memory
    than its credit."""
    has_closed: bool = False
    """Whether the peer has closed the channel."""
    moved: trio.Event = field(default_factory=trio.Event)
    """Set when bytes have come, or there is room to write."""
    came: trio.Event = field(default_factory=trio.Event)


class MultiplexedPath:
    """Channels to one peer. `run` must be running. It ends when the path does, and every channel with it.

    `opened(socket)` is called with each channel that the peer opens; `fell_silent(path)` is called now and
    then while the peer leaves a ping unanswered.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        is_first: bool,
        way: Way,
        address: Address | None,
        opened: Callable[["MultiplexedPath", socket.socket], None],
        fell_silent: Callable[["MultiplexedPath"], None],
        counters: Counter[str],
        settings: PathSettings,
    ) -> None:
        self.connection = connection
        self.peer: PeerId = connection.peer
        self.way: Way = way
        self.is_first = is_first
        self.address = address
        """The peer's address on this path. For a relayed path, the circuit, if this node dialled it."""
        self.is_own_dial = is_first and way == "direct"
        """Whether this node has dialled the path only so that the peer, which cannot dial, can use it. This
        node's own streams are dialled directly."""
        self.is_kept = False
        """Whether the path is kept while it carries nothing."""
        self.has_better = False
        """Whether there is a more direct path to the peer."""
        self.is_lost = False
        """Whether the path ended against this node's will while it carried something."""
        self._is_given_up = False
        self.since = self.used_at = trio.current_time()
        self._opened = opened
        self._fell_silent = fell_silent
        self._counters = counters
        self._core = Multiplexer(self.since, is_first=is_first, settings=settings)
        self._watch_seconds = settings.watch_seconds
        self._ends: dict[int, _End] = {}
        self._stirred = trio.Event()
        self._nursery: trio.Nursery | None = None
        connection.become_path(UNSENT_BYTES_MAX)
        if way == "punched":
            connection.kernel.leave_nothing()
        connection.limit(FRAME_BYTES_MAX)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def stands(self) -> bool:
        """Whether a channel can be opened."""
        return self._nursery is not None and self.connection.why is None

    @property
    def place(self) -> Address | None:
        """The peer's address as seen from here; None behind a relay."""
        return None if self.way == "relayed" else self.address

    @property
    def relay(self) -> PeerId | None:
        """The relay that carries the path, if any."""
        return self.address.relay if self.address is not None else None

    @property
    def round_trip_seconds(self) -> float | None:
        """The round trip of the latest answered ping."""
        return self._core.round_trip_seconds

    @property
    def is_silent(self) -> bool:
        """Whether the peer has left a ping unanswered for long, so the path may be dead."""
        return self._core.is_silent(trio.current_time())

    def doubt(self) -> None:
        """Ping, and wait less long for the answer, because there is evidence that the path is dead."""
        self._core.doubt(trio.current_time())
        self._stirred.set()

    def open(self) -> socket.socket:
        """Open a channel. Raises StreamClosed if the path is over or has no room."""
        if not self.stands:
            raise StreamClosed("the path is over")
        try:
            channel = self._core.open()
        except LocalProtocolError as error:
            raise StreamClosed(str(error)) from None
        return self._begin(channel)

    def end(self, why: str) -> None:
        """End the path and all its channels."""
        self._is_given_up = True
        self.connection.end(why)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry channels until the path is over."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._send_forever)
                nursery.start_soon(self._watch)
                task_status.started()
                await self._receive_forever()
                self.is_lost = bool(self._ends) and not self._is_given_up
                nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self.connection.end("the path is over")
            for end in self._ends.values():
                _close(end.socket)
            self._ends.clear()

    # --- the path ------------------------------------------------------------------------------------

    async def _receive_forever(self) -> None:
        try:
            while True:
                received = await self.connection.receive(0)
                if received is None:
                    continue
                if not isinstance(received, tuple):
                    raise RemoteProtocolError("a mark on a path")
                self._take(received[0])
        except RemoteProtocolError as error:
            self._is_given_up = True
            self.connection.offended(error)
        except StreamClosed:
            pass  # the normal end of a path

    def _take(self, frame: bytes) -> None:
        event = self._core.receive(trio.current_time(), frame)
        match event:
            case ChannelOpened(channel):
                self._serve(channel)
            case ChannelData(channel, data):
                end = self._ends[channel]
                end.waiting += data
                end.came.set()
            case ChannelClosed(channel):
                end = self._ends[channel]
                end.has_closed = True
                end.came.set()
            case None:
                pass
        self._make_room(frame)
        self._stirred.set()

    def _serve(self, channel: int) -> None:
        try:
            opened = self._begin(channel)
        except StreamClosed:
            self._counters["channels_refused"] += 1
            return
        self._counters["channels_served"] += 1
        self._opened(self, opened)

    async def _send_forever(self) -> None:
        try:
            while True:
                stirred = self._stirred
                while (frame := self._core.next_frame(trio.current_time())) is not None:
                    await self.connection.send(frame)
                    self._make_room(frame)
                await stirred.wait()
                self._stirred = trio.Event()
        except StreamClosed:
            pass  # the reader notices it too

    def _make_room(self, frame: bytes) -> None:
        """Update a channel after a frame: it may have room again, or may be over."""
        end = self._ends.get(int.from_bytes(frame[1:5], "big"))
        if end is not None:
            end.moved.set()

    async def _watch(self) -> None:
        while True:
            await trio.sleep_until(min(self._core.deadline, trio.current_time() + self._watch_seconds))
            if not self._core.tick(trio.current_time()):
                self._counters["paths_silent"] += 1
                self.connection.end(SILENCE)
                return
            if self.is_silent:
                self._fell_silent(self)
            self._stirred.set()

    # --- channels ------------------------------------------------------------------------------------

    def _begin(self, channel: int) -> socket.socket:
        """Make the socket pair of a channel. Raises StreamClosed, and ends the channel, if this process has
        no descriptors left."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._core.close(channel)
            self._stirred.set()
            raise StreamClosed(f"no channel can be made: {error.strerror}") from None
        for each in (ours, theirs):
            each.setblocking(False)
            keep_from_children(each)
        end = self._ends[channel] = _End(ours)
        self.used_at = trio.current_time()
        if self._nursery is None:
            ours.close()
        else:
            self._nursery.start_soon(self._carry, channel, end)
            self._stirred.set()
        return theirs

    async def _carry(self, channel: int, end: _End) -> None:
        """Carry one channel until either side closes it."""
        with contain("a channel"):
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._fetch, channel, end, nursery.cancel_scope)
                    await self._deliver(channel, end)
                    nursery.cancel_scope.cancel()
            finally:
                self._core.close(channel)
                self._ends.pop(channel, None)
                _close(end.socket)
                self.used_at = trio.current_time()
                self._stirred.set()

    async def _fetch(self, channel: int, end: _End, scope: trio.CancelScope) -> None:
        """Copy from the socket to the path."""
        while True:
            while not (room := min(self._core.room(channel), QUEUED_BYTES_MAX)):
                if channel not in self._core:
                    return  # the peer has closed the channel; received bytes are still delivered
                end.moved = trio.Event()
                await end.moved.wait()
            try:
                data = end.socket.recv(room)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(end.socket)
                continue
            except OSError:
                data = b""
            if not data:
                scope.cancel()
                return
            self._core.write(channel, data)
            self._stirred.set()
            await trio.lowlevel.checkpoint()

    async def _deliver(self, channel: int, end: _End) -> None:
        """Copy from the path to the socket until all bytes have been delivered."""
        while True:
            while end.waiting:
                try:
                    with memoryview(end.waiting) as whole, whole[:QUEUED_BYTES_MAX] as piece:
                        count = end.socket.send(piece)
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(end.socket)
                    continue
                except OSError:
                    return
                del end.waiting[:count]
                self._core.taken(channel, count)
                self._stirred.set()
                await trio.lowlevel.checkpoint()
            if end.has_closed:
                return
            end.came = trio.Event()
            await end.came.wait()


def _close(end: socket.socket) -> None:
    trio.lowlevel.notify_closing(end)
    with suppress(OSError):
        end.close()
