"""Whole nodes on a simulated network, for tests under trio's MockClock."""

from pathlib import Path
from typing import Any

from node import config
from node.runtime import Node
from node.services.capacity import Capacity
from sim.executor import SimExecutor
from sim.seams import SimClock, SimNetworkFabric
from sim.seeds import seeded_entropy, seeded_identity, seeded_rng
from sim.storage import MemoryStorage

SEED = 1


def simulated_node(
    medium: SimNetworkFabric,
    number: int,
    *join: str,
    settings: dict[str, Any] | None = None,
    clock: SimClock | None = None,
    executor: SimExecutor | None = None,
    **options: Any,
) -> Node:
    """Return the node with this number and an empty disk. `settings` are passed to its Config, `options` to
    the node."""
    identity, storage = seeded_identity(SEED, number), MemoryStorage()
    storage.write("identity.key", identity.seed)
    storage.write("static.key", bytes(32))
    return Node(
        config.Config(name=f"n{number}", data_dir=Path("/simulated"), **(settings or {})),
        join=join,
        network=medium.attach(identity.peer),
        clock=clock or SimClock(),
        rng=seeded_rng(SEED, number),
        entropy=seeded_entropy(SEED, number),
        executor=executor or SimExecutor(),
        storage=storage,
        capacity=Capacity("cpu", 1, 8 << 30, 16 << 30, 5e9, ""),
        **options,
    )
