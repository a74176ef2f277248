"""Stages without a holder are merged into adjacent stages, in virtual time: sums stay exact, and runs end."""

import os
from functools import partial
from itertools import pairwise

import pytest

from crypto.identity import PeerId
from partition.plan.change import Change, Joining
from partition.plan.plan import Plan, StagePlan
from sim.events import PlanAdopted, SamplesCounted
from sim.seeds import seeded_rng
from tests.sim.runs_world import BEGINS, Troubled, scenario, training
from tests.sim.test_training import assert_done, is_step

SEEDS = int(os.environ.get("PEERLOOM_PARTITION_SEEDS", "2"))
GOES_ON_SECONDS_MAX = 12.0
"""Maximum number of seconds between two applied steps: 7 s until SWIM declares a member dead, plus the steps
before and after."""


def play(seed: int, *, stages: int, steps: int = 30, seconds: float = 200.0) -> Troubled:
    """Play a run that no other peer can join. Each stage has one replica, and the requester holds one of the
    stages."""
    run = training(members=stages, stages=stages, replicas=1, steps=steps)
    return Troubled(scenario(run, nodes=stages, seconds=seconds), seed)


def assert_one_plan_at_each_height(played: Troubled) -> None:
    """Assert that all members followed the same plan at each height."""
    plans = {(row.event.height, row.event.plan) for row in played.story.of(PlanAdopted)}
    assert len(plans) == len({height for height, _ in plans})


def stages_of(played: Troubled) -> list[int]:
    """Return the stages that applied the last step."""
    last = max(row.event.step for row in played.story.of(SamplesCounted))
    return sorted({row.event.stage for row in played.story.of(SamplesCounted) if row.event.step == last})


@pytest.mark.parametrize("victim", [1, 2])
def test_the_remaining_stages_hold_all_layers(victim: int) -> None:
    played = play(victim, stages=3)
    played.when(is_step(6), partial(played.crash, victim))
    assert_done(played.play(), 30)
    assert stages_of(played) == [0, 1]
    applied = sorted(row.time for row in played.story.of(SamplesCounted))
    assert max(later - earlier for earlier, later in pairwise(applied)) <= GOES_ON_SECONDS_MAX


def test_two_successive_deaths_leave_two_stages_of_four() -> None:
    played = play(1, stages=4)
    played.when(is_step(6), partial(played.crash, 1))
    played.when(is_step(16), partial(played.crash, 3))
    assert_done(played.play(), 30)
    assert stages_of(played) == [0, 1]


def split_with(played: Troubled, newcomer: PeerId, plan: Plan) -> Change | None:
    """Return the change by which a stage of two or more layers gives half of them to a peer without a
    stage."""
    if plan.stage_of(newcomer) is not None or len(plan.stages) >= played.world.scenario.runs[0].stages:
        return None
    stages = list(plan.stages)
    number = max(range(len(stages)), key=lambda place: stages[place].last_layer - stages[place].first_layer)
    row = stages[number]
    middle = (row.first_layer + row.last_layer) // 2
    stages[number : number + 1] = [
        StagePlan(row.first_layer, middle, row.replicas, row.rates),
        StagePlan(middle, row.last_layer, (newcomer,), (1,)),
    ]
    return Change(joined=(Joining(newcomer, number + 1, 1),), stages=tuple(stages))


def split_whenever(played: Troubled, every: float) -> None:
    """At intervals, make the committer ask for a stage for each peer that has none."""

    def want() -> None:
        for committer in played.world.peers:
            for newcomer in played.world.peers:
                if played.world.runs(played.number(newcomer)):
                    played.world.training.recut(committer, partial(split_with, played, newcomer))
        played.at(played.world.now + every, want)

    played.at(BEGINS, want)


def test_a_machine_that_returns_gets_its_own_stage_again() -> None:
    played = play(1, stages=3, steps=40)
    played.when(is_step(6), partial(played.crash, 1, seconds=20.0))
    split_whenever(played, 5.0)
    assert_done(played.play(), 40)
    assert stages_of(played) == [0, 1, 2]
    merged = [row for row in played.story.of(SamplesCounted) if row.event.stage == 2]
    assert any(later.time - earlier.time > 5 for earlier, later in pairwise(merged)), (
        "the run does not have two stages after the merge"
    )


def test_a_stage_that_nobody_takes_pauses_the_run_but_loses_no_step() -> None:
    """The newcomer is asked to take a stage, and dies before it answers."""
    played = play(1, stages=3, steps=40)
    played.when(is_step(6), partial(played.crash, 1, seconds=15.0))
    split_whenever(played, 4.0)
    for step in (14, 18, 22):
        played.when(is_step(step), partial(played.crash, 1, seconds=6.0))
    assert_done(played.play(), 40)


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_a_run_without_spares_ends_exactly_under_any_disturbance(seed: int) -> None:
    """The disturbances are one to three temporary deaths, one at a time, and a partition."""
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
    if rng.random() < 0.7:
        split_whenever(played, rng.uniform(2, 10))
    assert_done(played.play(), 40)
    assert_one_plan_at_each_height(played)


def leave(played: Troubled, number: int, seconds: float) -> None:
    """Let a peer hand over its stage and leave, and return after `seconds`."""
    peer = played.world.peers[number]
    if played.world.runs(number) and not played.world.lives[peer].leaving:
        played.world.stop(number, "leave")
        played.at(played.world.now + seconds, come_back, played, number)


def come_back(played: Troubled, number: int) -> None:
    """Start a peer again once it has left."""
    if played.world.runs(number):
        played.at(played.world.now + 1.0, come_back, played, number)
    else:
        played.world.start(number)


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_leaving_members_hand_over_and_the_run_ends_exactly(seed: int) -> None:
    """The last holders of their stages say goodbye, sometimes two simultaneously, and one member dies."""
    rng = seeded_rng(seed, PeerId(bytes(32)))
    played = play(seed, stages=rng.randint(3, 5), steps=40, seconds=900)
    names = range(1, len(played.world.peers))
    time = BEGINS + rng.uniform(0.5, 5)
    for _ in range(rng.randint(1, 3)):
        for name in rng.sample(names, rng.choice((1, 1, 2))):
            played.at(time, leave, played, name, rng.uniform(15, 40))
        time += rng.uniform(3, 40)
    if rng.random() < 0.5:
        played.at(time, partial(played.crash, rng.choice(names), seconds=20.0))
    split_whenever(played, rng.uniform(2, 10))
    assert_done(played.play(), 40)
    assert_one_plan_at_each_height(played)


def test_no_step_is_lost_if_a_stages_last_holder_leaves() -> None:
    played = play(1, stages=3)
    played.when(is_step(7), partial(leave, played, 1, 300.0))
    assert_done(played.play(), 30)
    assert played.story.steps == list(range(len(played.story.steps)))
    assert stages_of(played) == [0, 1]
