"""Our streams beside plain TCP: bulk, a signed activation there and back, a round trip, connecting.

Two processes on loopback for each case, in turns, medians; a ratio is the median of the ratios within a
round, so that what else the machine does falls out. "Plain sockets" are blocking ones with one buffer made
before: nothing in Python is faster. The activation is a frame as the stages send it: packed, digested,
signed, encrypted, and checked at both ends, in the very messages of the pipeline; plain sockets send the same
number of bytes and no more.
"""

import multiprocessing
import os
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import trio
from _figures import Goal, arguments, leave, report
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from crypto.contact import make_address
from crypto.encoding import decode, encode
from crypto.facts import IdentitySigner, Signer
from crypto.identity import Identity
from node.runs.requests import PIPELINE_BYTES_MAX, PipelineMessage
from node.seams import RealClock, Stream
from node.transport.network import RealNetwork
from partition.codec import Array, pack, unpack
from partition.steps.frames import PAYLOAD_BYTES_MAX, Frame, make_frame, open_frame

BULK_BYTES = 64 * 2**20
ECHO_BYTES = 16 * 2**20
DIGEST_THREADS = 2
"""As a stage that was given both cores has it: while one end digests, the other waits."""
PING_BYTES = 64
PINGS, CONNECTS = 30, 5
ECHO_GOAL, BULK_GOAL, STALL_GOAL_SECONDS = 2.5, 0.5, 0.005
HOST = "127.0.0.1"

PLAIN, TRIO, TLS = "plain sockets", "trio sockets", "trio.SSLStream, TLS 1.3"
CIPHERS = {"peerloom, AES-256-GCM": "AESGCM", "peerloom, ChaCha20-Poly1305": "ChaChaPoly"}
OURS = next(iter(CIPHERS))
SERVER = Identity(b"s" * 32)
CLIENT = Identity(b"c" * 32)

Figures = dict[str, list[float]]


class Line(Protocol):
    """One case, connected: what is measured of it, and its far side's CPU seconds so far."""

    async def bulk(self) -> None: ...
    async def echo(self) -> None: ...
    async def ping(self) -> None: ...
    async def connect(self) -> None: ...
    async def far_cpu_seconds(self) -> float: ...


# --- bytes without messages: sockets and TLS -------------------------------------------------------


class Pipe(Protocol):
    """A connection that carries bytes."""

    async def send_all(self, data: memoryview) -> None: ...
    async def receive_into(self, view: memoryview) -> None:
        """Fill `view`; EOFError: the other side has closed."""

    def close(self) -> None: ...


class PlainPipe:
    """A blocking socket: async in form only."""

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


class TlsPipe:
    """TLS over a trio socket."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream

    async def send_all(self, data: memoryview) -> None:
        await self._stream.send_all(data)

    async def receive_into(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            data = await self._stream.receive_some(len(view) - at)
            if not data:
                raise EOFError
            view[at : at + len(data)] = data
            at += len(data)

    def close(self) -> None:
        self._stream.transport_stream.socket.close()


class PipeLine:
    """`Line` over bytes: a letter says what follows."""

    def __init__(self, pipe: Pipe, again: Callable[[], Awaitable[Pipe]]) -> None:
        self._pipe, self._again = pipe, again
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

    async def far_cpu_seconds(self) -> float:
        await self._pipe.send_all(memoryview(b"c"))
        await self._pipe.receive_into(self._back[:8])
        return float(np.frombuffer(self._back[:8])[0])


async def _ping(pipe: Pipe) -> None:
    await pipe.send_all(memoryview(b"p" + bytes(PING_BYTES)))
    await pipe.receive_into(memoryview(bytearray(PING_BYTES)))


async def serve_pipe(pipe: Pipe) -> None:
    """The far side of `PipeLine`. It takes an activation whole before it answers, as a stage must."""
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


def serve_plain(connection: Connection) -> None:
    """Blocking sockets, a thread for each."""
    listener = socket.create_server((HOST, 0))
    connection.send(listener.getsockname()[1])
    while True:
        accepted, _ = listener.accept()
        threading.Thread(target=trio.run, args=(serve_pipe, PlainPipe(accepted)), daemon=True).start()


async def serve_trio(connection: Connection, context: ssl.SSLContext | None) -> None:
    """Trio sockets, and TLS over them where there is a context."""

    async def serve(stream: trio.SocketStream) -> None:
        if context is None:
            await serve_pipe(TrioPipe(stream))
        else:
            await serve_pipe(TlsPipe(trio.SSLStream(stream, context, server_side=True)))

    listeners = await trio.open_tcp_listeners(0, host=HOST)
    connection.send(listeners[0].socket.getsockname()[1])
    await trio.serve_listeners(serve, listeners)


def certificate(folder: Path) -> Path:
    """A self-signed certificate and its key in one file."""
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
    """TLS 1.3 only; nobody's name is checked, which costs nothing here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if server:
        context.load_cert_chain(path)
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


# --- our streams -----------------------------------------------------------------------------------


