"""Guarantees of every network about dialling a peer and about the messages on a stream."""

import pytest
import trio

from crypto.errors import LocalProtocolError
from crypto.identity import short_peer
from node.errors import StreamClosed, Unreachable, WrongPeer
from node.seams import Stream
from node.transport.records import MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX
from tests.node.behaviour.worlds import (
    OLD_TALK,
    TALK,
    World,
    content,
    conversation,
    echo,
    on_both_networks,
    running,
    until,
)

SIZES = (0, 1, 1_000, 65_511, 65_512, 200_000, 3_000_000)


@on_both_networks
async def test_messages_and_payloads_of_every_size_arrive_whole_and_in_order(world: World) -> None:
    async with conversation(world, echo) as (stream, _, bob):
        assert stream.peer == bob.peer
        for number, size in enumerate(SIZES):
            message, payload = content(number, size // 3), content(number, size)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send, message, payload[:7], memoryview(payload)[7:])
                back, back_payload = await stream.receive_with_payload(size)
            assert back == message
            assert bytes(back_payload) == payload
            assert back_payload.readonly


@on_both_networks
async def test_successive_messages_arrive_in_order(world: World) -> None:
    async with conversation(world, echo) as (stream, _, _), trio.open_nursery() as nursery:

        async def send_all() -> None:
            for number in range(500):
                await stream.send(number.to_bytes(2, "big"))

        nursery.start_soon(send_all)
        assert [int.from_bytes(await stream.receive(), "big") for _ in range(500)] == list(range(500))


@on_both_networks
async def test_concurrent_senders_do_not_mix_their_messages(world: World) -> None:
    messages = [content(number, 2_000_000) for number in range(4)]
    async with conversation(world, echo) as (stream, _, _), trio.open_nursery() as nursery:
        for message in messages:
            nursery.start_soon(stream.send, message)
        assert sorted([await stream.receive() for _ in messages]) == sorted(messages)


@on_both_networks
async def test_simultaneous_streams_to_one_peer_do_not_mix(world: World) -> None:
    alice, bob = world.network("a"), world.network("b")
    bob.handle(TALK, echo)

    async def converse(number: int) -> None:
        for _ in range(3):
            stream = await alice.open(bob.peer, TALK)
            for length in (10, 100_000):
                await stream.send(content(number, length))
                assert await stream.receive() == content(number, length)
            await stream.aclose()

    async with running(alice, bob):
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(converse, number)
        assert alice.counters["streams_opened"] == bob.counters["streams_served"] == 30


@on_both_networks
async def test_a_payload_over_the_limit_ends_the_stream_and_is_counted(world: World) -> None:
    async def allow_ten(stream: Stream) -> None:
        await stream.receive_with_payload(10)

    async with conversation(world, allow_ten) as (stream, _, bob):
        await stream.send(b"message", bytes(11))
        with pytest.raises(StreamClosed):
            await stream.receive()
        assert bob.counters["streams_broken"] == 1


@on_both_networks
async def test_sending_an_oversized_message_raises_and_keeps_the_stream(world: World) -> None:
    async with conversation(world, echo) as (stream, _, _):
        for parts in ((bytes(MESSAGE_BYTES_MAX + 1),), (b"", bytes(PAYLOAD_BYTES_MAX), b"x")):
            with pytest.raises(LocalProtocolError):
                await stream.send(*parts)
        await stream.send(b"small")
        assert await stream.receive() == b"small"


# --- identity and protocols -----------------------------------------------------------------------


@on_both_networks
async def test_an_unknown_protocol_is_refused_while_others_are_served(
    world: World,
) -> None:
    alice, bob = world.network("a"), world.network("b")
    bob.handle(OLD_TALK, echo)
    async with running(alice, bob):
        for _ in range(3):
            with pytest.raises(Unreachable) as refusal:
                await alice.open(bob.peer, TALK)
            assert refusal.value.reason == "refused"
            assert refusal.value.detail == f"{short_peer(bob.peer)} does not speak {TALK}"
        assert bob.counters["streams_refused_protocol"] == 3
        stream = await alice.open(bob.peer, OLD_TALK)
        await stream.send(b"x")
        assert await stream.receive() == b"x"


@on_both_networks
async def test_the_first_offered_version_that_the_peer_speaks_is_used(world: World) -> None:
    served: list[str] = []

    async def tell(stream: Stream) -> None:
        served.append(stream.protocol)

    alice, old, new = world.network("a"), world.network("o"), world.network("n")
    old.handle(OLD_TALK, tell)
    new.handle(OLD_TALK, tell)
    new.handle(TALK, tell)
    async with running(alice, old, new):
        opened = [(await alice.open(each.peer, TALK, OLD_TALK)).protocol for each in (old, new)]
        assert opened == [OLD_TALK, TALK]
        await until(lambda: len(served) == 2)
        assert sorted(served) == sorted(opened)
        with pytest.raises(Unreachable, match=f"does not speak {TALK} or /peerloom/talk/3"):
            await alice.open(old.peer, TALK, "/peerloom/talk/3")


@on_both_networks
async def test_peers_without_an_address_or_a_process_are_unreachable(world: World) -> None:
    alice, bob = world.network("a"), world.network("b")
    async with running(alice):
        with pytest.raises(Unreachable) as refusal:
            await alice.open(bob.peer, TALK)
        assert refusal.value.reason == "unknown"
        async with running(bob):
            places = bob.addresses
        alice.learn(bob.peer, places)
        with pytest.raises(Unreachable) as refusal:
            await alice.open(bob.peer, TALK)
        assert refusal.value.reason == "refused"


@on_both_networks
async def test_an_unexpected_peer_is_refused_with_both_ids_named(world: World) -> None:
    alice, bob, carol = world.network("a"), world.network("b"), world.network("c")
    async with running(alice, bob):
        alice.learn(carol.peer, [bob.addresses[0].of(carol.peer)])
        with pytest.raises(WrongPeer) as by_address:
            await alice.identify(bob.addresses[0].of(carol.peer))
        with pytest.raises(WrongPeer) as by_peer:
            await alice.open(carol.peer, TALK)
        for refusal in (by_address, by_peer):
            assert refusal.value.reason == "wrong key"
            assert short_peer(bob.peer) in refusal.value.detail
            assert short_peer(carol.peer) in refusal.value.detail


@on_both_networks
async def test_identify_returns_the_peer_and_makes_it_reachable(world: World) -> None:
    alice, bob = world.network("a"), world.network("b")
    bob.handle(TALK, echo)
    async with running(bob), trio.open_nursery() as nursery:
        await nursery.start(alice.run)
        for place in (bob.addresses[0], bob.addresses[0].of(None)):
            assert await alice.identify(place) == bob.peer
        await (await alice.open(bob.peer, TALK)).aclose()
        nursery.cancel_scope.cancel()


@on_both_networks
async def test_a_protocol_has_one_handler_and_a_well_formed_name(world: World) -> None:
    alice = world.network("a")
    alice.handle(TALK, echo)
    for name in (TALK, "no slash"):
        with pytest.raises(LocalProtocolError):
            alice.handle(name, echo)
