"""Guarantees of every network if a writer is faster than its reader, and about deadlines and cancellation."""

from contextlib import suppress

import pytest
import trio

from node.errors import StreamClosed, StreamEnded
from node.seams import Stream
from tests.node.behaviour.worlds import World, content, conversation, echo, on_both_networks

MIB = 2**20


@on_both_networks
async def test_a_sleeping_reader_loses_nothing_and_uses_little_memory(world: World) -> None:
    number_max, taken, sent = 64, [], []

    async def sleep_and_read(stream: Stream) -> None:
        await trio.sleep(60)
        with suppress(StreamEnded):
            while True:
                taken.append(bytes((await stream.receive_with_payload(MIB))[1]))

    async with conversation(world, sleep_and_read) as (stream, _, _):
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                for number in range(number_max):
                    await stream.send(b"", content(number, MIB))
                    sent.append(number)
                await stream.send_eof()

            nursery.start_soon(write)
            await trio.sleep(30)
            # The kernels hold a window of a few MiB; no further message is accepted.
            assert 0 < len(sent) <= 24
            await trio.sleep(29)
            assert not taken
        with pytest.raises(StreamEnded):
            await stream.receive()
        assert trio.current_time() - begun >= 60
    assert taken == [content(number, MIB) for number in range(number_max)]


@on_both_networks
async def test_a_send_that_misses_its_deadline_leaves_a_consistent_stream(world: World) -> None:
    taken: list[bytes] = []

    async def sleep_and_read(stream: Stream) -> None:
        await trio.sleep(60)
        with suppress(StreamClosed):
            while True:
                taken.append(await stream.receive())

    async with conversation(world, sleep_and_read) as (stream, _, _):
        sent = 0
        while True:
            with trio.move_on_after(5) as scope:
                await stream.send(content(sent % 8, 1_500_000))
            if scope.cancelled_caught:
                break
            sent += 1
        assert trio.current_time() < 60
        is_open = True
        try:
            await stream.send(b"and another")
        except StreamClosed:
            is_open = False
        await stream.aclose()
        await trio.sleep(100)
    assert taken[:sent] == [content(number % 8, 1_500_000) for number in range(len(taken[:sent]))]
    assert taken[sent:] == ([b"and another"] if is_open else [])


@on_both_networks
async def test_a_send_cancelled_before_it_starts_has_no_effect(world: World) -> None:
    async with conversation(world, echo) as (stream, _, _):
        for _ in range(30):
            with trio.CancelScope() as scope:
                scope.cancel()
                await stream.send(b"never begun")
        await stream.send(b"all is well")
        assert await stream.receive() == b"all is well"


@on_both_networks
async def test_receives_that_miss_their_deadline_lose_nothing(world: World) -> None:
    number_max = 12

    async def speak_slowly(stream: Stream) -> None:
        for number in range(number_max):
            await stream.send(content(number, 300_000), content(number, 10))
            await trio.sleep(0.07)

    async with conversation(world, speak_slowly) as (stream, _, _):
        messages, deadlines = [], 0
        with suppress(StreamEnded):
            while True:
                with trio.move_on_after(0.02) as scope:
                    messages.append(await stream.receive_with_payload(10))
                deadlines += scope.cancelled_caught
        assert deadlines > number_max
        assert [message for message, _ in messages] == [
            content(number, 300_000) for number in range(number_max)
        ]
        assert all(bytes(payload) == content(number, 10) for number, (_, payload) in enumerate(messages))


@on_both_networks
async def test_a_cancelled_receive_leaves_the_message_to_be_read(world: World) -> None:
    async with conversation(world, echo) as (stream, _, _):
        for _ in range(3):
            await stream.send(b"message")
        await trio.sleep(1)
        for _ in range(40):
            with trio.CancelScope() as scope:
                scope.cancel()
                await stream.receive()
            assert scope.cancelled_caught
        for _ in range(3):
            assert await stream.receive() == b"message"
