"""Links are measured by bursts between two nodes: over sockets, over simulated links, and with liars."""

from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import StreamClosed
from node.seams import Network, Stream
from node.services.links import (
    CHUNK_BYTES,
    LINKS_PROTOCOL,
    STREAMS,
    LinkMeasuring,
    LinkProbe,
    ProbeAdmitted,
    ProbeChunk,
    ProbeRefused,
    ProbeTaken,
    measure_link,
)
from partition.plan.link_probes import PEER_PROBES_MAX, PROBE_BYTES
from sim.network.links import SimLinks
from sim.network.model import Access, NetworkModel
from sim.seams import SimClock, SimNetworkFabric
from sim.seeds import seeded_identity
from tests.node.nets import acquaint, make_network, running

Refused = list[tuple[PeerId, str]]


def service(network: Network, clock: Any, refused: Refused, *, is_busy: bool = False) -> LinkMeasuring:
    return LinkMeasuring(
        network,
        clock,
        Random(1),
        is_busy=lambda: is_busy,
        round_trip_seconds=lambda _: 0.002,
        refuse=lambda peer, error: refused.append((peer, str(error))),
        counters=Counter(),
    )


def near(*access: Access) -> NetworkModel:
    """Return a network whose round trips are short compared with a burst."""
    return NetworkModel(nearest_seconds=0.0005, farthest_seconds=0.0005, jitter_seconds=0.0, access=access)


def simulated(scenario: Callable[..., Awaitable[None]], *access: Access) -> None:
    async def play() -> None:
        medium = SimNetworkFabric(SimLinks(near(*access), 1))
        alice, bob = (medium.attach(seeded_identity(1, number).peer) for number in range(2))
        async with trio.open_nursery() as nursery:
            for network in (alice, bob):
                await nursery.start(network.run)
            acquaint(alice, bob)
            await scenario(alice, bob)
            nursery.cancel_scope.cancel()

    trio.run(play, clock=MockClock(autojump_threshold=0))


async def test_both_directions_are_measured_over_sockets() -> None:
    alice, bob = make_network("a"), make_network("b")
    refused: Refused = []
    service(bob, bob._clock, refused)
    async with running(alice, bob):
        acquaint(alice, bob)
        with trio.fail_after(20):
            sent, taken = await measure_link(alice, alice._clock, bob.peer)
    assert sent > 1e6
    assert taken > 1e6
    assert refused == []


@pytest.mark.parametrize("mbit", [4.0, 20.0, 100.0])
def test_the_measured_rate_of_a_simulated_link_is_accurate(mbit: float) -> None:
    found: list[tuple[float, float]] = []

    async def scenario(alice: Network, bob: Network) -> None:
        service(bob, SimClock(), [])
        found.append(await measure_link(alice, SimClock(), bob.peer))

    simulated(scenario, Access(share=1.0, up_mbit_per_second=mbit, down_mbit_per_second=1_000))
    ((sent, taken),) = found
    assert sent == pytest.approx(mbit * 125_000, rel=0.15)
    assert taken == pytest.approx(mbit * 125_000, rel=0.15)


def test_a_service_measures_its_neighbours_by_itself() -> None:
    changes: list[None] = []

    async def scenario(alice: Network, bob: Network) -> None:
        own = service(alice, SimClock(), [])
        service(bob, SimClock(), [])
        with trio.move_on_after(120):
            await own.run(lambda: [bob.peer], lambda: changes.append(None))
        (row,) = own.core.rows(SimClock().monotonic())
        assert row.peer == bob.peer
        assert row.sent == pytest.approx(2_500_000, rel=0.15)
        assert row.nanoseconds == 1_000_000

    simulated(scenario, Access(share=1.0, up_mbit_per_second=20, down_mbit_per_second=20))
    assert len(changes) >= 3


def test_a_computing_node_refuses_a_probe_with_a_time_to_retry() -> None:
    async def scenario(alice: Network, bob: Network) -> None:
        service(bob, SimClock(), [], is_busy=True)
        own = service(alice, SimClock(), [])
        with trio.move_on_after(60):
            await own.run(lambda: [bob.peer], lambda: None)
        assert own.core.rows(60.0) == ()

    simulated(scenario)


def test_a_peer_that_probes_too_often_is_the_only_one_refused() -> None:
    async def scenario(alice: Network, bob: Network) -> None:
        service(bob, SimClock(), [])
        for number in range(3 * PEER_PROBES_MAX):
            stream = await alice.open(bob.peer, LINKS_PROTOCOL)
            await stream.send(encode(LinkProbe(PROBE_BYTES[0])))
            answer = await stream.receive()
            assert (answer == encode(ProbeAdmitted())) == (number < PEER_PROBES_MAX)
            await stream.aclose()
            await trio.sleep(0.1)

    simulated(scenario)


@pytest.mark.parametrize("fault", ["longer", "short chunks", "no chunk", "silent"])
def test_a_faulty_burst_ends_only_the_senders_stream(fault: str) -> None:
    refused: Refused = []

    async def scenario(alice: Network, bob: Network) -> None:
        own = service(bob, SimClock(), refused)
        stream = await alice.open(bob.peer, LINKS_PROTOCOL)
        await stream.send(encode(LinkProbe(PROBE_BYTES[0])))
        assert await stream.receive() == encode(ProbeAdmitted())
        size = CHUNK_BYTES if fault == "longer" else 10
        message = LinkProbe(PROBE_BYTES[0]) if fault == "no chunk" else ProbeChunk(is_last=False)
        try:
            for _ in range(0 if fault == "silent" else 1_000):
                await stream.send(encode(message), bytes(size))
            await stream.receive()
        except StreamClosed:
            pass
        assert not own._limits.is_serving

    simulated(scenario)
    assert bool(refused) == (fault != "silent")


@pytest.mark.parametrize("answer", [ProbeTaken(10**6, 1_000), ProbeRefused(9), ProbeTaken(100, 1_000)])
def test_a_peer_that_overstates_received_bytes_is_not_believed(answer: ProbeTaken | ProbeRefused) -> None:
    async def serve(stream: Stream) -> None:
        await stream.receive()
        await stream.send(encode(ProbeAdmitted()))
        while True:
            data, _ = await stream.receive_with_payload(CHUNK_BYTES)
            if data == encode(ProbeChunk(is_last=True)):
                break
        await stream.send(encode(answer))
        for number in range(8):
            await stream.send(encode(ProbeChunk(is_last=number == 7)), bytes(CHUNK_BYTES))

    async def scenario(alice: Network, bob: Network) -> None:
        bob.handle(LINKS_PROTOCOL, serve, STREAMS)
        try:
            sent, _ = await measure_link(alice, SimClock(), bob.peer)
        except RemoteProtocolError:
            return
        assert sent < 1e7

    simulated(scenario, Access(share=1.0, up_mbit_per_second=20, down_mbit_per_second=20))
