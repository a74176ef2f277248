"""The next plan after members were lost: their replacements, and cases without any."""

from hypothesis import given
from hypothesis import strategies as st

from crypto.identity import PeerId
from partition.plan.change import Change, Joining, successor
from partition.plan.plan import NO_HASH, Plan, StagePlan, check_plan
from partition.run.next_change import NoViablePlan, PlanInputs, next_change, ranked


def peer(number: int) -> PeerId:
    return PeerId(bytes([number]) * 32)


FIRST, SECOND, THIRD, FOURTH, REQUESTER, SPARE = (peer(number) for number in range(1, 7))
PLAN = Plan(
    run=bytes(32),
    parent=NO_HASH,
    height=0,
    roster=(FIRST, SECOND, THIRD, FOURTH, REQUESTER),
    trainers=(REQUESTER,),
    microbatches=4,
    stages=(StagePlan(0, 2, (FIRST, SECOND), (1, 1)), StagePlan(2, 4, (THIRD, FOURTH), (1, 1))),
)
CHECKPOINT = (b"c" * 32, 40)


def view(absent: tuple[PeerId, ...] = (), **changes: object) -> PlanInputs:
    fields = {"plan": PLAN, "absent": frozenset(absent), "wanted": (2, 2), **changes}
    return PlanInputs(**fields)  # type: ignore[arg-type]  # fields by name


def change_of(outlook: PlanInputs) -> Change:
    found = next_change(outlook)
    assert isinstance(found, Change)
    successor(outlook.plan, found)
    return found


def test_no_change_is_proposed_while_all_members_live() -> None:
    assert next_change(view()) is None
    assert next_change(view(candidates=((SPARE, 9),))) is None


def test_a_stage_continues_without_its_lost_replica() -> None:
    change = change_of(view((SECOND,)))
    assert change == Change(lost=(SECOND,))


def test_candidates_that_declined_come_after_all_others() -> None:
    offers = [(peer(number), rate) for number, rate in ((1, 9), (2, 8), (3, 1))]
    order = ranked(offers, first=(), trainers=(), roster=(), last={peer(1), peer(2)})
    assert [candidate for candidate, _ in order] == [peer(3), peer(1), peer(2)]
    order = ranked(offers, first={peer(2)}, trainers=(), roster={peer(3)}, last=())
    assert [candidate for candidate, _ in order] == [peer(2), peer(3), peer(1)]


def test_a_trainer_takes_a_stage_only_without_an_idle_peer() -> None:
    offers = [(peer(1), 9), (peer(2), 1), (peer(3), 5)]
    order = ranked(offers, first=(), trainers=[peer(1)], roster={peer(1), peer(2)}, last=())
    assert [candidate for candidate, _ in order] == [peer(2), peer(3), peer(1)]


def test_a_lost_replica_is_replaced_one_plan_later() -> None:
    change = change_of(view((SECOND,), candidates=((SPARE, 9),)))
    assert (change.lost, change.joined) == ((SECOND,), ())
    after = successor(PLAN, change)
    refill = next_change(view(plan=after, candidates=((SPARE, 9),)))
    assert refill == Change(joined=(Joining(SPARE, 0, 9),))
    assert next_change(view(plan=after, candidates=((SPARE, 9),), may_refill=False)) is None


def test_a_stage_without_replicas_is_restored_on_a_newcomer() -> None:
    change = change_of(view((THIRD, FOURTH), candidates=((SPARE, 9),), restorable=CHECKPOINT))
    assert change == Change(
        lost=(THIRD, FOURTH), joined=(Joining(SPARE, 1, 9),), restored=CHECKPOINT[0], step=CHECKPOINT[1]
    )


def test_an_unreachable_checkpoint_is_not_restored() -> None:
    candidates = ((SPARE, 9),)
    apart = next_change(
        view((THIRD, FOURTH), candidates=candidates, restorable=CHECKPOINT, can_restore=False)
    )
    assert isinstance(apart, NoViablePlan)
    assert "stage 2 of 2 has no replica left, and no reachable member has a copy" in apart.reason
    assert apart.lost == (THIRD, FOURTH)
    goes_on = view((SECOND,), candidates=candidates, restorable=CHECKPOINT, can_restore=False)
    assert change_of(goes_on).lost == (SECOND,)


def test_a_restarted_replica_may_rejoin_its_stage_empty() -> None:
    change = change_of(view((THIRD, FOURTH), candidates=((THIRD, 9),), restorable=CHECKPOINT))
    assert change.joined == (Joining(THIRD, 1, 9),)
    assert THIRD in change.lost


