"""Secure streams over TCP: the dial, the answer to it, and `SecureStream`, one connection each.

On the wire: the initiator begins with two bytes (version, cipher), then the Noise messages of
`crypto.noise`, each behind two bytes of length, then records as in `records.py`. The initiator
names the cipher; the name is part of what Noise hashes, so nobody can change it on the way.

TCP's end is not authenticated: an attacker can cut a stream between two messages, never inside one
unnoticed. A protocol to which "that was all" matters says so in a message of its own.
"""

import math
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId
from crypto.noise import KEY_BYTES, Data, PeerHandshake, Session, WrongIdentity
from node.errors import StreamClosed, Unreachable, WrongPeer
from node.locks import acquire
from node.transport.pool import Pool
from node.transport.records import RecordReader, RecordWriter
from node.transport.sockets import address_of

CONNECT_SECONDS = 5.0
"""TCP's first retries are after one and three seconds: two lost packets are survived."""
HANDSHAKE_SECONDS = 5.0
HANDSHAKE_BYTES_MAX = 1_536
"""The longest handshake message has 200 bytes; the rest is room for what later versions add."""
STALL_SECONDS = 60.0
"""How long a sender may pause inside a message, which it had whole before it began."""
ASSEMBLY_BYTES_MAX = 2**30
"""Half-received messages of all streams together: sixteen of the longest."""
UNSENT_BYTES_MAX = 2**20
"""What the kernel takes beyond what the network does: one write, while the next is encrypted. trio's own
16 KiB is for who multiplexes; measured for 64 MiB, it makes seven times the writes and half the time more."""
KEEPALIVE_SECONDS = 30
"""A peer that vanished is noticed by the kernel, after a few times this."""

_VERSION = 2
_CIPHERS = {1: "AESGCM", 2: "ChaChaPoly"}
_LENGTH_BYTES = 2


@dataclass(frozen=True)
class Credentials:
    """What this node proves in handshakes. `static` is an X25519 private key of 32 bytes."""

    identity: Identity
    static: bytes
    swarm: str
    entropy: Callable[[int], bytes]
    cipher: str = "AESGCM"

    def handshake(self, *, initiator: bool, cipher: str, expected: PeerId | None = None) -> PeerHandshake:
        return PeerHandshake(
            initiator=initiator,
            identity=self.identity,
            static=self.static,
            ephemeral=self.entropy(KEY_BYTES),
            swarm=self.swarm,
            cipher=cipher,
            expected=expected,
        )


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


async def dial(address: Address, credentials: Credentials) -> tuple[trio.SocketStream, Session]:
    """Connect and shake hands; `address.peer`, if set, must be who answers.

    Raises:
        WrongPeer, Unreachable: with the reason and a sentence for a person.
    """
    transport = await _connect(address)
    session = None
    try:
        with trio.fail_after(HANDSHAKE_SECONDS):
            session = await _initiate(transport, credentials, address.peer)
    except trio.TooSlowError:
        detail = f"{address.short} took the connection, but did not shake hands in {HANDSHAKE_SECONDS:g} s"
        raise Unreachable("timeout", detail) from None
    except WrongIdentity as error:
        raise WrongPeer("wrong key", str(error)) from None
    except (RemoteProtocolError, trio.BrokenResourceError):
        raise Unreachable(
            "refused", f"{address.short} answers, but is of another swarm or not a peerloom node"
        ) from None
    finally:
        if session is None:
            transport.socket.close()
    return transport, session


async def accept(transport: trio.SocketStream, credentials: Credentials) -> Session:
    """The other side of `dial`, for a connection that came in; the caller sets the deadline.

    Raises:
        RemoteProtocolError, trio.BrokenResourceError: no peer of this swarm is there.
    """
    _set_options(transport)
    version, cipher = await _receive_exactly(transport, 2)
    if version != _VERSION or cipher not in _CIPHERS:
        raise RemoteProtocolError("a connection that does not begin as ours do")
    handshake = credentials.handshake(initiator=False, cipher=_CIPHERS[cipher])
    first = await _receive_framed(transport)
    await transport.send_all(_framed(handshake.receive(first)))
    handshake.receive(await _receive_framed(transport))
    assert handshake.session is not None
    return handshake.session


async def _initiate(
    transport: trio.SocketStream, credentials: Credentials, expected: PeerId | None
) -> Session:
    cipher = next(number for number, name in _CIPHERS.items() if name == credentials.cipher)
    handshake = credentials.handshake(initiator=True, cipher=credentials.cipher, expected=expected)
    await transport.send_all(bytes((_VERSION, cipher)) + _framed(handshake.start()))
    last = handshake.receive(await _receive_framed(transport))
    await transport.send_all(_framed(last))
    assert handshake.session is not None
    return handshake.session


async def _connect(address: Address) -> trio.SocketStream:
    try:
        with trio.fail_after(CONNECT_SECONDS):
            transport = await trio.open_tcp_stream(address.host, address.port)
    except trio.TooSlowError:
        raise Unreachable("timeout", f"{address.short} did not answer in {CONNECT_SECONDS:g} s") from None
    except socket.gaierror:
        raise Unreachable("unknown", f"no machine is known by the name {address.host}") from None
    except OSError as error:
        raise _no_connection(address, error) from None
    _set_options(transport)
    return transport


def _no_connection(address: Address, error: OSError) -> Unreachable:
    """trio wraps what the attempts raised: one error as the cause, several as a group in the cause."""
    cause = error.__cause__
    causes = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause or error,)
    if any(isinstance(each, ConnectionRefusedError) for each in causes):
        return Unreachable("refused", f"{address.host} is up, but no node listens on port {address.port}")
    reason = getattr(causes[0], "strerror", None) or "no way there"
    return Unreachable("timeout", f"{address.short} cannot be reached: {reason}")


def _set_options(transport: trio.SocketStream) -> None:
    # A connection that is gone already refuses options; the next read will tell.
    with suppress(OSError):
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        transport.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
            transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS // 3)


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


async def _receive_framed(transport: trio.SocketStream) -> bytes:
    length = int.from_bytes(await _receive_exactly(transport, _LENGTH_BYTES), "big")
    if length > HANDSHAKE_BYTES_MAX:
        raise RemoteProtocolError(f"a handshake message of {length} bytes")
    return await _receive_exactly(transport, length)


async def _receive_exactly(transport: trio.SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await transport.receive_some(count - len(data))
        if not more:
            raise RemoteProtocolError("the connection ended inside the handshake")
        data += more
    return data
