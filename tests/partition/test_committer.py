"""One committer, one message at a time. For whole histories see `test_steps_walk`."""

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.change import Change, Joining, successor
from partition.plan.plan import NO_HASH, StagePlan, plan_hash
from partition.steps.committer import (
    Committer,
    MicrobatchesMoved,
    ReplicaFailed,
    ReplicaRebuilt,
    Resumed,
    StepApplied,
    StepsPaused,
    TrainingEvaluated,
    TrainingFailed,
)
from partition.steps.messages import (
    EVALUATIONS_IN_FLIGHT_MAX,
    Applied,
    Apply,
    Counted,
    Evaluated,
    Failed,
    Fill,
    Open,
    Progress,
    Reduced,
    Save,
    Sends,
    StepCommit,
    Sync,
    Work,
)
from partition.steps.routes import attempts
from tests.partition.fake_stage import digest, peer
from tests.partition.small_plan import (
    FIRST,
    LAST,
    MIDDLES,
    PLAN,
    PLAN_HASH,
    SECOND,
    START,
    TRAINER,
    synced,
)

HERE, THERE = MIDDLES
REPLICAS = (FIRST, HERE, THERE, LAST)
WIDE = replace(
    PLAN,
    roster=tuple(sorted((*PLAN.roster, peer("middle2")))),
    stages=(PLAN.stages[0], StagePlan(1, 2, (*MIDDLES, peer("middle2")), (1, 1, 1)), PLAN.stages[2]),
)


def committer(**settings: Any) -> Committer:
    named = {"steps": 5, "evaluations": 0, **settings}
    found = Committer(TRAINER, named.pop("plan", PLAN), **named)
    found.start(0.0)
    return found


def counting(step: int = 0, **settings: Any) -> Committer:
    """Return a committer whose replicas are all at the beginning of a step."""
    found = committer(**settings)
    for who in REPLICAS:
        found.receive(0.0, who, synced(step))
    found.events.clear()
    return found


def tell_all(core: Committer, message: Any) -> Sends:
    """Deliver this message from every replica."""
    sends: Sends = []
    for who in REPLICAS:
        sends += core.receive(1.0, who, message)
    return sends


def count(core: Committer, *numbers: int, samples: int = 3, loss: float = 1.0, swap: bool = False) -> Sends:
    """Report these micro-batches as counted in all stages. Return the committer's answers."""
    sends: Sends = []
    for number in numbers:
        for stage, who in ((0, FIRST), (1, MIDDLES[(number + swap) % 2]), (2, LAST)):
            last = stage == 2
            row = Counted(
                plan=core.plan_hash,
                step=core.step,
                microbatch=number,
                stage=stage,
                samples=samples if last else 0,
                loss=loss if last else 0.0,
            )
            sends += core.receive(1.0, who, row)
    return sends


def reduce_all(core: Committer, **digests: bytes) -> Sends:
    """Report that all have reduced; the digest of `there` may differ from the others'."""
    sends: Sends = []
    for who in REPLICAS:
        name = digests.get("there", b"") if who == THERE and digests else digest("total", PLAN.stage_of(who))
        row = Reduced(plan=core.plan_hash, step=core.step, attempt=core.attempt, digest=name)
        sends += core.receive(1.0, who, row)
    return sends


def apply_all(core: Committer, there: bytes | None = None, work: Work = Work(1000)) -> Sends:  # noqa: B008
    sends: Sends = []
    step = core.step
    for who in REPLICAS:
        name = there if there is not None and who == THERE else digest("parameters", PLAN.stage_of(who))
        sends += core.receive(1.0, who, Applied(plan=core.plan_hash, step=step, digest=name, work=work))
    return sends


def opens(sends: Sends) -> list[Open]:
    return [message for _, message in sends if isinstance(message, Open)]


def failed_of(core: Committer) -> str:
    (event,) = [event for event in core.events if isinstance(event, TrainingFailed)]
    return event.reason


# Positions of members


