"""Runs of two members and their witnesses in a world of cores, with deaths, freezes and partitions among
these few.

There must never be two plans at one height, even if the requester's vote breaks ties. The run must continue
whenever enough voters are up and can reach each other. `PEERLOOM_SMALL_SEEDS` plays more seeds.
"""

import os
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest

from sim.events import PlanAdopted, RunEnded, StepCommitted
from sim.seeds import seeded_rng
from tests.sim.runs_world import BEGINS, Troubled, scenario, training

SEEDS = int(os.environ.get("PEERLOOM_SMALL_SEEDS", "3"))
FOUND = (46, 56)
"""With one of these seeds, two members that had been absent one after the other each waited for the other's
proposal. With the other seed, a lone requester went back to a checkpoint of which it had no copy.
"""
STEPS = 40
OPENS_AT = BEGINS + 12.7
"""The time at which the idle node, number 7, opens the stage that 3 and 6 held until BEGINS + 10."""
TROUBLE_SECONDS = 60.0
GOES_ON_SECONDS = 8.0
LOST = "lost its last replica, and no checkpoint holds its parameters"


def trial(seed: int, rule: str) -> Troubled:
    """Play a run of a requester, a replica and up to three members without a stage. There are splits and
    crashes for a minute, and none afterwards.
    """
    rng = seeded_rng(seed, "small")
    members = rng.randint(2, 5)
    run = training(
        members=members,
        stages=1,
        replicas=1,
        steps=STEPS,
        microbatches=4,
        checkpoint_every=4,
        pass_seconds=0.1,
        on_lost_quorum=rule,
    )
    played = Troubled(scenario(run, nodes=members, seconds=260, preset="local"), seed)
    at = BEGINS + rng.uniform(1, 6)
    while at < BEGINS + TROUBLE_SECONDS:
        lasts = rng.uniform(3, 20)
        if rng.random() < 0.6:
            side = rng.sample(range(members), rng.randint(1, members - 1))
            played.at(at, played.split, side)
            played.at(at + lasts, played.heal)
        else:
            played.at(at, partial(played.crash, rng.randrange(members), seconds=lasts))
        at += lasts + rng.uniform(0.5, 8)
    return played


@pytest.mark.parametrize("rule", ["wait", "requester"])
def test_small_runs_end_without_two_plans_at_one_height(rule: str) -> None:
    wrong = {}
    for seed in dict.fromkeys((*FOUND, *range(1, SEEDS + 1))):
        played = trial(seed, rule).play()
        plans = Counter((row.event.height, row.event.plan) for row in played.story.of(PlanAdopted))
        assert len({height for height, _ in plans}) == len(plans), f"seed {seed}: two plans at one height"
        ends = played.story.of(RunEnded)
        outcomes = {row.event.outcome for row in ends}
        # The only replica may die before the first checkpoint. The run cannot survive that, and must report
        # it.
        is_told = all(LOST in row.event.reason for row in ends if row.event.outcome == "failed")
        if not outcomes or not is_told:
            wrong[seed] = (
                outcomes,
                len(played.story.of(StepCommitted)),
                dict(played.world.training.standing(0)),
            )
    assert not wrong


@pytest.mark.parametrize(("rule", "goes_on"), [("wait", False), ("requester", True)])
def test_after_a_split_only_the_tie_breaking_requester_continues(rule: str, goes_on: bool) -> None:
    run = training(
        members=2, stages=1, replicas=1, steps=40, microbatches=4, pass_seconds=0.1, on_lost_quorum=rule
    )
    played = Troubled(scenario(run, nodes=2, seconds=200, preset="local"))
    played.at(BEGINS + 5, played.split, (1,))
    played.at(BEGINS + 45, played.heal)
    played.play()
    apart = [row for row in played.story.of(StepCommitted) if BEGINS + 15 < row.time < BEGINS + 45]
    assert bool(apart) == goes_on
    assert {played.number(row.peer) for row in apart} <= {0}
    assert {row.event.outcome for row in played.story.of(RunEnded)} == {"done"}


@pytest.mark.parametrize("how", ["killed", "stopped", "restarted"])
def test_an_idle_node_is_free_again_once_its_planner_dies(how: str) -> None:
    """A stage loses both replicas. A different member dies while the idle node opens that stage for the
    run."""
    stalled = {}
    for victim in (1, 2, 4, 5):
        run = training(
            members=8, stages=3, replicas=2, steps=40, microbatches=4, checkpoint_every=4, pass_seconds=0.1
        )
        played = Troubled(scenario(run, nodes=8, seconds=BEGINS + 35, preset="local"))
        goes = {
            "killed": partial(played.crash, victim),
            "stopped": partial(played.world.freeze, victim, 40.0),
            "restarted": partial(played.crash, victim, seconds=0.6),
        }
        played.at(BEGINS + 10, played.crash, 3, 6)
        played.at(OPENS_AT, goes[how])
        played.play()
        steps = [row.time for row in played.story.of(StepCommitted, since=OPENS_AT)]
        assert steps, f"victim {victim}: the run never continues"
        stalled[victim] = max(late - early for early, late in pairwise([OPENS_AT, *steps]))
    assert max(stalled.values()) <= GOES_ON_SECONDS, stalled
