"""One replica, one message at a time. For whole histories see `test_steps_walk`."""

from typing import Any

import pytest
from msgspec.structs import replace

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.change import Change, Joining, successor
from partition.plan.plan import NO_HASH, Plan, plan_hash
from partition.steps.frames import Outgoing
from partition.steps.messages import (
    Applied,
    Apply,
    BadFrame,
    Counted,
    Failed,
    Fill,
    Progress,
    Reduced,
    Save,
    Sends,
    StageRoutes,
    Sync,
    Synced,
    Work,
)
from partition.steps.replica import (
    ApplyReady,
    BackwardReady,
    FillReady,
    FillVoided,
    ForgetReady,
    ForwardReady,
    ReduceReady,
    ReduceVoided,
    Replica,
    SaveReady,
    StepDiscarded,
    SubtractReady,
)
from partition.steps.routes import attempts
from partition.steps.schedule import Schedule
from tests.partition.fake_stage import digest, peer
from tests.partition.small_plan import (
    FIRST,
    LAST,
    MIDDLES,
    PLAN,
    PLAN_HASH,
    SECOND,
    SENT,
    START,
    TRAINER,
    bring,
    commit,
    compute,
    forward,
    frame,
    opening,
)

HERE, THERE = MIDDLES
NO_WORK = Work()
NEXT = successor(PLAN, Change(lost=(THERE,)))
RESTORED = successor(PLAN, Change(restored=digest("checkpoint"), step=5))
SYNC = Sync(plan=PLAN_HASH)
APPLY = Apply(plan=PLAN_HASH, step=0, attempt=START, samples=2)


def opened_replica(middles: tuple[int, ...] = (0, 1), **settings: Any) -> Replica:
    replica = Replica(HERE, settings.pop("plan", PLAN), **settings)
    replica.receive(0.0, TRAINER, SYNC)
    replica.receive(0.0, TRAINER, opening(middles))
    return replica


def test_an_unusable_frame_is_reported_and_replaced_by_a_spare() -> None:
    second = replace(PLAN.stages[0], replicas=(FIRST, SECOND), rates=(1, 1))
    plan = replace(PLAN, stages=(second, *PLAN.stages[1:]))
    replica = Replica(HERE, plan)
    replica.receive(0.0, TRAINER, Sync(plan=plan_hash(plan)))
    replica.receive(0.0, TRAINER, replace(opening(), plan=plan_hash(plan)))
    bad, good = (frame(who, 0, plan=plan_hash(plan)) for who in (SECOND, FIRST))
    for each in (bad, good):
        replica.receive(0.0, PeerId(each.author), each)
    work = replica.next(0.0)
    assert isinstance(work, ForwardReady)
    reason = "a digest that does not fit"
    told = BadFrame(plan=plan_hash(plan), frame=bad.fact, reason=reason)
    assert replica.refused(work, "input", reason) == [(TRAINER, told)]
    replica.receive(0.0, SECOND, bad)  # it was refused, so this is a second report
    again = replica.next(0.0)
    assert isinstance(again, ForwardReady)
    assert replica._order.microbatches[0].frames["input"] == good
    forward(replica, again)
    assert replica.next(0.0) is None


def test_an_unusable_frame_is_reported_again_when_reopened() -> None:
    replica = opened_replica()
    bring(replica, 0)
    forward(replica, replica.next(0.0))
    work = replica.next(0.0)
    assert isinstance(work, BackwardReady)
    ((_, told),) = replica.refused(work, "gradient", "")
    assert isinstance(told, BadFrame)
    assert replica.next(0.0) is None
    assert (TRAINER, told) in replica.reconnected(TRAINER)
    assert (TRAINER, told) in replica.receive(0.0, TRAINER, opening(attempt=1))
    assert (TRAINER, told) not in replica.receive(0.0, TRAINER, opening((1, 1), attempt=2))