def test_replicas_and_trainers_receive_every_open() -> None:
    core = committer()
    assert core.start(0.0) == [(who, Sync(plan=PLAN_HASH)) for who in REPLICAS]
    sends: Sends = []
    for who in REPLICAS:
        sends = core.receive(0.0, who, synced(0))
    assert [receiver for receiver, _ in sends] == [*REPLICAS, TRAINER, SECOND]
    assert opens(sends)[0].stages[1].owners == bytes((0, 1))
    assert core.events == [Resumed(0, 0, ())]


def test_a_silent_replica_is_asked_again() -> None:
    core = committer()
    core.receive(0.5, FIRST, synced(0))
    assert core.awaited == (HERE, THERE, LAST)
    assert core.wake(0.1) == []
    assert [receiver for receiver, _ in core.wake(core.deadline)] == [HERE, THERE, LAST]
    assert [receiver for receiver, _ in core.wake(core.deadline)] == [HERE, THERE, LAST]


def test_a_step_left_half_applied_is_finished_with_the_same_total() -> None:
    core = committer(save_every=3)
    for who in (FIRST, HERE, LAST):
        assert core.receive(0.0, who, synced(3)) == []
    sends = core.receive(0.0, THERE, synced(2, reduced=7))
    assert sends == [(THERE, Apply(plan=PLAN_HASH, step=2, attempt=7, samples=9, loss=18.0))]
    sends = core.receive(0.0, THERE, Applied(plan=PLAN_HASH, step=2, digest=bytes(32), work=Work(5)))
    assert (core.phase, core.step) == ("counting", 3)
    (told,) = (event for event in core.events if isinstance(event, StepApplied))
    assert (told.step, told.attempt, told.loss, told.samples) == (2, 7, 2.0, 9)
    assert told.work == ((Work(),), (Work(), Work(5)), (Work(),))
    assert [row for row in sends if isinstance(row[1], Save)] == [
        (who, Save(plan=PLAN_HASH, step=3)) for who in REPLICAS
    ]


@pytest.mark.parametrize(("saved", "is_due"), [(0, True), (2, True), (3, False), (4, False)])
def test_a_checkpoint_that_failed_is_made_before_the_next_step(saved: int, is_due: bool) -> None:
    core = committer(save_every=3, saved=saved)
    sends = tell_all(core, synced(4))
    assert [message.step for _, message in sends if isinstance(message, Save)] == [4] * 4 * is_due
    assert isinstance(sends[-1][1], Open)


@pytest.mark.parametrize("answer", [synced(2, reduced=6), synced(2**40), synced(None), synced(3, attempt=8)])
def test_a_replica_that_cannot_continue_is_filled_from_its_stage(answer: Any) -> None:
    core = committer()
    for who in (FIRST, HERE, LAST):
        core.receive(0.0, who, synced(3, digest=digest("parameters", who)))
    ((receiver, fill),) = core.receive(0.0, THERE, answer)
    assert receiver == THERE
    assert isinstance(fill, Fill)
    assert (fill.step, fill.sources, fill.digest) == (3, (HERE,), digest("parameters", HERE))
    assert core.receive(0.0, THERE, answer) == []  # its earlier messages once more
    sends = core.receive(0.0, THERE, synced(3, digest=fill.digest))
    assert opens(sends)
    assert core.events[1:] == [Resumed(3, 0, (THERE,))]


def test_a_replica_with_differing_parameters_is_filled_too() -> None:
    core = committer()
    for who in (FIRST, HERE, LAST):
        core.receive(0.0, who, synced(3, digest=digest("parameters", PLAN.stage_of(who))))
    ((receiver, fill),) = core.receive(0.0, THERE, synced(3, digest=digest("others")))
    assert (receiver, type(fill)) == (THERE, Fill)


def test_a_stage_without_any_holder_ends_the_plan_with_a_reason() -> None:
    core = committer()
    for who in (FIRST, HERE, THERE):
        core.receive(0.0, who, synced(3))
    core.receive(0.0, LAST, synced(None))
    assert core.phase == "failed"
    assert failed_of(core) == (
        "no replica of stage 3 of 3 holds its parameters, "
        "so nothing can follow the 3 steps that others have committed"
    )


