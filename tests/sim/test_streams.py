"""Streams of whole nodes over the network model: shared bandwidth, splits, freezes, NATs, rates."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from node.errors import StreamClosed, Unreachable
from node.seams import Stream
from node.transport.handshake import CONNECT_SECONDS
from node.transport.settings import TRANSPORT
from sim.executor import SimExecutor
from sim.network.clocks import LocalClock
from sim.network.links import SimLinks
from sim.network.model import Access, Nat, NetworkModel
from sim.network.places import BYTES_PER_MBIT
from sim.network.sizes import STREAM_OVERHEAD
from sim.peer_network import SimNetwork
from sim.seams import EPOCH_SECONDS, SimClock, SimNetworkFabric, simulated_seams
from sim.seeds import seeded_peer
from tests.sim.test_seams import TALK, echo, running, simulate

A, B, C = sorted(seeded_peer(1, index) for index in range(3))


def narrow(*, up: float = math.inf, down: float = math.inf) -> NetworkModel:
    """Return a network whose links carry the given number of bytes of stream data per second."""
    mbit = STREAM_OVERHEAD / BYTES_PER_MBIT
    return NetworkModel(access=(Access(1.0, up_mbit_per_second=up * mbit, down_mbit_per_second=down * mbit),))


@asynccontextmanager
async def talkers(
    model: NetworkModel | None = None,
    *,
    stall_seconds: float = 0.0,
    handler: Callable[[Stream], Awaitable[None]] = echo,
) -> AsyncIterator[tuple[SimNetworkFabric, SimNetwork, SimNetwork, SimNetwork]]:
    """Yield three peers that know each other and answer with `handler`."""
    medium = SimNetworkFabric(SimLinks(model or NetworkModel(), 1), stall_seconds=stall_seconds)
    networks = medium.attach(A), medium.attach(B), medium.attach(C)
    for network in networks:
        for other in networks:
            network.learn(other.peer, other.addresses)
        network.handle(TALK, handler)
    async with running(*networks):
        yield medium, *networks


def now() -> float:
    return SimClock().monotonic()


async def timed(stream: Stream, count: int, done: list[float]) -> None:
    """Wait for the given number of messages; return the arrival time of each."""
    for _ in range(count):
        await stream.receive()
        done.append(now())


@pytest.mark.parametrize(("up", "down"), [(100_000, math.inf), (math.inf, 100_000), (100_000, 100_000)])
def test_the_streams_of_a_peer_share_its_bandwidth_fairly(up: float, down: float) -> None:
    async def scenario() -> None:
        arrived: dict[bytes, float] = {}

        async def reader(stream: Stream) -> None:
            data = await stream.receive()
            arrived[data[:1]] = now()

        async with talkers(narrow(up=up, down=down), handler=reader) as (_, one, _, third):
            streams = [await one.open(B, TALK), await one.open(B, TALK), await third.open(B, TALK)]
            begun = now()
            # Both of A's streams use its uplink, and all three use B's downlink.
            for number, stream in enumerate(streams):
                await stream.send(bytes([number]) * 100_000)
            await trio.sleep(20)
            took = [arrived[bytes([number])] - begun for number in range(3)]
            if down == math.inf:
                assert took == pytest.approx([2, 2, 1], abs=0.2)
            else:
                assert max(took) == pytest.approx(3, abs=0.2)
                assert min(took) > 2

    simulate(scenario)


def test_a_stream_uses_its_full_bandwidth_at_any_latency() -> None:
    async def scenario() -> None:
        model = NetworkModel(0.3, 0.3, access=narrow(up=100_000).access)
        async with talkers(model) as (_, one, _, _):
            stream = await one.open(B, TALK)
            begun = now()
            await stream.send(bytes(1_000_000))
            await stream.receive()
            assert now() - begun == pytest.approx(10 + 0.3 + 10 + 0.3, rel=0.01)

    simulate(scenario)


def test_a_datagram_waits_behind_segments_of_streams_and_is_not_starved() -> None:
    async def scenario() -> None:
        async with talkers(narrow(up=100_000)) as (medium, one, other, _):
            stream = await one.open(B, TALK)
            inbox = other.inbox(TALK)
            await stream.send(bytes(1_000_000))
            for _ in range(20):
                await trio.sleep(0.1)
                sent_at = now()
                one.send(B, TALK, b"ping")
                assert await inbox.take(math.inf) == [(A, b"ping")]
                assert 0.05 < now() - sent_at < 0.25
            assert medium.counters["overflowed"] == 0

    simulate(scenario)


def test_messages_of_all_sizes_arrive_in_order_before_the_close() -> None:
    async def scenario() -> None:
        seen: list[int] = []

        async def reader(stream: Stream) -> None:
            while True:
                message, payload = await stream.receive_with_payload(100_000)
                seen.append(len(message) + len(payload))

        async with talkers(narrow(up=50_000, down=80_000), handler=reader) as (medium, one, _, _):
            stream = await one.open(B, TALK)
            for size in (0, 1, 50_000, 3, 1_219, 1_220, 1_221, 2_440):
                await stream.send(bytes(size), b"", b"p")
            await stream.aclose()
            await trio.sleep(10)
            assert seen == [1, 2, 50_001, 4, 1_220, 1_221, 1_222, 2_441]
            assert medium.traffic(A)[TALK].messages == 8
            assert medium.traffic(A)[TALK].sent_bytes == pytest.approx(sum(seen) * STREAM_OVERHEAD, abs=8)
            assert medium.traffic(B) == {}

    simulate(scenario)


@pytest.mark.parametrize("model", [NetworkModel(), narrow(up=100_000, down=100_000)], ids=["free", "narrow"])
def test_a_stream_stalls_over_a_split_and_continues_after_it(model: NetworkModel) -> None:
    async def scenario() -> None:
        async with talkers(model, stall_seconds=60) as (medium, one, _, _):
            stream, same_side = await one.open(B, TALK), await one.open(C, TALK)
            medium.split([A, C], [B])
            await stream.send(b"hello")
            await same_side.send(b"hello")
            assert await same_side.receive() == b"hello"
            with trio.move_on_after(30) as scope:
                await stream.receive()
            assert scope.cancelled_caught
            medium.heal()
            begun = now()
            assert await stream.receive() == b"hello"
            assert now() - begun == pytest.approx(0.1, abs=0.01)

    simulate(scenario)


def test_a_stream_that_stalls_for_too_long_breaks_on_both_sides() -> None:
    async def scenario() -> None:
        ended: list[float] = []

        async def reader(stream: Stream) -> None:
            try:
                await stream.receive()
            finally:
                ended.append(now())

        async with talkers(stall_seconds=60, handler=reader) as (medium, one, _, _):
            stream = await one.open(B, TALK)
            begun = now()
            medium.split([A])
            await trio.sleep(50)
            medium.heal()
            await trio.sleep(5)
            assert ended == [], "the first stall still counts toward the limit"
            medium.links.block(B, A)
            medium.look_at_streams()
            with pytest.raises(StreamClosed):
                await stream.receive()
            assert now() - begun == pytest.approx(50 + 5 + 60)
            await trio.sleep(1)
            assert ended == [pytest.approx(begun + 115)]

    simulate(scenario)


def test_without_patience_a_split_breaks_streams_and_prevents_connections() -> None:
    async def scenario() -> None:
        async with talkers() as (medium, one, _, _):
            stream = await one.open(B, TALK)
            medium.split([A])
            begun = now()
            with pytest.raises(StreamClosed):
                await stream.receive()
            assert now() == begun
            with pytest.raises(Unreachable) as caught:
                await one.open(B, TALK)
            assert caught.value.reason == "timeout"
            assert now() - begun == CONNECT_SECONDS

    simulate(scenario)


@pytest.mark.parametrize("model", [NetworkModel(), narrow(up=100_000)], ids=["free", "narrow"])
def test_a_frozen_peer_neither_sends_receives_nor_closes_before_the_thaw(model: NetworkModel) -> None:
    async def scenario() -> None:
        async with talkers(model) as (medium, one, other, _):
            stream = await one.open(B, TALK)
            begun = now()
            medium.freeze(B, 10)
            await stream.send(b"to a frozen peer")
            assert await stream.receive() == b"to a frozen peer"
            assert now() - begun == pytest.approx(10.05, abs=0.01)
            medium.freeze(A, 10)
            await stream.send(b"from a frozen peer")
            await stream.receive()
            assert now() - begun == pytest.approx(20.05 + 0.1, abs=0.02)
            medium.freeze(A, 10)
            await stream.aclose()
            begun = now()
            await trio.sleep(9.9)
            assert len(other._streams) == 1
            await trio.sleep(0.3)
            assert len(other._streams) == 0

    simulate(scenario)


def test_a_frozen_peer_completes_no_handshake() -> None:
    async def scenario() -> None:
        async with talkers() as (medium, one, _, _):
            medium.freeze(B, 100)
            with pytest.raises(Unreachable, match="shake hands"):
                await one.open(B, TALK)
            assert now() == pytest.approx(0.2 + TRANSPORT.handshake_seconds)
            await trio.sleep_until(98)
            await one.open(B, TALK)
            assert now() == pytest.approx(100)

    simulate(scenario)


def test_a_kill_breaks_streams_and_ends_a_freeze() -> None:
    async def scenario() -> None:
        async with talkers() as (medium, one, _, _):
            stream = await one.open(B, TALK)
            medium.freeze(B, 100)
            medium.kill(B)
            begun = now()
            with pytest.raises(StreamClosed):
                await stream.receive()
            assert now() - begun == pytest.approx(0.05)
            again = medium.attach(B)
            again.handle(TALK, echo)
            async with running(again):
                stream = await one.open(B, TALK)
                await stream.send(b"hello")
                assert await stream.receive() == b"hello"
                assert now() < 1

    simulate(scenario)


@pytest.mark.parametrize("nat", ["restricted", "symmetric", "blocked"])
def test_nodes_behind_a_nat_can_open_streams_but_not_receive_them(nat: Nat) -> None:
    async def scenario() -> None:
        model = NetworkModel(access=(Access(0.5, nat=nat),))
        medium = SimNetworkFabric(SimLinks(model, 1))
        peers = [seeded_peer(2, index) for index in range(20)]
        behind = next(peer for peer in peers if medium.links.at(peer).nat is not None)
        public = next(peer for peer in peers if medium.links.at(peer).nat is None)
        networks = medium.attach(behind), medium.attach(public)
        for network in networks:
            network.handle(TALK, echo)
        for one, other in (networks, networks[::-1]):
            one.learn(other.peer, [other.outside])
        async with running(*networks):
            stream = await networks[0].open(public, TALK)
            await stream.send(b"out")
            assert await stream.receive() == b"out"
            with pytest.raises(Unreachable) as caught:
                await networks[1].open(behind, TALK)
            assert caught.value.reason == "timeout"
            with pytest.raises(Unreachable):
                await networks[1].identify(networks[0].outside)

    simulate(scenario)


def test_computing_slows_with_a_slow_peer_and_stops_with_a_frozen_one() -> None:
    async def scenario() -> None:
        medium = SimNetworkFabric(SimLinks(NetworkModel(), 1))
        executor = simulated_seams(medium, A, 1).executor
        assert isinstance(executor, SimExecutor)
        medium.slow(A, 3.0)
        assert await executor.run(lambda: 1, seconds=2.0) == 1
        assert now() == 6.0
        medium.slow(A, 1.0)
        async with trio.open_nursery() as nursery:

            async def compute() -> None:
                await executor.run(lambda: 1, seconds=2.0)
                assert now() == 6.0 + 2.0 + 10.0 + 1.0

            nursery.start_soon(compute)
            await trio.sleep(1.5)
            medium.freeze(A, 10.0)
            await trio.sleep(5.0)
            medium.freeze(A, 6.0)

    simulate(scenario)


def test_a_wrong_wall_clock_does_not_affect_timers() -> None:
    async def scenario() -> None:
        medium = SimNetworkFabric(SimLinks(NetworkModel(clock_offset_seconds=30.0, clock_drift=0.01), 1))
        wrong = medium.links.clock(A)
        assert wrong != LocalClock()
        clock = simulated_seams(medium, A, 1).clock
        for _ in range(3):
            await trio.sleep(100)
            assert clock.monotonic() == now()
            assert clock.wall() == EPOCH_SECONDS + wrong.local(now())

    simulate(scenario)
