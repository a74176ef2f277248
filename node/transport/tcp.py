"""`Connection`: messages and marks over one TCP connection, after its handshake.

On the wire are the messages of `handshake.py`, then records as in `records.py`. Not here: conversations and
the meaning of marks (`streams.py`). The socket is used directly instead of through trio, which checkpoints at
every call. Here a call checkpoints only when it has to wait, or after a number of calls without a wait.
"""

import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from math import inf
from typing import Protocol

import trio

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.noise import Data, HandshakeResult
from crypto.registers import Silence
from node.errors import StreamClosed
from node.forks import keep_from_children
from node.transport.buffer_pool import Pool
from node.transport.kernel_socket import KernelSocket
from node.transport.pace import BURST_SECONDS, PIECE_BYTES, Paces
from node.transport.records import PAYLOAD_BYTES_MAX, Mark, RecordReader, RecordWriter
from node.transport.settings import TransportSettings
from node.transport.sockets import address_of

ASSEMBLY_BYTES_MAX = 2**30
"""Maximum size of the half-received messages of all streams: sixteen of the longest. At the limit the oldest
message is given up, because an honest sender would have finished it by now."""
STRANGERS_ASSEMBLY_BYTES_MAX = 2**26 + 2**20
"""The same limit for all streams whose peers have not completed a message here yet: one of the longest
payloads, with its message."""
CALLS_WITHOUT_REST_MAX = 16
"""Number of calls without a wait before other tasks run: well below a millisecond in all. A checkpoint after
each call would take as long as the call."""

_FILL_CALLS = CALLS_WITHOUT_REST_MAX // 2
"""Number of short calls that one read counts as: a read of up to a mebibyte and its decryption take at least
as long."""


class Carrier(Hashable, Protocol):
    """The path that carries a channel."""

    @property
    def has_better(self) -> bool:
        """Whether there is a more direct path to the peer."""


Received = tuple[bytes, memoryview] | Mark


