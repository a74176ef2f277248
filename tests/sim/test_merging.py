"""Stages that nobody is left for go to those beside them, in virtual time: sums stay exact, runs end."""

import os
from functools import partial
from itertools import pairwise

import pytest

from crypto.identity import PeerId
from sim.events import PlanAdopted, SamplesCounted
from sim.seeds import seeded_rng
from tests.sim.runs_world import BEGINS, Troubled, scenario, training
from tests.sim.test_training import assert_done, is_step

SEEDS = int(os.environ.get("PEERLOOM_PARTITION_SEEDS", "2"))
GOES_ON_SECONDS_MAX = 12.0
"""Between two applied steps: 7 s until SWIM is sure of a death, and the steps before and after it."""


def play(seed: int, *, stages: int, steps: int = 30, seconds: float = 200.0) -> Troubled:
    """A run whose stages have one replica each, its requester included, and which nobody else can join."""
    run = training(members=stages, stages=stages, replicas=1, steps=steps)
    return Troubled(scenario(run, nodes=stages, seconds=seconds), seed)


def assert_one_plan_at_each_height(played: Troubled) -> None:
    """Assert that nobody followed another plan than all others of its height."""
    plans = {(row.event.height, row.event.plan) for row in played.story.of(PlanAdopted)}
    assert len(plans) == len({height for height, _ in plans})


def stages_of(played: Troubled) -> list[int]:
    """How many stages applied the last step."""
    last = max(row.event.step for row in played.story.of(SamplesCounted))
    return sorted({row.event.stage for row in played.story.of(SamplesCounted) if row.event.step == last})


@pytest.mark.parametrize("victim", [1, 2])
def test_the_stages_that_are_left_hold_all_layers(victim: int) -> None:
    played = play(victim, stages=3)
    played.when(is_step(6), partial(played.crash, victim))
    assert_done(played.play(), 30)
    assert stages_of(played) == [0, 1]
    applied = sorted(row.time for row in played.story.of(SamplesCounted))
    assert max(later - earlier for earlier, later in pairwise(applied)) <= GOES_ON_SECONDS_MAX


def test_two_deaths_one_after_the_other_leave_two_stages_of_four() -> None:
    played = play(1, stages=4)
    played.when(is_step(6), partial(played.crash, 1))
    played.when(is_step(16), partial(played.crash, 3))
    assert_done(played.play(), 30)
    assert stages_of(played) == [0, 1]


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_whatever_befalls_its_members_a_run_without_spares_ends_exactly(seed: int) -> None:
    """One to three deaths for a while each, one at a time, and a partition."""
    rng = seeded_rng(seed, PeerId(bytes(32)))
    played = play(seed, stages=rng.randint(3, 5), steps=40, seconds=900)
    names = range(1, len(played.world.peers))
    time = BEGINS + rng.uniform(0.5, 5)
    for _ in range(rng.randint(1, 3)):
        down = rng.uniform(1, 40)
        played.at(time, partial(played.crash, rng.choice(names), seconds=down))
        time += down + rng.uniform(3, 20)
    if rng.random() < 0.5:
        played.at(time, played.split, [rng.choice(names)])
        played.at(time + rng.uniform(5, 60), played.heal)
    assert_done(played.play(), 40)
    assert_one_plan_at_each_height(played)
