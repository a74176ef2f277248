"""Runs in a world of cores: sums are exact under any disturbance of members, and planted bugs are found."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from crypto.identity import PeerId
from gossip.member import MemberDown, MemberUp
from partition.plan.change import Change
from partition.run.settings import RunSettings
from partition.steps.replica import ReduceReady, Replica, WorkItem
from sim.churn.model import Churn
from sim.events import NetworkHealed, PeerFrozen, PlanAdopted, RunEnded, SamplesCounted, StepCommitted
from sim.network.model import Access, NetworkModel
from sim.observers import Broken, Observation
from sim.seeds import seeded_rng
from sim.worlds.factories import Cores
from sim.worlds.life import Life
from tests.sim.runs_world import BEGINS, Troubled, scenario, training

SEEDS = int(os.environ.get("PEERLOOM_PARTITION_SEEDS", "2"))
RESUME_SECONDS_MAX = 10.0
SPLIT_SECONDS = 60.0
STAGES = 2
NOTED = (21, 18)
"""With these seeds, a newcomer must commit, and no member can continue until the network heals."""
SEVEN = range(7)


def is_step(number: int) -> Callable[[Observation], bool]:
    return lambda seen: isinstance(seen.event, StepCommitted) and seen.event.step == number


def assert_done(played: Troubled, steps: int) -> None:
    """Assert that every reported end is "done" and no step is missing. Sums were compared during the run."""
    assert played.story.outcomes, played.world.training.standing(0)
    assert set(played.story.outcomes.values()) == {"done"}, played.describe()
    applied = {row.event.step for row in played.story.of(SamplesCounted)}
    assert applied == set(range(steps))


def counted(played: Troubled) -> dict[tuple[bytes, int, int], Counter[int]]:
    """Return, by plan, step and stage, how often each micro-batch is in the sums of members that applied the
    step."""
    found: dict[tuple[bytes, int, int], Counter[int]] = {}
    for row in played.story.of(SamplesCounted):
        key = (row.event.plan, row.event.step, row.event.stage)
        found.setdefault(key, Counter()).update(row.event.microbatches)
    return found


def test_an_undisturbed_run_counts_each_micro_batch_once_and_succeeds() -> None:
    played = Troubled(scenario(training(), seconds=40)).play()
    assert played.story.steps == list(range(10))
    assert len(played.story.outcomes) == 7
    assert_done(played, 10)
    for (_, step, _), numbers in counted(played).items():
        assert numbers == Counter(range(step * 8, step * 8 + 8))
    assert len(counted(played)) == 10 * STAGES
    for row in played.story.of(StepCommitted):
        for stage in row.event.counted:
            assert sorted(number for _, numbers in stage for number in numbers) == list(
                range(row.event.step * 8, row.event.step * 8 + 8)
            )


# Deaths


def crash_in(phase: str, victim: int) -> Troubled:
    """Play a run in which the victim dies while the committer is in this phase of the fifth step, or in the
    final evaluation."""
    played = Troubled(scenario(training(), seconds=100))
    wanted = "evaluating step 10" if phase == "evaluating" else f"{phase} step 4"

    def look() -> None:
        if any(wanted in words for words in played.world.training.standing(0).values()):
            played.crash(victim, seconds=20.0)
        else:
            played.at(played.world.now + 0.002, look)

    played.at(BEGINS, look)
    return played.play()


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("phase", ["counting", "committing", "applying", "evaluating"])
def test_a_death_in_any_phase_of_a_step_leaves_the_sums_exact(phase: str, victim: int) -> None:
    """`victim` 0 is the committer, 1 holds the first stage, and 2 holds the last stage."""
    played = crash_in(phase, victim)
    assert_done(played, 10)
    # The others soon evaluate the dead member's samples, so no plan is needed.
    assert phase == "evaluating" or played.story.of(PlanAdopted)[-1].event.height > 0


def test_a_death_before_the_first_step_is_survived() -> None:
    played = Troubled(scenario(training(), seconds=60))
    played.at(BEGINS + 0.6, played.crash, 1)
    assert_done(played.play(), 10)


def test_a_run_that_loses_a_stage_restores_its_newest_checkpoint() -> None:
    played = Troubled(scenario(training(), seconds=60))
    played.when(is_step(7), lambda: played.crash(2, 4))
    assert_done(played.play(), 10)
    again = [row.event.step for row in played.story.of(SamplesCounted) if row.event.stage == 0]
    height = {row.event.plan: row.event.height for row in played.story.of(PlanAdopted)}
    later = {row.event.step for row in played.story.of(SamplesCounted) if height[row.event.plan] > 0}
    assert min(later) == 6, "the checkpoint does not have six steps"
    assert Counter(again)[6] > Counter(again)[8]


def test_without_a_checkpoint_the_run_fails_and_names_the_lost_stage() -> None:
    played = Troubled(scenario(training(checkpoint_every=0), seconds=200))
    played.when(is_step(4), lambda: played.crash(2, 4))
    played.play()
    reasons = {row.event.reason for row in played.story.of(RunEnded)}
    assert set(played.story.outcomes.values()) == {"failed"}
    # After this reason, details of the lost members may follow.
    lost = "stage 2 of 2 lost its last replica, and no checkpoint holds its parameters"
    assert {reason[: len(lost)] for reason in reasons} == {lost}


@pytest.mark.parametrize("remembers", [True, False])
def test_the_run_notices_a_quick_restart_that_lost_its_stage(remembers: bool) -> None:
    played = Troubled(scenario(training(steps=40), seconds=150, churn=Churn(remembers=remembers)))
    played.when(is_step(4), lambda: played.crash(1, seconds=0.1))
    assert_done(played.play(), 40)
    crashed = played.story.of(StepCommitted)[4].time
    later = [row.time - crashed for row in played.story.of(PlanAdopted) if row.event.height == 1]
    assert later[0] < (3.0 if remembers else RunSettings().renew_seconds + 1.0)
    assert not [row for row in played.story.seen if isinstance(row.event, MemberDown)]


def test_others_do_the_work_of_a_stalled_peer_and_it_counts_once() -> None:
    played = Troubled(scenario(training(steps=20), seconds=90))

    def freeze() -> None:
        life = played.world.lives[played.world.peers[1]]
        played.world.tell(life, PeerFrozen(3.0))

    played.when(is_step(4), freeze)
    assert_done(played.play(), 20)


# Splits


def split_trial(seed: int) -> tuple[Troubled, float]:
    """Seven members, a split of a minute, and crashes that leave a majority. Return the play and the end of
    the split."""
    rng = seeded_rng(seed, "troubles")
    run = training(stages=3, steps=110, microbatches=4, checkpoint_every=4, pass_seconds=0.05)
    played = Troubled(scenario(run, seconds=250, preset="local"), seed)
    split = BEGINS + 3 + rng.uniform(0, 8)
    healed = split + SPLIT_SECONDS
    played.at(split, played.split, rng.sample(SEVEN, rng.randint(1, 3)))
    played.at(healed, played.heal)
    away: list[tuple[float, float, int]] = []
    for _ in range(rng.randint(0, 3)):
        at = rng.uniform(BEGINS, healed - 3)
        back = min(at + rng.uniform(0.5, 20), healed - 1)
        busy = {number for begin, end, number in away if begin < back + 1 and at < end + 1}
        victim = rng.choice([number for number in SEVEN if number not in busy])
        away.append((at, back, victim))
        played.at(at, partial(played.crash, victim, seconds=back - at))
    return played, healed


def test_a_run_resumes_after_healing_and_minorities_never_commit() -> None:
    wrong = {}
    for seed in [*NOTED, *(seed for seed in range(1, SEEDS + 1) if seed not in NOTED)][:SEEDS]:
        played, healed = split_trial(seed)
        played.play()
        after = [row.time - healed for row in played.story.of(StepCommitted, healed)]
        is_done = set(played.story.outcomes.values()) == {"done"}
        if not after or after[0] > RESUME_SECONDS_MAX or not is_done:
            wrong[seed] = (after[:1], dict(played.world.training.standing(0)))
        plans = Counter((row.event.height, row.event.plan) for row in played.story.of(PlanAdopted))
        assert len({height for height, _ in plans}) == len(plans), "two plans at one height"
    assert not wrong


def parted(on_lost_quorum: str, apart_seconds: float) -> Troubled:
    """The network is in three parts for a while, none of which has a majority: the requester with a replica
    of each stage, another such pair, and two members that keep copies.
    """
    steps = 100 if on_lost_quorum == "fork" else 60
    run = training(steps=steps, on_lost_quorum=on_lost_quorum, checkpoint_every=5)
    played = Troubled(scenario(run, seconds=420, preset="local"))
    sides = {3: 1, 4: 1, 5: 2, 6: 2}
    played.at(BEGINS + 5, played.world.split, sides)
    played.at(BEGINS + 5 + apart_seconds, played.heal)
    return played.play()


def test_nobody_commits_without_a_majority_until_the_network_heals() -> None:
    played = parted("wait", 40)
    (healed,) = played.story.of(NetworkHealed)
    times = [row.time for row in played.story.of(StepCommitted)]
    assert not [time for time in times if BEGINS + 6 < time < healed.time]
    assert min(time for time in times if time > healed.time) < healed.time + RESUME_SECONDS_MAX
    assert_done(played, 60)


def test_allowed_forks_continue_and_one_branch_survives_healing() -> None:
    played = parted("fork", 100)
    (healed,) = played.story.of(NetworkHealed)
    apart = [row for row in played.story.of(StepCommitted) if BEGINS + 10 < row.time < healed.time]
    branches = {row.event.plan: played.number(row.peer) for row in apart}
    assert len(set(branches.values())) >= 2, "a side has no committer of its own"
    after = {row.peer for row in played.story.of(StepCommitted, healed.time + 30)}
    assert len(after) == 1, "more than one branch is left"
    assert_done(played, 100)


# Many runs, and repeatable ones


@pytest.mark.slow
def test_concurrent_runs_do_not_disturb_each_other() -> None:
    runs = [training(at_seconds=BEGINS + number / 10, steps=5) for number in range(6)]
    played = Troubled(scenario(*runs, nodes=42, seconds=40))
    played.at(BEGINS + 3, played.crash, 8)
    played.play()
    ends = Counter(row.event.run for row in played.story.of(RunEnded) if row.event.outcome == "done")
    assert len(ends) == 6
    assert sum(ends.values()) == 41


def digest_of(seed: int) -> str:
    played = Troubled(scenario(training(steps=12), seconds=60), seed)
    played.at(BEGINS + 3, played.split, (1, 2))
    played.at(BEGINS + 9, played.heal)
    played.at(BEGINS + 12, partial(played.crash, 0, seconds=5.0))
    return played.play().watch.digest()


def test_the_same_seed_gives_the_same_run_in_another_process() -> None:
    assert digest_of(1) == digest_of(1) != digest_of(2)
    code = "from tests.sim.test_training import digest_of; print(digest_of(1))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest_of(1)


# Planted bugs


class CountsTwice(Replica):
    """A replica with a bug: it does not subtract micro-batches that another replica counts."""

    def _committed(self, step: int) -> WorkItem:
        work = super()._committed(step)
        if isinstance(work, ReduceReady):
            return work
        assert self._commit is not None
        members = tuple(tuple(PeerId(peer) for peer in stage.replicas) for stage in self.plan.stages)
        return ReduceReady(self.plan_hash, step, self._commit.attempt, members)


def cut_off_for_a_moment(seed: int, cores: Cores) -> Troubled:
    """One replica is out of reach for a second, in which the others do its work, so both count some of it."""
    rng = seeded_rng(seed, "moment")
    run = training(steps=12, microbatches=16, pass_seconds=0.1)
    played = Troubled(scenario(run, seconds=70, preset="local"), seed, cores)
    begins = BEGINS + rng.uniform(3, 12)
    played.at(begins, played.split, (rng.choice((1, 2, 3, 4)),))
    played.at(begins + 1.0, played.heal)
    return played


@pytest.mark.slow
def test_fifty_seeds_expose_a_replica_that_counts_twice() -> None:
    caught: list[Broken] = []
    for seed in range(1, 51):
        try:
            cut_off_for_a_moment(seed, Cores(replica=CountsTwice)).play()
        except Broken as broken:
            caught.append(broken)
            break
    assert caught
    assert caught[0].invariant in ("sums", "samples")
    assert_done(cut_off_for_a_moment(seed, Cores()).play(), 12)


def test_a_replacement_core_is_really_used() -> None:
    made: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        ours = getattr(Cores(), name)

        def make(*arguments: Any, **named: Any) -> Any:
            made[name] += 1
            return ours(*arguments, **named)

        return make

    counted: dict[str, Any] = {name: counting(name) for name in ("replica", "committer", "agreement")}
    assert_done(Troubled(scenario(training(), seconds=40), 1, Cores(**counted)).play(), 10)
    assert made == {"replica": 4, "committer": 1, "agreement": 7}


def test_actions_planned_within_an_event_happen_on_time() -> None:
    played = Troubled(scenario(training(), seconds=30))
    late: list[float] = []

    def plan_ahead(life: Life, event: MemberUp) -> None:
        at = played.world.now + 0.001
        played.at(at, lambda: late.append(played.world.now - at))

    played.world.on(MemberUp, plan_ahead)
    played.play()
    assert late
    assert max(map(abs, late)) < 1e-6


def test_a_slow_access_link_makes_steps_longer() -> None:
    """At 1 Mbit/s a frame of 16 KiB takes 0.13 s to send, and eight micro-batches cross the link in each
    direction.
    """

    def seconds(mbit: float) -> float:
        network = NetworkModel(access=(Access(1.0, up_mbit_per_second=mbit, down_mbit_per_second=100.0),))
        played = Troubled(scenario(training(), seconds=100, network=network)).play()
        times = [row.time for row in played.story.of(StepCommitted)]
        assert_done(played, 10)
        return times[-1] - times[0]

    assert seconds(1.0) > 2 * seconds(100.0)


def test_a_run_waits_until_enough_of_its_members_are_up() -> None:
    played = Troubled(scenario(training(), seconds=60))
    played.at(5.0, lambda: played.crash(*range(1, 7), seconds=20.0))
    played.play()
    assert min(row.time for row in played.story.of(PlanAdopted)) >= 25.0
    assert_done(played, 10)


# Borders between stages


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_sums_stay_exact_if_members_die_while_stage_borders_move(seed: int) -> None:
    played = Troubled(scenario(training(steps=40), seconds=150), seed)
    rng = seeded_rng(seed, PeerId(bytes(32)))
    for step in (3, 9, 10, 17, 25):
        cut = rng.randrange(1, 8)
        played.when(is_step(step), partial(move_borders, played, cut))
        if rng.random() < 0.5:
            played.when(is_step(step), partial(played.crash, rng.randrange(1, 7), seconds=15.0))
    assert_done(played.play(), 40)
    assert played.story.of(PlanAdopted)[-1].event.height >= 2


def move_borders(played: Troubled, cut: int) -> None:
    """Let the committer move the border between the two stages."""
    for peer in played.world.peers:
        played.world.training.recut(peer, lambda _: Change(cuts=(cut,)))
