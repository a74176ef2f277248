"""Which idle machine follows which stage as a standby, and the reasons against it."""

from collections.abc import Sequence

from crypto.identity import PeerId
from partition.plan.change import Change, Joining, successor
from partition.plan.plan import NO_HASH, Plan, StagePlan
from partition.plan.problem import Link
from partition.run.reliability import DAY_SECONDS, LOSSES_MAX, PEERS_MAX, RunLosses
from partition.run.standbys import (
    WATCHED_STEPS,
    Following,
    FollowWatch,
    StageSize,
    Uncovered,
    next_standby,
)
from partition.steps.ledger import Ledger

A, B, C, D = (PeerId(bytes([number]) * 32) for number in range(4))
SMALL = StageSize(1_000, 3_000)
LARGE = StageSize(100_000_000, 300_000_000)


def plan_of(*stages: Sequence[tuple[PeerId, int]]) -> Plan:
    rows = [
        StagePlan(number, number + 1, tuple(peer for peer, _ in row), tuple(rate for _, rate in row))
        for number, row in enumerate(stages)
    ]
    return Plan(
        run=bytes([1]) * 32,
        parent=NO_HASH,
        height=0,
        roster=(A, B, C, D),
        trainers=(D,),
        microbatches=4,
        stages=tuple(rows),
    )


TWO = plan_of([(A, 5)], [(B, 7)])


def found(
    plan: Plan = TWO,
    sizes: Sequence[StageSize] = (SMALL, LARGE),
    lost: Sequence[PeerId] = (),
    link: Link | None = None,
    idle: Sequence[PeerId] = (C, D),
) -> Following | Uncovered | None:
    link = link or Link(10**10, 0)
    return next_standby(plan, sizes, idle, lost.count, lambda *_: link, step_seconds=1.0)


def test_a_standby_first_follows_the_stage_whose_loss_costs_most() -> None:
    assert found() == Following(1, C, 2 * LARGE.gradient_bytes)
    assert found(lost=[A, A], sizes=(SMALL, SMALL)) == Following(0, C, 2 * SMALL.gradient_bytes)


def test_a_member_lost_twice_today_counts_less() -> None:
    followed = plan_of([(A, 5), (C, 0)])
    assert found(followed, sizes=[SMALL]) is None
    assert found(followed, sizes=[SMALL], lost=[A, A]) == Following(0, C, 2 * SMALL.gradient_bytes)
    assert found(sizes=(SMALL, SMALL), lost=[C]) == Following(0, D, 2 * SMALL.gradient_bytes)


def test_a_slow_link_prevents_following_and_is_reported() -> None:
    slow = found(plan_of([(A, 5)]), sizes=[LARGE], link=Link(1_000_000, 0))
    assert slow == Uncovered(0, "the link to the idle machine would add 100.0 s to each step")
    unknown = next_standby(TWO, (LARGE, LARGE), [C], lambda _: 0, lambda *_: None, step_seconds=1.0)
    assert isinstance(unknown, Uncovered)
    assert "unmeasured link" in unknown.reason


def test_a_standby_that_slows_steps_is_detected() -> None:
    watch = FollowWatch()
    for _ in range(WATCHED_STEPS):
        assert not watch.stepped(1.0)
    watch.begin(is_following=True)
    assert [watch.stepped(1.2) for _ in range(WATCHED_STEPS)][-1] is False
    watch.begin(is_following=True)
    assert [watch.stepped(1.6) for _ in range(WATCHED_STEPS)][-1] is True


def test_a_standby_gets_no_work_while_its_stage_has_another_replica() -> None:
    plan = successor(TWO, Change(joined=(Joining(C, 1, 0),)))
    assert plan.standbys == (C,)
    ledger = Ledger(plan, range(4), train=True)
    ledger.deal([[1], [1, 1]])
    assert ledger.numbers_of((1, 1)) == []
    after = successor(plan, Change(lost=(B,)))
    assert after.standbys == ()
    assert after.stages[1] == StagePlan(1, 2, (C,), (7,)), (
        "the standby does not count as fast as the replica that it replaces"
    )


def test_losses_are_forgotten_after_a_day_and_bounded() -> None:
    losses = RunLosses()
    for now in range(LOSSES_MAX + 3):
        losses.note(float(now), A)
    assert losses.count(20.0, A) == LOSSES_MAX
    assert losses.count(20.0 + DAY_SECONDS, A) == 0
    for number in range(1, PEERS_MAX + 1):
        losses.note(30.0, PeerId(number.to_bytes(32, "big")))
    assert losses.count(30.0, A) == 0
