"""Guarantees of every network about the limits that a handler sets for its protocol."""

from contextlib import suppress
from functools import partial

import pytest
import trio

from node.errors import StreamClosed, Unreachable
from node.seams import MESSAGE_BYTES_USUAL, Network, Stream, StreamLimits
from tests.node.behaviour.worlds import TALK, World, echo, on_both_networks, running, until

WIDE = "/peerloom/wide/1"


async def fail_with(stream: Stream, message: bytes) -> None:
    """Send an oversized message, and wait for the end of the stream, which shows the refusal."""
    with suppress(StreamClosed):
        await stream.send(message)
    with pytest.raises(StreamClosed):
        await stream.receive()


def broken(network: Network, number: int) -> bool:
    return network.counters["streams_broken"] == number


@on_both_networks
async def test_a_message_over_its_protocols_limit_ends_the_stream(
    world: World,
) -> None:
    alice, bob = world.network("a"), world.network("b")
    taken: list[int] = []

    async def weigh(stream: Stream) -> None:
        while True:
            taken.append(len(await stream.receive()))
            await stream.send(b"taken")

    bob.handle(TALK, weigh)
    bob.handle(WIDE, weigh, StreamLimits(message_bytes_max=3 * MESSAGE_BYTES_USUAL))
    async with running(alice, bob):
        bystander = await alice.open(bob.peer, TALK)
        for number, (protocol, longest) in enumerate(
            ((TALK, MESSAGE_BYTES_USUAL), (WIDE, 3 * MESSAGE_BYTES_USUAL)), start=1
        ):
            stream = await alice.open(bob.peer, protocol)
            await stream.send(bytes(longest))
            assert await stream.receive() == b"taken"
            await fail_with(stream, bytes(longest + 1))
            await until(partial(broken, bob, number))
        await bystander.send(b"still here")
        assert await bystander.receive() == b"taken"
    assert max(taken) == 3 * MESSAGE_BYTES_USUAL


@on_both_networks
async def test_an_answer_may_be_as_long_as_the_opener_accepts(world: World) -> None:
    alice, bob = world.network("a"), world.network("b")

    async def answer_at_length(stream: Stream) -> None:
        await stream.send(bytes(int(await stream.receive())))

    bob.handle(TALK, answer_at_length)
    async with running(alice, bob):
        for length, bytes_max in ((1_000, 1_000), (2 * MESSAGE_BYTES_USUAL, 2 * MESSAGE_BYTES_USUAL)):
            stream = await alice.open(bob.peer, TALK, message_bytes_max=bytes_max)
            await stream.send(b"%d" % length)
            assert len(await stream.receive()) == length
            await stream.aclose()
        stream = await alice.open(bob.peer, TALK)
        await stream.send(b"%d" % (MESSAGE_BYTES_USUAL + 1))
        with pytest.raises(StreamClosed, match=f"{MESSAGE_BYTES_USUAL + 1} bytes"):
            await stream.receive()
        assert alice.counters["streams_broken"] == 1


@on_both_networks
async def test_streams_of_a_protocol_are_limited_per_peer(world: World) -> None:
    alice, bob, carol = (world.network(letter) for letter in "abc")
    bob.handle(TALK, echo, StreamLimits(streams_per_peer_max=2))
    bob.handle(WIDE, echo)
    async with running(alice, bob, carol):
        streams = [await alice.open(bob.peer, TALK) for _ in range(2)]
        for _ in range(3):
            with pytest.raises(Unreachable, match="too many streams") as refusal:
                await alice.open(bob.peer, TALK)
            assert refusal.value.reason == "refused"
        assert bob.counters["streams_refused_busy"] == 3
        streams += [await alice.open(bob.peer, WIDE), await carol.open(bob.peer, TALK)]
        for stream in streams:
            await stream.send(b"here")
            assert await stream.receive() == b"here"
        await streams[0].aclose()
        await trio.sleep(1)
        again = await alice.open(bob.peer, TALK)
        await again.send(b"again")
        assert await again.receive() == b"again"


@on_both_networks
async def test_a_reset_stream_frees_its_slot(world: World) -> None:
    alice, bob, carol = (world.network(letter) for letter in "abc")
    bob.handle(TALK, echo, StreamLimits(message_bytes_max=10, streams_per_peer_max=1))
    async with running(alice, bob, carol):
        for number in range(1, 4):
            stream = await alice.open(bob.peer, TALK)
            await fail_with(stream, bytes(11))
            await until(partial(broken, bob, number))
            await trio.sleep(1)
        assert bob.counters["streams_refused_busy"] == 0
