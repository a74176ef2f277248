"""The simulated seams (interfaces to the outside world) under a virtual clock: datagrams, streams, executor,
storage."""

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from crypto.contact import make_address
from crypto.encoding import encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from node.errors import StageFailed, StreamClosed, Unreachable, WrongPeer
from node.seams import Stream
from node.transport.records import PAYLOAD_BYTES_MAX
from partition.model.cut import cut_layers
from partition.model.graph import encode_graph, graph_hash
from partition.stage import Export, Exported, StageSpecification
from sim.executor import SimExecutor
from sim.network.links import SimLinks
from sim.network.model import Access, NetworkModel
from sim.network.places import BYTES_PER_MBIT
from sim.network.sizes import STREAM_OVERHEAD
from sim.peer_network import SimNetwork
from sim.seams import EPOCH_SECONDS, SimClock, SimNetworkFabric, simulated_seams
from sim.seeds import seeded_peer
from sim.storage import MemoryStorage
from sim.streams import WINDOW_BYTES_MAX
from tests.partition.graphs import GraphBuilder

A, B, C = sorted(seeded_peer(1, index) for index in range(3))
TALK = "/peerloom/talk/1"


def simulate(scenario: Callable[[], Awaitable[Any]]) -> None:
    """Run under a clock that jumps to the next event; a deadlock ends after a virtual hour."""

    async def main() -> None:
        with trio.fail_after(3_600):
            await scenario()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def medium(*, up_bytes_per_second: float = math.inf, loss: float = 0.0) -> SimNetworkFabric:
    access = Access(1.0, up_mbit_per_second=up_bytes_per_second / BYTES_PER_MBIT)
    return SimNetworkFabric(SimLinks(NetworkModel(loss=loss, access=(access,)), 1))


def attach(shared: SimNetworkFabric, *, acquainted: bool = True) -> tuple[SimNetwork, SimNetwork, SimNetwork]:
    networks = shared.attach(A), shared.attach(B), shared.attach(C)
    for one in networks if acquainted else ():
        for other in networks:
            one.learn(other.peer, other.addresses)
    return networks


@contextlib.asynccontextmanager
async def running(*networks: SimNetwork) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for network in networks:
            await nursery.start(network.run)
        yield
        nursery.cancel_scope.cancel()


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())


def test_a_datagram_arrives_after_the_latency() -> None:
    async def scenario() -> None:
        one, other, _ = attach(medium())
        inbox = other.inbox(TALK)
        one.send(B, TALK, b"hello")
        assert await inbox.take(1.0) == [(A, b"hello")]
        assert SimClock().monotonic() == 0.05
        assert await inbox.take(1.0) == []
        assert SimClock().monotonic() == 1.0

    simulate(scenario)


def test_simultaneous_datagrams_are_ordered_by_sender_and_number() -> None:
    async def scenario() -> None:
        one, other, third = attach(medium())
        inbox = third.inbox(TALK)
        other.send(C, TALK, b"B1")
        one.send(C, TALK, b"A1")
        other.send(C, TALK, b"B2")
        one.send(C, TALK, b"A2")
        assert [data for _, data in await inbox.take(1.0)] == [b"A1", b"A2", b"B1", b"B2"]
        assert inbox.ties == 3

    simulate(scenario)


