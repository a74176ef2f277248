"""`SecureStream`: one conversation with a peer over a connection, and how it ends.

Each peer ends with a mark, CLOSE, and may send END earlier, which means "I send no more". So an orderly end
differs from a cut. Once both peers have closed, the connection is free for another conversation.
"""

from collections.abc import Callable

import trio

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from crypto.noise import Data
from node.errors import StreamClosed, StreamEnded
from node.locks import Turn
from node.transport.records import PAYLOAD_BYTES_MAX, Mark
from node.transport.tcp import Connection

LINGER_SECONDS = 2.0
"""How long the peer may take to close too before the connection is given up. The peer only has to end a
handler, and a new connection costs less than a long wait."""
LINGER_BYTES_MAX = 2**20
"""Maximum number of bytes that the peer may still send meanwhile: those in flight. Reading more would be
useless."""

_THIS_SIDE = "this side closed it"
_OTHER_SIDE = "the other side closed it"
_LEAVING = "this node is leaving"


class SecureStream:
    """The real `node.seams.Stream`. Several tasks may send and receive; each message stays whole.

    A `send` that is cancelled after it began closes the stream; cancelled earlier, it has no effect. A
    cancelled `receive` loses nothing. `closed(stream)` is called once, when this node closes; a stream served
    here has no `closed`, because its server sees the end.
    """

    def __init__(
        self,
        connection: Connection,
        protocol: str,
        closed: Callable[["SecureStream"], None] | None = None,
    ) -> None:
        self._connection = connection
        self._protocol = protocol
        self._tell_closed = closed
        self._sending = Turn()
        self._receiving = Turn()
        self._closed: str | None = None
        self._is_leaving = False
        self._said_end = self._heard_end = self._heard_close = False

    @property
    def peer(self) -> PeerId:
        return self._connection.peer

    @property
    def protocol(self) -> str:
        return self._protocol

    @property
    def source(self) -> Address | None:
        return self._connection.source

    @property
    def has_better_path(self) -> bool:
        """Whether a new stream to the peer would be carried more directly than this one."""
        return self._connection.path is not None and self._connection.path.has_better

    @property
    def is_served(self) -> bool:
        """Whether the peer has opened the stream."""
        return self._tell_closed is None

    @property
    def connection(self) -> Connection:
        return self._connection

    async def send(self, message: Data, *payload: Data) -> None:
        """Send one message of at most `records.MESSAGE_BYTES_MAX`; returns when the kernel has it.

        The pieces of `payload` arrive joined, at most `records.PAYLOAD_BYTES_MAX`. They are encrypted out of
        the caller's memory, which must not change until this returns.

        Raises:
            StreamClosed: the stream is over. LocalProtocolError: the message or the payload is too long.
        """
        await self._sending.take()
        try:
            if self._closed is not None:
                raise StreamClosed(self._closed)
            if self._said_end:
                raise StreamClosed("this side has announced that it sends no more")
            await self._connection.send(message, *payload)
        finally:
            self._sending.give()

    async def send_eof(self) -> None:
        """Announce that this node sends no more; it may still receive. May be called repeatedly. Raises
        StreamClosed."""
        await self._sending.take()
        try:
            if self._closed is not None:
                raise StreamClosed(self._closed)
            if not self._said_end:
                self._said_end = True
                self._connection.say(Mark.END)
                await self._connection.settle()
        finally:
            self._sending.give()

    async def receive(self) -> bytes:
        """Return the next message, which must have no payload.

        Raises:
            StreamEnded: everything was received. StreamClosed: the stream is over, with the reason.
        """
        message, _ = await self.receive_with_payload(0)
        return message

    async def receive_with_payload(self, payload_bytes_max: int) -> tuple[bytes, memoryview]:
        """Return the next message and its payload, which is read-only, and empty if there is none.

        The payload's memory is reused once nothing refers to it, so copy any small part that is kept for
        long. A payload that is too long ends the stream before it is read.

        Raises:
            StreamEnded: everything was received.
            StreamClosed: the stream is over, with the reason.
        """
        # After a local close, the closing task holds the lock.
        self._check_receiving()
        await self._receiving.take()
        try:
            while True:
                self._check_receiving()
                received = await self._connection.receive(payload_bytes_max)
                if type(received) is tuple:
                    return received
                if received is not None:
                    self._hear(received)
        finally:
            self._receiving.give()

    def _check_receiving(self) -> None:
        if self._heard_end and self._closed in (None, _OTHER_SIDE):
            raise StreamEnded(self._closed or "the other side sends no more")
        if self._closed is not None:
            raise StreamClosed(self._closed)
        if self._is_leaving and not self._connection.inside:
            raise StreamClosed(_LEAVING)

    def _hear(self, received: Mark | tuple[bytes, memoryview]) -> None:
        """Handle a mark, or a message where only a mark is allowed."""
        if isinstance(received, Mark) and received is Mark.CLOSE and not self._heard_close:
            self._heard_end = self._heard_close = True
            self._closed = self._closed or _OTHER_SIDE
        elif received is Mark.END and not self._heard_end:
            self._heard_end = True
        elif self._heard_end:
            raise self._connection.offended(RemoteProtocolError("a message after the announced end"))

    # --- the end -----------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close; the peer learns it after everything that was sent. A task in `send` or `receive` gets
        StreamClosed. May be called repeatedly."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close without waiting, like `aclose`."""
        if self._closed == _THIS_SIDE:
            return
        self._closed = _THIS_SIDE
        if self._sending.is_taken:
            # A different task is inside a message, so no mark can be sent any more.
            self._connection.end(_THIS_SIDE)
        else:
            self._connection.say(Mark.CLOSE)
            if self._receiving.is_taken:
                self._connection.notify()
        if self._tell_closed is not None:
            self._tell_closed(self)

    def leave(self) -> None:
        """Prepare to leave: the current answer may be finished, but no new message is accepted."""
        self._is_leaving = True
        if self._receiving.is_taken:
            self._connection.notify()

    def finish_now(self) -> bool:
        """Close; return whether the received bytes show that the peer has closed too."""
        self.close()
        if self._receiving.is_taken:
            return False
        try:
            while not self._heard_close and (received := self._connection.take()) is not None:
                self._hear(received)
        except StreamClosed:
            return False
        return self._heard_close and self._connection.is_settled

    async def finish(self) -> bool:
        """Close, and wait a little until the peer has closed too. Return whether the connection is free."""
        with trio.move_on_after(LINGER_SECONDS):
            await self._sending.take()
            self._sending.give()
            self.close()
            await self._receiving.take()
            try:
                await self._connection.settle()
                await self._hear_out()
                return self._connection.why is None
            except StreamClosed:
                return False
            finally:
                self._receiving.give()
        self.close()
        return False

    async def _hear_out(self) -> None:
        """Read until the peer closes, and discard what it sends."""
        came_bytes = 0
        while not self._heard_close:
            received = await self._connection.receive(PAYLOAD_BYTES_MAX)
            if isinstance(received, tuple):
                came_bytes += len(received[0]) + len(received[1])
                if came_bytes > LINGER_BYTES_MAX:
                    raise self._connection.end(_THIS_SIDE)
            if received is not None:
                self._hear(received)
