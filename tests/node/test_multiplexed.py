"""The driver of a path (one connection that carries all streams between two peers): against a hostile peer,
and on a machine without free resources."""

import errno
import socket
import tracemalloc
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from crypto.contact import make_address
from crypto.identity import PeerId
from node.errors import StreamClosed, Unreachable
from node.transport.multiplexed import MultiplexedPath
from node.transport.multiplexer import Kind
from node.transport.network import RealNetwork
from node.transport.paths import DOUBT_AGAIN_SECONDS, STOOD_SECONDS, PathHost, Paths
from node.transport.settings import PATHS, PathSettings, TransportSettings
from tests.node.nets import PING, acquaint, echo, make_network, running, until
from tests.node.test_relays import ask, behind_a_relay


def frame(kind: Kind, channel: int, data: bytes = b"") -> bytes:
    return bytes([kind]) + channel.to_bytes(4, "big") + data


async def test_slowly_dripped_bytes_take_no_more_memory_than_their_length() -> None:
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


async def test_a_path_survives_a_lack_of_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make_network("h"), make_network("o")
    other.handle(PING, echo)

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with running(one, other):
        acquaint(one, other)
        path = await one.multiplexed.offer(other.peer)
        with trio.fail_after(10):
            await until(lambda: bool(other.multiplexed.of(one.peer)))
            with monkeypatch.context() as patched:
                patched.setattr(socket, "socketpair", refuse)
                with pytest.raises(StreamClosed, match="Too many open files"):
                    path.open()
                await until(lambda: other.counters["channels_refused"] == 1)
            path.open().close()
            await until(lambda: other.counters["channels_served"] == 1)
        assert path.stands


async def test_channels_open_through_a_relay_known_by_host_name() -> None:
    one, other = make_network("h"), make_network("o")
    async with running(one, other):
        one.learn(other.peer, other.addresses)
        path = await one.multiplexed.offer(other.peer)
        with trio.fail_after(10):
            await until(lambda: bool(other.multiplexed.of(one.peer)))
            theirs = other.multiplexed.of(one.peer)[0]
            theirs.way, theirs.address = "relayed", make_address("relay.example", 9747)
            for served in (1, 2):
                path.open().close()
                await until(lambda: other.counters["channels_served"] == served)  # noqa: B023 - awaited
        assert path.stands


async def test_a_circuit_through_this_node_itself_is_refused() -> None:
    one, other = make_network("h"), make_network("o")
    async with running(one, other):
        circuit = one.addresses[0].of(one.peer).through(other.peer)
        with trio.fail_after(30), pytest.raises(Unreachable, match="through this node itself"):
            await one.multiplexed.through(circuit)


async def test_concurrent_new_paths_are_limited_like_established_ones() -> None:
    hostile, other = make_network("h"), make_network("o")
    async with running(hostile, other):
        hostile.learn(other.peer, other.addresses)
        with trio.fail_after(10):
            dial = hostile._connections.dial_path
            connections = [await dial(other.peer) for _ in range(3 * PATHS.per_peer_max)]
            carry = partial(hostile.multiplexed.carry, is_first=True, way="direct", address=None)
            async with trio.open_nursery() as nursery:
                for connection in connections:
                    nursery.start_soon(carry, connection)
                while len(hostile.multiplexed) < len(connections):
                    await trio.lowlevel.checkpoint()
                ended = [each.why for each in connections].count("more paths than needed")
                nursery.cancel_scope.cancel()
        assert ended == 2 * PATHS.per_peer_max


HASTY = TransportSettings(
    paths=PathSettings(ping_seconds=0.05, silent_seconds=0.1, doubted_seconds=0.2, watch_seconds=0.02)
)


def mute(network: RealNetwork, peer: PeerId) -> None:
    """Discard everything that a network sends on its path to a peer, as if the router in between had been
    rebooted."""

    async def lose(*_: object) -> None:
        await trio.lowlevel.checkpoint()

    (path,) = network.multiplexed.of(peer)
    path.connection.send = lose  # type: ignore[assignment,method-assign]  # no packet is lost on this machine


async def test_a_silent_path_is_replaced_by_the_peer_that_dialled_it() -> None:
    one, other = make_network("h", settings=HASTY), make_network("o", settings=HASTY)
    one.handle(PING, echo)
    async with running(one, other):
        acquaint(one, other)
        before = await one.multiplexed.offer(other.peer)
        with trio.fail_after(20):
            await until(lambda: bool(other.multiplexed.of(one.peer)))
            stream = await other.open(one.peer, PING)
            await stream.send(b"one")
            assert await stream.receive() == b"one"
            mute(other, one.peer)
            with pytest.raises(StreamClosed):
                await stream.receive()
            assert one.counters["paths_replaced"] == 1
            await until(lambda: not before.stands)
            stream = await other.open(one.peer, PING)
            await stream.send(b"two")
            assert await stream.receive() == b"two"