def test_a_waiting_inbox_reacts_to_datagrams_and_a_changed_deadline() -> None:
    async def scenario() -> None:
        one, other, _ = attach(medium())
        inbox = other.inbox(TALK)
        taken: list[tuple[float, int]] = []

        async def reader() -> None:
            for _ in range(3):
                taken.append((SimClock().monotonic(), len(await inbox.take(math.inf))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            await trio.sleep(1.0)
            one.send(B, TALK, b"x")
            await trio.sleep(1.0)
            inbox.notify()
            await trio.sleep(1.0)
            inbox.notify()
        assert taken == [(0.0, 1), (1.05, 0), (2.0, 0)]

    simulate(scenario)


def test_messages_to_unknown_or_dead_peers_and_unknown_protocols_are_lost() -> None:
    async def scenario() -> None:
        shared = medium()
        one, other, third = attach(shared, acquainted=False)
        one.send(B, TALK, b"stranger")
        assert one.counters["messages_without_address"] == 1
        one.learn(B, [make_address("10.9.9.9", 9747)])
        one.send(B, TALK, b"wrong address")
        assert one.counters["messages_without_address"] == 2
        one.learn(B, other.addresses)
        one.send(B, TALK, b"nobody reads")
        await trio.sleep(1.0)
        inbox = other.inbox(TALK)
        assert other.counters["messages_refused_protocol"] == 1
        one.send(B, TALK, b"hello")
        assert await inbox.take(2.0) == [(A, b"hello")]
        other.send(A, TALK, b"an answer to whoever reached us")
        assert other.counters["messages_without_address"] == 0
        shared.kill(B)
        one.send(B, TALK, b"dead")
        assert await inbox.take(3.0) == []
        assert shared.counters["missed"] == 2
        assert third.counters == {}

    simulate(scenario)


@pytest.mark.parametrize("loss", [0.1, 0.5])
def test_loss_has_the_configured_rate(loss: float) -> None:
    async def scenario() -> None:
        one, other, _ = attach(medium(loss=loss))
        inbox = other.inbox(TALK)
        for _ in range(2_000):
            one.send(B, TALK, b"x")
        arrived = len(await inbox.take(1.0))
        assert abs(2_000 - arrived - loss * 2_000) < 4 * math.sqrt(2_000 * loss * (1 - loss))

    simulate(scenario)


def test_a_stream_delivers_in_order_with_latency() -> None:
    async def scenario() -> None:
        one, other, _ = attach(medium())
        other.handle(TALK, echo)
        async with running(one, other):
            stream = await one.open(B, TALK)
            opened = SimClock().monotonic()
            assert opened == 0.2  # four one-way delays
            assert stream.peer == B
            for number in range(5):
                await stream.send(memoryview(bytes([number])))
            assert [await stream.receive() for _ in range(5)] == [bytes([number]) for number in range(5)]
            assert SimClock().monotonic() == 0.3

    simulate(scenario)


def test_a_payload_arrives_with_its_message_unless_too_long() -> None:
    async def scenario() -> None:
        one, other, _ = attach(medium())

        async def answer(stream: Stream) -> None:
            while True:
                message, payload = await stream.receive_with_payload(4)
                assert payload.readonly
                await stream.send(message, payload)

        other.handle(TALK, answer)
        async with running(one, other):
            stream = await one.open(B, TALK)
            await stream.send(b"message", b"pay", memoryview(b"load")[:1])
            message, payload = await stream.receive_with_payload(4)
            assert message == b"message"
            assert bytes(payload) == b"payl"
            await stream.send(b"message", b"payload")
            with pytest.raises(StreamClosed):
                await stream.receive()
            stream = await one.open(B, TALK)
            await stream.send(b"message", b"p")
            with pytest.raises(StreamClosed, match=r"a payload of 1, at most \d+ and 0"):
                await stream.receive()
            with pytest.raises(LocalProtocolError):
                await stream.send(b"", bytes(PAYLOAD_BYTES_MAX), b"x")

    simulate(scenario)


def test_a_slow_link_delays_large_messages() -> None:
    async def scenario() -> None:
        one, other, _ = attach(medium(up_bytes_per_second=1_000 * STREAM_OVERHEAD))
        other.handle(TALK, echo)
        async with running(one, other):
            stream = await one.open(B, TALK)
            begun = SimClock().monotonic()
            for _ in range(3):
                await stream.send(bytes(500))
            await stream.receive()
            # 0.5 s of sending, plus a one-way delay in each direction.
            assert SimClock().monotonic() - begun == pytest.approx(1.1)

    simulate(scenario)


def test_a_sender_waits_for_a_reader_that_does_not_read() -> None:
    async def scenario() -> None:
        one, other, _ = attach(medium())
        read: list[int] = []

        async def slow(stream: Stream) -> None:
            await trio.sleep(10)
            while True:
                read.append(len(await stream.receive()))

        other.handle(TALK, slow)
        async with running(one, other):
            stream = await one.open(B, TALK)
            for _ in range(8):
                await stream.send(bytes(WINDOW_BYTES_MAX // 4))
            assert SimClock().monotonic() >= 10
            await stream.aclose()
            await trio.sleep(1)
            assert len(read) == 8

    simulate(scenario)


def test_closing_is_seen_after_the_last_message() -> None:
    async def scenario() -> None:
        one, other, _ = attach(medium())
        seen: list[bytes] = []

        async def reader(stream: Stream) -> None:
            seen.append(await stream.receive())
            with pytest.raises(StreamClosed):
                await stream.receive()
            with pytest.raises(StreamClosed):
                await stream.send(b"too late")

        other.handle(TALK, reader)
        async with running(one, other):
            stream = await one.open(B, TALK)
            await stream.send(b"last")
            await stream.aclose()
            with pytest.raises(StreamClosed):
                await stream.send(b"after closing")
            with pytest.raises(StreamClosed):
                await stream.receive()
            await trio.sleep(1)
        assert seen == [b"last"]

    simulate(scenario)


def test_a_killed_peer_breaks_its_streams_and_cannot_be_reached() -> None:
    async def scenario() -> None:
        shared = medium()
        one, other, _ = attach(shared)
        other.handle(TALK, echo)
        async with running(one, other):
            stream = await one.open(B, TALK)
            shared.kill(B)
            with pytest.raises(StreamClosed):
                await stream.receive()
            assert SimClock().monotonic() == 0.25
            with pytest.raises(Unreachable) as caught:
                await one.open(B, TALK)
            assert caught.value.reason == "refused"

    simulate(scenario)


def test_a_killed_peer_restarts_at_the_same_address() -> None:
    async def scenario() -> None:
        shared = medium()
        one, other, _ = attach(shared)
        with pytest.raises(LocalProtocolError):
            shared.attach(B)
        shared.kill(B)
        again = shared.attach(B)
        assert again.addresses == other.addresses
        again.handle(TALK, echo)
        async with running(again):
            stream = await one.open(B, TALK)
            await stream.send(b"you again")
            assert await stream.receive() == b"you again"

    simulate(scenario)


def test_an_unknown_peer_is_unreachable() -> None:
    async def scenario() -> None:
        one, _, _ = attach(medium(), acquainted=False)
        for peer in (B, seeded_peer(9, 9)):
            with pytest.raises(Unreachable) as caught:
                await one.open(peer, TALK)
            assert caught.value.reason == "unknown"

    simulate(scenario)


def test_a_peer_without_the_protocol_refuses() -> None:
    async def scenario() -> None:
        one, other, _ = attach(medium())
        async with running(one, other):
            with pytest.raises(Unreachable, match="does not speak"):
                await one.open(B, TALK)

    simulate(scenario)


def test_an_address_identifies_the_peer_there() -> None:
    async def scenario() -> None:
        shared = medium()
        one, other, _ = attach(shared, acquainted=False)
        place = other.addresses[0]
        assert await one.identify(place.of(None)) == B
        with pytest.raises(WrongPeer):
            await one.identify(place.of(C))
        with pytest.raises(Unreachable):
            await one.identify(make_address("10.9.9.9", 9747))
        shared.kill(B)
        with pytest.raises(Unreachable):
            await one.identify(place)

    simulate(scenario)


def test_a_handler_that_receives_garbage_ends_only_its_stream() -> None:
    async def scenario() -> None:
        one, other, _ = attach(medium())

        async def strict(stream: Stream) -> None:
            raise RemoteProtocolError("garbage")

        other.handle(TALK, strict)
        async with running(one, other):
            stream = await one.open(B, TALK)
            with pytest.raises(StreamClosed):
                await stream.receive()
            assert other.counters["streams_broken"] == 1
            assert other.alive

    simulate(scenario)


def test_computing_takes_the_modelled_time_after_the_work_is_done() -> None:
    async def scenario() -> None:
        with trio.move_on_after(1.0) as scope:
            await SimExecutor().run(lambda: 1, seconds=2.0)
        assert scope.cancelled_caught
        assert await SimExecutor().run(lambda: 42, seconds=0.5) == 42
        assert SimClock().monotonic() == 1.5
        assert SimClock().wall() == EPOCH_SECONDS + 1.5

    simulate(scenario)


def test_storage_survives_a_peers_restart() -> None:
    async def scenario() -> None:
        storage = MemoryStorage()
        shared = medium()
        seams = simulated_seams(shared, A, 1, storage)
        seams.storage.write("key", memoryview(b"value"))  # type: ignore[arg-type]  # copied all the same
        shared.kill(A)
        again = simulated_seams(shared, A, 1, storage)
        assert again.storage.read("key") == b"value"
        again.storage.delete("key")
        assert again.storage.read("key") is None
        assert again.entropy(32) == seams.entropy(32)

    simulate(scenario)


def test_a_simulated_stage_runs_the_real_executor() -> None:
    async def scenario() -> None:
        build = GraphBuilder()
        x = build.symbol("batch")
        build.begin("forward")
        out = build.node("linear", build.input("x", "float32", x, 4), build.parameter("fc.weight", 3, 4))
        build.end(outputs=[out])
        graph = build.finish()
        (stage_graph,) = cut_layers(graph, graph_hash(encode_graph(graph)), [(0, 1)])
        specification = StageSpecification(run=b"run", graph=stage_graph, sizes_max=(8,))
        stage = await SimExecutor(lambda request: 0.25).open_stage(encode(specification))
        assert isinstance(await stage.call(Export()), Exported)
        assert SimClock().monotonic() == 0.25
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage.call, Export())
            nursery.start_soon(stage.call, Export())
        assert SimClock().monotonic() == 0.75, "the calls did not run one after the other"
        assert stage.vector("parameters").nbytes > 0
        with pytest.raises(LocalProtocolError):
            await stage.call("a request")
        await stage.aclose()
        with pytest.raises(StageFailed):
            await stage.call(Export())

    simulate(scenario)
