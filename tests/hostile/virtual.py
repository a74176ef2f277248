"""The hostile peer in virtual time: a whole node among the nodes of `tests.stack.swarm`, which lies and sends
hostile messages."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from crypto.facts import IdentitySigner
from crypto.identity import Identity, PeerId
from node import config
from node.runs.runs import Runs
from node.runtime import Node
from node.services.capacity import Capacity
from sim.executor import SimExecutor
from sim.seams import SimClock
from sim.seeds import seeded_entropy, seeded_rng
from sim.storage import MemoryStorage
from tests.hostile.insider import Insider, lying
from tests.hostile.known import Known
from tests.hostile.values import Values
from tests.stack import Swarm

NAME = "m"
MET_SECONDS = 60.0


@dataclass
class Hostile:
    """The hostile node, what it has learnt, and its `Insider`."""

    node: Node
    values: Values
    insider: Insider

    @property
    def known(self) -> Known:
        return self.values.known

    def overhear(self, runs: Runs) -> None:
        """Learn every message of a run that this node sends."""
        observe = runs._observe

        def heard(message: object) -> None:
            self.known.learn(message)
            observe(message)

        runs._observe = heard


@asynccontextmanager
async def hostile_in(
    group: Swarm, seed: int, *, takes_stages: bool = False, flops_per_second: float = 5e9
) -> AsyncIterator[Hostile]:
    """Start the hostile node as a member of the swarm; with `takes_stages` it may get a stage in an honest
    run."""
    identity = Identity(bytes([seed, ord(NAME)]) * 16)
    storage = MemoryStorage()
    storage.write("identity.key", identity.seed)
    storage.write("static.key", bytes(32))
    values = Values(
        seeded_rng(seed, "hostile values"), Known(), IdentitySigner(identity, config.SwarmSettings().name)
    )
    network = group.medium.attach(identity.peer)
    node = Node(
        config.Config(
            name=NAME,
            swarm=config.SwarmSettings(preset="local"),
            data_dir=Path("/simulated"),
            resources=config.Resources(accept_runs="swarm" if takes_stages else "never"),
        ),
        join=[next(iter(group.nodes.values())).network.addresses[0].short],
        network=lying(network, values),
        clock=SimClock(),
        rng=seeded_rng(seed, identity.peer),
        entropy=seeded_entropy(seed, identity.peer),
        executor=SimExecutor(lambda request: 0.02),
        storage=storage,
        capacity=Capacity("cpu", 1, 8 << 30, 16 << 30, flops_per_second, ""),
        parts=group.parts,
    )
    async with node:
        group.nodes[NAME] = node
        with trio.fail_after(MET_SECONDS):
            while any(  # noqa: ASYNC110 - virtual time: waiting costs nothing
                len(each.membership.live) < len(group.nodes) for each in group.nodes.values()
            ):
                await trio.sleep(0.1)
        bad = Hostile(node, values, Insider(network, values))
        for peer in [each.peer for each in group.nodes.values()]:
            bad.known.learn(peer, "peer")
        for each in group.nodes.values():
            bad.overhear(each.runs)
        yield bad
        await bad.insider.close()
    del group.nodes[NAME]


def peers(group: Swarm, names: Sequence[str]) -> list[PeerId]:
    """Return the peers of these nodes."""
    return [group.nodes[name].peer for name in names]
