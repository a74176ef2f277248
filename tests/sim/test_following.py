"""Idle peers follow a stage and take it over, in virtual time. Sums stay exact, and no step is made twice."""

import os
from functools import partial

import pytest

from crypto.identity import PeerId
from partition.plan.change import Change, Joining
from partition.plan.plan import Plan
from partition.run.standbys import cover
from sim.events import PlanAdopted
from sim.seeds import seeded_rng
from tests.sim.runs_world import BEGINS, Troubled, scenario, training
from tests.sim.test_merging import assert_one_plan_at_each_height, split_whenever
from tests.sim.test_training import assert_done, is_step

SEEDS = int(os.environ.get("PEERLOOM_PARTITION_SEEDS", "2"))


def play(seed: int, *, stages: int, idle: int, steps: int = 30, seconds: float = 200.0) -> Troubled:
    """Return a run whose stages have one replica each, in a world with some idle peers."""
    members = stages + idle
    run = training(members=members, stages=stages, replicas=1, steps=steps, checkpoint_every=20)
    return Troubled(scenario(run, nodes=members, seconds=seconds), seed)


def following(played: Troubled, newcomer: PeerId, plan: Plan) -> Change | None:
    """Return the change by which a peer without a stage follows the stage with the fewest holders."""
    if plan.stage_of(newcomer) is not None:
        return None
    covers = [cover(stage, lambda _: 0) for stage in plan.stages]
    number = min(range(len(covers)), key=covers.__getitem__)
    return Change(joined=(Joining(newcomer, number, 0),)) if covers[number] < 0.98 else None


def follow_whenever(played: Troubled, every: float) -> None:
    """At intervals, make the committer ask every peer without a stage to follow a stage."""

    def want() -> None:
        for committer in played.world.peers:
            for newcomer in played.world.peers:
                if played.world.runs(played.number(newcomer)):
                    played.world.training.recut(committer, partial(following, played, newcomer))
        played.at(played.world.now + every, want)

    played.at(BEGINS, want)


def test_a_follower_takes_over_and_no_step_is_committed_twice() -> None:
    played = play(1, stages=3, idle=3)
    follow_whenever(played, 1.0)
    played.when(is_step(10), partial(played.crash, 1))
    assert_done(played.play(), 30)
    assert played.story.steps == list(range(len(played.story.steps)))
    assert len({row.event.height for row in played.story.of(PlanAdopted)}) >= 3, (
        "no follower joined and took over"
    )


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_a_followed_run_ends_exactly_under_any_disturbance(seed: int) -> None:
    """There are one to four temporary deaths, and a partition; followers may die, too."""
    rng = seeded_rng(seed, PeerId(bytes(32)))
    played = play(seed, stages=rng.randint(2, 4), idle=rng.randint(1, 3), steps=40, seconds=900)
    names = range(1, len(played.world.peers))
    time = BEGINS + rng.uniform(0.5, 8)
    for _ in range(rng.randint(1, 4)):
        down = rng.uniform(1, 40)
        played.at(time, partial(played.crash, rng.choice(names), seconds=down))
        time += rng.uniform(3, 40)
    if rng.random() < 0.5:
        played.at(time, played.split, [rng.choice(names)])
        played.at(time + rng.uniform(5, 60), played.heal)
    follow_whenever(played, rng.uniform(1, 6))
    if rng.random() < 0.4:
        split_whenever(played, rng.uniform(2, 10))
    assert_done(played.play(), 40)
    assert_one_plan_at_each_height(played)
