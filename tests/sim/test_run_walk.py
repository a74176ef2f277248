"""Random walks of whole runs: members crash, restart, leave, stall and are cut off, and every run ends.

All checkers are active. For example, they require one plan per height, each sample in one committed step, and
exact sums. A walk ends once its run has ended. `PEERLOOM_RUN_WALK_EVENTS=1000000` starts new walks until the
members' cores have had this many calls.
"""

import os
from collections import Counter
from random import Random
from typing import Any, get_args

import pytest

from partition.run.member import Member
from partition.run.states import NEXT, Cause, State
from sim.churn.model import Churn
from sim.events import PeerFrozen, RunEnded
from sim.network.model import NetworkModel
from sim.seeds import seeded_rng
from tests.sim.runs_world import BEGINS, Troubled, scenario, training
from tests.sim.test_following import follow_whenever

EVENTS_WANTED = int(os.environ.get("PEERLOOM_RUN_WALK_EVENTS", "3000"))
FOUND = (3_058,)
"""In the walk of this seed, a requester returned with a plan that was unknown to the committer, and became
the next committer."""
PEERS = 7
TROUBLE_SECONDS = 40.0
AWAY_SECONDS_MAX = 15.0
ENDS_SECONDS = 400.0


class Trouble:
    """The disturbances of one walk. At its end each peer is up again, and all can reach each other."""

    def __init__(self, played: Troubled, rng: Random) -> None:
        self.played = played
        self.kinds: Counter[str] = Counter()
        for _ in range(rng.randint(1, 6)):
            kind = rng.choice(("crash", "crash", "leave", "split", "freeze", "suspect"))
            at = rng.uniform(BEGINS, BEGINS + TROUBLE_SECONDS)
            seconds = rng.uniform(0.1, AWAY_SECONDS_MAX)
            some = rng.sample(range(PEERS), rng.randint(1, 3))
            self.kinds[kind] += 1
            played.at(at, getattr(self, kind), some, seconds)
        played.at(BEGINS + TROUBLE_SECONDS + AWAY_SECONDS_MAX, played.heal)

    def crash(self, some: list[int], seconds: float) -> None:
        for number in some[:2]:
            self.stop(number, "crash", seconds)

    def leave(self, some: list[int], seconds: float) -> None:
        self.stop(some[0], "leave", seconds + AWAY_SECONDS_MAX)

    def stop(self, number: int, why: str, seconds: float) -> None:
        world = self.played.world
        if world.runs(number):
            world.stop(number, why)
            self.played.at(world.now + seconds, self.start, number)

    def start(self, number: int) -> None:
        world = self.played.world
        if world.peers[number] in world.lives:
            self.played.at(world.now + 1.0, self.start, number)  # the peer is still saying goodbye
        else:
            world.start(number)

    def split(self, some: list[int], seconds: float) -> None:
        self.played.split(some)
        self.played.at(self.played.world.now + seconds, self.played.heal)

    def freeze(self, some: list[int], seconds: float) -> None:
        world = self.played.world
        if world.runs(some[0]):
            world.tell(world.lives[world.peers[some[0]]], PeerFrozen(min(seconds, 4.0)))

    def suspect(self, some: list[int], _seconds: float) -> None:
        """Disconnect one peer for a moment, so that others suspect it."""
        world = self.played.world
        world.deafen(some[0], True)
        self.played.at(world.now + 2.0, world.deafen, some[0], False)


def walk(seed: int, *, follows: bool = True) -> tuple[Troubled, Trouble]:
    """Return a walk and its disturbances. With `follows`, idle peers follow a stage in half of the walks."""
    rng = seeded_rng(seed, "run walk")
    run = training(
        stages=rng.randint(1, 3), replicas=2, steps=60, microbatches=4, checkpoint_every=4, pass_seconds=0.05
    )
    played = Troubled(
        scenario(
            run,
            nodes=PEERS,
            seconds=BEGINS + ENDS_SECONDS,
            preset="local",
            network=NetworkModel(nearest_seconds=0.005, farthest_seconds=0.02, loss=rng.choice((0.0, 0.05))),
            churn=Churn(permanent=0),
        ),
        seed,
    )
    trouble = Trouble(played, rng)
    if follows and rng.random() < 0.5:
        follow_whenever(played, rng.uniform(1, 6))
    return played, trouble


CALLS = ("begin", "on_chain", "receive", "replied", "wake", "members_changed")


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count all calls of members' cores from now on."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> None:
        ours = getattr(Member, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return ours(*arguments, **named)

        monkeypatch.setattr(Member, name, call)

    for name in CALLS:
        counting(name)
    return calls


def test_every_run_ends_under_any_disturbance(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    seed, kinds, outcomes = 0, Counter[str](), Counter[str]()
    while calls.total() < EVENTS_WANTED:
        seed += 1
        played, trouble = walk(seed)
        played.play()
        ends = {row.event.outcome for row in played.story.of(RunEnded)}
        assert len(ends) == 1, (seed, trouble.kinds, ends, played.world.training.standing(0))
        kinds += trouble.kinds
        outcomes += Counter(ends)
    print(f"{seed} walks, calls {dict(calls)}, troubles {dict(kinds)}, ends {dict(outcomes)}")  # noqa: T201
    assert outcomes["done"] > 0.9 * seed


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_whose_run_once_did_not_end_do_end(seed: int) -> None:
    played, _trouble = walk(seed, follows=False)
    played.play()
    assert {row.event.outcome for row in played.story.of(RunEnded)} == {"done"}


def test_every_cause_in_the_table_of_run_states_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception is the cause "asked to stop", because no peer in a world of cores asks a run to stop."""
    seen: set[str] = set()

    def after(state: State, cause: Cause) -> State:
        seen.add(cause)
        return NEXT[state][cause]

    monkeypatch.setattr("partition.run.standing.after", after)
    lost = Troubled(scenario(training(checkpoint_every=0), seconds=200))
    lost.at(BEGINS + 1.0, lost.crash, 2, 4)
    lost.play()
    away = Troubled(scenario(training(steps=60), seconds=120))
    away.at(BEGINS + 1.0, lambda: away.crash(1, seconds=0.1))
    away.at(BEGINS + 3.0, away.split, (1, 2, 3))
    away.at(BEGINS + 30.0, away.heal)
    away.play()
    assert seen == set(get_args(Cause)) - {"asked to stop"}
