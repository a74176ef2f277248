"""Connections of the real network on 127.0.0.1: how they are reused, abandoned, limited, and found dead."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from crypto.identity import PeerId
from node.errors import Unreachable
from node.seams import Stream
from node.transport import streams, tcp
from node.transport.connection_pool import IDLE_PER_PEER_MAX, IDLE_SECONDS, IdleConnections
from node.transport.network import RealNetwork
from node.transport.records import Mark
from node.transport.settings import TRANSPORT, TransportSettings
from tests.hostile.attack import Target
from tests.hostile.guests import ECHO, Guest
from tests.node.nets import (
    BULK,
    PING,
    acquaint,
    acquainted,
    arrival,
    conversation,
    echo,
    make_network,
    running,
    until,
)


async def ask(network: RealNetwork, peer: PeerId, protocol: str = BULK) -> bytes:
    """Send one question, and return its answer, on a new stream."""
    stream = await network.open(peer, protocol)
    await stream.send(b"question")
    answer = await stream.receive()
    await stream.aclose()
    return answer


def number_idle(network: RealNetwork) -> int:
    return len(network._connections._idle)


def number_open(network: RealNetwork) -> int:
    return len(network._connections._open)


async def answer_once(stream: Stream) -> None:
    await stream.send(await stream.receive())


async def test_successive_conversations_use_one_connection() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.handle(BULK, answer_once)
    bob.handle(PING, echo)
    bob.inbox(PING)
    async with running(alice, bob):
        acquaint(alice, bob)
        for protocol in (BULK, PING, BULK):
            assert await ask(alice, bob.peer, protocol) == b"question"
            await until(lambda: number_idle(alice) == 1)
        with pytest.raises(Unreachable, match="does not speak"):
            await alice.open(bob.peer, "/peerloom/unknown/1")
        for length in (5_000, 6_000):
            alice.send(bob.peer, PING, bytes(length))
            assert await arrival(bob) == (alice.peer, bytes(length))
            await until(lambda: number_idle(alice) == 1)
        assert number_open(alice) == number_open(bob) == 1
        assert alice.counters["connections_used_again"] == 4


async def test_an_idle_connection_holds_no_buffer_at_either_end() -> None:
    async with acquainted(answer_once) as (alice, bob):
        await ask(alice, bob.peer)
        await until(lambda: number_idle(alice) == len(bob._connections.arrivals._waiting) == 1)
        for network in (alice, bob):
            (connection,) = network._connections._open
            assert len(connection._reader._buffer) == len(connection._reader._own_buffer) == 0


async def test_a_busy_peer_keeps_few_idle_connections_to_one_other() -> None:
    async with acquainted(answer_once) as (alice, bob):
        opened = [await alice.open(bob.peer, BULK) for _ in range(3 * IDLE_PER_PEER_MAX)]
        for stream in opened:
            await stream.aclose()
        await until(lambda: number_open(alice) == number_open(bob) == IDLE_PER_PEER_MAX)
        assert number_idle(alice) == IDLE_PER_PEER_MAX


def test_both_ends_close_idle_connections_after_a_while() -> None:
    async def main() -> None:
        async with acquainted(answer_once) as (alice, bob):
            await ask(alice, bob.peer)
            await until(lambda: number_idle(alice) == 1)
            await trio.sleep(IDLE_SECONDS - 5)
            assert number_idle(alice) == 1
            await trio.sleep(5 + TRANSPORT.look_seconds)
            assert number_open(alice) == number_open(bob) == 0
            # The peer can still be asked again.
            await ask(alice, bob.peer)
            assert alice.counters["connections_used_again"] == 0

    trio.run(main, clock=MockClock(autojump_threshold=0.03))


def test_a_connection_that_the_other_end_never_closes_is_abandoned() -> None:
    async def answer_and_stay(stream: Stream) -> None:
        await answer_once(stream)
        await trio.sleep(10 * streams.LINGER_SECONDS)

    async def main() -> None:
        async with acquainted(answer_and_stay) as (alice, bob):
            await ask(alice, bob.peer)
            await trio.sleep(2 * streams.LINGER_SECONDS)
            assert number_open(alice) == 0

    trio.run(main, clock=MockClock(autojump_threshold=0.03))


class FakeConnection:
    """The part of a connection that an idle one needs."""

    def __init__(self, peer: PeerId, ended: Callable[["FakeConnection"], None]) -> None:
        self.peer, self.is_quiet, self.whys = peer, True, list[str]()
        self._ended = ended

    def release(self) -> None:
        """Do nothing, because there is nothing to give back."""

    def end(self, why: str) -> None:
        self.whys.append(why)
        self._ended(self)


def test_idle_connections_are_limited_and_the_longest_idle_is_closed() -> None:
    idle: Any = IdleConnections(seconds=10, per_peer_max=2, number_max=3)
    peers = [PeerId(bytes((number,)) * 32) for number in range(3)]
    first, second, third, fourth, fifth = (
        FakeConnection(peers[number], idle.forget) for number in (0, 0, 0, 1, 2)
    )
    for at, connection in enumerate((first, second, third)):
        idle.put(connection, float(at))
    assert (bool(first.whys), len(idle)) == (True, 2)
    idle.put(fourth, 4.0)
    idle.put(fifth, 5.0)
    assert (bool(second.whys), len(idle)) == (True, 3)
    assert idle.take(peers[1]) is fourth
    assert idle.take(peers[1]) is None
    fifth.is_quiet = False
    assert idle.take(peers[2]) is None
    assert fifth.whys
    idle.expire(11.9)
    assert not third.whys
    idle.expire(12.0)
    assert third.whys
    assert len(idle) == 0


@pytest.mark.parametrize("is_seen", [True, False])
async def test_a_restarted_peer_is_reached_without_an_error(
    is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.handle(BULK, answer_once)
    async with running(alice):
        async with running(bob):
            acquaint(alice, bob)
            for stream in [await alice.open(bob.peer, BULK) for _ in range(2)]:
                await stream.aclose()
            await until(lambda: number_idle(alice) == 2)
        if not is_seen:
            # As after a power failure of the other machine, no packet has reported the end.
            monkeypatch.setattr(tcp.Connection, "is_quiet", True)
        again = make_network("b", listen=("127.0.0.1", bob.port))
        again.handle(BULK, answer_once)
        async with running(again):
            assert again.port == bob.port
            assert await ask(alice, bob.peer) == b"question"
            assert alice.counters["connections_stale"] == (not is_seen)
            assert alice.counters["connections_used_again"] == 0


def of_places(places: int) -> TransportSettings:
    """Return settings by which each peer and each network may take all available slots."""
    return TransportSettings(
        inbound_max=places, inbound_per_peer_max=places - 1, inbound_per_network_max=places
    )


async def test_idle_connections_make_room_for_active_ones() -> None:
    alice, bob, carol, dave = (make_network(letter, settings=of_places(2)) for letter in "abcd")
    bob.handle(BULK, answer_once)
    async with running(alice, bob, carol, dave):
        acquaint(alice, bob, carol, dave)
        for network in (alice, carol):
            await ask(network, bob.peer)
            await until(partial(number_waiting_is, bob, 1 if network is alice else 2))
        await ask(dave, bob.peer)
        assert bob.counters["connections_over_limit"] == 0
        await until(lambda: number_open(alice) == 0 or not alice._connections._idle.take(bob.peer))
        assert await ask(alice, bob.peer) == b"question"


def number_waiting_is(network: RealNetwork, number: int) -> bool:
    return len(network._connections.arrivals._waiting) == number


async def test_a_crowd_from_one_address_keeps_no_other_peer_out() -> None:
    alice, bob = make_network("a"), make_network("b", settings=of_places(4))
    bob.handle(ECHO, echo)
    async with running(alice, bob):
        acquaint(alice, bob)
        target = Target("127.0.0.1", bob.port, 0, bob.peer, "test")
        crowd: list[Guest] = []

        async def one_more() -> None:
            guest = await trio.to_thread.run_sync(Guest, target, "127.0.0.2")
            crowd.append(guest)
            await trio.to_thread.run_sync(guest.open)

        for _ in range(4):
            await one_more()
        streams = [await alice.open(bob.peer, ECHO) for _ in range(2)]
        assert bob.counters["connections_displaced"] == 2
        # A source gets at most as many connections as the other sources have.
        with pytest.raises(Unreachable):
            await alice.open(bob.peer, ECHO)
        with suppress(EOFError, OSError):
            await one_more()  # it evicts a connection of its own crowd once one has been silent for a while
        for stream in streams:
            await stream.send(b"still here")
            assert await stream.receive() == b"still here"
        for guest in crowd:
            guest.close()


@pytest.mark.parametrize("marks", [(Mark.END, Mark.END), (Mark.CLOSE, Mark.CLOSE), (Mark.CLOSE, Mark.END)])
async def test_invalid_marks_end_the_connection(marks: tuple[Mark, Mark]) -> None:
    async def listen(stream: Stream) -> None:
        while True:
            await stream.receive()

    async with conversation(listen) as (stream, _, bob):
        for mark in marks:
            stream.connection.say(mark)
        await until(lambda: bob.counters["streams_broken"] + bob.counters["hellos_refused"] == 1)
        await until(lambda: number_open(bob) == 0)


async def test_a_peer_that_requests_only_unknown_protocols_is_disconnected() -> None:
    alice, bob = make_network("a"), make_network("b", settings=TransportSettings(refusals_max=3))
    async with running(alice, bob):
        acquaint(alice, bob)
        for _ in range(10):
            with pytest.raises(Unreachable, match="does not speak"):
                await alice.open(bob.peer, BULK)
        assert bob.counters["streams_refused_protocol"] == 10
        assert alice.counters["connections_used_again"] == 0
