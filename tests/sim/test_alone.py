"""Isolated members continue if their run allows it, and one branch is kept, in virtual time."""

import os
from collections import Counter
from collections.abc import Mapping
from functools import partial

import pytest

from crypto.identity import PeerId
from partition.plan.quorum import FORK_SECONDS
from sim.events import BranchLeft, StepCommitted
from sim.seeds import seeded_rng
from tests.sim.runs_world import BEGINS, Troubled, scenario, training

SEEDS = int(os.environ.get("PEERLOOM_PARTITION_SEEDS", "2"))
SPLIT_AT = BEGINS + 12
APART_SECONDS = FORK_SECONDS + 40
AGREED_SECONDS = 60.0
"""Number of seconds after the network heals within which only one branch must be left."""


def play(seed: int, *, members: int, steps: int, stages: int = 2) -> Troubled:
    run = training(
        members=members,
        stages=stages,
        replicas=1,
        steps=steps,
        microbatches=2,
        pass_seconds=0.1,
        checkpoint_every=4,
        on_lost_quorum="fork",
    )
    return Troubled(scenario(run, nodes=members, seconds=900, preset="local"), seed)


def committers(played: Troubled, since: float, until: float) -> Counter[int]:
    """Return the number of steps that each member committed in a period."""
    rows = played.story.of(StepCommitted, since)
    return Counter(played.number(row.peer) for row in rows if row.time < until)


def parted(seed: int, sides: Mapping[int, int], *, members: int, steps: int = 400) -> Troubled:
    played = play(seed, members=members, steps=steps)
    played.at(SPLIT_AT, played.world.split, sides)
    played.at(SPLIT_AT + APART_SECONDS, played.heal)
    return played.play()


def test_two_partitioned_members_train_alone_and_one_branch_is_kept() -> None:
    played = parted(1, {1: 1}, members=2)
    healed = SPLIT_AT + APART_SECONDS
    apart = committers(played, SPLIT_AT + FORK_SECONDS, healed)
    assert set(apart) == {0, 1}
    (left,) = {played.number(row.peer) for row in played.story.of(BranchLeft)}
    after = committers(played, healed + AGREED_SECONDS, 900)
    assert set(after) == {1 - left}
    assert set(played.story.outcomes.values()) == {"done"}


@pytest.mark.slow
def test_three_isolated_members_end_on_one_branch() -> None:
    played = parted(2, {1: 1, 2: 2}, members=3)
    apart = committers(played, SPLIT_AT + FORK_SECONDS, SPLIT_AT + APART_SECONDS)
    assert set(apart) == {0, 1, 2}
    assert len({played.number(row.peer) for row in played.story.of(BranchLeft)}) == 2
    assert set(played.story.outcomes.values()) == {"done"}


@pytest.mark.slow
def test_members_that_wake_up_adopt_the_branch_of_the_lone_member() -> None:
    """All members but one sleep. When they wake up, the remaining member has made more steps than they
    have."""
    played = play(3, members=3, steps=400)
    awake = 1
    for sleeper in (0, 2):
        played.at(SPLIT_AT, partial(played.world.freeze, sleeper, APART_SECONDS))
    played.play()
    apart = committers(played, SPLIT_AT + FORK_SECONDS, SPLIT_AT + APART_SECONDS)
    assert set(apart) == {awake}
    assert apart[awake] > 10
    steps = [row.event.step for row in played.story.of(StepCommitted, SPLIT_AT + FORK_SECONDS)]
    assert steps == sorted(set(steps)), "a step of the branch is committed a second time"
    assert set(played.story.outcomes.values()) == {"done"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_partitions_and_deaths_leave_one_branch_and_the_run_ends(seed: int) -> None:
    """Some splits are too short for a fork. Some members die or sleep on their branch."""
    rng = seeded_rng(seed, PeerId(bytes(32)))
    members = rng.randint(2, 5)
    played = play(seed, members=members, steps=rng.choice((60, 300)), stages=rng.randint(1, min(3, members)))
    time = SPLIT_AT
    for _ in range(rng.randint(1, 3)):
        lasts = rng.uniform(5, 150)
        played.at(time, played.world.split, {number: rng.randint(0, 2) for number in range(members)})
        if rng.random() < 0.4:
            victim, away = rng.randrange(members), rng.uniform(5, 60)
            played.at(time + rng.uniform(0, lasts), partial(played.crash, victim, seconds=away))
        played.at(time + lasts, played.heal)
        time += lasts + rng.uniform(5, 60)
    played.play()
    outcomes = set(played.story.outcomes.values())
    assert outcomes == {"done"}, (outcomes, dict(played.world.training.standing(0)))
