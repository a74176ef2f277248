"""The rivals of `transport.py` (plain sockets, trio's sockets, and TLS over those), and the interface of
every case. They carry bytes without messages: a one-byte code announces what follows."""

import os
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import numpy as np
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

BULK_BYTES = 64 * 2**20
ECHO_BYTES = 16 * 2**20
PING_BYTES = 64
HOST = "127.0.0.1"
DATAGRAM_BYTES_MAX = 2_048
ANSWER_SECONDS = 5.0


class Line(Protocol):
    """One connected case with its measurements, and the CPU seconds of its far side so far."""

    async def bulk(self) -> None: ...
    async def echo(self) -> None: ...
    async def ping(self) -> None: ...
    async def connect(self) -> None: ...
    async def datagram(self) -> None: ...
    async def far_cpu_seconds(self) -> float: ...


# --- bytes without messages: sockets and TLS -------------------------------------------------------


class Pipe(Protocol):
    """A connection that carries bytes."""

    async def send_all(self, data: memoryview) -> None: ...
    async def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises EOFError if the other side has closed."""

    def close(self) -> None: ...


class PlainPipe:
    """A blocking socket; its methods are async only in form."""

    def __init__(self, plain: socket.socket) -> None:
        self._socket = plain
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send_all(self, data: memoryview) -> None:
        self._socket.sendall(data)

    async def receive_into(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError
            at += count

    def close(self) -> None:
        self._socket.close()


class TrioPipe:
    """A trio socket, read straight into the buffer."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def send_all(self, data: memoryview) -> None:
        await self._stream.send_all(data)

    async def receive_into(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            count = await self._stream.socket.recv_into(view[at:])
            if not count:
                raise EOFError
            at += count

    def close(self) -> None:
        self._stream.socket.close()


async def fill(view: memoryview, read: Callable[[int], Awaitable[bytes | bytearray]]) -> None:
    """Fill `view` with the results of `read`, which is called with the number of missing bytes. Raises
    EOFError if the other side has closed."""
    at = 0
    while at < len(view):
        data = await read(len(view) - at)
        if not data:
            raise EOFError
        view[at : at + len(data)] = data
        at += len(data)


class TlsPipe:
    """TLS over a trio socket."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream

    async def send_all(self, data: memoryview) -> None:
        await self._stream.send_all(data)

    async def receive_into(self, view: memoryview) -> None:
        await fill(view, self._stream.receive_some)

    def close(self) -> None:
        self._stream.transport_stream.socket.close()


class PipeLine:
    """A `Line` over bytes: a one-byte code announces what follows."""

    def __init__(
        self,
        pipe: Pipe,
        again: Callable[[], Awaitable[Pipe]],
        ask: Callable[[bytes], Awaitable[bytes]] | None = None,
    ) -> None:
        self._pipe, self._again, self._ask = pipe, again, ask
        self._bulk = memoryview(os.urandom(BULK_BYTES))
        self._sent = self._bulk[:ECHO_BYTES]
        self._back = memoryview(bytearray(ECHO_BYTES))

    async def bulk(self) -> None:
        await self._pipe.send_all(memoryview(b"b"))
        await self._pipe.send_all(self._bulk)
        await self._pipe.receive_into(self._back[:1])

    async def echo(self) -> None:
        await self._pipe.send_all(memoryview(b"e"))
        await self._pipe.send_all(self._sent)
        await self._pipe.receive_into(self._back)

    async def ping(self) -> None:
        await _ping(self._pipe)

    async def connect(self) -> None:
        pipe = await self._again()
        await _ping(pipe)
        pipe.close()

    async def datagram(self) -> None:
        assert self._ask is not None
        assert await self._ask(bytes(PING_BYTES)) == bytes(PING_BYTES)

    async def far_cpu_seconds(self) -> float:
        await self._pipe.send_all(memoryview(b"c"))
        await self._pipe.receive_into(self._back[:8])
        return float(np.frombuffer(self._back[:8])[0])


async def _ping(pipe: Pipe) -> None:
    await pipe.send_all(memoryview(b"p" + bytes(PING_BYTES)))
    await pipe.receive_into(memoryview(bytearray(PING_BYTES)))


async def serve_pipe(pipe: Pipe) -> None:
    """Run the far side of `PipeLine`. It receives a whole activation before it answers, as a stage must."""
    memory = memoryview(bytearray(PING_BYTES))
    try:
        while True:
            await pipe.receive_into(memory[:1])
            letter = bytes(memory[:1])
            if letter in b"be" and len(memory) < BULK_BYTES:
                memory = memoryview(bytearray(BULK_BYTES))
            match letter:
                case b"b":
                    await pipe.receive_into(memory)
                    await pipe.send_all(memory[:1])
                case b"e":
                    await pipe.receive_into(memory[:ECHO_BYTES])
                    await pipe.send_all(memory[:ECHO_BYTES])
                case b"p":
                    await pipe.receive_into(memory[:PING_BYTES])
                    await pipe.send_all(memory[:PING_BYTES])
                case b"c":
                    await pipe.send_all(memoryview(np.float64(time.process_time()).tobytes()))
    except (EOFError, OSError, trio.BrokenResourceError):
        pipe.close()


def udp_socket(port: int = 0) -> socket.socket:
    """Return a bound socket for datagrams."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((HOST, port))
    return made


def ask_plain(port: int) -> Callable[[bytes], Awaitable[bytes]]:
    """Return a function that sends a datagram to this port and returns its echo, over a blocking socket."""
    plain = udp_socket()
    plain.settimeout(ANSWER_SECONDS)

    async def ask(data: bytes) -> bytes:
        plain.sendto(data, (HOST, port))
        return plain.recvfrom(DATAGRAM_BYTES_MAX)[0]

    return ask


def ask_trio(port: int) -> Callable[[bytes], Awaitable[bytes]]:
    """Return a function that sends a datagram to this port and returns its echo, over a trio socket."""
    wrapped = trio.socket.from_stdlib_socket(udp_socket())

    async def ask(data: bytes) -> bytes:
        with trio.fail_after(ANSWER_SECONDS):
            await wrapped.sendto(data, (HOST, port))
            return (await wrapped.recvfrom(DATAGRAM_BYTES_MAX))[0]

    return ask


def answer_plain(plain: socket.socket) -> None:
    """Echo every datagram."""
    while True:
        plain.sendto(*plain.recvfrom(DATAGRAM_BYTES_MAX))


def serve_plain(connection: Connection) -> None:
    """Serve blocking sockets, with one thread for each."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    threading.Thread(target=answer_plain, args=(udp_socket(port),), daemon=True).start()
    connection.send(port)
    while True:
        accepted, _ = listener.accept()
        threading.Thread(target=trio.run, args=(serve_pipe, PlainPipe(accepted)), daemon=True).start()


async def serve_trio(connection: Connection, context: ssl.SSLContext | None) -> None:
    """Serve trio sockets, with TLS if there is a context."""

    async def serve(stream: trio.SocketStream) -> None:
        if context is None:
            await serve_pipe(TrioPipe(stream))
        else:
            await serve_pipe(TlsPipe(trio.SSLStream(stream, context, server_side=True)))

    listeners = await trio.open_tcp_listeners(0, host=HOST)
    port = listeners[0].socket.getsockname()[1]
    wrapped = trio.socket.from_stdlib_socket(udp_socket(port))

    async def answer() -> None:
        while True:
            await wrapped.sendto(*await wrapped.recvfrom(DATAGRAM_BYTES_MAX))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        connection.send(port)
        await trio.serve_listeners(serve, listeners)


def certificate(folder: Path) -> Path:
    """Write a self-signed certificate and its key to one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = folder / "tls.pem"
    path.write_bytes(
        signed.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return path


def tls_context(path: Path, *, server: bool) -> ssl.SSLContext:
    """Return a TLS 1.3 context. Host names are not checked; a check would cost next to nothing here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if server:
        context.load_cert_chain(path)
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
