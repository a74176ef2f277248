"""Limits on streams for averaging attempts that a node takes no part in. Real nodes on loopback."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from crypto.encoding import encode
from gossip.averaging.messages import CHUNK_BYTES_MAX, PROTOCOL, Chunk, Opening
from node.averaging.early_streams import STREAMS_MAX, STREAMS_PER_PEER_MAX, EarlyStreams
from node.averaging.runner import MESSAGE_BYTES_MAX
from node.errors import StreamClosed, Unreachable
from node.seams import Parts
from node.transport.streams import SecureStream
from tests.gossip.swarm import peer_of
from tests.node.averaging.test_average import nodes

STREAMS = 24
CHUNK_BYTES = CHUNK_BYTES_MAX - 4_096


async def test_a_chunk_of_an_unknown_attempt_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_bytes = 0
    receive = SecureStream.receive_with_payload

    async def count(stream: SecureStream, payload_bytes_max: int) -> tuple[bytes, memoryview]:
        nonlocal taken_bytes
        message, payload = await receive(stream, payload_bytes_max)
        taken_bytes += len(payload)
        return message, payload

    monkeypatch.setattr(SecureStream, "receive_with_payload", count)
    attempt = bytes(32)
    chunk = memoryview(bytes(CHUNK_BYTES))
    message = encode(Chunk(attempt, "scatter", 0, 0, b"", bytes(32), memoryview(b"")))
    async with nodes(tmp_path, 2) as (victim, hostile):
        victim.averaging.open("run", bytes(32))
        ended: list[int] = []
        few_left = trio.Event()

        async def strike(number: int) -> None:
            try:
                stream = await hostile.network.open(
                    victim.peer, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX
                )
                await stream.send(encode(Opening(attempt)))
                await stream.send(message, chunk)
                await stream.receive()
            except (StreamClosed, Unreachable):
                ended.append(number)
                if len(ended) == STREAMS - STREAMS_PER_PEER_MAX:
                    few_left.set()

        async with trio.open_nursery() as nursery:
            for number in range(STREAMS):
                nursery.start_soon(strike, number)
            with trio.fail_after(20):
                await few_left.wait()
            assert len(victim.averaging.early) == STREAMS_PER_PEER_MAX
            assert not taken_bytes, "a chunk of an unknown attempt was read"
            nursery.cancel_scope.cancel()


async def test_a_silent_stream_loses_its_slot(tmp_path: Path) -> None:
    parts: Parts = {EarlyStreams: partial(EarlyStreams, seconds_max=0.2)}
    async with nodes(tmp_path, 2, parts) as (victim, hostile):
        victim.averaging.open("run", bytes(32))
        stream = await hostile.network.open(victim.peer, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX)
        with pytest.raises(StreamClosed), trio.fail_after(20):
            await stream.receive()
        assert not len(victim.averaging.early)


async def test_a_flood_from_many_ids_shuts_out_no_member() -> None:
    member = peer_of(0)
    early = EarlyStreams(lambda peer: 2 if peer == member else 1)
    outcomes: list[str] = []

    async def wait(number: int, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with early.place(peer_of(number)):
                task_status.started()
                await trio.sleep_forever()
        except StreamClosed:
            outcomes.append("evicted")

    async with trio.open_nursery() as nursery:
        for number in range(1, STREAMS_MAX + 1):
            await nursery.start(wait, number)
        with pytest.raises(StreamClosed), early.place(peer_of(STREAMS_MAX + 1)):
            pass
        await nursery.start(wait, 0)
        await trio.testing.wait_all_tasks_blocked()
        assert outcomes == ["evicted"]
        assert len(early) == STREAMS_MAX
        nursery.cancel_scope.cancel()
