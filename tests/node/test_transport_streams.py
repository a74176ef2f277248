"""Streams of the real network on 127.0.0.1: delivery, endings, and the peer's identity."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from crypto.contact import Address, make_address, parse_address
from crypto.errors import RemoteProtocolError
from crypto.noise import preferred
from node.errors import StreamClosed, Unreachable
from node.seams import Stream, StreamLimits
from node.transport import tcp
from node.transport.records import MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX, RECORD_PLAIN_BYTES_MAX
from node.transport.settings import TRANSPORT, TransportSettings
from node.transport.streams import SecureStream
from tests.node.nets import (
    BULK,
    PING,
    acquaint,
    acquainted,
    conversation,
    echo,
    make_network,
    running,
    until,
    unused_address,
)

LONGEST = StreamLimits(message_bytes_max=MESSAGE_BYTES_MAX)


@pytest.mark.parametrize("suite", [suite.name for suite in preferred(has_aes=True)])
async def test_messages_of_every_size_return_whole_over_a_stream(suite: str) -> None:
    alice, bob = make_network("a", suites=[suite]), make_network("b")
    bob.handle(BULK, echo, LONGEST)
    edge = RECORD_PLAIN_BYTES_MAX
    async with running(alice, bob):
        acquaint(alice, bob)
        stream: Stream = await alice.open(bob.peer, BULK, message_bytes_max=MESSAGE_BYTES_MAX)
        assert stream.peer == bob.peer
        for size in (0, 1, edge - 5, edge - 4, edge - 3, 2 * edge - 4, 2 * edge, 3_000_000):
            message = os.urandom(size)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send, memoryview(message))
                assert await stream.receive() == message
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(StreamClosed, match="this side"):
            await stream.send(b"x")
        with pytest.raises(StreamClosed, match="this side"):
            await stream.receive()


async def echo_all(stream: Stream) -> None:
    while True:
        await stream.send(*await stream.receive_with_payload(PAYLOAD_BYTES_MAX))


async def test_payloads_of_every_size_return_with_their_messages() -> None:
    edge = RECORD_PLAIN_BYTES_MAX
    async with conversation(echo_all) as (stream, _, _):
        kept = []
        for size in (0, 1, edge, edge + 1, 3_000_000, 3_000_000, 0):
            message, payload = os.urandom(size // 3), os.urandom(size)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send, message, payload[:7], memoryview(payload)[7:])
                back = await stream.receive_with_payload(size)
            assert back[0] == message
            assert bytes(back[1]) == payload
            kept.append((back[1], payload))
        # Later payloads do not overwrite earlier ones that are still referenced.
        assert all(bytes(back) == payload for back, payload in kept)


async def test_unexpected_or_oversized_payloads_end_the_stream() -> None:
    alice, bob = make_network("a"), make_network("b")

    async def allow_ten(stream: Stream) -> None:
        await stream.receive_with_payload(10)

    bob.handle(PING, echo)
    bob.handle(BULK, allow_ten)
    async with running(alice, bob):
        acquaint(alice, bob)
        for number, protocol in enumerate((PING, BULK), start=1):
            stream = await alice.open(bob.peer, protocol)
            await stream.send(b"message", bytes(11))
            with pytest.raises(StreamClosed):
                await stream.receive()
            assert bob.counters["streams_broken"] == number


async def test_a_truncated_payload_closes_the_stream_and_frees_memory() -> None:
    endings: list[str] = []

    async def wait_for_all(stream: Stream) -> None:
        try:
            await stream.receive_with_payload(PAYLOAD_BYTES_MAX)
        except StreamClosed as closed:
            endings.append(str(closed))

    async with conversation(wait_for_all) as (stream, _, bob):
        connection, held = stream.connection, bob._connections.arrivals._strangers_assembly
        chunks = connection._writer.chunks(b"", bytes(PAYLOAD_BYTES_MAX))
        for _ in range(2):
            await connection._write(next(chunks))
        await until(lambda: held._bytes > 2**20)
        # Received bytes and a read buffer are counted; announced bytes are not.
        assert held._bytes < 4 * 2**20
        connection.end("cut")
        await until(lambda: bool(endings))
        assert held._bytes == 0
    assert "inside a message" in endings[0] or "broke" in endings[0]


async def test_a_long_message_sent_byte_by_byte_makes_room_for_others() -> None:
    async with acquainted(echo, LONGEST) as (alice, bob):
        held = bob._connections.arrivals._strangers_assembly = tcp.ReassemblyBudget(5 * 2**20)
        dripping = await alice.open(bob.peer, BULK)
        chunks = dripping.connection._writer.chunks(bytes(8 * 2**20))
        for _ in range(3):
            await dripping.connection._write(next(chunks))
        await until(lambda: held._bytes > 3 * 2**20)
        stream = await alice.open(bob.peer, BULK, message_bytes_max=MESSAGE_BYTES_MAX)
        message = os.urandom(3 * 2**20)
        for _ in range(2):
            await stream.send(message)
            assert await stream.receive() == message
        assert bob.counters["messages_given_up"] == 1
        with pytest.raises(StreamClosed):
            await dripping.receive()
        await until(lambda: held._bytes == 0)


async def test_a_receive_cancelled_between_messages_loses_nothing() -> None:
    async with conversation(echo) as (stream, _, _):
        with trio.move_on_after(0.01) as scope:
            await stream.receive()
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.send(b"never begun")
        await stream.send(b"all is well")
        assert await stream.receive() == b"all is well"


async def test_a_send_cancelled_inside_a_message_closes_both_ends() -> None:
    endings: list[str] = []
    go_on = trio.Event()

    async def listen_late(stream: Stream) -> None:
        await go_on.wait()
        try:
            await stream.receive()
        except StreamClosed as closed:
            endings.append(str(closed))

    async with conversation(listen_late, LONGEST) as (stream, _, _):
        with trio.move_on_after(0.2) as scope:
            await stream.send(bytes(MESSAGE_BYTES_MAX))
        assert scope.cancelled_caught
        with pytest.raises(StreamClosed, match="cut short"):
            await stream.receive()
        go_on.set()
        await until(lambda: bool(endings))
    assert "inside a message" in endings[0] or "connection broke" in endings[0]


async def test_a_receive_cancelled_inside_a_message_loses_nothing() -> None:
    go_on = trio.Event()
    async with half_sent_message(go_on=go_on) as stream:
        with trio.move_on_after(0.05) as scope:
            await stream.receive()
        assert scope.cancelled_caught
        assert stream.connection.inside
        go_on.set()
        assert await stream.receive() == bytes(1_000)


async def test_a_stream_that_ends_inside_a_message_reports_that() -> None:
    async with half_sent_message(hang_up=True) as stream:
        with pytest.raises(StreamClosed, match="ended inside a message"):
            await stream.receive()


async def test_a_sender_that_stalls_inside_a_message_is_abandoned() -> None:
    async with half_sent_message(settings=TransportSettings(stall_seconds=0.05)) as stream:
        with pytest.raises(StreamClosed, match="no byte in"):
            await stream.receive()


@asynccontextmanager
async def half_sent_message(
    *, hang_up: bool = False, go_on: trio.Event | None = None, settings: TransportSettings = TRANSPORT
) -> AsyncIterator[SecureStream]:
    """Yield a stream on which the peer sends the first half of a message, and the rest once `go_on` is
    set."""

    async def send_half(stream: Stream) -> None:
        assert isinstance(stream, SecureStream)
        chunk = next(stream.connection._writer.chunks(bytes(1_000)))
        await stream.connection._write(chunk[:500])
        if not hang_up:
            await (trio.Event() if go_on is None else go_on).wait()
            await stream.connection._write(chunk[500:])
            await stream.receive()
        stream.connection.end("cut")

    async with conversation(send_half, settings=settings) as (stream, _, _):
        yield stream


async def test_a_peer_that_breaks_record_rules_loses_its_stream() -> None:
    async with conversation(echo) as (stream, _, bob):
        await stream.connection._write(b"\x00\x20" + os.urandom(32))
        with pytest.raises(StreamClosed):
            await stream.receive()
        await until(lambda: bob.counters["streams_broken"] == 1)


# --- identity of the peer ---------------------------------------------------------------------------


async def test_identify_returns_the_peers_id() -> None:
    alice, bob = make_network("a"), make_network("b")
    async with running(alice, bob):
        typed = parse_address(f"localhost:{bob.port}")
        assert await alice.identify(typed) == bob.peer
        assert await alice.identify(bob.addresses[0]) == bob.peer
        # Identify has proved the peer, so opening a stream needs no lookup.
        bob.handle(BULK, echo)
        await (await alice.open(bob.peer, BULK)).aclose()


async def test_a_silent_responder_times_out() -> None:
    hasty = make_network("a", settings=TransportSettings(handshake_seconds=0.1))
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with pytest.raises(Unreachable, match="did not shake hands") as refusal:
        await hasty.identify(make_address(*silent[0].socket.getsockname()))
    assert refusal.value.reason == "timeout"
    await silent[0].aclose()


async def test_every_failure_states_its_reason() -> None:
    alice, bob, other = make_network("a"), make_network("b"), make_network("o", swarm="other")
    async with running(alice, other):
        expected = [
            (unused_address(), "refused", "no node listens on port"),
            (other.addresses[0], "refused", "another swarm or is not a peerloom node"),
            (Address("dns", "no-such-machine.invalid", 1), "unknown", "no-such-machine.invalid"),
            (Address("ip6", "fe80::1", 1), "unknown", "Add the interface, as in [fe80::1%eth0]:1"),
            (Address("ip6", "fe80::1%no-such-link", 1), "unknown", "fe80::1%no-such-link"),
        ]
        for address, reason, words in expected:
            with pytest.raises(Unreachable) as refusal:
                await alice.identify(address.of(None))
            assert refusal.value.reason == reason
            assert words in refusal.value.detail
        with pytest.raises(Unreachable) as refusal:
            await alice.open(bob.peer, BULK)
        assert refusal.value.reason == "unknown"


async def test_two_swarms_do_not_mix_by_datagram_either() -> None:
    alice, other = make_network("a"), make_network("o", swarm="other")
    other.inbox(PING)
    async with running(alice, other):
        acquaint(alice, other)
        alice.send(other.peer, PING, b"hello?")
        await until(lambda: other.counters["datagrams_refused_swarm"] == 1)


async def test_one_peer_cannot_take_all_streams() -> None:
    async with acquainted(echo, StreamLimits(streams_per_peer_max=2 * TRANSPORT.inbound_per_peer_max)) as (
        alice,
        bob,
    ):
        streams = [await alice.open(bob.peer, BULK) for _ in range(TRANSPORT.inbound_per_peer_max)]
        with pytest.raises(Unreachable, match="too many streams"):
            await alice.open(bob.peer, BULK)
        for stream in streams:
            await stream.aclose()
        await until(
            lambda: bob._connections.arrivals._register.count(alice.peer) < TRANSPORT.inbound_per_peer_max
        )
        await (await alice.open(bob.peer, BULK)).aclose()


async def test_handlers_contain_faults_of_peers_but_raise_own_bugs() -> None:
    async def offended(stream: Stream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise RemoteProtocolError(f"nonsense of {len(await stream.receive())} bytes")

    async def buggy(stream: Stream) -> None:
        raise KeyError(stream.peer)

    alice, bob = make_network("a"), make_network("b")
    bob.handle(PING, offended)
    bob.handle(BULK, buggy)

    async def main() -> None:
        async with running(alice, bob):
            acquaint(alice, bob)
            stream = await alice.open(bob.peer, PING)
            await stream.send(b"nonsense")
            await until(lambda: bob.counters["streams_broken"] == 1)
            await alice.open(bob.peer, BULK)
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as group:
        await main()
    assert group.value.subgroup(KeyError) is not None
    assert group.value.split(KeyError)[1] is None
