"""Whole nodes average in the grid of Moshpit SGD, in virtual time, for as many rounds as the grid has axes.

PEERLOOM_GRID_PEERS and PEERLOOM_GRID_GROUP set the size: `make soak` uses 27 and 3.
"""

import os
from typing import Any

import numpy as np
import pytest
import trio

from gossip.averaging.aggregates import DEFAULT
from node.averaging.participation import Participation
from node.averaging.rounds import RoundWish
from sim.worlds.scheduling import run_virtually
from tests.stack import swarm

PEERS = int(os.environ.get("PEERLOOM_GRID_PEERS", "8"))
GROUP = int(os.environ.get("PEERLOOM_GRID_GROUP", "2"))
NAMES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"[:PEERS]
SIGNATURE = bytes([7]) * 32


async def play(
    runs: list[Participation], values: list[Any], rounds: int, size_max: int = GROUP
) -> list[tuple[float, list[int]]]:
    """Have all nodes average. Return the variance over all peers and the group sizes after each round."""
    found = []
    wanted = RoundWish(window_seconds=2.0, patience_seconds=10.0, size_max=size_max)
    sizes: list[int] = []

    async def average(place: int) -> None:
        made = await runs[place].average(values[place], 1.0, wanted)
        sizes.append(len(made.shares))
        if made.vector is not None:
            values[place] = made.vector

    for _ in range(rounds):
        sizes.clear()
        async with trio.open_nursery() as nursery:
            for place in range(len(runs)):
                nursery.start_soon(average, place)
        found.append((float(np.var([value[0] for value in values])), sorted(sizes)))
    return found


def test_grid_nodes_agree_after_one_round_per_axis() -> None:
    found: list[tuple[float, list[int]]] = []
    draws = np.random.default_rng(1)
    values: list[Any] = [draws.standard_normal(64) for _ in NAMES]
    mean = np.mean(values, axis=0)
    axes: set[tuple[int, ...]] = set()

    async def main() -> None:
        async with swarm(NAMES) as group:
            runs = [group.nodes[name].averaging.open("grid", SIGNATURE) for name in NAMES]
            with trio.fail_after(60):
                for run in runs:
                    await run.wait_for_peers(len(NAMES) - 1)
            found.extend(await play(runs, values, 3))
            axes.update(run.walk.axes for run in runs)

    run_virtually(main)
    told = f"{axes}: {found}"
    assert len(axes) == 1, told
    rounds = len(axes.pop())
    assert rounds > 1, told
    variance, sizes = found[rounds - 1]
    assert sizes == [GROUP] * len(NAMES), told
    assert variance < 1e-9, told
    assert all(value == pytest.approx(mean, abs=1e-6) for value in values), told


def test_honest_nodes_of_a_grid_form_groups_without_liars() -> None:
    """In every round the liars send a value of a million, whether the previous round succeeded or failed. In
    `make soak` three of 27 nodes lie."""
    names, size, liars = (NAMES, 9, 3) if len(NAMES) == 27 else (NAMES[:8], 4, 1)
    draws = np.random.default_rng(2)
    values: list[Any] = [draws.standard_normal(64) for _ in names]
    honest = np.stack(values[liars:])
    least, most = honest.min(axis=0), honest.max(axis=0)
    spreads = [float(np.var(honest, axis=0).mean())]
    axes: set[tuple[int, ...]] = set()

    async def main() -> None:
        async with swarm(names) as group:
            runs = [group.nodes[name].averaging.open("liars", SIGNATURE, None, DEFAULT) for name in names]
            with trio.fail_after(60):
                for run in runs:
                    await run.wait_for_peers(len(names) - 1)
            for _ in range(4):
                for liar in range(liars):
                    values[liar] = np.full(64, 1e6)
                await play(runs, values, 1, size)
                spreads.append(float(np.var(np.stack(values[liars:]), axis=0).mean()))
            axes.update(run.walk.axes for run in runs)

    run_virtually(main)
    told = f"{axes}: {spreads}"
    assert all(len(each) > 1 for each in axes), told
    kept = np.stack(values[liars:])
    assert (kept >= least - 1e-9).all(), told
    assert (kept <= most + 1e-9).all(), told
    assert spreads[-1] < spreads[0] / 20, told