def make_network(identity: Identity, cipher: str) -> RealNetwork:
    """A node's network on any port of loopback."""
    return RealNetwork(
        identity,
        os.urandom(32),
        "benchmark",
        clock=RealClock(),
        entropy=os.urandom,
        listen=[(HOST, 0)],
        suites=(cipher,),
    )


async def send_activation(stream: Stream, signer: Signer, activation: Array) -> None:
    """As a stage does: pack, digest, sign, send."""
    payload = pack([("float32", activation)], "raw", threads=DIGEST_THREADS)
    frame = make_frame(
        signer,
        payload,
        plan=bytes(32),
        step=0,
        attempt=0,
        microbatch=0,
        stage=0,
        direction="input",
        train=True,
    )
    await stream.send(encode(frame), payload.data)


async def receive_activation(stream: Stream, signer: Signer) -> Array:
    """Receive, check the signature, the digest and the shapes."""
    data, payload = await stream.receive_with_payload(PAYLOAD_BYTES_MAX)
    message: Frame = decode(data, PipelineMessage, bytes_max=PIPELINE_BYTES_MAX)
    opened = open_frame(signer, stream.peer, message, payload)
    ((_, activation),) = unpack(opened.payload, bytes_max=PAYLOAD_BYTES_MAX, threads=DIGEST_THREADS)
    return activation


class StreamLine:
    """`Line` over our streams, one for each kind of conversation."""

    def __init__(self, network: RealNetwork, streams: dict[str, Stream]) -> None:
        self._network, self._streams = network, streams
        self._signer = IdentitySigner(CLIENT, "benchmark")
        self._bulk = os.urandom(BULK_BYTES)
        rng = np.random.default_rng(1)
        self._activation = rng.standard_normal((ECHO_BYTES // 4096, 1024), dtype=np.float32)

    async def bulk(self) -> None:
        await self._streams["bulk"].send(b"", self._bulk)
        await self._streams["bulk"].receive()

    async def echo(self) -> None:
        stream = self._streams["frames"]
        await send_activation(stream, self._signer, self._activation)
        back = await receive_activation(stream, self._signer)
        # A hundredth of it is compared here: the digests have compared all of it.
        assert np.array_equal(back[::100], self._activation[::100])

    async def payload(self) -> None:
        """Encrypted there and back, neither signed nor digested."""
        stream = self._streams["payloads"]
        await stream.send(b"", self._activation.data)
        await stream.receive_with_payload(ECHO_BYTES)

    async def ping(self) -> None:
        await self._streams["pings"].send(bytes(PING_BYTES))
        await self._streams["pings"].receive()

    async def connect(self) -> None:
        await (await self._network.open(SERVER.peer, _protocol("pings"))).aclose()

    async def far_cpu_seconds(self) -> float:
        await self._streams["cpu"].send(b"")
        return float(await self._streams["cpu"].receive())


def _protocol(name: str) -> str:
    return f"/benchmark/{name}/1"


async def take_bulk(stream: Stream) -> None:
    while True:
        await stream.receive_with_payload(BULK_BYTES)
        await stream.send(b"")


async def echo_frames(stream: Stream) -> None:
    signer = IdentitySigner(SERVER, "benchmark")
    while True:
        await send_activation(stream, signer, await receive_activation(stream, signer))


async def echo_payloads(stream: Stream) -> None:
    while True:
        await stream.send(*await stream.receive_with_payload(ECHO_BYTES))


async def echo_pings(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())


async def tell_cpu(stream: Stream) -> None:
    while True:
        await stream.receive()
        await stream.send(str(time.process_time()).encode())


CONVERSATIONS = {
    "bulk": take_bulk,
    "frames": echo_frames,
    "payloads": echo_payloads,
    "pings": echo_pings,
    "cpu": tell_cpu,
}


async def serve_streams(connection: Connection, cipher: str) -> None:
    """The far side of `StreamLine`."""
    network = make_network(SERVER, cipher)
    for name, conversation in CONVERSATIONS.items():
        network.handle(_protocol(name), conversation)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        connection.send(network.port)


# --- measuring -------------------------------------------------------------------------------------


def serve(case: str, pem: Path, connection: Connection) -> None:
    """The whole of a far side's process."""
    if case == PLAIN:
        serve_plain(connection)
    elif case in CIPHERS:
        trio.run(serve_streams, connection, CIPHERS[case])
    else:
        trio.run(serve_trio, connection, tls_context(pem, server=True) if case == TLS else None)


@contextmanager
def far_sides(cases: list[str], folder: Path) -> Iterator[dict[str, int]]:
    """Each case's far side in a process of its own; where each listens."""
    pem = certificate(folder)
    context = multiprocessing.get_context("spawn")
    processes, ports = [], {}
    try:
        for case in cases:
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(case, pem, theirs), daemon=True))
            processes[-1].start()
            ports[case] = ours.recv()
        yield ports
    finally:
        for process in processes:
            process.terminate()
            process.join()


async def connect_pipe(case: str, port: int, pem: Path) -> Pipe:
    if case == PLAIN:
        return PlainPipe(socket.create_connection((HOST, port)))
    stream = await trio.open_tcp_stream(HOST, port)
    if case == TRIO:
        return TrioPipe(stream)
    return TlsPipe(trio.SSLStream(stream, tls_context(pem, server=False), server_hostname=HOST))


