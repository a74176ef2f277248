"""Secure streams over TCP: `SecureStream`, one connection each, after the handshake.

On the wire: what `handshake.py` says, then records as in `records.py`.

TCP's end is not authenticated: an attacker can cut a stream between two messages, never inside one
unnoticed. A protocol to which "that was all" matters says so in a message of its own.
"""

import math
from collections import Counter
from collections.abc import Callable

import trio

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from crypto.noise import Data, Session
from node.errors import StreamClosed
from node.locks import acquire
from node.transport.pool import Pool
from node.transport.records import RecordReader, RecordWriter
from node.transport.sockets import address_of

STALL_SECONDS = 60.0
"""How long a sender may pause inside a message, which it had whole before it began."""
ASSEMBLY_BYTES_MAX = 2**30
"""Half-received messages of all streams together: sixteen of the longest."""


class Assembly:
    """Counts the bytes of half-received messages over all streams, against a common limit."""

    def __init__(self, bytes_max: int = ASSEMBLY_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0

    def change(self, difference: int) -> None:
        """Count more or less; RemoteProtocolError where the limit is passed."""
        self._bytes += difference
        if difference > 0 and self._bytes > self._bytes_max:
            raise RemoteProtocolError("more half-received messages than this node has room for")


class SecureStream:
    """`node.seams.Stream` over one TCP connection.

    Several tasks may send and receive; each message stays whole. A `send` that is cancelled after it
    began, or a `receive` inside a message, closes the connection; between messages nothing is lost.
    `ended(stream)` is called once, when it is over.
    """

    def __init__(
        self,
        transport: trio.SocketStream,
        session: Session,
        assembly: Assembly,
        pool: Pool,
        counters: Counter[str],
        ended: Callable[["SecureStream"], None],
    ) -> None:
        self._transport = transport
        self._peer = session.peer
        self._writer = RecordWriter(session.sending)
        self._reader = RecordReader(session.receiving, pool)
        self._assembly = assembly
        self._counters = counters
        self._tell_ended = ended
        self._counted_bytes = 0
        self._sending = trio.Lock()
        self._receiving = trio.Lock()
        self._ended: str | None = None

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def source(self) -> Address | None:
        try:
            return address_of(self._transport.socket.getpeername())
        except OSError:
            return None  # it is over

    def limit(self, message_bytes_max: int) -> None:
        """The longest message that is taken from now on."""
        self._reader.message_bytes_max = message_bytes_max

    async def send(self, message: Data, *payload: Data) -> None:
        """Send one message of at most `records.MESSAGE_BYTES_MAX`; returns when the kernel has it.

        The pieces of `payload` arrive as one, of at most `records.PAYLOAD_BYTES_MAX`. They are encrypted
        out of the caller's memory, which must not change until this returns.

        Raises:
            StreamClosed: it is over. LocalProtocolError: the message or the payload is too long.
        """
        # Cancelled before the first byte is encrypted, a send costs nothing.
        await acquire(self._sending)
        begun = False
        try:
            self._check_open()
            for chunk in self._writer.chunks(message, *payload):
                begun = True
                await self._transport.send_all(chunk)
            begun = False
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._end("the connection broke while sending") from None
        finally:
            self._sending.release()
            if begun:
                self._end("a send was cut short")

    async def receive(self) -> bytes:
        """The next message, which must have no payload.

        Raises:
            StreamClosed: it is over, with the reason.
        """
        message, _ = await self.receive_with_payload(0)
        return message

    async def receive_with_payload(self, payload_bytes_max: int) -> tuple[bytes, memoryview]:
        """The next message and its payload, empty for none, read-only.

        The payload's memory is used again once nothing refers to it; who keeps a small part of it for
        long had better copy that. A longer payload than allowed ends the stream before it is taken.

        Raises:
            StreamClosed: it is over, with the reason.
        """
        # Cancelled before the message is taken or not at all, so that none is lost.
        await acquire(self._receiving)
        try:
            self._check_open()
            message = self._next_message(payload_bytes_max)
            if message is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
            while message is None:
                await self._fill()
                message = self._next_message(payload_bytes_max)
        except RemoteProtocolError as error:
            self._counters["streams_broken"] += 1
            raise self._end(f"the other side broke the protocol: {error}") from None
        except trio.TooSlowError:
            self._counters["streams_stalled"] += 1
            raise self._end(f"no byte in {STALL_SECONDS:g} s inside a message") from None
        except (OSError, trio.ClosedResourceError):
            raise self._end("the connection broke") from None
        finally:
            self._receiving.release()
        return message

    async def aclose(self) -> None:
        """Close, at once; whoever waits in `send` or `receive` gets StreamClosed. May be repeated."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """As `aclose`, for code that may not wait."""
        self._end("this side closed it")

    def _next_message(self, payload_bytes_max: int) -> tuple[bytes, memoryview] | None:
        message = self._reader.next_message(payload_bytes_max)
        difference = self._reader.held_bytes - self._counted_bytes
        self._counted_bytes += difference
        self._assembly.change(difference)
        return message

    async def _fill(self) -> None:
        inside = self._reader.inside
        # Straight into the buffer: receive_some would copy every byte once more.
        space = self._reader.space()
        try:
            with trio.fail_after(STALL_SECONDS if inside else math.inf):
                count = await self._transport.socket.recv_into(space)
        except trio.Cancelled:
            if inside:
                self._end("a receive was cut short inside a message")
            raise
        if count == 0:
            raise self._end("the connection ended inside a message" if inside else "the other side closed it")
        self._reader.filled(count)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise StreamClosed(self._ended)

    def _end(self, why: str) -> StreamClosed:
        """Close the socket; the first reason stays."""
        if self._ended is None:
            self._ended = why
            self._assembly.change(-self._counted_bytes)
            self._counted_bytes = 0
            self._transport.socket.close()
            self._tell_ended(self)
        return StreamClosed(self._ended)