def test_counted_micro_batches_stay_with_their_replica() -> None:
    core = committer()
    core.receive(0.0, FIRST, synced(0, begun=(0, 1)))
    core.receive(0.0, HERE, synced(0, counted=(1,), samples=(0,), losses=(0.0,)))
    core.receive(0.0, THERE, synced(0, counted=(1,), samples=(0,), losses=(0.0,)))
    (message, *_) = opens(
        core.receive(0.0, LAST, synced(0, counted=(0, 1), samples=(3, 4), losses=(1.0, 2.0)))
    )
    # The first replica of the plan keeps the micro-batches that both have; the other is free for the rest.
    assert [routes.owners for routes in message.stages] == [bytes(2), bytes((0, 0)), bytes(2)]
    assert [routes.counted for routes in message.stages] == [(), (1,), (0, 1)]
    # The holder of micro-batch 0 in the middle stage has left, but the last stage counts the micro-batch.
    assert core.events == [Resumed(0, 1, ())]
    count_first = Counted(plan=PLAN_HASH, step=0, microbatch=0, stage=1, samples=0, loss=0.0)
    core.receive(0.0, HERE, count_first)
    for number in (0, 1):
        core.receive(
            0.0, FIRST, Counted(plan=PLAN_HASH, step=0, microbatch=number, stage=0, samples=0, loss=0.0)
        )
    reduce_all(core)
    apply_all(core)
    (event,) = [event for event in core.events if isinstance(event, StepApplied)]
    assert (event.loss, event.samples) == (3.0 / 7, 7)


def test_all_start_at_the_checkpoint_of_a_plan_that_restores() -> None:
    plan = successor(PLAN, Change(restored=digest("checkpoint"), step=3))
    core = committer(plan=plan)
    assert core.step == 3
    with pytest.raises(RemoteProtocolError, match="fewer steps than the checkpoint"):
        core.receive(0.0, FIRST, replace(synced(2), plan=plan_hash(plan)))
    for who in REPLICAS:
        core.receive(0.0, who, replace(synced(3), plan=plan_hash(plan), applied=None))
    assert (core.phase, core.step) == ("counting", 3)


def test_attempts_under_a_later_plan_have_later_numbers() -> None:
    assert attempts(PLAN).stop == attempts(replace(PLAN, height=PLAN.height + 1)).start
    assert attempts(replace(PLAN, height=2**32 - 1)).stop == 2**63


# Moves


def test_a_suspect_loses_its_uncounted_work_and_gets_nothing_back() -> None:
    core = counting()
    (message, *_) = opens(core.suspect(0.0, HERE))
    assert (message.attempt, message.stages[1].owners) == (START + 1, bytes((1, 1)))
    assert core.events == [MicrobatchesMoved(0, 1, HERE, 1)]
    assert core.suspect(0.0, THERE) == []  # no receiver is left
    assert core.suspect(0.0, HERE) == []
    assert core.suspect(0.0, TRAINER) == []


def test_late_results_of_moved_work_are_ignored() -> None:
    core = counting()
    row = Counted(plan=PLAN_HASH, step=0, microbatch=0, stage=1, samples=0, loss=0.0)
    core.receive(0.0, HERE, row)
    assert core.suspect(0.0, HERE) == []
    core.suspect(0.0, THERE)
    assert core.receive(0.0, THERE, replace(row, microbatch=1)) == []
    assert not core._ledger.is_complete


def test_a_replica_suspected_between_steps_skips_one_step() -> None:
    core = counting()
    count(core, 0, 1)
    assert core.suspect(0.0, HERE) == []
    reduce_all(core)
    (message, *_) = opens(apply_all(core))
    assert message.stages[1].owners == bytes((1, 1))
    for number in (2, 3):
        core.receive(
            0.0, THERE, Counted(plan=PLAN_HASH, step=1, microbatch=number, stage=1, samples=0, loss=0.0)
        )
    count(core, 2, 3)
    reduce_all(core)
    (message, *_) = opens(apply_all(core))
    assert set(message.stages[1].owners) == {0, 1}


def stalled(core: Committer, until: float) -> list[Open]:
    """Return the Opens before this moment that move micro-batches."""
    found: list[Open] = []
    while core.deadline <= until:
        now = core.deadline
        found += opens([send for send in core.wake(now) if send[0] == FIRST])
    return found


