"""Runs in local mode in a world of cores, with deaths, restarts and partitions drawn from a seed.

The rules are those of nodes (`partition.run.local`). Every run ends with one result, no stage works for two
heads simultaneously, no step counts twice (`sim.worlds.local_truth` raises Broken otherwise), and no stage
lacks a holder for long. `PEERLOOM_LOCAL_SEEDS` plays more seeds.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import pytest

from crypto.identity import PeerId
from partition.run.local.seat import SeatedHead, StageSeat
from partition.run.sight import GRACE_SECONDS
from sim.events import ColumnStepped, LocalRunEnded, StageAveraged
from sim.observers import Broken
from sim.scenario.model import LocalTraining
from sim.seeds import seeded_rng
from sim.worlds.local_context import CountedState
from sim.worlds.local_member import SimulatedMember
from tests.sim.runs_world import BEGINS, Troubled, scenario

SEEDS = int(os.environ.get("PEERLOOM_LOCAL_SEEDS", "3"))
STEPS = 40
TROUBLE_SECONDS = 40.0
PARTED_SECONDS_MAX = GRACE_SECONDS - 2.0
"""A longer split may let each side settle on a result, because members that cannot be reached lose their
votes."""
CALM_SECONDS = 15.0
"""Seconds from the end of a trial's disturbances to the first check whether the run is over."""
NOBODY_SECONDS_MAX = 60.0
END_SECONDS = 900.0


class Ended(Exception):
    """Raised when the run has no member left."""


class LocalPlay(Troubled):
    """Return a world with one run in local mode."""

    def __init__(self, training: LocalTraining, seed: int = 1, nodes: int = 0) -> None:
        count = nodes or training.members
        seconds = BEGINS + END_SECONDS
        super().__init__(scenario(nodes=count, seconds=seconds, preset="local", local_runs=(training,)), seed)
        self.stages = training.stages
        self.calm_since = 0.0
        self.nobody_seconds = self.longest_nobody_seconds = 0.0

    def play(self) -> "LocalPlay":
        """Play until no member is left, but at least until all disturbances are over."""
        self.at(BEGINS + 1.0, self._look)
        with suppress(Ended):
            super().play()
        return self

    def _look(self) -> None:
        runs, now = self.world.local_runs, self.world.now
        is_over = bool(self.ends)
        if now > self.calm_since and is_over and not runs.standing(0):
            raise Ended
        is_short = now > self.calm_since and not is_over and len(runs.working(0)) < self.stages
        self.nobody_seconds = self.nobody_seconds + 1.0 if is_short else 0.0
        self.longest_nobody_seconds = max(self.longest_nobody_seconds, self.nobody_seconds)
        self.at(now + 1.0, self._look)

    @property
    def ends(self) -> list[LocalRunEnded]:
        """Return the outcomes of the members that did not leave before the end of the run."""
        found = [row.event for row in self.story.of(LocalRunEnded)]
        return [event for event in found if event.outcome != "left"]


def trial(seed: int) -> LocalPlay:
    """For a while, split the swarm, and stop and restart nodes. For each death one free node remains."""
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
    played = LocalPlay(training, seed)
    # while stages load, there is no second copy of each stage, so a death may end the run
    if rng.random() < 0.5:
        played.at(BEGINS + rng.uniform(2, 10), played.split, [rng.randrange(members)])
        played.at(BEGINS + 12, played.heal)
    at = BEGINS + rng.uniform(20, 30)
    until, deaths = at + TROUBLE_SECONDS, 0
    while at < until:
        lasts = rng.uniform(2, 15)
        kind = rng.choice(("death", "restart", "part", "part"))
        if kind == "part":
            played.at(at, played.split, rng.sample(range(members), rng.randint(1, max(1, members - 1))))
            played.at(at + min(lasts, PARTED_SECONDS_MAX), played.heal)
        elif kind == "restart":
            played.at(at, partial(played.crash, rng.randrange(members), seconds=lasts))
        elif deaths < members - 2:
            deaths += 1
            played.at(at, played.crash, members - deaths)
        at += lasts + rng.uniform(12, 20)
    played.calm_since = until + CALM_SECONDS
    return played


@pytest.mark.parametrize("seed", range(1, 1 + SEEDS))
def test_disturbed_local_runs_end_with_one_result(seed: int) -> None:
    played = trial(seed).play()
    assert not played.world.local_runs.standing(0), "the run did not end"
    assert {event.outcome for event in played.ends} == {"done"}
    assert len({event.weights for event in played.ends}) == 1
    assert played.longest_nobody_seconds <= NOBODY_SECONDS_MAX


def test_columns_of_an_undisturbed_run_average_and_end() -> None:
    played = LocalPlay(LocalTraining(steps=STEPS, at_seconds=BEGINS)).play()
    assert len(played.ends) == 4
    steps = [(row.peer, row.event.step) for row in played.story.of(ColumnStepped)]
    assert len(set(steps)) == len(steps)
    assert {step for _, step in steps} == set(range(STEPS))
    assert {row.event.stage for row in played.story.of(StageAveraged)} == {0, 1}


def test_a_holder_takes_the_place_of_a_dead_head() -> None:
    """The requester holds the first stage of the only column, and dies permanently."""
    played = LocalPlay(LocalTraining(members=2, steps=STEPS, at_seconds=BEGINS))
    played.at(BEGINS + 25.0, played.crash, 0)
    played.calm_since = BEGINS + 30.0
    (end,) = played.play().ends
    assert end.outcome == "done"
    heads = {played.number(row.peer) for row in played.story.of(ColumnStepped, since=BEGINS + 26.0)}
    assert heads == {1}


class UselessDonor(SimulatedMember):
    """A member that hands over a state beyond the end of the run. `asked` holds the peers that it hands it
    to."""

    asked: ClassVar[list[PeerId]] = []

    def answer(self, asker: PeerId, question: tuple[Any, ...], answer: Callable[[Any], None]) -> None:
        if question[0] == "state":
            self.asked.append(asker)
            answer(CountedState(2 * STEPS))
        else:
            super().answer(asker, question, answer)


def test_a_newcomer_passes_over_a_donor_with_an_unusable_state() -> None:
    """One of three heads has an unusable state."""
    played = LocalPlay(LocalTraining(members=4, stages=1, replicas=0, steps=STEPS, at_seconds=BEGINS))
    returns, (_, donor, _, newcomer) = BEGINS + 15.0, played.world.peers[:4]

    def plant() -> None:
        (run,) = played.world.local_runs._runs
        run._members[donor].__class__ = UselessDonor

    UselessDonor.asked.clear()
    played.at(returns - 1.0, plant)
    played.at(returns - 1.0, partial(played.crash, 3, seconds=1.0))
    assert len(played.play().ends) == 4
    assert set(UselessDonor.asked) == {newcomer}
    assert any(row.peer == newcomer for row in played.story.of(ColumnStepped, since=returns))


def test_a_stage_that_works_for_two_heads_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(seat: StageSeat, now: float, head: SeatedHead, **told: Any) -> bool:
        del now, told
        seat._seated, seat.head = head, head.peer  # a second head is accepted too
        return True

    monkeypatch.setattr(StageSeat, "take", take)
    played = LocalPlay(LocalTraining(steps=STEPS, at_seconds=BEGINS))

    def lose_holder() -> None:
        row = played.story.of(ColumnStepped)[-1]
        played.crash(played.number(row.event.holders[0]))

    played.at(BEGINS + 30.0, lose_holder)
    with pytest.raises(Broken, match="two heads"):
        played.play()