async def test_a_path_cut_while_in_use_is_replaced() -> None:
    one, other = make_network("h", settings=HASTY), make_network("o", settings=HASTY)
    other.handle(PING, echo)
    async with running(one, other):
        acquaint(one, other)
        path = await one.multiplexed.offer(other.peer)
        with trio.fail_after(20):
            await until(lambda: bool(other.multiplexed.of(one.peer)))
            channel = path.open()
            other.multiplexed.of(one.peer)[0].connection.end("a test")
            await until(lambda: one.counters["paths_replaced"] == 1)
            channel.close()


def test_lost_paths_of_a_peer_cast_doubt_on_it_once_a_minute() -> None:
    doubts: list[float] = []

    async def main() -> None:
        host = SimpleNamespace(serving=None, doubt=lambda: doubts.append(trio.current_time()))
        paths = Paths(cast("PathHost", host), make_network("o").credentials, Counter())
        began = trio.current_time()

        def lose(letter: str, stood_seconds: float) -> int:
            peer, since = make_network(letter).peer, trio.current_time() - stood_seconds
            lost = SimpleNamespace(peer=peer, way="direct", is_kept=True, since=since)
            paths._lose(cast("MultiplexedPath", lost))
            return len(doubts)

        while trio.current_time() < began + 2 * DOUBT_AGAIN_SECONDS:
            assert lose("x", STOOD_SECONDS - 1) == 0
            await trio.sleep(4)
        began = trio.current_time()
        while trio.current_time() < began + 2 * DOUBT_AGAIN_SECONDS:
            assert lose("x", STOOD_SECONDS) <= 2
            paths.look(trio.current_time())
            await trio.sleep(4)
        assert lose("y", STOOD_SECONDS) == 3

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_path_cut_while_idle_is_not_replaced() -> None:
    one, other = make_network("h"), make_network("o")
    async with running(one, other):
        acquaint(one, other)
        path = await one.multiplexed.offer(other.peer)
        with trio.fail_after(20):
            await until(lambda: bool(other.multiplexed.of(one.peer)))
            other.multiplexed.of(one.peer)[0].connection.end("a test")
            await until(lambda: not path.stands)
        assert not path.is_lost


async def test_peers_behind_one_relay_are_counted_separately() -> None:
    guests = [make_network(letter) for letter in "xyz"]
    narrow = TransportSettings(paths=PathSettings(per_relay_max=2))
    async with behind_a_relay(settings=narrow) as world, running(*guests):
        await until(lambda: bool(world.hidden.circuits))
        for count, guest in enumerate(guests, start=1):
            guest.learn(world.hidden.peer, world.hidden.circuits)
            assert await ask(guest, world.hidden.peer) == b"there?"
            sources = world.hidden._connections.arrivals._register._all.by_source
            assert sources[guest.peer] == 1
            carried = [path for path in world.hidden.multiplexed if path.way == "relayed"]
            await until(lambda: sum(each.stands for each in carried) == min(count, 2))  # noqa: B023 - awaited


async def test_a_circuit_of_a_relay_known_by_host_name_is_dialled() -> None:
    async with behind_a_relay() as world:
        await until(lambda: bool(world.hidden.circuits))
        relay = make_address("localhost", world.relay.port, world.relay.peer)
        assert relay.kind.startswith("dns")
        other = make_network("o")
        async with running(other):
            other.learn(world.hidden.peer, [relay.through(None)])
            assert await ask(other, world.hidden.peer) == b"there?"


async def test_a_cancelled_opener_of_a_circuit_leaks_nothing() -> None:
    async with behind_a_relay() as world:
        await until(lambda: bool(world.hidden.circuits))
        circuit = world.hidden.circuits[0].of(world.hidden.peer)
        paths, connections = world.guest.multiplexed, world.guest._connections
        for tenths in range(0, 150, 5):
            with trio.move_on_after(tenths / 10_000) as scope:
                await paths.through(circuit)
            if not scope.cancelled_caught:
                for path in paths:
                    path.end("a test")
            await until(lambda: not len(paths) and not world.server._waiting)
            assert not paths._connecting
        await until(lambda: not world.server.ledger.circuits)
        await until(lambda: len(connections._open) == len(connections._idle))
        await until(lambda: all(path.is_kept for path in world.hidden.multiplexed))
