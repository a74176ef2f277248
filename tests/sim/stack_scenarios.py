"""Scenarios of whole nodes that are defined once and played by several processes.

`python -m tests.sim.stack_scenarios NAME SEED [GC]` plays one, and prints the digest of all events and then
the hash of each run's weights. GC is the threshold of Python's garbage collector, which must not affect the
digest.
"""

import gc
import sys
from collections import Counter
from dataclasses import dataclass, field

from sim.checkers import checkers_for
from sim.churn.model import Churn, ChurnEvent
from sim.observers import Observation, Watch
from sim.scenario import Scenario, TrainingScenario
from sim.worlds.stack import StackWorld

SWARM = Scenario(
    name="swarm", about="Eight nodes that have nothing to do.", fidelity="stack", nodes=8, seconds=30.0
)
# All distances are equal, without jitter, so many events fall on the same instant.
DIGITS = Scenario(
    name="digits",
    about="Digits are trained on machines that come and go, with a little of every disturbance.",
    fidelity="stack",
    nodes=7,
    seconds=130.0,
    churn=Churn(profile="spot", speedup=720.0),
    events=(
        ChurnEvent(32.0, "slow", share=0.3, lasts_seconds=30.0),
        ChurnEvent(35.0, "freeze", share=0.2, lasts_seconds=2.0),
        ChurnEvent(44.0, "partition", share=0.3, lasts_seconds=10.0),
        ChurnEvent(62.0, "loss", share=0.5, loss=0.1, lasts_seconds=15.0),
        ChurnEvent(75.0, "one-way", share=0.2, lasts_seconds=5.0),
    ),
    runs=(
        TrainingScenario(
            members=7,
            steps=36,
            microbatches=4,
            at_seconds=25.0,
            pass_seconds=0.06,
            trainers=2,
            accuracy=0.8,
        ),
    ),
)
FULL = Scenario(
    name="full",
    about="Twenty spot machines train digits in three stages.",
    fidelity="stack",
    nodes=20,
    seconds=360.0,
    churn=Churn(profile="spot", speedup=480.0),
    runs=(
        TrainingScenario(
            members=14,
            stages=3,
            steps=70,
            microbatches=4,
            at_seconds=30.0,
            pass_seconds=0.15,
            trainers=2,
            accuracy=0.94,
        ),
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in (SWARM, DIGITS, FULL)}


@dataclass
class Played:
    """The outcome of a scenario. `kinds` counts events by the name of their type."""

    world: StackWorld
    watch: Watch
    events: list[Observation] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def printed(self) -> list[str]:
        """Return the lines that must be the same wherever the scenario is played."""
        return [self.watch.digest(), *(trained.weights or trained.outcome for trained in self.world.trained)]


def play(scenario: Scenario, seed: int) -> Played:
    """Play a scenario to its end, and check every invariant."""
    watch = Watch(checkers_for(scenario))

    def publish(observed: Observation) -> None:
        played.events.append(observed)
        played.kinds[type(observed.event).__name__] += 1
        watch.publish(observed, world)

    world = StackWorld(scenario, seed, publish)
    played = Played(world, watch)
    world.play(lambda: watch.sample(world))
    watch.end(world)
    return played


if __name__ == "__main__":
    if len(sys.argv) > 3:
        gc.set_threshold(int(sys.argv[3]))
    sys.stdout.write("\n".join(play(SCENARIOS[sys.argv[1]], int(sys.argv[2])).printed) + "\n")