class ReassemblyBudget:
    """Counts the bytes of half-received messages over all streams, against a common limit."""

    def __init__(self, bytes_max: int = ASSEMBLY_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        # Messages in the order in which they began.
        self._held: dict[object, tuple[int, Callable[[], object]]] = {}

    def hold(self, who: object, held_bytes: int, give_up: Callable[[], object], *, anew: bool) -> None:
        """Record the bytes held for the message of a stream; `anew` means that it is a new message. While the
        total exceeds the limit, call `give_up` of the oldest message, which must `release` it."""
        before = self._held.pop(who, None) if anew or not held_bytes else self._held.get(who)
        self._bytes += held_bytes - (before[0] if before is not None else 0)
        if held_bytes:
            self._held[who] = held_bytes, give_up
        while self._bytes > self._bytes_max:
            next(iter(self._held.values()))[1]()

    def release(self, who: object) -> None:
        """Forget the message of `who`, whose stream is over."""
        self._bytes -= self._held.pop(who, (0, None))[0]


class Connection:
    """One TCP connection. One task at a time may send, and one receive. A `send` that is cancelled after it
    began ends the connection; a cancelled `receive` loses nothing, and the next call continues.
    `ended(connection)` is called once, at the end; `why` is the reason.
    """

    def __init__(
        self,
        transport: trio.SocketStream,
        session: HandshakeResult,
        assembly: ReassemblyBudget,
        pool: Pool,
        counters: Counter[str],
        ended: Callable[["Connection"], None],
        paces: Paces,
        settings: TransportSettings,
        path: Carrier | None = None,
        place: Address | None = None,
    ) -> None:
        """If the connection is a channel, `path` carries it, and its address is the peer's on that path, if
        known."""
        # The previous stream is not used any more, so it must neither close the socket nor warn.
        self._socket = socket.socket(fileno=transport.socket.detach())
        self._socket.setblocking(False)
        keep_from_children(self._socket)
        self.kernel = KernelSocket(self._socket)
        self.peer = session.peer
        self.path = path
        self._place = place
        self.is_punched = False
        """Whether both peers dialled simultaneously through their routers."""
        self.why: str | None = None
        self._writer = RecordWriter(session.sending, pool)
        self._reader = RecordReader(session.receiving, pool)
        self._assembly = assembly
        self._counters = counters
        self._tell_ended = ended
        self._paces = paces
        self._stall_seconds = settings.stall_seconds
        self._narrowed = 0
        self._held_bytes = 0
        self._calls = 0
        self._is_drained = True
        self._is_woken = False
        self._stalls_at = 0.0
        self._owed = b""
        self._silence = Silence()
        self.is_spare = False
        """Whether the connection waits for the next conversation that the peer begins."""

    @property
    def inside(self) -> bool:
        """Whether part of a message has come."""
        return self._reader.inside

    @property
    def silent_since(self) -> float:
        """The time since which the peer has moved no awaited bytes in either direction: see
        `crypto.registers.PlaceHolder`."""
        return -inf if self.is_spare else self._silence.since

    @property
    def source(self) -> Address | None:
        if self.path is not None:
            return self._place
        try:
            return address_of(self._socket.getpeername())
        except OSError:
            return None  # the connection is over

    def charge(self, assembly: ReassemblyBudget) -> None:
        """Count half-received messages against this budget from now on."""
        if assembly is not self._assembly:
            self._assembly.release(self)
            self._held_bytes = 0
            self._assembly = assembly

    def limit(self, message_bytes_max: int) -> None:
        """Set the maximum size of messages that are accepted from now on."""
        self._reader.message_bytes_max = message_bytes_max

    def become_path(self, unsent_bytes_max: int) -> None:
        """Become the carrier of a path. Its channels pace themselves, so the kernel should queue little."""
        self._paces = Paces()
        self.kernel.queue_little(unsent_bytes_max)

    def detach(self) -> tuple[socket.socket, bytes]:
        """Hand over the socket between two messages, and the bytes received since the last one. This
        connection is over."""
        if self.why is not None or self._owed:
            raise self.end("it cannot carry anything else")
        rest = self._reader.rest()
        taken = socket.socket(fileno=self._socket.detach())
        self._over("it carries something else now")
        return taken, rest

    # --- sending -----------------------------------------------------------------------------------

    async def send(self, message: Data, *payload: Data) -> None:
        """Send like `SecureStream.send`, from one task at a time."""
        await self._rest()
        whole = self._writer.whole(message) if type(message) is bytes and not payload else None
        begun = False
        try:
            if whole is not None:
                begun = True
                self._paces.up.take(trio.current_time(), len(whole))
                await self._write(whole)
            else:
                for chunk in self._writer.chunks(message, *payload):
                    if begun:
                        await trio.lowlevel.checkpoint()
                    begun = True
                    await self._write_paced(chunk)
            begun = False
        except (OSError, trio.ClosedResourceError):
            raise self.end("the connection broke while sending") from None
        finally:
            if begun:
                self.end("a send was cut short")

    def say(self, mark: Mark) -> None:
        """Send as much of a mark as the kernel takes now; `settle` sends the rest."""
        if self.why is None:
            self._owed += self._writer.mark(mark)
            try:
                self._owed = self._owed[self._socket.send(self._owed) :]
            except BlockingIOError:
                pass  # `settle` waits until the socket can take it
            except OSError:
                self.end("the connection broke while sending")

    async def settle(self) -> None:
        """Send unsent marks."""
        owed, self._owed = self._owed, b""
        settled = not owed
        try:
            if owed:
                await self._write(owed)
                settled = True
        except (OSError, trio.ClosedResourceError):
            raise self.end("the connection broke while sending") from None
        finally:
            if not settled:
                self.end("a mark was cut short")

    async def _write_paced(self, data: bytes | memoryview) -> None:
        """Write at the owner's rate limit."""
        if not self._paces.up.bytes_per_second:
            await self._write(data)
            return
        rest = memoryview(data)
        while rest:
            piece, rest = rest[:PIECE_BYTES], rest[PIECE_BYTES:]
            if seconds := self._paces.up.take(trio.current_time(), len(piece)):
                await trio.sleep(seconds)
            await self._write(piece)

    async def _write(self, data: bytes | memoryview) -> None:
        while True:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            if sent:
                self._silence.moved(trio.current_time())
            if sent == len(data):
                return
            data = data[sent:]
            await self._wait(trio.lowlevel.wait_writable)

    # --- receiving ---------------------------------------------------------------------------------

    async def receive(self, payload_bytes_max: int) -> Received | None:
        """Return the next message with its payload, or a mark; None after `wake`.

        Raises:
            StreamClosed: the connection is over, with the reason.
        """
        await self._rest()
        try:
            while (received := self._next(payload_bytes_max)) is None:
                # With a fast sender, a long message would otherwise be read without a checkpoint.
                await self._rest()
                if not await self._fill():
                    return None
        except RemoteProtocolError as error:
            raise self.offended(error) from None
        except trio.TooSlowError:
            self._counters["streams_stalled"] += 1
            raise self.end(f"no byte in {self._stall_seconds:g} s inside a message") from None
        except (OSError, trio.ClosedResourceError):
            raise self.end("the connection broke") from None
        return received

    def take(self) -> Received | None:
        """Like `receive`, but without reading from the socket. Raises StreamClosed."""
        try:
            received = self._next(PAYLOAD_BYTES_MAX)
            if received is None and self.why is None:
                space = self._reader.space()
                self._filled(self._socket.recv_into(space), len(space))
                received = self._next(PAYLOAD_BYTES_MAX)
        except BlockingIOError:
            return None
        except RemoteProtocolError as error:
            raise self.offended(error) from None
        except OSError:
            raise self.end("the connection broke") from None
        return received

    def offended(self, error: RemoteProtocolError) -> StreamClosed:
        """End the connection after a violation by the peer, and count it."""
        self._counters["streams_broken"] += 1
        return self.end(f"the other side broke the protocol: {error}")

    def _next(self, payload_bytes_max: int) -> Received | None:
        if self.why is not None:
            raise StreamClosed(self.why)
        received = self._reader.next_message(payload_bytes_max)
        held_bytes = self._reader.held_bytes
        if held_bytes != self._held_bytes or (received is not None and held_bytes):
            self._held_bytes = held_bytes
            self._assembly.hold(self, held_bytes, self._give_up, anew=received is not None)
            if self.why is not None:
                raise StreamClosed(self.why)
        return received

    def _give_up(self) -> None:
        self._counters["messages_given_up"] += 1
        self.end("this node has no room for so many half-received messages, and this one began first")

    async def _fill(self) -> bool:
        """Receive more bytes; return False after `wake`."""
        inside = self._reader.inside
        # After a read that emptied the socket, a further read would find nothing, except within a long
        # message.
        if self._is_drained and not inside and not await self._wait_for_bytes(inside=False):
            return False
        # Receive into the reader's buffer directly, which saves a copy.
        space = self._reader.space()
        while True:
            try:
                count = self._socket.recv_into(space)
                break
            except BlockingIOError:
                if not await self._wait_for_bytes(inside=inside):
                    return False
        self._calls += _FILL_CALLS
        self._filled(count, len(space))
        if self._paces.down.bytes_per_second:
            await self._read_paced(count)
        return True

    async def _read_paced(self, count: int) -> None:
        """Delay the sender to keep the owner's rate limit; received bytes stay here."""
        pace = self._paces.down
        seconds = pace.take(trio.current_time(), count)
        if self._narrowed != pace.bytes_per_second:
            # Otherwise the bytes that the kernel receives meanwhile would exceed the owner's limit.
            self._narrowed = pace.bytes_per_second
            self.kernel.take_little(max(PIECE_BYTES, int(pace.bytes_per_second * BURST_SECONDS)))
        if seconds and self._reader.inside:
            await trio.sleep(seconds)
            self._stalls_at = trio.current_time() + self._stall_seconds

    async def _wait_for_bytes(self, *, inside: bool) -> bool:
        if self._is_woken:
            self._is_woken = False
            return False
        if not inside:
            return await self._wait(trio.lowlevel.wait_readable)
        with trio.move_on_at(self._stalls_at) as scope:
            return await self._wait(trio.lowlevel.wait_readable)
        assert scope.cancelled_caught
        raise trio.TooSlowError

    def _filled(self, count: int, room: int) -> None:
        if not count:
            inside = self._reader.inside
            raise self.end("the connection ended inside a message" if inside else "the other side closed it")
        self._is_drained = count < room
        self._reader.filled(count)
        self._stalls_at = trio.current_time() + self._stall_seconds

    # --- waiting and ending ------------------------------------------------------------------------

    async def _wait(self, ready: Callable[[socket.socket], Awaitable[None]]) -> bool:
        """Wait until the socket is ready; return False after `wake`."""
        self._calls = 0
        self._silence.begin(trio.current_time())
        try:
            await ready(self._socket)
        except trio.ClosedResourceError:
            if self.why is not None:
                raise
            return False
        finally:
            self._silence.end(trio.current_time())
        return True

    async def _rest(self) -> None:
        self._calls += 1
        if self._calls > CALLS_WITHOUT_REST_MAX:
            self._calls = 0
            await trio.lowlevel.checkpoint()

    def notify(self) -> None:
        """Make a waiting `receive` return None, because something has changed."""
        if self.why is None:
            self._is_woken = True
            trio.lowlevel.notify_closing(self._socket)

    def release(self) -> None:
        """Release buffers while the connection is idle between two conversations."""
        self._is_woken = False
        self._reader.release()

    @property
    def is_settled(self) -> bool:
        """Whether the connection is open and nothing is left to send."""
        return self.why is None and not self._owed

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has arrived, neither bytes nor the end."""
        if self.why is not None or self._reader.inside:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def end(self, why: str) -> StreamClosed:
        """Close the socket. If it is called again, the first reason stays."""
        if self.why is None:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
            self._over(why)
        return StreamClosed(self.why or why)

    def _over(self, why: str) -> None:
        self.why = why
        self._assembly.release(self)
        self._tell_ended(self)