def progress(core: Committer, number: int, stage: int = 0) -> None:
    who = FIRST if stage == 0 else MIDDLES[number % 2]
    core.receive(1.0, who, Progress(plan=PLAN_HASH, step=core.step, microbatch=number, stage=stage))


def measured(busy: int = 10**8) -> Committer:
    """Return a committer that has seen a step in which every middle replica had one micro-batch."""
    core = counting()
    count(core, 0, 1)
    reduce_all(core)
    apply_all(core, work=Work(busy))
    core.events.clear()
    return core


def test_work_moves_away_from_a_silent_replica() -> None:
    core = measured()
    progress(core, 2)
    assert stalled(core, 3.5) == []
    (message,) = stalled(core, 6.0)
    assert message.stages[1].owners == bytes((1, 1))
    assert core.events == [MicrobatchesMoved(1, 1, HERE, 1)]


def test_idle_and_slow_replicas_are_not_stalled() -> None:
    core = measured()
    for number in (2, 3):
        progress(core, number)
        progress(core, number, stage=1)
    assert not any(isinstance(event, MicrobatchesMoved) for event in core.events)
    stalled(core, 9.0)  # only the last stage is waited for, and it has no other replica
    assert core.events == []
    slow = measured(busy=10**9)
    progress(slow, 2)
    assert stalled(slow, 7.0) == []
    assert len(stalled(slow, 11.0)) == 1


def test_a_replica_waiting_for_a_gradient_is_not_stalled() -> None:
    core = measured()
    progress(core, 2)
    progress(core, 2, stage=1)
    assert stalled(core, 9.0) == []
    core.receive(9.0, LAST, Counted(plan=PLAN_HASH, step=1, microbatch=2, stage=2, samples=1, loss=1.0))
    assert len(stalled(core, 14.0)) == 1


def test_stalls_of_all_replicas_move_nothing_and_repeat_all_messages() -> None:
    core = measured()
    for number in (2, 3):
        progress(core, number)
    (message,) = stalled(core, 12.0)
    assert message.attempt == START  # the same once more
    assert core.events == []


def test_an_unmeasured_replica_is_not_stalled() -> None:
    core = counting()
    progress(core, 0)
    assert {message.attempt for message in stalled(core, 30.5)} == {START}
    assert stalled(core, 33.0)[0].attempt == START + 1


# A step


def test_norms_are_added_up_once_per_stage() -> None:
    core = counting()
    ((_, message), *_) = count(core, 0, 1)
    assert isinstance(message, StepCommit)
    sends: Sends = []
    # The replicas of a stage may differ in the last bit, so one of them reports for both.
    for who, norm in ((FIRST, 1.0), (HERE, 2.0), (THERE, 2.0000000000000004), (LAST, 4.0)):
        name = digest("of a stage", PLAN.stage_of(who))
        row = Reduced(plan=PLAN_HASH, step=0, attempt=START, digest=name, squared_norm=norm)
        sends += core.receive(0.0, who, row)
    expected = Apply(plan=PLAN_HASH, step=0, attempt=START, samples=6, squared_norm=7.0, loss=2.0)
    assert sends == [(who, expected) for who in REPLICAS]


def test_a_step_reports_the_time_of_each_replica() -> None:
    core = counting()
    count(core, 0, 1)
    reduce_all(core)
    apply_all(core, work=Work(7, 8, 9, 1))
    (event,) = core.events
    row = Work(7, 8, 9, 1)
    assert event == StepApplied(0, START, 2.0 / 6, 6, 4, ((row,), (row, row), (row,)))


def test_a_step_without_counted_samples_is_still_a_step() -> None:
    core = counting()
    count(core, 0, 1, samples=0, loss=0.0)
    reduce_all(core)
    apply_all(core)
    assert [event.step for event in core.events if isinstance(event, StepApplied)] == [0]
    assert len(core.events) == 1


def test_a_non_finite_loss_or_norm_ends_the_run_with_advice() -> None:
    core = counting()
    count(core, 0, loss=float("nan"))
    assert "step 0: the loss is no longer finite" in failed_of(core)
    assert "learning_rate" in failed_of(core)
    core = counting()
    count(core, 0, 1)
    for who in REPLICAS:
        name = digest(PLAN.stage_of(who))
        core.receive(0.0, who, Reduced(plan=PLAN_HASH, step=0, attempt=START, digest=name, squared_norm=inf))
    assert "the gradient's norm is no longer finite" in failed_of(core)


