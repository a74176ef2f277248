"""A tie-breaker lets half of an even committee decide, and any two deciding sets still intersect."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from partition.plan.change import Change
from partition.plan.paxos import PaxosChain, QuorumLost
from partition.plan.plan import committee
from partition.plan.quorum import QUORUM_SECONDS, decides, indispensable
from tests.partition.agreement_world import genesis
from tests.partition.fake_stage import peer


def test_the_tie_breaker_of_two_members_decides_alone() -> None:
    plan = genesis(2, 1)
    seats = committee(plan)
    for breaker in seats:
        for me in seats:
            core = PaxosChain(me, plan, Random(1), tie_breaker=breaker)
            core.reach(0.0, [me])
            other = next(seat for seat in seats if seat != me)
            trainers = Change(trainers=(me,), lost=())
            core.wish(0.0, trainers)
            core.wake(QUORUM_SECONDS)
            assert core.could_decide([me]) == (me == breaker)
            assert core.head.height == (1 if me == breaker else 0)
            lost = [event for event in core.events if isinstance(event, QuorumLost)]
            assert [event.missing for event in lost] == ([] if me == breaker else [(other,)])


@given(st.integers(1, 9), st.data())
def test_any_two_sets_that_decide_have_a_member_in_common(size: int, data: st.DataObject) -> None:
    seats = [peer(str(number)) for number in range(1, size + 1)]
    breaker = data.draw(st.sampled_from([None, *seats, peer("stranger")]))
    first, second = (data.draw(st.frozensets(st.sampled_from(seats))) for _ in range(2))
    if decides(seats, first, breaker) and decides(seats, second, breaker):
        assert first & second


def test_a_run_pauses_without_a_deciding_set() -> None:
    two, three, four = (genesis(size, 1) for size in (2, 3, 4))
    assert set(indispensable(two, None)) == set(two.members)
    assert indispensable(two, two.members[0]) == (two.members[0],)
    assert indispensable(three, None) == indispensable(four, four.members[0]) == ()
    assert indispensable(genesis(1, 1), None) == genesis(1, 1).members
