"""Runs in local mode in a world of cores: deaths, restarts, partitions and newcomers drawn from a seed.

The rules are those of nodes (`partition.run.local`). Every run ends, no stage works for two heads at one
time, and no step counts twice (`sim.worlds.local_truth` raises where one does). `PEERLOOM_LOCAL_SEEDS` plays
more of them.
"""

import os
from contextlib import suppress
from functools import partial

import pytest

from sim.events import ColumnStepped, LocalRunEnded
from sim.scenario.model import LocalTraining
from sim.seeds import seeded_rng
from tests.sim.runs_world import BEGINS, Troubled, scenario

SEEDS = int(os.environ.get("PEERLOOM_LOCAL_SEEDS", "6"))
STEPS = 40
TROUBLE_SECONDS = 40.0
END_SECONDS = 900.0


def played(training: LocalTraining, seed: int = 1, nodes: int = 5) -> Troubled:
    return Troubled(
        scenario(nodes=nodes, seconds=BEGINS + END_SECONDS, preset="local", local_runs=(training,)), seed
    )


class Ended(Exception):
    """All members that are up have ended."""


def play(world: Troubled, since: float = 0.0) -> Troubled:
    """Play until no member is left, at `since` at the earliest."""

    def look() -> None:
        standing = world.world.local_runs.standing(0)
        if world.world.now > since and world.story.of(LocalRunEnded) and not standing:
            raise Ended
        world.at(world.world.now + 1.0, look)

    world.at(BEGINS + 1.0, look)
    with suppress(Ended):
        world.world.play(lambda: None)
    return world


def ends(world: Troubled) -> list[LocalRunEnded]:
    return [row.event for row in world.story.of(LocalRunEnded)]


def trial(seed: int) -> Troubled:
    rng = seeded_rng(seed, "local runs")
    stages = rng.choice((1, 2, 2, 3))
    members = rng.randint(max(2, stages), 6)
    training = LocalTraining(
        members=members,
        stages=stages,
        replicas=rng.choice((0, 1, 2)),
        steps=STEPS,
        patience=rng.choice((0, 0, 3)),
        at_seconds=BEGINS,
    )
    world = played(training, seed, nodes=members)
    if rng.random() < 0.5:  # while stages are opened: without a copy of each, a death may end the run
        world.at(BEGINS + rng.uniform(2, 10), world.split, [rng.randrange(members)])
        world.at(BEGINS + 12, world.heal)
    at = BEGINS + rng.uniform(20, 30)
    until, number = at + TROUBLE_SECONDS, 0
    while at < until:
        lasts = rng.uniform(2, 15)
        kind = rng.choice(("death", "restart", "part", "part"))
        if kind == "part":
            world.at(at, world.split, rng.sample(range(members), rng.randint(1, max(1, members - 1))))
            world.at(at + lasts, world.heal)
        elif kind == "restart":
            world.at(at, partial(world.crash, rng.randrange(members), seconds=lasts))
        elif number < members - 2:
            number += 1
            world.at(at, world.crash, members - number)
        at += lasts + rng.uniform(12, 20)
    return play(world, until + 15.0)


@pytest.mark.parametrize("seed", range(1, 1 + SEEDS))
def test_disturbed_local_runs_end_with_one_result(seed: int) -> None:
    world = trial(seed)
    found = [event for event in ends(world) if event.outcome != "left"]
    assert not world.world.local_runs.standing(0), "the run did not end"
    assert found
    assert len({event.weights for event in found}) == 1
    assert world.story.of(ColumnStepped)
