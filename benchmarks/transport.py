"""Our streams compared with plain TCP: bulk, a signed activation sent and returned, a round trip, connecting.

There are two processes on loopback for each case, which take turns. Figures are medians; a ratio is the
median of the ratios within a round, so that other load on the machine cancels out. "Plain sockets" are
blocking sockets with one preallocated buffer; nothing in Python is faster. The activation is a frame as
stages send it: packed, digested, signed, encrypted, and checked at both ends, in the pipeline's own messages;
plain sockets send just the same number of bytes.
"""

import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import trio
from _figures import Goal, arguments, leave, report
from _libp2p import is_installed, libp2p_line, serve_libp2p
from _pipes import (
    ANSWER_SECONDS,
    BULK_BYTES,
    ECHO_BYTES,
    HOST,
    PING_BYTES,
    Line,
    Pipe,
    PipeLine,
    PlainPipe,
    TlsPipe,
    TrioPipe,
    ask_plain,
    ask_trio,
    certificate,
    serve_plain,
    serve_trio,
    tls_context,
)

from crypto.contact import make_address
from crypto.encoding import decode, encode
from crypto.facts import IdentitySigner, Signer
from crypto.identity import Identity
from node.protocols.runs import PIPELINE_BYTES_MAX, PipelineMessage
from node.seams import RealClock, Stream
from node.transport.network import RealNetwork
from partition.codecs.codec import Array, pack, unpack
from partition.steps.frames import PAYLOAD_BYTES_MAX, Frame, make_frame, open_frame

DIGEST_THREADS = 2
"""Number of threads that digest, as in a stage with both cores, because while one end digests, the other
waits."""
PINGS, CONNECTS, DATAGRAMS = 100, 5, 30
TIMES = {"ping": PINGS, "connect": CONNECTS, "reopen": CONNECTS, "datagram": DATAGRAMS}
ECHO_GOAL, BULK_GOAL, STALL_GOAL_SECONDS = 2.5, 0.5, 0.005
BULK_CPU_GOAL, PING_GOAL, CONNECT_CPU_GOAL_SECONDS = 2.2, 1.3, 0.003
KNOWN_PEER_CPU_GOAL_SECONDS = 60e-6
"""Maximum CPU time on one side for a datagram sent and returned, in addition to that of trio's sockets."""

PLAIN, TRIO, TLS, LIBP2P = "plain sockets", "trio sockets", "trio.SSLStream, TLS 1.3", "py-libp2p"
SLOW_ROUNDS = 2
"""Number of final rounds in which py-libp2p is measured; its bulk transfer takes as long as all other cases
together."""
CIPHERS = {"peerloom, AES-256-GCM": "AESGCM", "peerloom, ChaCha20-Poly1305": "ChaChaPoly"}
OURS = next(iter(CIPHERS))
SERVER = Identity(b"s" * 32)
CLIENT = Identity(b"c" * 32)

Figures = dict[str, list[float]]


# --- our streams -----------------------------------------------------------------------------------


def make_network(identity: Identity, cipher: str) -> RealNetwork:
    """Return a node's network on any free port of loopback."""
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
    """Send an activation as a stage does: pack, digest, sign, send."""
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


async def receive_activation(stream: Stream) -> Array:
    """Receive an activation; check the digest and the shapes."""
    data, payload = await stream.receive_with_payload(PAYLOAD_BYTES_MAX)
    message: Frame = decode(data, PipelineMessage, bytes_max=PIPELINE_BYTES_MAX)
    opened = open_frame(stream.peer, message, payload)
    ((_, activation),) = unpack(opened.payload, bytes_max=PAYLOAD_BYTES_MAX, threads=DIGEST_THREADS)
    return activation


class StreamLine:
    """A `Line` over our streams, with one stream for each kind of conversation."""

    def __init__(self, network: RealNetwork, port: int, cipher: str, streams: dict[str, Stream]) -> None:
        self._network, self._streams = network, streams
        self._address, self._cipher = make_address(HOST, port), cipher
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
        back = await receive_activation(stream)
        # Only a hundredth is compared here, because the digests have compared all of it.
        assert np.array_equal(back[::100], self._activation[::100])

    async def payload(self) -> None:
        """Send a payload there and back: encrypted, but neither signed nor digested."""
        stream = self._streams["payloads"]
        await stream.send(b"", self._activation.data)
        await stream.receive_with_payload(ECHO_BYTES)

    async def ping(self) -> None:
        await self._streams["pings"].send(bytes(PING_BYTES))
        await self._streams["pings"].receive()

    async def connect(self) -> None:
        """Open a new connection each time, even if one is idle."""
        await self._network.identify(self._address)

    async def reopen(self) -> None:
        """Open a stream on the idle connection of the previous one."""
        await (await self._network.open(SERVER.peer, _protocol("once"))).aclose()

    async def datagram(self) -> None:
        """Send a message to a known peer and back."""
        await ask_by_datagram(self._network)

    async def new_peer(self) -> float:
        """Send from a node that is unknown to the far side; return the seconds from its first message to the
        answer."""
        network = make_network(Identity(os.urandom(32)), self._cipher)
        async with trio.open_nursery() as nursery:
            await nursery.start(network.run)
            network.learn(SERVER.peer, [self._address])
            begun = time.perf_counter()
            await ask_by_datagram(network)
            seconds = time.perf_counter() - begun
            nursery.cancel_scope.cancel()
        return seconds

    async def far_cpu_seconds(self) -> float:
        await self._streams["cpu"].send(b"")
        return float(await self._streams["cpu"].receive())


