"""Nodes publish their measurements and plan with those of other nodes. Whole nodes in virtual time."""

from contextlib import AsyncExitStack

import trio
from trio.testing import MockClock

from node.runs.occupancy import TRAINING_SECONDS
from node.runtime import Node
from partition.plan.problem import LINK_BYTES_PER_SECOND
from partition.plan.rates import REFERENCE
from sim.network.links import SimLinks
from sim.network.model import Access, NetworkModel
from sim.seams import SimNetworkFabric
from tests.node.simulated import simulated_node
from tests.stack import simple_cnn

MBIT = 20.0
KNOWN_SECONDS = 30.0
"""Most seconds from the end of the calibrations until a different node plans with the links, as stated in
docs/plan.md."""


def slow_medium() -> SimNetworkFabric:
    """Return a medium in which every node has MBIT in each direction."""
    access = Access(share=1.0, up_mbit_per_second=MBIT, down_mbit_per_second=MBIT)
    model = NetworkModel(nearest_seconds=0.001, farthest_seconds=0.001, jitter_seconds=0.0, access=(access,))
    return SimNetworkFabric(SimLinks(model, 1))


async def three_nodes(stack: AsyncExitStack) -> list[Node]:
    """Return nodes on slow links; the first node introduces the others."""
    medium = slow_medium()
    first = await stack.enter_async_context(simulated_node(medium, 1))
    join = first.network.addresses[0].short
    return [first, *[await stack.enter_async_context(simulated_node(medium, n, join)) for n in (2, 3)]]


def test_links_are_known_soon_after_busy_nodes_were_calibrated() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            nodes = await three_nodes(stack)
            await trio.sleep(40)
            async with trio.open_nursery() as nursery:
                for node in nodes:
                    # The changing load of a busy machine may have used up the number of changes that a node
                    # may announce.
                    assert node.machine.standing._changes.take(trio.current_time())
                    node.measurements.calibration = REFERENCE
                    node.machine.calibrated(REFERENCE)
                    nursery.start_soon(node.measurements.run, REFERENCE)
                await trio.sleep(KNOWN_SECONDS)
                peers = [node.peer for node in nodes]
                for node in nodes:
                    known = await node.measurements.learn(peers)
                    assert len(known.links(peers)) == 6
                    assert len(known.observed) == 3
                nursery.cancel_scope.cancel()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_a_third_node_knows_links_and_calibrations_of_the_others() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            nodes = await three_nodes(stack)
            await trio.sleep(10)
            async with trio.open_nursery() as nursery:
                for node in nodes[:2]:
                    nursery.start_soon(node.measurements.run, REFERENCE)
                await trio.sleep(100)
                nursery.cancel_scope.cancel()
            one, other, third = (node.peer for node in nodes)
            known = await nodes[2].measurements.learn([one, other, third])
            assert known.calibrations == {one: REFERENCE, other: REFERENCE}
            links = known.links([one, other, third])
            for pair in ((one, other), (other, one)):
                assert 0.8 < links[pair].bytes_per_second / (MBIT * 125_000) <= 1.05
                assert links[pair].nanoseconds > 500_000
            # The third node announces nothing about itself, and no node has measured a link to it.
            assert (one, third) not in links
            planned = (await nodes[2].plan(simple_cnn().graph)).problem.links
            assert LINK_BYTES_PER_SECOND in {link.bytes_per_second for link in planned.values()}
            assert len({link.bytes_per_second for link in planned.values()}) >= 2

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_no_measurement_runs_while_a_program_in_the_process_trains() -> None:
    async def scenario() -> None:
        async with simulated_node(slow_medium(), 1) as node:
            is_computing = node.measurements.is_computing
            assert not is_computing()
            part = node.averaging.open("run", b"signature")
            assert is_computing(), "a run that was just opened does not count as computing"
            await trio.sleep(TRAINING_SECONDS)
            assert not is_computing(), "an idle run still counts as computing"
            part.stepped(1, 8)
            assert is_computing()
            part.close()
            assert not is_computing()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