def test_totals_that_differ_are_reduced_again_before_an_exclusion() -> None:
    core = counting()
    count(core, 0, 1)
    for attempt in (1, 2):
        commits = reduce_all(core, there=digest("wrong"))
        assert {message.attempt for _, message in commits if isinstance(message, StepCommit)} == {
            START + attempt
        }
    assert reduce_all(core, there=digest("wrong")) == []
    (event,) = core.events
    assert isinstance(event, ReplicaFailed)
    assert (event.peer, event.stage) == (THERE, 1)
    assert "3 times" in event.reason


def test_a_replica_that_diverges_from_its_stage_is_rebuilt() -> None:
    core = counting()
    count(core, 0, 1)
    reduce_all(core)
    ((receiver, fill),) = apply_all(core, there=digest("a bit has turned"))
    assert (receiver, core.phase) == (THERE, "filling")
    assert isinstance(fill, Fill)
    assert (fill.step, fill.sources, fill.digest) == (1, (HERE,), digest("parameters", 1))
    assert core.reconnected(THERE) == [(THERE, fill)]
    sends = core.receive(0.0, THERE, synced(1, attempt=START, digest=fill.digest))
    assert opens(sends)[0].step == 1
    assert core.events[1:] == [ReplicaRebuilt(1, 1, THERE)]


def test_two_of_three_replicas_are_believed_even_if_they_report_last() -> None:
    core = Committer(TRAINER, WIDE, steps=2, evaluations=0)
    core.start(0.0)
    for who in core.awaited:
        core.receive(0.0, who, replace(synced(0), plan=core.plan_hash))
    other = peer("middle2")
    for number in (0, 1):
        for stage, who in ((0, FIRST), (1, MIDDLES[number]), (2, LAST)):
            counted = Counted(
                plan=core.plan_hash, step=0, microbatch=number, stage=stage, samples=0, loss=0.0
            )
            core.receive(0.0, who, counted)
    everybody = (FIRST, HERE, THERE, other, LAST)
    for who in everybody:
        row = Reduced(plan=core.plan_hash, step=0, attempt=START, digest=digest(WIDE.stage_of(who)))
        core.receive(0.0, who, row)
    sends: Sends = []
    for who in everybody:
        name = digest("wrong") if who == HERE else digest(WIDE.stage_of(who))
        sends += core.receive(0.0, who, Applied(plan=core.plan_hash, step=0, digest=name))
    ((receiver, fill),) = sends
    assert isinstance(fill, Fill)
    assert (receiver, fill.sources) == (HERE, (THERE, other))


def test_a_failed_replica_is_left_to_the_next_plan() -> None:
    core = counting()
    for _ in range(2):
        assert core.receive(0.0, LAST, Failed(plan=PLAN_HASH, reason="a label of 12 among 10")) == []
    assert core.events == [ReplicaFailed(LAST, 2, "a label of 12 among 10")]
    assert core.phase == "counting"


# Copies, pauses, evaluation


def test_all_replicas_save_before_the_next_step_opens() -> None:
    core = counting(save_every=2)
    count(core, 0, 1)
    reduce_all(core)
    assert not any(isinstance(message, Save) for _, message in apply_all(core))
    count(core, 2, 3)
    reduce_all(core)
    sends = apply_all(core)
    assert sends[: len(REPLICAS)] == [(who, Save(plan=PLAN_HASH, step=2)) for who in REPLICAS]
    assert len(opens(sends)) == 6
    assert core.reconnected(FIRST)[0] == (FIRST, Save(plan=PLAN_HASH, step=2))


def test_a_copy_can_be_requested_at_any_time() -> None:
    core = counting()
    assert core.save(0.0) == [(who, Save(plan=PLAN_HASH, step=0)) for who in REPLICAS]
    count(core, 0, 1)
    assert core.save(0.0) == []
    reduce_all(core)
    assert apply_all(core)[0] == (FIRST, Save(plan=PLAN_HASH, step=1))