async def ask_by_datagram(network: RealNetwork) -> None:
    """Send a message to the far side and back; a loss would hang, but loopback loses nothing."""
    network.send(SERVER.peer, _protocol("datagrams"), bytes(PING_BYTES))
    inbox = network.inbox(_protocol("datagrams"))
    ((_, answer),) = await inbox.take(trio.current_time() + ANSWER_SECONDS)
    assert answer == bytes(PING_BYTES)


def _protocol(name: str) -> str:
    return f"/benchmark/{name}/1"


async def take_bulk(stream: Stream) -> None:
    while True:
        await stream.receive_with_payload(BULK_BYTES)
        await stream.send(b"")


async def echo_frames(stream: Stream) -> None:
    signer = IdentitySigner(SERVER, "benchmark")
    while True:
        await send_activation(stream, signer, await receive_activation(stream))


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


async def say_nothing(stream: Stream) -> None:
    """Do nothing, as the far side of a stream that is only opened and closed."""


async def answer_datagrams(network: RealNetwork) -> None:
    inbox = network.inbox(_protocol("datagrams"))
    while True:
        for sender, message in await inbox.take(trio.current_time() + 3_600):
            network.send(sender, _protocol("datagrams"), message)


CONVERSATIONS = {
    "bulk": take_bulk,
    "frames": echo_frames,
    "payloads": echo_payloads,
    "pings": echo_pings,
    "cpu": tell_cpu,
}


async def serve_streams(connection: Connection, cipher: str) -> None:
    """Run the far side of `StreamLine`."""
    network = make_network(SERVER, cipher)
    for name, conversation in CONVERSATIONS.items():
        network.handle(_protocol(name), conversation)
    network.handle(_protocol("once"), say_nothing)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        nursery.start_soon(answer_datagrams, network)
        connection.send(network.port)


# --- measuring -------------------------------------------------------------------------------------


def serve(case: str, pem: Path, connection: Connection) -> None:
    """Run the process of a far side."""
    if case == PLAIN:
        serve_plain(connection)
    elif case == LIBP2P:
        trio.run(serve_libp2p, connection)
    elif case in CIPHERS:
        trio.run(serve_streams, connection, CIPHERS[case])
    else:
        trio.run(serve_trio, connection, tls_context(pem, server=True) if case == TLS else None)