def test_a_repeated_frame_under_the_next_plan_is_accepted() -> None:
    replica = opened_replica()
    replica.receive(0.0, FIRST, frame(FIRST, 0))
    replica.adopt(NEXT)
    opened = replace(opening((0, 0)), plan=plan_hash(NEXT), attempt=attempts(NEXT).start)
    replica.receive(0.0, TRAINER, opened)
    again = frame(FIRST, 0, plan=plan_hash(NEXT))
    for number in range(2):
        work = replica.next(0.0)
        assert isinstance(work, ForwardReady)
        sent = replica.refused(work, "input", "")
        assert bool(sent) == bool(number)
        replica.receive(0.0, FIRST, again)


def test_a_skipped_step_needs_no_totals_and_leaves_no_state() -> None:
    replica = opened_replica()
    bring(replica, 0)
    forward(replica, replica.next(0.0))
    with pytest.raises(RemoteProtocolError, match="before the totals"):
        replica.receive(0.0, TRAINER, APPLY)
    replica.receive(0.0, TRAINER, replace(APPLY, skipped=1))
    work = replica.next(0.0)
    assert isinstance(work, ApplyReady)
    assert work.is_skipped
    replica.applied(work, digest("parameters"), Work())
    assert replica.step == 1
    replica.receive(0.0, TRAINER, Sync(plan=PLAN_HASH))
    assert replica.next(0.0) is None


def reduced_replica() -> Replica:
    replica = opened_replica()
    bring(replica, 0)
    compute(replica)
    replica.receive(0.0, TRAINER, commit((0,), (1,)))
    work = replica.next(0.0)
    assert work == ReduceReady(PLAN_HASH, 0, START, ((FIRST,), MIDDLES, (LAST,)))
    (sent,) = replica.reduced(work, digest("total"))
    assert sent == (TRAINER, Reduced(plan=PLAN_HASH, step=0, attempt=START, digest=digest("total")))
    return replica


def sent_frames(sends: Sends) -> list[PeerId]:
    """Return the receivers of frames."""
    return [receiver for receiver, message in sends if isinstance(message, Outgoing)]


def applied_replica() -> Replica:
    replica = reduced_replica()
    replica.receive(0.0, TRAINER, APPLY)
    replica.applied(replica.next(0.0), digest("parameters"), NO_WORK)  # type: ignore[arg-type]  # what is next
    return replica


def synced_of(sends: Sends) -> Synced:
    """Return the answer to a Sync."""
    (answer,) = [message for _, message in sends if isinstance(message, Synced)]
    return answer


# Computing


def test_outputs_are_sent_on_and_reported() -> None:
    replica = opened_replica()
    bring(replica, 0)
    work = replica.next(0.0)
    assert replica.next(0.0) is None  # only one computation runs at a time
    sends = forward(replica, work)
    assert sends == [
        (LAST, Outgoing(SENT, START, PLAN_HASH)),
        (TRAINER, Progress(plan=PLAN_HASH, step=0, microbatch=0, stage=1)),
    ]
    back = replica.next(0.0)
    assert isinstance(back, BackwardReady)
    counted = Counted(plan=PLAN_HASH, step=0, microbatch=0, stage=1, samples=0, loss=0.0)
    assert replica.backwarded(back, gradient=SENT) == [
        (FIRST, Outgoing(SENT, START, PLAN_HASH)),
        (TRAINER, counted),
    ]


def test_frames_that_arrive_before_their_open_wait_for_it() -> None:
    replica = opened_replica((0, 1))
    replica.receive(0.0, FIRST, frame(FIRST, 1, attempt=START + 1))
    assert replica.next(0.0) is None  # micro-batch 1 belongs to the other replica
    replica.receive(0.0, TRAINER, opening((0, 0), attempt=1))
    work = replica.next(0.0)
    assert isinstance(work, ForwardReady)
    assert (work.microbatch, work.attempt) == (1, START + 1)


def test_a_stage_without_gradients_counts_after_sending() -> None:
    replica = opened_replica(awaits_gradient=False)
    replica.receive(0.0, FIRST, frame(FIRST, 0))
    (sent, (_, counted)) = forward(replica, replica.next(0.0))
    assert sent == (LAST, Outgoing(SENT, START, PLAN_HASH))
    assert isinstance(counted, Counted)
    assert (counted.microbatch, counted.stage) == (0, 1)