def test_a_run_ends_without_a_checkpoint_or_a_provider() -> None:
    no_room = ((FIRST, 0, 4), (SECOND, 0, 4))
    nobody = next_change(view((THIRD, FOURTH), restorable=CHECKPOINT, refused=no_room))
    assert isinstance(nobody, NoViablePlan)
    assert "stage 2 of 2 has no replica left" in nobody.reason
    nothing = next_change(view((THIRD, FOURTH), candidates=((SPARE, 9),)))
    assert isinstance(nothing, NoViablePlan)
    assert "no checkpoint" in nothing.reason
    assert nobody.lost == nothing.lost == (THIRD, FOURTH)


def test_a_stage_without_holders_goes_to_an_adjacent_one() -> None:
    change = change_of(view((THIRD, FOURTH), restorable=CHECKPOINT))
    assert change.stages == (StagePlan(0, 4, (FIRST, SECOND), (1, 1)),)
    assert (change.restored, change.step, change.joined) == (*CHECKPOINT, ())
    assert set(change.lost) == {THIRD, FOURTH}


def test_a_peer_without_room_gets_no_stage_in_a_merged_plan() -> None:
    change = change_of(view((THIRD, FOURTH), restorable=CHECKPOINT, refused=((FIRST, 0, 4),)))
    assert change.stages == (StagePlan(0, 4, (SECOND,), (1,)),)
    assert FIRST in successor(PLAN, change).roster


def test_an_idle_peer_takes_the_stage_before_a_holder_of_another() -> None:
    change = change_of(view((THIRD, FOURTH), candidates=((SPARE, 9),), restorable=CHECKPOINT))
    assert (change.stages, change.joined) == ((), (Joining(SPARE, 1, 9),))


def test_only_the_asking_member_proposes_to_merge() -> None:
    assert isinstance(next_change(view((THIRD, FOURTH), restorable=CHECKPOINT, asks=False)), NoViablePlan)


def test_a_leaving_last_replica_is_replaced_first() -> None:
    alone = successor(PLAN, Change(lost=(SECOND,)))
    leaving = frozenset((FIRST,))
    change = change_of(view(plan=alone, leaving=leaving, candidates=((SPARE, 9),), may_refill=False))
    assert change == Change(joined=(Joining(SPARE, 0, 9),))
    both = successor(alone, change)
    assert next_change(view(plan=both, leaving=leaving, may_refill=False)) is None


def test_a_returning_requester_is_admitted_again() -> None:
    without = successor(PLAN, Change(lost=(REQUESTER,)))
    assert change_of(view(plan=without, newcomers=(REQUESTER,))) == Change(admitted=(REQUESTER,))


@given(
    absent=st.sets(st.sampled_from(PLAN.members)),
    leaving=st.sets(st.sampled_from(PLAN.members)),
    candidates=st.lists(st.sampled_from([*PLAN.members, SPARE, peer(7)]), unique=True),
    has_checkpoint=st.booleans(),
    may_refill=st.booleans(),
)
def test_every_proposal_makes_a_valid_plan_without_absent_members(
    absent: set[PeerId],
    leaving: set[PeerId],
    candidates: list[PeerId],
    has_checkpoint: bool,
    may_refill: bool,
) -> None:
    found = next_change(
        view(
            tuple(absent),
            leaving=frozenset(leaving - absent),
            candidates=tuple((who, 1) for who in candidates),
            restorable=CHECKPOINT if has_checkpoint else None,
            may_refill=may_refill,
        )
    )
    if not isinstance(found, Change):
        assert found is not None or not absent
        return
    plan = successor(PLAN, found)
    check_plan(plan)
    back = {row.peer for row in found.joined}
    assert not (absent - back) & set(plan.roster)
    assert (found.restored != NO_HASH) == any(set(stage.replicas) <= absent for stage in PLAN.stages)


def test_borders_move_only_if_no_member_is_lost_or_leaves() -> None:
    recut = Change(restored=CHECKPOINT[0], step=40, cuts=(1,))
    change = change_of(view(recut=recut))
    assert change == Change(restored=CHECKPOINT[0], step=40, cuts=(1,))
    assert change_of(view((SECOND,), recut=recut)).cuts == ()
    assert next_change(view(recut=recut, leaving=frozenset({FIRST}))) is None
