"""A node that leaves while it is still finding its swarm."""

import trio
from trio.testing import MockClock

from node.events import JoinTried, NodeStopped
from sim.network.links import Links
from sim.network.model import NetworkModel
from sim.seams import Medium
from tests.node.simulated import simulated_node


def test_a_node_may_leave_while_its_first_dial_is_under_way() -> None:
    medium = Medium(Links(NetworkModel(), 1))
    events: list[object] = []

    async def scenario() -> None:
        async with simulated_node(medium, 0, report=events.append) as first:
            there = first.network.addresses[0].short
            async with simulated_node(medium, 1, there, report=events.append):
                pass

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
    assert [event.outcome for event in events if isinstance(event, JoinTried)] == ["ok"]
    assert sum(isinstance(event, NodeStopped) for event in events) == 2