@contextmanager
def far_sides(cases: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield each case's far side in a separate process: its port, and py-libp2p's id."""
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
        return PipeLine(await again(), again, ask_plain(port) if case == PLAIN else ask_trio(port))
    network = make_network(CLIENT, CIPHERS[case])
    await nursery.start(network.run)
    network.learn(SERVER.peer, [make_address(HOST, port)])
    network.inbox(_protocol("datagrams"))
    streams: dict[str, Stream] = {
        name: await network.open(SERVER.peer, _protocol(name)) for name in CONVERSATIONS
    }
    return StreamLine(network, port, CIPHERS[case], streams)


async def timed(line: Line, figures: Figures, name: str) -> None:
    """Measure once, with enough repetitions for a meaningful time; also record the CPU seconds of both
    ends."""
    call, times = getattr(line, name), TIMES.get(name, 1)
    far = await line.far_cpu_seconds()
    near, begun = time.process_time(), time.perf_counter()
    for _ in range(times):
        await call()
    figures.setdefault(name, []).append((time.perf_counter() - begun) / times)
    near = time.process_time() - near
    figures.setdefault(f"{name} cpu", []).append((near + await line.far_cpu_seconds() - far) / times)


class LongestStep(trio.abc.Instrument):
    """The longest time that any task held the event loop, in seconds of computing, so that other load on the
    machine cancels out."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = time.thread_time()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 - trio's signature
        self._begun = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 - trio's signature
        self.seconds = max(self.seconds, time.thread_time() - self._begun)


async def longest_stall_seconds(line: Line, rounds: int) -> float:
    """Return the longest stall while payloads are encrypted and decrypted: the median over the worst stall of
    each echo."""
    assert isinstance(line, StreamLine)
    worst = []
    for _ in range(rounds):
        instrument = LongestStep()
        trio.lowlevel.add_instrument(instrument)
        await line.payload()
        trio.lowlevel.remove_instrument(instrument)
        worst.append(instrument.seconds)
    return statistics.median(worst)


async def measure(ports: dict[str, Any], pem: Path, rounds: int) -> tuple[dict[str, Figures], float]:
    """Measure all cases in turns, and our longest stall."""
    found: dict[str, Figures] = {case: {} for case in ports}
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        lines: dict[str, Line] = {}
        for case, port in ports.items():
            if case == LIBP2P:
                lines[case] = await stack.enter_async_context(libp2p_line(*port))
            else:
                lines[case] = await connect_line(case, port, pem, nursery)
        for number in range(rounds + 1):
            for case, line in lines.items():
                if case == LIBP2P and number + SLOW_ROUNDS <= rounds:
                    continue
                # The first round only warms up buffers, windows and caches.
                figures = found[case] if number else {}
                for name in ("bulk", "echo", "ping", "connect"):
                    await timed(line, figures, name)
                if case != LIBP2P:
                    await timed(line, figures, "datagram")
                if isinstance(line, StreamLine):
                    await timed(line, figures, "payload")
                    await timed(line, figures, "reopen")
                    figures.setdefault("new peer", []).append(await line.new_peer())
        stall_seconds = await longest_stall_seconds(lines[OURS], rounds)
        nursery.cancel_scope.cancel()
    return found, stall_seconds


def ratio(
    found: dict[str, Figures], case: str, name: str, plain_name: str | None = None, *, beside: str = PLAIN
) -> float:
    """Return the time, or the rate, relative to plain sockets: the median over the rounds."""
    figures, others = found[case][name], found[beside][plain_name or name]
    pairs = zip(figures, others[-len(figures) :], strict=True)
    return statistics.median(ours / other for ours, other in pairs)


def known_peer_seconds(found: dict[str, Figures]) -> float:
    """Return one side's CPU time for a datagram to a known peer and back, in addition to that of trio's
    sockets."""
    pairs = zip(found[OURS]["datagram cpu"], found[TRIO]["datagram cpu"], strict=True)
    return statistics.median(ours - raw for ours, raw in pairs) / 2


def row(found: dict[str, Figures], case: str) -> dict[str, Any]:
    """Return the row of one case, relative to plain sockets."""
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
        "round_trip_of_trio": round(ratio(found, case, "ping", beside=TRIO), 2),
        "connect_ms": round(1000 * middle["connect"], 2),
        "connect_cpu_ms": round(1000 * middle["connect cpu"], 2),
    }
    if "datagram" in middle:
        figures["datagram_ms"] = round(1000 * middle["datagram"], 3)
        figures["datagram_cpu_ms"] = round(1000 * middle["datagram cpu"], 3)
    if "payload" in middle:
        figures["reopen_ms"] = round(1000 * middle["reopen"], 2)
        figures["datagram_new_peer_ms"] = round(1000 * middle["new peer"], 2)
        figures["payload_echo_time_of_plain"] = round(ratio(found, case, "payload", "echo"), 2)
    return figures


def main() -> int:
    """Start the far sides, measure, report."""
    flags = arguments(__doc__ or "")
    cases = [PLAIN, TRIO, TLS, *CIPHERS, *([LIBP2P] if is_installed() else [])]
    with tempfile.TemporaryDirectory() as folder, far_sides(cases, Path(folder)) as ports:
        pem = Path(folder) / "tls.pem"
        found, stall_seconds = trio.run(measure, ports, pem, 9 if flags.quick else 31)
    goals = [
        Goal(
            "signed activation of 16 MiB there and back, time relative to plain sockets",
            ratio(found, OURS, "echo"),
            "<=",
            ECHO_GOAL,
        ),
        Goal("bulk, speed relative to plain sockets", 1 / ratio(found, OURS, "bulk"), ">=", BULK_GOAL),
        Goal("bulk, CPU relative to plain sockets", ratio(found, OURS, "bulk cpu"), "<=", BULK_CPU_GOAL),
        Goal(
            "round trip, time relative to trio's sockets",
            ratio(found, OURS, "ping", beside=TRIO),
            "<=",
            PING_GOAL,
        ),
        Goal(
            "connect, CPU seconds of both ends",
            statistics.median(found[OURS]["connect cpu"]),
            "<=",
            CONNECT_CPU_GOAL_SECONDS,
        ),
        Goal(
            "datagram there and back with a known peer, CPU seconds per side above trio's sockets",
            known_peer_seconds(found),
            "<=",
            KNOWN_PEER_CPU_GOAL_SECONDS,
        ),
        Goal("longest step of the event loop, seconds", stall_seconds, "<=", STALL_GOAL_SECONDS),
    ]
    return report("transport", [row(found, case) for case in cases], goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
