"""Whole nodes average repeatedly while one of them is killed or restarted every half to two seconds.

This follows the stress test of PCCL (Keiblinger et al. 2025). It runs in virtual time with real streams,
groups and attempts; conveners and reducers are killed too. In one variant all nodes form one group, in the
other a grid of several axes. PEERLOOM_STRESS_SECONDS and PEERLOOM_STRESS_PEERS set length and size: `make
soak` uses 600 and 10.
"""

import os
from random import Random
from typing import Any

import numpy as np
import pytest
import trio

from crypto.identity import PeerId
from node.averaging.rounds import RoundWish
from node.runtime import Node
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.stack import Swarm, swarm

SECONDS = float(os.environ.get("PEERLOOM_STRESS_SECONDS", "12"))
PEERS = int(os.environ.get("PEERLOOM_STRESS_PEERS", "5"))
NAMES = "abcdefghijkl"[:PEERS]
LEAST = 3
ITEMS = 2_000
STALL_SECONDS_MAX = 30.0
SIGNATURE = bytes([7]) * 32


class Stress:
    """The outcome of all rounds, over all restarts of the nodes."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.axes_max = 0
        self.means: dict[bytes, tuple[bytes, dict[PeerId, float]]] = {}
        self.successes = 0
        self.since: dict[str, float] = {}
        self.longest = 0.0

    async def average(self, node: Node, name: str) -> None:
        """Average repeatedly until this node is killed."""
        run = node.averaging.open("stress", SIGNATURE)
        await run.settle(3.0)
        draws = np.random.default_rng(ord(name))
        while True:
            vector = draws.standard_normal(ITEMS).astype(np.float32)
            wanted = RoundWish(window_seconds=1.0, patience_seconds=10.0, size_max=self.group_size)
            made = await run.average(vector, 1.0, wanted)
            self.axes_max = max(self.axes_max, len(run.walk.axes))
            if made.vector is not None:
                held = self.means.setdefault(made.attempt, (made.vector.tobytes(), made.shares))
                assert held == (made.vector.tobytes(), made.shares), (
                    "two members of one attempt hold different means"
                )
                assert abs(sum(made.shares.values()) - 1) < 1e-6
                self.successes += 1
                self.since[name] = trio.current_time()

    def look(self) -> None:
        for name, at in self.since.items():
            waited = trio.current_time() - at
            self.longest = max(self.longest, waited)
            assert waited < STALL_SECONDS_MAX, f"{name} stalls"


async def play(stress: Stress, group: Swarm, nursery: trio.Nursery) -> int:
    """Kill and start nodes until the time is up; return the number of kills."""
    rng, kills = Random(1), 0
    lives: dict[str, trio.CancelScope] = {}

    async def live(name: str, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        with trio.CancelScope() as lives[name]:
            stress.since[name] = trio.current_time()
            task_status.started()
            await stress.average(group.nodes[name], name)

    for name in NAMES:
        await nursery.start(live, name)
    begun = trio.current_time()
    while trio.current_time() - begun < SECONDS:
        await trio.sleep(rng.uniform(0.5, 2.0))
        stress.look()
        name = rng.choice(NAMES)
        if name in lives and len(lives) > LEAST:
            lives.pop(name).cancel()
            del stress.since[name]
            group.kill(name)
            kills += 1
        elif name not in lives:
            await nursery.start(stack._live, group, name, next(iter(lives)), 1, stack.STAGE_SECONDS)
            await nursery.start(live, name)
    nursery.cancel_scope.cancel()
    return kills


@pytest.mark.parametrize(("group_size", "axes"), [(16, 1), (3, 2)])
def test_averaging_continues_while_nodes_die_and_return(group_size: int, axes: int) -> None:
    stress, kills = Stress(group_size), 0

    async def main() -> None:
        nonlocal kills
        async with swarm(NAMES) as group, trio.open_nursery() as nursery:
            kills = await play(stress, group, nursery)

    run_virtually(main)
    assert kills >= SECONDS / 8
    found = f"{stress.successes} successes, {kills} kills, longest wait {stress.longest:.1f} s"
    assert stress.axes_max >= axes, found
    assert stress.successes >= SECONDS / 2, found
    assert len(stress.means) < stress.successes, "no attempt was reported by several members"
