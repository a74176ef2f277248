"""A node that leaves while it is still finding its swarm."""

from pathlib import Path

import trio
from trio.testing import MockClock

from node import config
from node.events import JoinTried, NodeStopped
from node.runtime import Node
from node.services.capacity import Capacity
from sim.executor import SimExecutor
from sim.network.links import Links
from sim.network.model import NetworkModel
from sim.seams import Medium, SimClock
from sim.seeds import seeded_entropy, seeded_identity, seeded_rng
from sim.storage import MemoryStorage


def test_a_node_may_leave_while_its_first_dial_is_under_way() -> None:
    medium = Medium(Links(NetworkModel(), 1))
    events: list[object] = []

    def node(number: int, *join: str) -> Node:
        identity, storage = seeded_identity(1, number), MemoryStorage()
        storage.write("identity.key", identity.seed)
        storage.write("static.key", bytes(32))
        return Node(
            config.Config(name=f"n{number}", data_dir=Path("/simulated")),
            join=join,
            network=medium.attach(identity.peer),
            clock=SimClock(),
            rng=seeded_rng(1, number),
            entropy=seeded_entropy(1, number),
            executor=SimExecutor(),
            storage=storage,
            capacity=Capacity("cpu", 1, 8 << 30, 16 << 30, 5e9, ""),
            report=events.append,
        )

    async def scenario() -> None:
        async with node(0) as first, node(1, first.network.addresses[0].short):
            pass

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
    assert [event.outcome for event in events if isinstance(event, JoinTried)] == ["ok"]
    assert sum(isinstance(event, NodeStopped) for event in events) == 2
