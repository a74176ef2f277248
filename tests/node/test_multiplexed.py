"""The driver of a path, before a hostile peer and on a machine that has no room."""

import tracemalloc

import trio

from node.transport.multiplexer import Kind
from tests.node.nets import make_network, running, until


def frame(kind: Kind, channel: int, data: bytes = b"") -> bytes:
    return bytes([kind]) + channel.to_bytes(4, "big") + data


async def test_bytes_that_come_one_by_one_take_no_more_memory_than_they_are() -> None:
    hostile, other = make_network("h"), make_network("o")
    async with running(hostile, other):
        hostile.learn(other.peer, other.addresses)
        await hostile.multiplexed.offer(other.peer)
        with trio.fail_after(10):
            await until(lambda: bool(other.multiplexed.of(hostile.peer)))
        (path,) = other.multiplexed.of(hostile.peer)
        count = 20_000
        path._take(frame(Kind.OPEN, 1))
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(count):
                path._take(frame(Kind.DATA, 1, b"x"))
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 4 * count
