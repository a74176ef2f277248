"""Guarantees of every network about the end of a stream, and about handlers."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio

from crypto.errors import RemoteProtocolError
from node.errors import StreamClosed, StreamEnded, Unreachable
from node.seams import Network, Stream
from tests.node.behaviour.worlds import TALK, World, conversation, echo, on_both_networks, running, until


async def read_to_the_end(stream: Stream) -> list[bytes]:
    """Read all messages until the other end closes its half of the stream."""
    messages = []
    while True:
        try:
            messages.append(await stream.receive())
        except StreamEnded:
            return messages


async def send_until_closed(stream: Stream) -> None:
    """Send without reading until the network reports that the other end is gone."""
    with suppress(StreamClosed):
        while True:
            await stream.send(bytes(50_000))
            await trio.sleep(0.1)


@on_both_networks
async def test_a_half_closed_stream_is_read_to_its_end_and_answered(world: World) -> None:
    async def answer_at_the_end(stream: Stream) -> None:
        messages = await read_to_the_end(stream)
        with pytest.raises(StreamEnded):
            await stream.receive()
        for message in messages:
            await stream.send(message.upper())

    async with conversation(world, answer_at_the_end) as (stream, _, _):
        for message in (b"one", b"two", b"three"):
            await stream.send(message)
        await stream.send_eof()
        await stream.send_eof()
        with pytest.raises(StreamClosed):
            await stream.send(b"four")
        assert await read_to_the_end(stream) == [b"ONE", b"TWO", b"THREE"]


@on_both_networks
async def test_a_stream_closes_after_all_sent_messages_have_arrived(world: World) -> None:
    heard: list[bytes] = []
    afterwards: list[str] = []

    async def listen(stream: Stream) -> None:
        await trio.sleep(1)
        heard.extend(await read_to_the_end(stream))
        with pytest.raises(StreamClosed) as closed:
            await stream.send(b"to nobody")
        afterwards.append(str(closed.value))

    async with conversation(world, listen) as (stream, _, _):
        for number in range(20):
            await stream.send(bytes((number,)))
        await stream.aclose()
        await stream.aclose()
        for call in (stream.receive, stream.send_eof, lambda: stream.send(b"x")):
            with pytest.raises(StreamClosed) as closed:
                await call()
            assert not isinstance(closed.value, StreamEnded)
        await until(lambda: bool(afterwards))
    assert heard == [bytes((number,)) for number in range(20)]


@on_both_networks
async def test_a_stream_closes_in_order_when_its_handler_returns(world: World) -> None:
    async def say_and_leave(stream: Stream) -> None:
        await stream.send(b"last words")

    async with conversation(world, say_and_leave) as (stream, _, _):
        assert await read_to_the_end(stream) == [b"last words"]
        await send_until_closed(stream)


@on_both_networks
async def test_a_reset_is_distinguished_from_a_clean_end(world: World) -> None:
    async with conversation(world, echo) as (stream, _, bob):
        await stream.send(b"hello")
        assert await stream.receive() == b"hello"
        world.cut(bob)
        with pytest.raises(StreamClosed) as closed:
            await stream.receive()
        assert not isinstance(closed.value, StreamEnded)


@on_both_networks
async def test_a_waiting_receive_ends_when_its_own_stream_is_closed(world: World) -> None:
    async def never_answer(stream: Stream) -> None:
        await read_to_the_end(stream)

    async with conversation(world, never_answer) as (stream, _, _), trio.open_nursery() as nursery:
        closed: list[str] = []

        async def wait() -> None:
            try:
                await stream.receive()
            except StreamClosed as error:
                closed.append(str(error))

        for _ in range(2):
            nursery.start_soon(wait)
        await trio.sleep(1)
        await stream.aclose()
        await until(lambda: len(closed) == 2)
        assert "this side" in closed[0]


@on_both_networks
async def test_a_writer_that_never_reads_notices_that_the_reader_is_gone(world: World) -> None:
    async def leave_at_once(stream: Stream) -> None:
        await stream.receive()

    async with conversation(world, leave_at_once) as (stream, _, _):
        with trio.fail_after(30):
            await send_until_closed(stream)


# --- a node that leaves ----------------------------------------------------------------------------


@on_both_networks
async def test_a_leaving_peer_finishes_answers_and_ends_streams(world: World) -> None:
    answering = trio.Event()

    async def take_a_while(stream: Stream) -> None:
        while True:
            question = await stream.receive()
            answering.set()
            await trio.sleep(0.1)
            await stream.send(b"answer to " + question)

    alice, bob = world.network("a"), world.network("b")
    bob.handle(TALK, take_a_while)
    async with running(alice), trio.open_nursery() as nursery:
        await nursery.start(bob.run)
        alice.learn(bob.peer, bob.addresses)
        asking, idle = [await alice.open(bob.peer, TALK) for _ in range(2)]
        await asking.send(b"a question")
        await answering.wait()
        begun = trio.current_time()
        nursery.cancel_scope.cancel()
        assert await read_to_the_end(asking) == [b"answer to a question"]
        assert await read_to_the_end(idle) == []
        assert trio.current_time() - begun < 30
        with pytest.raises(Unreachable):
            await alice.open(bob.peer, TALK)


@on_both_networks
async def test_a_handler_that_never_ends_does_not_prevent_leaving(world: World) -> None:
    async def never_end(stream: Stream) -> None:
        await trio.sleep_forever()

    async with conversation(world, never_end) as (stream, _, _):
        begun = trio.current_time()
    assert trio.current_time() - begun < 30
    with pytest.raises(StreamClosed):
        await stream.receive()


# --- handlers ------------------------------------------------------------------------------------


async def _offended(stream: Stream) -> None:
    raise RemoteProtocolError("nonsense")


async def _offended_in_a_nursery(stream: Stream) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        raise RemoteProtocolError("nonsense")


async def _cut_off(stream: Stream) -> None:
    raise Unreachable("timeout", "a third peer is not there")


@on_both_networks
async def test_a_fault_of_another_peer_ends_only_its_stream(world: World) -> None:
    counted = {
        _offended: "streams_broken",
        _offended_in_a_nursery: "streams_broken",
        _cut_off: "streams_ended_early",
    }
    handlers: list[Callable[[Stream], Awaitable[None]]] = list(counted)
    alice, bob = world.network("a"), world.network("b")
    for number, handler in enumerate(handlers):
        bob.handle(f"/peerloom/talk/{number}", handler)
    bob.handle("/peerloom/echo/1", echo)
    async with running(alice, bob):
        for number in range(len(handlers)):
            stream = await alice.open(bob.peer, f"/peerloom/talk/{number}")
            with pytest.raises(StreamClosed):
                await stream.receive()
        await until(lambda: bob.counters["streams_broken"] == 2)
        assert bob.counters["streams_ended_early"] == 1
        stream = await alice.open(bob.peer, "/peerloom/echo/1")
        await stream.send(b"still there?")
        assert await stream.receive() == b"still there?"


@on_both_networks
async def test_a_bug_in_a_handler_propagates_out_of_run(world: World) -> None:
    async def buggy(stream: Stream) -> None:
        raise KeyError(stream.protocol)

    async def provoke(alice: Network, bob: Network) -> None:
        async with running(alice, bob):
            await alice.open(bob.peer, TALK)
            await trio.sleep_forever()

    alice, bob = world.network("a"), world.network("b")
    bob.handle(TALK, buggy)
    with pytest.raises(BaseExceptionGroup) as group:
        await provoke(alice, bob)
    found, rest = group.value.split(KeyError)
    assert found is not None
    assert rest is None
