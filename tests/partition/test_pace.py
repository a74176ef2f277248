"""The measured speed of a replica, from its times in steps, even for the committer of a later plan."""

import pytest
from msgspec.structs import replace

from partition.plan.change import Change, successor
from partition.plan.plan import Plan, StagePlan, plan_hash
from partition.steps.committer import Committer
from partition.steps.messages import Apply, Open, Sync, Synced, Work
from partition.steps.replica import ApplyReady, ReduceReady, Replica
from partition.steps.throughput import StepPace
from tests.partition.small_plan import (
    FIRST,
    LAST,
    MIDDLES,
    PLAN,
    PLAN_HASH,
    SECOND,
    START,
    TRAINER,
    bring,
    commit,
    compute,
    opening,
)

HERE, THERE = MIDDLES


def test_micro_batches_are_dealt_by_measured_rates() -> None:
    pace = StepPace()
    stage = StagePlan(0, 1, (HERE, THERE), (100, 50))
    assert pace.rates(stage)[0] == 2 * pace.rates(stage)[1]
    pace.measured(HERE, Work(2 * 10**9), 2)
    # The other replica still counts as half as fast, as the plan says.
    assert pace.rates(stage)[0] == 2 * pace.rates(stage)[1]
    pace.measured(THERE, Work(10**9), 2)
    assert 2 * pace.rates(stage)[0] == pace.rates(stage)[1]


def test_noise_between_equal_machines_does_not_change_their_shares() -> None:
    pace = StepPace()
    pace.measured(HERE, Work(1_001_000_000), 1)
    pace.measured(THERE, Work(1_003_000_000), 1)
    assert len(set(pace.rates(StagePlan(0, 1, (HERE, THERE), (7, 3))))) == 1


def test_one_slow_step_does_not_make_a_machine_slow() -> None:
    pace = StepPace()
    stage = StagePlan(0, 1, (HERE,), (1,))
    pace.measured(HERE, Work(10**9), 1)
    before = pace.rates(stage)[0]
    pace.measured(HERE, Work(2 * 10**9), 1)
    assert before / 2 < pace.rates(stage)[0] < before
    pace.measured(HERE, Work(), 1)  # it was not measured
    pace.measured(HERE, Work(10**9), 0)
    assert pace.patience_seconds(HERE) == pytest.approx(8 * 1.3)


def test_measured_rates_carry_over_to_the_next_plan() -> None:
    replica = Replica(HERE, PLAN)
    assert synced_of(replica, PLAN).pace_nanoseconds == 0
    replica.receive(0.0, TRAINER, opening((0, 0)))
    bring(replica, 0, 1)
    assert len(compute(replica)) == 4
    replica.receive(0.0, TRAINER, commit((0, 1), ()))
    reduce = replica.next(0.0)
    assert isinstance(reduce, ReduceReady)
    replica.reduced(reduce, bytes(32))
    replica.receive(0.0, TRAINER, Apply(plan=PLAN_HASH, step=0, attempt=START, samples=2))
    apply = replica.next(0.0)
    assert isinstance(apply, ApplyReady)
    replica.applied(apply, bytes(32), Work(8 * 10**9))
    plan = successor(PLAN, Change(trainers=(SECOND,)))
    replica.adopt(plan)
    said = synced_of(replica, plan)
    assert said.pace_nanoseconds == 4 * 10**9
    committer = Committer(SECOND, plan, steps=3, evaluations=0)
    sends = [
        send
        for who in (FIRST, HERE, THERE, LAST)
        for send in committer.receive(
            0.0, who, replace(said, pace_nanoseconds=10**9 if who == THERE else said.pace_nanoseconds)
        )
    ]
    (opened, *_) = [message for _, message in sends if isinstance(message, Open)]
    assert opened.stages[1].owners == bytes((1, 1)), (
        "the replica that is four times as fast did not get both micro-batches"
    )


def synced_of(replica: Replica, plan: Plan) -> Synced:
    sends = replica.receive(0.0, plan.committer, Sync(plan=plan_hash(plan)))
    return next(message for _, message in sends if isinstance(message, Synced))
