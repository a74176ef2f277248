"""64 hostile peers occupy one protocol of a real node for two minutes, while an honest peer uses it.

`PEERLOOM_HELD` sets the seconds (`make soak`); `tests.test_held_places` does the same in virtual time. The
hostile peers hold all streams that they get. Some are silent, some send a long message without its last byte,
and all come back when they lose a stream. A node answers questions about data on streams of its own, to
addresses from the DHT; the hostile peers ask about missing data, and read no answer.
"""

import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import trio

import dht.messages
from crypto.contact import parse_address
from crypto.encoding import encode
from crypto.identity import Identity, PeerId, parse_peer
from gossip.averaging.messages import PROTOCOL as ATTEMPT_PROTOCOL
from gossip.pieces.messages import DATA_PROTOCOL
from node.averaging import transfer
from node.checkpoints import replication
from node.content import blobs
from node.demo.processes import SwarmProcesses
from node.errors import StreamClosed, Unreachable
from node.protocols import runs as wire
from node.seams import MESSAGE_BYTES_USUAL
from node.transport.network import RealNetwork
from node.transport.streams import SecureStream
from partition.run.local.column_messages import PROTOCOL as COLUMN_PROTOCOL
from tests.node.nets import make_network
from tests.test_held_places import (
    AGAIN_SECONDS,
    ANSWER_SECONDS,
    HOSTILE,
    DataPeer,
    first_words,
    honest_call,
    never_read,
)

SECONDS = float(os.environ.get("PEERLOOM_HELD", "0"))
STREAMS_EACH = 8
GROWTH_MIB_MAX = 100
PAGE_CONNECTIONS = 140
PAGE = "page"
HELD = [
    wire.RUNS_PROTOCOL, blobs.BLOBS_PROTOCOL, replication.COPIES_PROTOCOL, transfer.PROTOCOL,
    ATTEMPT_PROTOCOL, COLUMN_PROTOCOL, wire.PIPELINE_PROTOCOL, DATA_PROTOCOL, PAGE,
]  # fmt: skip
SWARM = "held"

pytestmark = pytest.mark.skipif(not SECONDS, reason="PEERLOOM_HELD=120 holds each protocol for two minutes")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[SwarmProcesses]:
    found = SwarmProcesses(tmp_path, SWARM, time.sleep, with_page="a", calibrate=False)
    try:
        found.launch("a")
        found.start("a", None)
        yield found
    finally:
        found.close()


async def hold_stream(network: RealNetwork, victim: PeerId, protocol: str, is_long: bool) -> None:
    while True:
        with suppress(Unreachable, StreamClosed, OSError):
            stream = await network.open(victim, protocol)
            if first := first_words(protocol):
                await stream.send(first)
            if is_long:
                await send_most(stream)
            await stream.receive()
        await trio.sleep(AGAIN_SECONDS)


async def send_most(stream: SecureStream) -> None:
    """Send a long message without its last byte."""
    *chunks, last = stream.connection._writer.chunks(bytes(MESSAGE_BYTES_USUAL - 100))
    for chunk in (*map(bytes, chunks), bytes(last)[:-1]):
        await stream.connection._write(chunk)


async def hold_page(port: int, number: int) -> None:
    while True:
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                if number % 2:
                    await stream.send_all(b"GET /api/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
                while await stream.receive_some(1_000):
                    pass
        await trio.sleep(AGAIN_SECONDS)


def ask_page(link: str) -> None:
    address, _, token = link.partition("/#token=")
    request = urllib.request.Request(f"{address}/api/view", headers={"x-peerloom-token": token})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        assert json.load(answer)["schema"] == "peerloom/page/1"


def memory_mib(nodes: SwarmProcesses) -> float:
    return float(psutil.Process(nodes.nodes["a"].process.pid).memory_info().rss) / 2**20


@pytest.mark.parametrize("protocol", HELD)
def test_an_occupied_protocol_answers_and_its_node_stays_small(nodes: SwarmProcesses, protocol: str) -> None:
    trio.run(attack, nodes, protocol)


async def attack(nodes: SwarmProcesses, protocol: str) -> None:
    node = nodes.nodes["a"]
    victim = cast("Any", SimpleNamespace(peer=parse_peer(node.peer)))
    address, before = parse_address(node.address), memory_mib(nodes)
    names = [Identity(number.to_bytes(32, "big")) for number in range(HOSTILE + 1)]
    honest, *hostile = [make_network("x", swarm=SWARM, identity=name) for name in names]
    async with trio.open_nursery() as nursery:
        for network in (honest, *hostile):
            await nursery.start(network.run)
            network.learn(victim.peer, [address.of(victim.peer)])
            await network.identify(address)
            if protocol == DATA_PROTOCOL:
                said = dht.messages.Ping(1, tuple(str(each) for each in network.addresses))
                network.send(victim.peer, dht.messages.PROTOCOL, encode(said))
                if network is not honest:
                    network.handle(DATA_PROTOCOL, never_read)
        data = DataPeer(honest)
        link = nodes.page("a")
        for number, network in enumerate(hostile):
            for each in range(0 if protocol == PAGE else STREAMS_EACH):
                nursery.start_soon(hold_stream, network, victim.peer, protocol, (number + each) % 2 == 1)
        for number in range(PAGE_CONNECTIONS if protocol == PAGE else 0):
            nursery.start_soon(hold_page, int(link.partition("/#")[0].rpartition(":")[2]), number)
        await trio.sleep(1)
        slowest, highest, calls = 0.0, before, 0
        failures: list[str] = []
        until = trio.current_time() + SECONDS
        while trio.current_time() < until:
            begun = trio.current_time()
            try:
                with trio.fail_after(2 * ANSWER_SECONDS):
                    if protocol == PAGE:
                        await trio.to_thread.run_sync(ask_page, link)
                    elif protocol == DATA_PROTOCOL:
                        await data.ask(victim.peer)
                    else:
                        await honest_call(honest, victim, protocol)
            except (Unreachable, StreamClosed, OSError, trio.TooSlowError) as error:
                failures.append(f"{type(error).__name__} {error}")
            took = trio.current_time() - begun
            slowest, highest, calls = max(slowest, took), max(highest, memory_mib(nodes)), calls + 1
            if took > ANSWER_SECONDS:
                failures.append(f"answered after {took:.1f} s")
            await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    figures = f"{protocol}: {calls} calls, slowest {slowest:.2f} s, memory +{highest - before:.0f} MiB"
    sys.stderr.write(f"{figures}\n")
    assert failures == [], figures
    assert highest - before <= GROWTH_MIB_MAX