async def connect_line(case: str, port: int, pem: Path, nursery: trio.Nursery) -> Line:
    if case not in CIPHERS:
        again = partial(connect_pipe, case, port, pem)
        return PipeLine(await again(), again)
    network = make_network(CLIENT, CIPHERS[case])
    await nursery.start(network.run)
    network.learn(SERVER.peer, [make_address(HOST, port)])
    return StreamLine(
        network, {name: await network.open(SERVER.peer, _protocol(name)) for name in CONVERSATIONS}
    )


async def timed(line: Line, figures: Figures, name: str, times: int = 1) -> None:
    """One measurement of `times` times; for a single one the CPU seconds of both ends too."""
    call = getattr(line, name)
    far = await line.far_cpu_seconds() if times == 1 else 0.0
    near, begun = time.process_time(), time.perf_counter()
    for _ in range(times):
        await call()
    figures.setdefault(name, []).append((time.perf_counter() - begun) / times)
    if times == 1:
        near = time.process_time() - near
        figures.setdefault(f"{name} cpu", []).append(near + await line.far_cpu_seconds() - far)


class LongestStep(trio.abc.Instrument):
    """The longest that any task kept the event loop to itself."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = time.perf_counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 - trio's signature
        self._begun = time.perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 - trio's signature
        self.seconds = max(self.seconds, time.perf_counter() - self._begun)


async def longest_stall_seconds(line: Line, rounds: int) -> float:
    """While payloads are encrypted and decrypted; the median of the worst of each echo."""
    assert isinstance(line, StreamLine)
    worst = []
    for _ in range(rounds):
        instrument = LongestStep()
        trio.lowlevel.add_instrument(instrument)
        await line.payload()
        trio.lowlevel.remove_instrument(instrument)
        worst.append(instrument.seconds)
    return statistics.median(worst)


async def measure(ports: dict[str, int], pem: Path, rounds: int) -> tuple[dict[str, Figures], float]:
    """All cases in turns, and our longest stall."""
    found: dict[str, Figures] = {case: {} for case in ports}
    async with trio.open_nursery() as nursery:
        lines = {case: await connect_line(case, port, pem, nursery) for case, port in ports.items()}
        for number in range(rounds + 1):
            for case, line in lines.items():
                # The first round warms up: buffers, windows, caches.
                figures = found[case] if number else {}
                await timed(line, figures, "bulk")
                await timed(line, figures, "echo")
                if isinstance(line, StreamLine):
                    await timed(line, figures, "payload")
                await timed(line, figures, "ping", PINGS)
                await timed(line, figures, "connect", CONNECTS)
        stall_seconds = await longest_stall_seconds(lines[OURS], rounds)
        nursery.cancel_scope.cancel()
    return found, stall_seconds


def ratio(found: dict[str, Figures], case: str, name: str, plain_name: str | None = None) -> float:
    """How many times as long as plain sockets, or as much: the median over the rounds."""
    pairs = zip(found[case][name], found[PLAIN][plain_name or name], strict=True)
    return statistics.median(ours / plain for ours, plain in pairs)


def row(found: dict[str, Figures], case: str) -> dict[str, Any]:
    """One case, beside plain sockets."""
    middle = {name: statistics.median(values) for name, values in found[case].items()}
    figures = {
        "case": case,
        "bulk_gb_per_second": round(BULK_BYTES / middle["bulk"] / 1e9, 2),
        "bulk_speed_of_plain": round(1 / ratio(found, case, "bulk"), 2),
        "bulk_cpu_of_plain": round(ratio(found, case, "bulk cpu"), 2),
        "echo_ms": round(1000 * middle["echo"], 1),
        "echo_time_of_plain": round(ratio(found, case, "echo"), 2),
        "echo_cpu_of_plain": round(ratio(found, case, "echo cpu"), 2),
        "round_trip_ms": round(1000 * middle["ping"], 3),
        "connect_ms": round(1000 * middle["connect"], 2),
    }
    if "payload" in middle:
        figures["payload_echo_time_of_plain"] = round(ratio(found, case, "payload", "echo"), 2)
    return figures


def main() -> int:
    """Start the far sides, measure, report."""
    flags = arguments(__doc__ or "")
    cases = [PLAIN, TRIO, TLS, *CIPHERS]
    with tempfile.TemporaryDirectory() as folder, far_sides(cases, Path(folder)) as ports:
        pem = Path(folder) / "tls.pem"
        found, stall_seconds = trio.run(measure, ports, pem, 9 if flags.quick else 31)
    goals = [
        Goal(
            "signed activation of 16 MiB there and back, time of plain sockets",
            ratio(found, OURS, "echo"),
            "<=",
            ECHO_GOAL,
        ),
        Goal("bulk, speed of plain sockets", 1 / ratio(found, OURS, "bulk"), ">=", BULK_GOAL),
        Goal("longest step of the event loop, seconds", stall_seconds, "<=", STALL_GOAL_SECONDS),
    ]
    return report("transport", [row(found, case) for case in cases], goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