def test_a_paused_run_opens_no_step_after_the_current_one() -> None:
    core = counting()
    assert core.pause(0.0) == []
    count(core, 0, 1)
    reduce_all(core)
    assert opens(apply_all(core)) == []
    assert core.events[-1] == StepsPaused(1)
    assert (core.phase, core.deadline) == ("paused", inf)


def evaluating(evaluations: int, metrics: int = 0) -> Committer:
    return counting(steps=0, evaluations=evaluations, metrics=metrics)


def evaluate(core: Committer, number: int, **other: Any) -> Sends:
    metrics = other.pop("metrics", ())
    row = Evaluated(plan=PLAN_HASH, step=core.step, microbatch=number, samples=2, loss=1.0, metrics=metrics)
    return core.receive(0.0, LAST, replace(row, **other))


def test_held_out_micro_batches_are_opened_a_few_at_a_time() -> None:
    core = evaluating(3 * EVALUATIONS_IN_FLIGHT_MAX)
    before = core._ledger.routes()[1].owners
    assert len(before) == EVALUATIONS_IN_FLIGHT_MAX
    half = EVALUATIONS_IN_FLIGHT_MAX // 2
    for number in range(half - 1):
        assert evaluate(core, number) == []
    (message, *_) = opens(evaluate(core, half - 1))
    assert (message.first, message.train, message.attempt) == (half, False, START + 1)
    assert message.stages[1].owners[:half] == before[half:]


def test_an_evaluation_ends_with_the_sums_over_all() -> None:
    core = evaluating(2, metrics=1)
    evaluate(core, 1, metrics=(3.0,))
    evaluate(core, 1, metrics=(3.0,))
    evaluate(core, 0, metrics=(4.0,))
    assert core.events == [TrainingEvaluated(4, 2.0, (7.0,))]
    assert (core.phase, core.deadline) == ("done", inf)


def test_a_run_without_evaluations_ends_with_its_last_step() -> None:
    core = counting(steps=1)
    count(core, 0, 1)
    reduce_all(core)
    assert apply_all(core) == []
    assert core.events[-1] == TrainingEvaluated(0, 0, ())


def test_an_evaluation_has_as_many_values_as_the_model_has_metrics() -> None:
    core = evaluating(1, metrics=2)
    for numbers in ((), (1.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(RemoteProtocolError, match="impossible values"):
            evaluate(core, 0, metrics=numbers)
    evaluate(core, 0, metrics=(1.0, float("nan")))
    assert "held out" in failed_of(core)


def test_a_suspect_loses_its_held_out_micro_batches_too() -> None:
    core = evaluating(4)
    (message, *_) = opens(core.suspect(0.0, HERE))
    assert message.stages[1].owners == bytes((1, 1, 1, 1))
    assert core.events == [MicrobatchesMoved(0, 1, HERE, 2)]


def test_a_joining_replica_gets_its_share_of_the_next_step() -> None:
    plan = successor(PLAN, Change(joined=(Joining(SECOND, 1, 1),), trainers=(TRAINER,)))
    core = committer(plan=plan)
    name = plan_hash(plan)
    for who in REPLICAS:
        core.receive(0.0, who, replace(synced(3, digest=digest(PLAN.stage_of(who))), plan=name))
    ((receiver, fill),) = core.receive(0.0, SECOND, replace(synced(None), plan=name))
    assert isinstance(fill, Fill)
    assert (receiver, fill.sources) == (SECOND, MIDDLES)
    answer = replace(synced(3, digest=fill.digest), plan=name)
    assert [routes.owners for routes in opens(core.receive(0.0, SECOND, answer))[0].stages] == [
        bytes(2),
        bytes((0, 1)),
        bytes(2),
    ]
    assert core.events[1:] == [Resumed(3, 0, (PeerId(SECOND),))]


def test_the_parameters_of_a_fresh_run_have_no_known_digest() -> None:
    core = committer()
    for who in (FIRST, HERE, LAST):
        core.receive(0.0, who, synced(0))
    ((_, fill),) = core.receive(0.0, THERE, synced(None))
    assert isinstance(fill, Fill)
    assert (fill.digest, fill.applied) == (NO_HASH, None)