@pytest.mark.parametrize(
    ("schedule", "memory", "expected"),
    [
        ("1f1b", 64, ["f0", "b0", "f1", "b1", "f2", "b2", "f3", "b3"]),
        ("gpipe", 64, ["f0", "f1", "f2", "f3", "b0", "b1", "b2", "b3"]),
        ("gpipe", 2, ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"]),
    ],
)
def test_the_schedule_gives_the_order_of_work(schedule: Schedule, memory: int, expected: list[str]) -> None:
    plan = replace(PLAN, microbatches=4)
    replica = Replica(HERE, plan, schedule=schedule, in_flight_max=memory)
    name = plan_hash(plan)
    replica.receive(0.0, TRAINER, Sync(plan=name))
    for number in (2, 3, 1, 0):
        replica.receive(0.0, FIRST, frame(FIRST, number, plan=name))
        replica.receive(0.0, LAST, frame(LAST, number, "gradient", plan=name))
    stages = tuple(StageRoutes(bytes(4)) for _ in range(3))
    replica.receive(0.0, TRAINER, replace(opening(), plan=name, stages=stages))
    order = [
        f"{'f' if isinstance(work, ForwardReady) else 'b'}{work.microbatch}" for work in compute(replica)
    ]
    assert order == expected


def test_microbatches_in_flight_are_bounded_by_the_remaining_stages() -> None:
    plan = replace(PLAN, microbatches=4)
    replica = Replica(HERE, plan)
    name = plan_hash(plan)
    replica.receive(0.0, TRAINER, Sync(plan=name))
    stages = tuple(StageRoutes(bytes(4)) for _ in range(3))
    replica.receive(0.0, TRAINER, replace(opening(), plan=name, stages=stages))
    for number in range(4):
        replica.receive(0.0, FIRST, frame(FIRST, number, plan=name))
    assert [work.microbatch for work in compute(replica)] == [0, 1]
    replica.receive(0.0, LAST, frame(LAST, 1, "gradient", plan=name))
    assert [(type(work), work.microbatch) for work in compute(replica)] == [
        (BackwardReady, 1),
        (ForwardReady, 2),
    ]


def test_a_commit_waits_until_no_other_work_is_held() -> None:
    replica = opened_replica((0, 0))
    bring(replica, 0)
    compute(replica)
    replica.receive(0.0, FIRST, frame(FIRST, 1))
    forward(replica, replica.next(0.0))
    replica.receive(0.0, TRAINER, opening((0, 1), attempt=1))
    replica.receive(0.0, TRAINER, commit((0,), (1,), attempt=1))
    forget = replica.next(0.0)
    assert forget == ForgetReady(PLAN_HASH, 0, 1)
    replica.forgotten(forget)
    assert isinstance(replica.next(0.0), ReduceReady)


# Moves


def test_moved_work_is_forgotten_and_counts_again_on_its_return() -> None:
    replica = opened_replica((0, 1))
    replica.receive(0.0, FIRST, frame(FIRST, 0))
    forward(replica, replica.next(0.0))
    replica.receive(0.0, TRAINER, opening((1, 1), attempt=1))
    forget = replica.next(0.0)
    assert forget == ForgetReady(PLAN_HASH, 0, 0)
    replica.forgotten(forget)
    assert replica.next(0.0) is None
    replica.receive(0.0, TRAINER, opening((0, 1), attempt=2))
    again = replica.next(0.0)
    assert isinstance(again, ForwardReady)
    # The last stage already has the same output.
    assert sent_frames(forward(replica, again)) == []


def test_moved_work_that_returns_before_it_is_forgotten_continues() -> None:
    replica = opened_replica((0, 1))
    replica.receive(0.0, FIRST, frame(FIRST, 0))
    forward(replica, replica.next(0.0))
    replica.receive(0.0, TRAINER, opening((1, 1), attempt=1))
    replica.receive(0.0, TRAINER, opening((0, 1), attempt=2))
    replica.receive(0.0, LAST, frame(LAST, 0, "gradient"))
    assert isinstance(replica.next(0.0), BackwardReady)


def test_doubly_counted_work_is_subtracted_before_the_reduction() -> None:
    replica = opened_replica((0, 0))
    bring(replica, 0, 1)
    compute(replica)
    replica.receive(0.0, TRAINER, opening((0, 1), attempt=1))
    assert replica.next(0.0) is None  # not before it is sure that the other replica counts it
    replica.receive(0.0, TRAINER, commit((0,), (1,), attempt=1))
    remove = replica.next(0.0)
    assert isinstance(remove, SubtractReady)
    assert (remove.microbatch, remove.input, remove.gradient) == (
        1,
        frame(FIRST, 1).payload,
        frame(LAST, 1, "gradient").payload,
    )
    replica.removed(remove)
    assert isinstance(replica.next(0.0), ReduceReady)


def test_frames_are_repeated_to_a_new_owner_that_has_not_counted_them() -> None:
    replica = Replica(FIRST, PLAN)
    replica.receive(0.0, TRAINER, SYNC)
    replica.receive(0.0, TRAINER, opening((0, 1)))
    for number in (0, 1):
        replica.receive(0.0, TRAINER, frame(TRAINER, number, stage=0))
        forward(replica, replica.next(0.0))
    assert replica.receive(0.0, TRAINER, opening((0, 1), attempt=1)) == []
    counted: tuple[tuple[int, ...], ...] = ((), (0,), ())
    sends = replica.receive(0.0, TRAINER, opening((0, 0), attempt=2, counted=counted))
    assert sends == [(HERE, Outgoing(SENT, START + 2, PLAN_HASH))]
    assert replica.receive(0.0, TRAINER, opening((0, 0), attempt=2, counted=counted)) == []
    assert replica.receive(0.0, TRAINER, opening((1, 1), attempt=1)) == []  # late


# Reducing and applying


def test_a_repeated_commit_gets_the_same_report() -> None:
    replica = reduced_replica()
    ((_, again),) = replica.receive(0.0, TRAINER, commit((0,), (1,)))
    assert again == Reduced(plan=PLAN_HASH, step=0, attempt=START, digest=digest("total"))
    assert replica.next(0.0) is None


def test_a_commit_of_a_later_attempt_reduces_again() -> None:
    replica = reduced_replica()
    replica.receive(0.0, TRAINER, commit((0,), (1,), attempt=1))
    work = replica.next(0.0)
    assert isinstance(work, ReduceReady)
    assert work.attempt == START + 1
    with pytest.raises(RemoteProtocolError, match="before the totals"):
        replica.receive(0.0, TRAINER, APPLY)


def test_two_successive_steps_leave_no_state_of_the_first() -> None:
    replica = reduced_replica()
    replica.receive(0.0, TRAINER, APPLY)
    work = replica.next(0.0)
    assert work == ApplyReady(PLAN_HASH, 0, START, 2, None)
    assert isinstance(work, ApplyReady)
    replica.receive(0.0, FIRST, frame(FIRST, 1))  # for a step that is being applied
    ((_, applied),) = replica.applied(work, digest("parameters"), NO_WORK)
    assert applied == Applied(plan=PLAN_HASH, step=0, digest=digest("parameters"))
    assert (replica.step, replica.reconnected(FIRST), replica.reconnected(LAST)) == (1, [], [])
    replica.receive(0.0, TRAINER, opening(step=1))
    bring(replica, 2, step=1)
    assert [(done.step, done.microbatch) for done in compute(replica)] == [(1, 2), (1, 2)]


def test_a_commit_of_uncounted_work_makes_the_replica_give_up() -> None:
    replica = opened_replica()
    ((receiver, message),) = replica.receive(0.0, TRAINER, commit((0,), (1,)))
    assert receiver == TRAINER
    assert isinstance(message, Failed)
    assert "names micro-batches that this replica has not counted" in message.reason


def test_a_copy_is_made_before_the_next_step_is_applied() -> None:
    replica = opened_replica()
    bring(replica, 0)
    running = replica.next(0.0)
    replica.receive(0.0, TRAINER, Save(plan=PLAN_HASH, step=0))
    forward(replica, running)
    save = replica.next(0.0)
    assert save == SaveReady(PLAN_HASH, 0)
    assert isinstance(save, SaveReady)
    replica.saved(save)
    replica.receive(0.0, TRAINER, Save(plan=PLAN_HASH, step=0))
    assert isinstance(replica.next(0.0), BackwardReady)  # one copy is enough


# Plans


def test_a_new_plan_keeps_sums_and_frames_and_voids_a_reduction() -> None:
    replica = opened_replica((0, 0))
    bring(replica, 0)
    compute(replica)
    replica.receive(0.0, FIRST, frame(FIRST, 1))
    forward(replica, replica.next(0.0))
    replica.receive(0.0, TRAINER, opening((0, 1), attempt=1))
    replica.forgotten(replica.next(0.0))  # type: ignore[arg-type]  # what is next
    replica.receive(0.0, TRAINER, commit((0,), (1,), attempt=1))
    work = replica.next(0.0)
    assert isinstance(work, ReduceReady)
    replica.adopt(NEXT)
    assert replica.events == [ReduceVoided(PLAN_HASH, 0)]
    assert replica.reduced(work, digest("total")) == []
    answer = synced_of(replica.receive(0.0, TRAINER, Sync(plan=plan_hash(NEXT))))
    assert (answer.step, answer.counted, answer.begun, answer.reduced) == (0, (0,), (), None)


def test_a_ready_total_stays_ready_under_a_new_plan() -> None:
    replica = reduced_replica()
    replica.adopt(NEXT)
    assert replica.events == []
    answer = synced_of(replica.receive(0.0, TRAINER, Sync(plan=plan_hash(NEXT))))
    assert (answer.step, answer.reduced) == (0, START)
    replica.receive(0.0, TRAINER, replace(APPLY, plan=plan_hash(NEXT)))
    assert isinstance(replica.next(0.0), ApplyReady)


def test_a_position_request_waits_for_the_current_computation() -> None:
    replica = opened_replica()
    bring(replica, 0)
    work = replica.next(0.0)
    replica.adopt(NEXT)
    assert replica.receive(0.0, TRAINER, Sync(plan=plan_hash(NEXT))) == []
    answer = synced_of(forward(replica, work))
    assert (answer.counted, answer.begun) == ((), (0,))
    assert replica.next(0.0) is None  # no work starts until the plan opens


def test_the_sync_reports_a_step_applied_under_the_previous_plan() -> None:
    replica = reduced_replica()
    replica.receive(0.0, TRAINER, APPLY)
    work = replica.next(0.0)
    assert isinstance(work, ApplyReady)
    replica.adopt(NEXT)
    assert replica.receive(0.0, TRAINER, Sync(plan=plan_hash(NEXT))) == []
    answer = synced_of(replica.applied(work, digest("parameters"), NO_WORK))
    assert (answer.step, answer.applied, answer.digest) == (1, APPLY, digest("parameters"))


def test_frames_are_repeated_under_a_new_plan_to_the_same_owner() -> None:
    replica = opened_replica((0, 0))
    bring(replica, 0)
    compute(replica)
    replica.adopt(NEXT)
    name = plan_hash(NEXT)
    replica.receive(0.0, TRAINER, Sync(plan=name))
    again = replace(opening((0, 0)), plan=name, attempt=replica.attempt)
    assert sent_frames(replica.receive(0.0, TRAINER, again)) == [LAST, FIRST]
    assert sent_frames(replica.reconnected(LAST)) == [LAST]


def test_receiving_the_same_plan_again_changes_nothing() -> None:
    replica = reduced_replica()
    replica.adopt(PLAN)
    assert (replica.events, replica.attempt) == ([], START)


def test_a_plan_that_moves_or_drops_the_replica_raises_an_error() -> None:
    replica = opened_replica()
    elsewhere = successor(PLAN, Change(lost=(HERE,), joined=(Joining(HERE, 0, 1),)))
    for plan in (elsewhere, successor(PLAN, Change(lost=(HERE,)))):
        with pytest.raises(LocalProtocolError):
            replica.adopt(plan)
    with pytest.raises(LocalProtocolError):
        Replica(SECOND, PLAN)


# Filling


def filling(plan: Plan = PLAN, **changes: Any) -> Fill:
    return replace(
        Fill(plan=plan_hash(plan), step=4, digest=digest("parameters"), sources=(THERE,)), **changes
    )


def test_a_new_replica_reports_itself_and_is_filled() -> None:
    replica = Replica(HERE, PLAN, step=None)
    ((_, answer),) = replica.receive(0.0, TRAINER, SYNC)
    assert answer == Synced(plan=PLAN_HASH, step=None)
    replica.receive(0.0, FIRST, frame(FIRST, 8, step=4))
    fill = filling(applied=replace(APPLY, step=3))
    replica.receive(0.0, TRAINER, fill)
    discard = replica.next(0.0)
    assert isinstance(discard, StepDiscarded)
    replica.discarded(discard)
    work = replica.next(0.0)
    assert work == FillReady(PLAN_HASH, 4, digest("parameters"), (THERE,))
    assert isinstance(work, FillReady)
    assert replica.receive(0.0, TRAINER, fill) == []
    ((_, filled),) = replica.filled(work, digest("parameters"))
    assert filled == Synced(plan=PLAN_HASH, step=4, applied=fill.applied, digest=digest("parameters"))
    assert replica.receive(0.0, TRAINER, fill) == [(TRAINER, filled)]  # it was reported, and perhaps lost


def test_parameters_with_another_digest_are_refused() -> None:
    replica = Replica(HERE, PLAN, step=None)
    replica.receive(0.0, TRAINER, filling())
    replica.discarded(replica.next(0.0))  # type: ignore[arg-type]  # what is next
    ((_, message),) = replica.filled(replica.next(0.0), digest("others"))  # type: ignore[arg-type]  # the same
    assert isinstance(message, Failed)
    assert "do not have the expected digest" in message.reason
    assert replica.step is None


def test_a_new_plan_cancels_a_transfer_of_state_to_a_replica() -> None:
    replica = applied_replica()
    replica.receive(0.0, TRAINER, filling(step=1))
    replica.discarded(replica.next(0.0))  # type: ignore[arg-type]  # what is next
    work = replica.next(0.0)
    assert isinstance(work, FillReady)
    replica.adopt(NEXT)
    assert replica.events == [FillVoided(PLAN_HASH, 1)]
    assert replica.filled(work, digest("parameters")) == []
    assert synced_of(replica.receive(0.0, TRAINER, Sync(plan=plan_hash(NEXT)))).step is None


def test_a_plan_that_restores_discards_everything() -> None:
    replica = opened_replica((0, 0))
    bring(replica, 0)
    compute(replica)
    replica.receive(0.0, FIRST, frame(FIRST, 1))
    running = replica.next(0.0)
    replica.adopt(RESTORED)
    assert replica.receive(0.0, TRAINER, Sync(plan=plan_hash(RESTORED))) == []
    assert replica.next(0.0) is None
    assert forward(replica, running) == []  # it no longer counts
    replica.discarded(replica.next(0.0))  # type: ignore[arg-type]  # what is next
    work = replica.next(0.0)
    assert work == FillReady(plan_hash(RESTORED), 5, NO_HASH, (), RESTORED.restored)
    assert isinstance(work, FillReady)
    answer = synced_of(replica.filled(work, digest("parameters")))
    assert (answer.step, answer.counted, answer.applied) == (5, (), None)


def test_an_unread_checkpoint_is_still_required_by_the_next_plan() -> None:
    replica = opened_replica()
    replica.adopt(RESTORED)
    replica.discarded(replica.next(0.0))  # type: ignore[arg-type]  # what is next
    work = replica.next(0.0)
    assert isinstance(work, FillReady)
    later = successor(RESTORED, Change(lost=(THERE,)))
    replica.adopt(later)
    assert replica.receive(0.0, TRAINER, Sync(plan=plan_hash(later))) == []
    assert synced_of(replica.filled(work, digest("parameters"))).step == 5


def test_a_fill_from_a_peer_of_another_stage_is_refused() -> None:
    replica = applied_replica()
    for sources in ((FIRST,), (HERE,), (peer("stranger"),)):
        with pytest.raises(RemoteProtocolError, match="do not hold this stage"):
            replica.receive(0.0, TRAINER, filling(sources=sources))
