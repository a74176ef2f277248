"""A run with more participants than a node tracks: groups form by declarations in the DHT. Virtual time.

A node that tracks six of the eleven others misjudges the number of participants by a third (by 3 % if it
tracks 1,024). There are two alternating grids. In one of them all twelve peers are in one cell; in the other,
seven are in one cell and five in another.
"""

from functools import partial
from typing import Any

import numpy as np
import trio

from crypto.identity import PeerId
from node.averaging.participation import Participation
from node.averaging.rounds import RoundWish
from node.averaging.service import Averaging
from node.seams import Parts
from sim.worlds.scheduling import run_virtually
from tests.stack import swarm

NAMES = "abcdefghijkl"
KEPT = 6
GROUP = 4
ROUNDS = 5
SIGNATURE = bytes([7]) * 32


def test_peers_unknown_to_each_other_meet_by_their_group_key() -> None:
    parts: Parts = {Averaging: partial(Averaging, participants_max=KEPT)}
    draws = np.random.default_rng(1)
    values: list[Any] = [draws.standard_normal(64) for _ in NAMES]
    mean = np.mean(values, axis=0)
    variances = [float(np.var([value[0] for value in values]))]
    unknown: set[PeerId] = set()
    sizes: list[int] = []
    wanted = RoundWish(window_seconds=2.0, patience_seconds=20.0, size_max=GROUP)

    async def average(runs: list[Participation], place: int) -> None:
        run = runs[place]
        known = set(run.roster.reports)
        made = await run.average(values[place], 1.0, wanted)
        if made.vector is not None:
            values[place] = made.vector
            sizes.append(len(made.shares))
            unknown.update(set(made.shares) - known - {run.peer})

    async def main() -> None:
        async with swarm(NAMES, preset="lan", parts=parts) as group:
            runs = [group.nodes[name].averaging.open("large", SIGNATURE) for name in NAMES]
            with trio.fail_after(120):
                while any(run.roster.is_whole for run in runs):  # noqa: ASYNC110 - virtual time
                    await trio.sleep(1.0)
            await trio.sleep(5.0)
            for run in runs:
                assert len(run.roster.reports) <= KEPT
            for _ in range(ROUNDS):
                async with trio.open_nursery() as nursery:
                    for place in range(len(runs)):
                        nursery.start_soon(average, runs, place)
                variances.append(float(np.var([value[0] for value in values])))

    run_virtually(main)
    told = f"variances {variances}, group sizes {sizes}, met {len(unknown)} peers that were not known before"
    assert len(unknown) > len(NAMES) // 2, told
    assert max(sizes) <= GROUP, told
    assert variances[-1] < 0.02 * variances[0], told
    assert np.abs(np.mean(values, axis=0) - mean).max() < 0.2, told
