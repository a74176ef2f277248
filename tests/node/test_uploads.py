"""Weights, graphs and data are sent to peers that do not read. Such uploads take little memory, and only for
a short time.
"""

import os
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from crypto.encoding import decode, encode
from crypto.identity import Identity, PeerId
from crypto.registers import SLOW_SECONDS
from node.checkpoints.weights import weights_name
from node.errors import StreamClosed, Unreachable
from node.executor import RealExecutor
from node.protocols import calls
from node.protocols import runs as wire
from node.protocols.permits import Permit, Permits
from node.protocols.uploads import STALL_SECONDS_MAX, send_blob, whole
from node.runs.server import FILES_MAX, FILES_PER_PEER_MAX, PATIENCE_SECONDS
from node.runtime import Node
from node.seams import Network, RealClock, Stream
from node.storage.folder import FolderStorage
from tests.node.nets import conversation
from tests.stack import Swarm, simulate, swarm

RUN = "0123456789abcdef"
ALICE, BOB, CAROL = (Identity(bytes([number]) * 32).peer for number in (1, 2, 3))
WEIGHTS = bytes(8 << 20)
"""A size above the amount that the network buffers for one stream."""


def scenario(test: Callable[[Swarm, Node], Awaitable[None]]) -> None:
    """Run `test` with a node that keeps the weights of a run."""

    async def main() -> None:
        async with swarm("a") as group:
            group.storages["a"].write(weights_name(RUN), WEIGHTS)
            await test(group, group.nodes["a"])

    simulate(main)


@asynccontextmanager
async def strangers(group: Swarm, node: Node, count: int) -> AsyncIterator[Sequence[Network]]:
    networks = [group.medium.attach(Identity(number.to_bytes(32, "big")).peer) for number in range(count)]
    async with trio.open_nursery() as nursery:
        for network in networks:
            await nursery.start(network.run)
            network.learn(node.peer, node.network.addresses)
        yield networks
        nursery.cancel_scope.cancel()


async def ask_and_never_read(network: Network, node: Node) -> Stream:
    stream = await network.open(node.peer, wire.RUNS_PROTOCOL, message_bytes_max=wire.BLOB_CHUNK_BYTES)
    await stream.send(encode(wire.FetchWeights(RUN)))
    return stream


async def drain(stream: Stream) -> int:
    """Return the number of bytes that arrive before the stream ends."""
    received = 0
    with suppress(StreamClosed):
        while True:
            received += len(await stream.receive())
    return received


async def fetch(network: Network, node: Node) -> bytes:
    return await calls.fetch(network, node.peer, wire.FetchWeights(RUN), seconds=20)


def test_a_peer_that_never_reads_does_not_block_uploads_to_others() -> None:
    async def test(group: Swarm, node: Node) -> None:
        async with strangers(group, node, 2) as (hostile, honest):
            for _ in range(FILES_PER_PEER_MAX):
                await ask_and_never_read(hostile, node)
            await trio.sleep(0.5)
            with pytest.raises(Unreachable) as refused:
                await fetch(hostile, node)
            assert refused.value.reason == "busy", "the refusal has no code that is independent of its text"
            assert await fetch(honest, node) == WEIGHTS

    scenario(test)


def test_a_crowd_that_never_reads_is_evicted_within_seconds() -> None:
    async def test(group: Swarm, node: Node) -> None:
        async with strangers(group, node, FILES_MAX // FILES_PER_PEER_MAX + 1) as (honest, *crowd):
            for hostile in crowd:
                for _ in range(FILES_PER_PEER_MAX):
                    await ask_and_never_read(hostile, node)
            await trio.sleep(PATIENCE_SECONDS + 0.5)
            assert await fetch(honest, node) == WEIGHTS

    scenario(test)


def test_a_stalled_receiver_loses_its_stream() -> None:
    async def test(group: Swarm, node: Node) -> None:
        async with strangers(group, node, 1) as (hostile,):
            stream = await ask_and_never_read(hostile, node)
            await trio.sleep(STALL_SECONDS_MAX + 1)
            assert 0 < await drain(stream) < len(WEIGHTS)

    scenario(test)


def test_a_slow_receiver_that_keeps_reading_gets_the_whole_file() -> None:
    async def test(group: Swarm, node: Node) -> None:
        async with strangers(group, node, 1) as (slow,):
            stream = await ask_and_never_read(slow, node)
            assert decode(await stream.receive(), wire.Reply, bytes_max=100) == wire.Blob(len(WEIGHTS))
            received = 0
            while received < len(WEIGHTS):
                await trio.sleep(STALL_SECONDS_MAX / 2)
                received += len(await stream.receive())
            assert received == len(WEIGHTS)

    scenario(test)


async def test_an_upload_of_any_size_takes_one_chunk_of_memory(tmp_path: Path) -> None:
    storage, size = FolderStorage(tmp_path), 128 << 20
    storage.write("large", b"")
    os.truncate(tmp_path / "large", size)
    executor = RealExecutor()

    async def serve(stream: Stream) -> None:
        permits = Permits(1, 1, patience_seconds=1, clock=RealClock())
        with permits.take(stream.peer) as permit:
            assert permit is not None
            part = whole(storage.open("large"))
            assert part is not None
            await send_blob(stream, part, permit, executor)

    async with conversation(serve) as (stream, _, _):
        tracemalloc.start()
        try:
            assert decode(await stream.receive(), wire.Reply, bytes_max=100) == wire.Blob(size)
            received = 0
            while received < size:
                received += len(await stream.receive())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 8 << 20


def test_only_a_stalled_peer_loses_its_permit() -> None:
    permits = Permits(2, 1, patience_seconds=2, clock=RealClock())
    taken: list[PeerId] = []

    async def hold(peer: PeerId, prepare: Callable[[Permit], None]) -> None:
        with permits.take(peer) as permit:
            assert permit is not None
            prepare(permit)
            await trio.sleep(1_000)
        taken.append(peer)

    def is_free(peer: PeerId) -> bool:
        with permits.take(peer) as permit:
            return permit is not None

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold, ALICE, lambda permit: permit.works())
            nursery.start_soon(hold, BOB, lambda permit: permit.waits(100))
            await trio.sleep(SLOW_SECONDS / 2)
            assert not is_free(CAROL), "a permit was revoked although the wait is still short"
            await trio.sleep(SLOW_SECONDS)
            assert not is_free(BOB), "a peer got a second permit"
            assert is_free(CAROL)
            await trio.sleep(0.1)
            assert taken == [BOB]
            assert len(permits) == 1
            nursery.cancel_scope.cancel()

    simulate(main)
