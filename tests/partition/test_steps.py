"""The step machines under every disturbance the world knows; hostile messages are in `test_steps_hostile`."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.steps.frames import OpenedFrame
from partition.steps.messages import (
    EVALUATIONS_IN_FLIGHT_MAX,
    Applied,
    Apply,
    Counted,
    Drop,
    Evaluated,
    Failed,
    Reduced,
    Sends,
    StageCommit,
    StepCommit,
    Sync,
    Synced,
)
from partition.steps.replica import ApplyReady, ForwardReady, ReduceReady, ReduceVoided, Replica, _Microbatch
from partition.steps.trainer import (
    FeedReady,
    ReplicaLost,
    StepApplied,
    Trainer,
    TrainingEvaluated,
    TrainingFailed,
)
from tests.partition.fake_stage import METRICS, Broken, digest, peer
from tests.partition.small_plan import FIRST, LAST, MIDDLES, PLAN, PLAN_HASH, SENT, TRAINER, frame, synced
from tests.partition.steps_world import World

WALKS = 1_000


def walk(seed: int, *, false_suspicion: bool = False, **classes: Any) -> World:
    """One history of a small run; raises Broken, naming the seed."""
    rng = Random(seed)
    shape = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    world = World(
        rng,
        shape,
        microbatches=rng.randint(1, 4),
        steps=rng.randint(1, 3),
        evaluations=rng.randint(0, 3),
        **classes,
    )
    try:
        world.run(rng.randint(0, 5), false_suspicion=false_suspicion, chance=rng.choice((0.01, 0.04, 0.12)))
    except Broken as broken:
        raise Broken(f"seed {seed}: {broken}") from broken
    return world


# Whole histories


def test_an_undisturbed_run_commits_every_step_once_and_ends_as_the_truth() -> None:
    world = World(Random(1), [2, 1, 3], microbatches=4, steps=3, evaluations=5)
    world.run(0)
    assert world.outcome == "done"
    assert world.committed == [(0, 0), (0, 1), (0, 2)]


def test_deaths_broken_links_and_new_trainers_change_no_sum() -> None:
    outcomes = [walk(seed).outcome for seed in range(WALKS)]
    assert outcomes.count("done") > WALKS * 0.7  # the others lost a stage, and the world has checked that
    assert "failed" in outcomes


def test_suspecting_the_living_changes_no_sum() -> None:
    outcomes = [walk(seed, false_suspicion=True).outcome for seed in range(WALKS)]
    assert outcomes.count("done") > WALKS * 0.6


def test_a_stage_without_a_replica_ends_the_run_with_a_reason() -> None:
    world = World(Random(3), [1, 2], microbatches=2, steps=2, evaluations=1)
    world.kill(peer("s0r0"))
    world.run(0)
    assert world.outcome == "failed"
    assert "stage 1 of 2 lost its last replica" in world.reason


def test_who_died_before_the_trainer_began_is_dropped_before_the_start() -> None:
    world = World(Random(4), [2, 2], microbatches=3, steps=2, evaluations=2)
    world.links.clear()
    world.kill(peer("s1r0"))
    world.trainer = Trainer(world.trainer.me, world.plan, steps=2, evaluations=2, metrics=METRICS)
    world._notice(peer("s1r0"))
    world._from_trainer(world.trainer.start(0.0))
    world.run(0)
    assert world.outcome == "done"


@pytest.mark.parametrize("seed", range(6))
def test_a_long_evaluation_keeps_no_more_frames_than_are_in_flight(seed: int) -> None:
    evaluations = 3 * EVALUATIONS_IN_FLIGHT_MAX
    most = 0

    class Watched(Replica):
        def _keep(self, *args: Any, **kwargs: Any) -> Sends:
            nonlocal most
            sends = super()._keep(*args, **kwargs)
            most = max(most, len(self._kept), len(self._evaluations))
            return sends

    world = World(
        Random(seed), [2, 2, 2], microbatches=1, steps=0, evaluations=evaluations, replica_class=Watched
    )
    world.run(4, chance=0.01)
    assert most <= EVALUATIONS_IN_FLIGHT_MAX
    assert world.outcome == "done" or any(not set(s.replicas) - world.wronged for s in world.plan.stages)


# Bugs planted on purpose: the world must find them


class CountsAReplayTwice(Replica):
    def _frame(self, sender: PeerId, frame: OpenedFrame) -> Sends:
        number, direction = frame.header.microbatch, frame.header.direction
        state = self._microbatches.get(number)
        if state is not None and frame.header.train and direction == "input" and state.backward == "done":
            self._microbatches[number] = _Microbatch(labels=state.labels)
        return super()._frame(sender, frame)


class ForgetsKeptFrames(Replica):
    def _send_rerouted(self) -> Sends:
        return []


class SaysNothingAgain(Replica):
    def reconnected(self, peer: PeerId) -> Sends:
        return []


class VoidsATotalForARepeatedDrop(Replica):
    def _drop(self, message: Drop) -> Sends:
        if self._reducing is not None and message.step == self.step and not self._applying:
            self.events.append(ReduceVoided(self.plan_hash, self.step))
            self._reducing = self._reduced = None
        return super()._drop(message)


class KeepsNoHeldOutFrames(Replica):
    def _keep(self, *args: Any, train: bool, **kwargs: Any) -> Sends:
        sends = super()._keep(*args, train=train, **kwargs)
        if not train:
            self._kept.clear()
        return sends


class ForgetsTheTotalUnderANewPlan(Replica):
    def adopt(self, plan: Plan) -> None:
        super().adopt(plan)
        self._reduced = None


class KeepsSumsUnderANewPlan(Replica):
    def adopt(self, plan: Plan) -> None:
        super().adopt(plan)
        self._synced = True


class AnswersSyncWhileApplying(Replica):
    def applied(self, done: ApplyReady, digest: bytes) -> Sends:
        return [row for row in super().applied(done, digest) if not isinstance(row[1], Synced)]


class ForgetsWhatADeathOrphaned(Trainer):
    def _feed(self, microbatch: int, *, train: bool, only_stage: int | None = None, **only: Any) -> None:
        if only_stage is None:
            super()._feed(microbatch, train=train, only_stage=only_stage, **only)


class CommitsUnderTheSameAttempt(Trainer):
    def _when_counted(self) -> Sends:
        self.attempt = 0
        return super()._when_counted()


class ForgetsTheNormOfAHalfAppliedStep(Trainer):
    def _when_synced(self) -> Sends:
        return [
            (who, replace(message, squared_norm=None) if isinstance(message, Apply) else message)
            for who, message in super()._when_synced()
        ]


class LeavesAStepHalfApplied(Trainer):
    def _when_synced(self) -> Sends:
        if any(name not in self._synced for name in self.live):
            return []
        self.step = max(self._synced[name].step for name in self.live)
        return self._open_step()


PLANTED: list[dict[str, Any]] = [
    {"replica_class": CountsAReplayTwice},
    {"replica_class": ForgetsKeptFrames},
    {"replica_class": SaysNothingAgain},
    {"replica_class": VoidsATotalForARepeatedDrop},
    {"replica_class": KeepsNoHeldOutFrames},
    {"replica_class": ForgetsTheTotalUnderANewPlan},
    {"replica_class": KeepsSumsUnderANewPlan},
    {"replica_class": AnswersSyncWhileApplying},
    {"trainer_class": ForgetsWhatADeathOrphaned},
    {"trainer_class": CommitsUnderTheSameAttempt},
    {"trainer_class": ForgetsTheNormOfAHalfAppliedStep},
    {"trainer_class": LeavesAStepHalfApplied},
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: next(iter(planted.values())).__name__)
def test_the_walk_finds_a_planted_bug(planted: dict[str, Any]) -> None:
    def walks() -> None:
        for seed in range(WALKS):
            walk(seed, **planted)

    with pytest.raises(Broken):
        walks()


# One replica, one message at a time


def replica_of_the_middle(index: int = 0) -> Replica:
    replica = Replica(MIDDLES[index], PLAN)
    replica.receive(0.0, TRAINER, Sync(plan=PLAN_HASH))
    replica.events.clear()
    return replica


def count_all(replica: Replica, microbatches: tuple[int, ...]) -> None:
    """Bring these through forward and backward."""
    for number in microbatches:
        replica.receive(0.0, FIRST, frame(FIRST, number))
        replica.receive(0.0, LAST, frame(LAST, number, "gradient"))
        (ready,) = replica.events
        replica.events.clear()
        replica.forwarded(ready, output=SENT, gradient=None, samples=1, loss=0.0, metrics=())
        (back,) = replica.events
        replica.events.clear()
        replica.backwarded(back, gradient=SENT)


def commit(*rows: tuple[int, PeerId, tuple[int, ...]], attempt: int = 0) -> StepCommit:
    return StepCommit(
        plan=PLAN_HASH, step=0, attempt=attempt, replicas=tuple(StageCommit(*row) for row in rows)
    )


WHOLE = commit((0, FIRST, (0, 1)), (1, MIDDLES[0], (0,)), (1, MIDDLES[1], (1,)), (2, LAST, (0, 1)))


def reduced_replica() -> Replica:
    replica = replica_of_the_middle()
    count_all(replica, (0,))
    replica.receive(0.0, TRAINER, WHOLE)
    (ready,) = replica.events
    replica.events.clear()
    assert ready == ReduceReady(PLAN_HASH, 0, 0, ((FIRST,), MIDDLES, (LAST,)))
    (sent,) = replica.reduced(ready, digest("total"))
    assert sent == (TRAINER, Reduced(plan=PLAN_HASH, step=0, attempt=0, digest=digest("total")))
    return replica


def test_a_frame_ahead_of_the_drop_that_sent_it_here_waits_for_it() -> None:
    replica = replica_of_the_middle()
    replica.receive(0.0, FIRST, frame(FIRST, 1))
    assert replica.events == []  # 1 is the other one's
    replica.receive(0.0, TRAINER, Drop(plan=PLAN_HASH, step=0, dropped=(MIDDLES[1],)))
    (ready,) = replica.events
    assert isinstance(ready, ForwardReady)
    assert ready.microbatch == 1


def test_a_stage_to_which_no_gradient_comes_back_counts_what_it_has_sent_on() -> None:
    replica = Replica(MIDDLES[0], PLAN, awaits_gradient=False)
    replica.receive(0.0, TRAINER, Sync(plan=PLAN_HASH))
    replica.receive(0.0, FIRST, frame(FIRST, 0))
    ready = replica.events[-1]
    (sent, (_, counted)) = replica.forwarded(
        ready, output=SENT, gradient=None, samples=1, loss=0.0, metrics=()
    )
    assert sent == (LAST, SENT)
    assert isinstance(counted, Counted)
    assert (counted.microbatch, counted.stage) == (0, 1)


def test_a_repeated_commit_is_answered_with_the_same_report() -> None:
    replica = reduced_replica()
    ((_, again),) = replica.receive(0.0, TRAINER, WHOLE)
    assert again == Reduced(plan=PLAN_HASH, step=0, attempt=0, digest=digest("total"))
    assert replica.events == []


def test_a_drop_voids_a_total_that_counts_the_dropped_and_a_repeat_voids_nothing() -> None:
    replica = reduced_replica()
    drop = Drop(plan=PLAN_HASH, step=0, dropped=(MIDDLES[1],))
    replica.receive(0.0, TRAINER, drop)
    assert replica.events == [ReduceVoided(PLAN_HASH, 0)]
    replica.events.clear()
    count_all(replica, (1,))
    alone = commit((0, FIRST, (0, 1)), (1, MIDDLES[0], (0, 1)), (2, LAST, (0, 1)), attempt=1)
    replica.receive(0.0, TRAINER, alone)
    assert replica.events == [ReduceReady(PLAN_HASH, 0, 1, ((FIRST,), (MIDDLES[0],), (LAST,)))]
    replica.events.clear()
    replica.receive(0.0, TRAINER, drop)
    assert replica.events == []


def test_a_total_stands_when_the_drop_is_of_the_step_after() -> None:
    replica = reduced_replica()
    replica.receive(0.0, TRAINER, Drop(plan=PLAN_HASH, step=1, dropped=(MIDDLES[1],)))
    assert replica.events == []
    replica.receive(0.0, TRAINER, Apply(plan=PLAN_HASH, step=0, attempt=0, samples=2))
    assert replica.events == [ApplyReady(PLAN_HASH, 0, 2, None)]


def test_frames_and_results_of_a_step_that_is_being_applied_are_ignored() -> None:
    replica = reduced_replica()
    replica.receive(0.0, TRAINER, Drop(plan=PLAN_HASH, step=1, dropped=(MIDDLES[1],)))
    replica.receive(0.0, FIRST, frame(FIRST, 1))
    (late,) = replica.events
    replica.receive(0.0, TRAINER, Apply(plan=PLAN_HASH, step=0, attempt=0, samples=2))
    replica.events.clear()
    replica.receive(0.0, LAST, frame(LAST, 1, "gradient"))
    assert replica.forwarded(late, output=SENT, gradient=None, samples=1, loss=0.0, metrics=()) == []
    assert replica.events == []


def test_two_steps_follow_each_other() -> None:
    replica = reduced_replica()
    replica.receive(0.0, TRAINER, Apply(plan=PLAN_HASH, step=0, attempt=0, samples=2))
    (ready,) = replica.events
    replica.events.clear()
    ((_, applied),) = replica.applied(ready, digest("parameters"))
    assert applied == Applied(plan=PLAN_HASH, step=0, digest=digest("parameters"))
    assert (replica.step, replica.reconnected(FIRST)) == (1, [])
    replica.receive(0.0, FIRST, frame(FIRST, 2, step=1))
    (ready,) = replica.events
    assert (ready.step, ready.microbatch) == (1, 2)


def test_a_commit_that_counts_something_else_makes_the_replica_give_up() -> None:
    replica = replica_of_the_middle()
    ((receiver, message),) = replica.receive(0.0, TRAINER, WHOLE)
    assert receiver == TRAINER
    assert isinstance(message, Failed)
    assert "does not name what this replica has summed" in message.reason


def test_a_dropped_replica_is_told_so() -> None:
    trainer = Trainer(TRAINER, PLAN, steps=1, evaluations=0)
    told = [receiver for receiver, _ in trainer.drop(0.0, MIDDLES[0])]
    assert MIDDLES[0] in told
    assert [type(event) for event in trainer.events] == [ReplicaLost]


# The trainer finds out where everybody is


def test_a_step_left_half_applied_is_finished_with_the_same_total() -> None:
    trainer = Trainer(TRAINER, PLAN, steps=5, evaluations=0)
    trainer.start(0.0)
    for name in (FIRST, MIDDLES[0], LAST):
        assert trainer.receive(0.0, name, synced(3)) == []
    sends = trainer.receive(0.0, MIDDLES[1], synced(2, reduced=7))
    assert sends == [(MIDDLES[1], Apply(plan=PLAN_HASH, step=2, attempt=7, samples=9))]
    trainer.receive(0.0, MIDDLES[1], Applied(plan=PLAN_HASH, step=2, digest=bytes(32)))
    assert (trainer.phase, trainer.step) == ("counting", 3)


def test_a_replica_behind_with_a_total_of_another_attempt_is_dropped() -> None:
    trainer = Trainer(TRAINER, PLAN, steps=5, evaluations=0)
    trainer.start(0.0)
    for name in (FIRST, MIDDLES[0], LAST):
        trainer.receive(0.0, name, synced(3))
    trainer.receive(0.0, MIDDLES[1], synced(2, reduced=6))
    assert trainer.dropped == (MIDDLES[1],)
    assert (trainer.phase, trainer.step) == ("counting", 3)


def test_one_replica_that_claims_a_far_step_cannot_end_the_run() -> None:
    trainer = Trainer(TRAINER, PLAN, steps=5, evaluations=0)
    trainer.start(0.0)
    trainer.receive(0.0, MIDDLES[0], synced(2**40))
    for name in (FIRST, MIDDLES[1], LAST):
        trainer.receive(0.0, name, synced(1))
    assert trainer.dropped == (MIDDLES[0],)
    assert (trainer.phase, trainer.step) == ("counting", 1)


def test_attempts_under_a_later_plan_have_later_numbers() -> None:
    plans = (PLAN, replace(PLAN, height=PLAN.height + 1))
    first, second = (Trainer(TRAINER, plan, steps=1, evaluations=0) for plan in plans)
    assert first.attempt + 4096 < second.attempt


def test_replicas_with_different_totals_end_the_run() -> None:
    world = World(Random(5), [2], microbatches=2, steps=1, evaluations=0)
    first, second = world.trainer.live
    trainer, name = world.trainer, world.trainer.plan_hash
    for who in (first, second):
        trainer.receive(0.0, who, Synced(plan=name, step=0, reduced=None, applied=None))
    for feed in [event for event in trainer.events if isinstance(event, FeedReady)]:
        assert feed.input_to is not None
        row = Counted(plan=name, step=0, microbatch=feed.microbatch, stage=0, samples=1, loss=1.0)
        trainer.receive(0.0, feed.input_to, row)
    for who in (first, second):
        trainer.receive(0.0, who, Reduced(plan=name, step=0, attempt=0, digest=digest(who)))
    assert trainer.phase == "failed"
    (failed,) = [event for event in trainer.events if isinstance(event, TrainingFailed)]
    assert "different totals" in failed.reason


def counting_trainer(metrics: int = 0) -> Trainer:
    """One whose four replicas are at the beginning."""
    trainer = Trainer(TRAINER, PLAN, steps=1, evaluations=1, metrics=metrics)
    trainer.start(0.0)
    for who in (FIRST, *MIDDLES, LAST):
        trainer.receive(0.0, who, Synced(plan=PLAN_HASH, step=0, reduced=None, applied=None))
    trainer.events.clear()
    return trainer


def count(trainer: Trainer, samples: int = 3, loss: float = 1.0) -> Sends:
    """Everything of step 0 is counted; what the trainer then says."""
    sends: Sends = []
    for number in (0, 1):
        for stage, who in ((0, FIRST), (1, MIDDLES[number]), (2, LAST)):
            last = stage == 2
            row = Counted(
                plan=PLAN_HASH,
                step=0,
                microbatch=number,
                stage=stage,
                samples=samples if last else 0,
                loss=loss if last else 0.0,
            )
            sends += trainer.receive(0.0, who, row)
    return sends


def test_a_loss_that_is_no_number_ends_the_run_with_advice() -> None:
    trainer = counting_trainer()
    count(trainer, loss=float("nan"))
    (failed,) = trainer.events
    assert isinstance(failed, TrainingFailed)
    assert "step 0: the loss is no finite number" in failed.reason
    assert "learning_rate" in failed.reason


def test_the_norms_of_all_stages_add_up_one_of_each() -> None:
    trainer = counting_trainer()
    assert count(trainer), "the commit"
    sends: Sends = []
    # The second replica of a stage may differ in the last bit: one of them speaks for both.
    for who, norm in ((FIRST, 1.0), (MIDDLES[0], 2.0), (MIDDLES[1], 2.0000000000000004), (LAST, 4.0)):
        name = digest("of a stage", PLAN.stage_of(who))
        sends += trainer.receive(
            0.0, who, Reduced(plan=PLAN_HASH, step=0, attempt=trainer.attempt, digest=name, squared_norm=norm)
        )
    applies = [message for _, message in sends]
    assert len(applies) == 4
    expected = Apply(plan=PLAN_HASH, step=0, attempt=trainer.attempt, samples=6, squared_norm=7.0)
    assert all(message == expected for message in applies)


def test_a_step_in_which_nothing_counts_is_a_step_all_the_same() -> None:
    trainer = counting_trainer()
    count(trainer, samples=0, loss=0.0)
    for who in (FIRST, *MIDDLES, LAST):
        row = Reduced(plan=PLAN_HASH, step=0, attempt=trainer.attempt, digest=digest("total"))
        trainer.receive(0.0, who, row)
    for who in (FIRST, *MIDDLES, LAST):
        trainer.receive(0.0, who, Applied(plan=PLAN_HASH, step=0, digest=digest("parameters")))
    assert [event.step for event in trainer.events if isinstance(event, StepApplied)] == [0]


def test_an_evaluation_has_as_many_numbers_as_the_model() -> None:
    trainer = counting_trainer(metrics=2)
    trainer.steps = 0
    trainer._open_step()
    for numbers in ((), (1.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(RemoteProtocolError, match="impossible numbers"):
            trainer.receive(
                0.0, LAST, Evaluated(plan=PLAN_HASH, microbatch=0, samples=3, loss=1.0, metrics=numbers)
            )
    trainer.receive(
        0.0, LAST, Evaluated(plan=PLAN_HASH, microbatch=0, samples=3, loss=1.0, metrics=(1.0, 2.0))
    )
    assert trainer.events[-1] == TrainingEvaluated(3, 1.0, (1.0, 2.0))


def test_why_the_last_replica_of_a_stage_gave_up_is_passed_on() -> None:
    trainer = counting_trainer()
    trainer.receive(0.0, LAST, Failed(plan=PLAN_HASH, reason="a label of 12 among 10"))
    failed = trainer.events[-1]
    assert isinstance(failed, TrainingFailed)
    assert "stage 3 of 3 lost its last replica" in failed.reason
    assert failed.reason.endswith("its parameters are gone (a label of 12 among 10)")
