"""Whole nodes in virtual time: they train under churn and repeat bit for bit, and watchers may stop them.

PEERLOOM_STACK=full plays the scenario of twenty nodes too.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gossip.member import MemberUp
from gossip.swim import Swim
from node.errors import UsageError
from sim.churn.model import ChurnEvent
from sim.events import PeerStarted, PeerStopped, PlanAdopted, StepCommitted
from sim.observers import Broken, Observation
from sim.scenario import RecordsScenario, Scenario, TrainingScenario
from sim.worlds.factories import Cores
from sim.worlds.stack import StackWorld
from tests.sim.stack_scenarios import DIGITS, FULL, SWARM, Played, play

ROOT = Path(__file__).parent.parent.parent
FULLY = os.environ.get("PEERLOOM_STACK") == "full"
OTHER_GC_THRESHOLD = 5_000
"""Python's default is 700. With this value, garbage is collected at different moments."""


def play_here_and_elsewhere(scenario: Scenario, seed: int) -> Played:
    """Play a scenario in two concurrent processes, which must agree on all events and on every weight."""
    other = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.sim.stack_scenarios",
            scenario.name,
            str(seed),
            str(OTHER_GC_THRESHOLD),
        ],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        played = play(scenario, seed)
        printed, _ = other.communicate(timeout=600)
    finally:
        other.kill()
        other.communicate()
    assert printed.split() == played.printed
    return played


@pytest.mark.parametrize(
    ("scenario", "seed"),
    [
        pytest.param(DIGITS, 1, marks=pytest.mark.slow),
        pytest.param(FULL, 1, marks=pytest.mark.skipif(not FULLY, reason="PEERLOOM_STACK=full")),
    ],
    ids=["digits", "full"],
)
def test_simulated_training_on_spot_machines_is_identical_in_two_processes(
    scenario: Scenario, seed: int
) -> None:
    played = play_here_and_elsewhere(scenario, seed)
    (trained,) = played.world.trained
    (training,) = scenario.runs
    print(f"{trained.standing}; {played.kinds}")  # noqa: T201 - what the soak is run for
    assert trained.outcome == "done"
    assert trained.accuracy is not None
    assert trained.accuracy >= training.accuracy
    assert played.kinds["PeerStopped"] > 3
    plans = [seen.event for seen in played.events if isinstance(seen.event, PlanAdopted)]
    assert max(plan.height for plan in plans) > 1
    if scenario.events:
        assert {"NetworkSplit", "NetworkHealed", "PeerFrozen", "PeerSlowed", "SelfAccused"} <= set(
            played.kinds
        )
    assert_whole([seen.event for seen in played.events if isinstance(seen.event, StepCommitted)], training)


def assert_whole(commits: Sequence[StepCommitted], training: TrainingScenario) -> None:
    """Assert that each step counts its micro-batches once in every stage. A checker has already verified that
    the sums contain exactly these.
    """
    for commit in commits:
        first = commit.step * training.microbatches
        for stage in commit.counted:
            numbers = sorted(number for _, named in stage for number in named)
            assert numbers == list(range(first, first + training.microbatches))
    # If the committer of a step died, the next committer finishes the step without a commit of its own.
    assert len({commit.step for commit in commits}) >= 0.9 * training.steps


def test_a_different_seed_gives_a_different_world_with_simultaneous_events() -> None:
    worlds = [play(SWARM, seed) for seed in (1, 2)]
    assert worlds[0].printed == play(SWARM, 1).printed
    assert worlds[0].printed != worlds[1].printed
    for played in worlds:
        instants = [seen.time for seen in played.events if seen.peer is not None]
        assert len(instants) - len(set(instants)) > 20
        assert all(len(played.world.believes(peer)) == SWARM.nodes for peer in played.world.peers)


def test_a_broken_invariant_stops_the_world_and_is_raised_unchanged() -> None:
    seen: list[Observation] = []
    broken = Broken("planted", "somebody is up")

    def publish(observed: Observation) -> None:
        seen.append(observed)
        if isinstance(observed.event, MemberUp):
            raise broken

    with pytest.raises(Broken) as raised:
        StackWorld(SWARM, 1, publish).play(lambda: None)
    assert raised.value is broken
    assert raised.traceback[-1].name == "publish"
    assert isinstance(seen[-1].event, MemberUp)


def test_a_watcher_may_stop_the_world_when_it_samples() -> None:
    world = StackWorld(SWARM, 1, lambda observed: None)

    def sample() -> None:
        if world.now >= 5:
            raise Broken("planted", f"{world.now:g} s")

    with pytest.raises(Broken, match="planted: 5 s"):
        world.play(sample)


def test_a_run_that_misses_its_accuracy_breaks_an_invariant() -> None:
    (training,) = DIGITS.runs
    hopeless = replace(training, steps=1, at_seconds=22.0, microbatches=1)
    scenario = replace(SWARM, seconds=40.0, runs=(hopeless,))
    with pytest.raises(Broken, match=r"accuracy: want 0\.8: done after 1 steps, accuracy 0\.[01]"):
        StackWorld(scenario, 1, lambda observed: None).play(lambda: None)


def test_a_stack_accepts_a_replaced_swim_core_but_no_replaced_replica() -> None:
    made: list[Swim] = []

    class Counted(Swim):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    world = StackWorld(replace(SWARM, seconds=2.0), 1, lambda observed: None, cores=Cores(swim=Counted))
    world.play(lambda: None)
    assert made == [life.swim for life in world.lives.values()]
    with pytest.raises(UsageError, match="swim"):
        StackWorld(SWARM, 1, lambda observed: None, cores=Cores(replica=Counted))


@pytest.mark.parametrize("remembers", [True, False])
def test_a_peer_returns_with_its_disk_or_as_a_new_peer(remembers: bool) -> None:
    churn = replace(SWARM.churn, remembers=remembers)
    scenario = replace(
        SWARM,
        churn=churn,
        events=(ChurnEvent(20.0, "leave", share=0.2, lasts_seconds=5.0),),
        records=RecordsScenario(False),
    )
    seen: list[Observation] = []
    world = StackWorld(scenario, 1, seen.append)
    world.play(lambda: None)
    (gone,) = {row.peer for row in seen if isinstance(row.event, PeerStopped)}
    (back,) = [
        row for row in seen if row.peer == gone and isinstance(row.event, PeerStarted) and row.time > 20
    ]
    assert gone is not None
    assert back.event.remembers is remembers
    assert world.up_since(gone) == back.time == 25.0
    dialled = world.lives[gone].node.state.joins
    assert (len(dialled) > 1) is remembers  # the peers that it knew before the restart
