"""Each message of a run is delivered to the local member of the right plan. A member stores its Paxos
promises before it sends anything that depends on them."""

from dataclasses import dataclass
from random import Random

import pytest

from crypto.errors import RemoteProtocolError
from partition.plan.change import Change
from partition.plan.paxos import PaxosChain, PlanDecided
from partition.plan.plan import NO_HASH, Plan, StagePlan, plan_hash
from partition.run.dispatch import EARLY_MAX, Dispatch, Role, role_of
from partition.run.messages import Leaving
from partition.run.stored_chain import StoredChain
from partition.steps.messages import Failed, Sync
from tests.partition.test_run_member import ONE, OTHER, PLAN, REQUESTER, SPARE

NAME = plan_hash(PLAN)
ALONE = Plan(NO_HASH, NO_HASH, 0, (REQUESTER,), (REQUESTER,), 4, (StagePlan(0, 1, (REQUESTER,), (1,)),))


@dataclass
class Member:
    plan: Plan | None = PLAN


def test_early_messages_are_delivered_once_their_plan_is_in_force() -> None:
    dispatch: Dispatch[Member, str] = Dispatch()
    assert dispatch.find(ONE, NAME) is None
    dispatch.keep(ONE, NAME, "first")
    dispatch.keep(OTHER, bytes(32), "of another plan")
    dispatch.keep(ONE, NAME, "second")
    member = Member()
    assert dispatch.follow(NAME, member) == [(ONE, "first"), (ONE, "second")]
    assert dispatch.find(ONE, NAME) is member
    assert dispatch.follow(NAME, member) == []
    assert [row[2] for row in dispatch.early] == ["of another plan"]


def test_the_number_of_early_messages_is_limited() -> None:
    dispatch: Dispatch[Member, int] = Dispatch()
    for number in range(EARLY_MAX + 9):
        dispatch.keep(OTHER, NAME, number)
    assert [row[2] for row in dispatch.early] == list(range(9, EARLY_MAX + 9))


def test_a_member_gets_only_messages_of_its_newest_plan() -> None:
    dispatch: Dispatch[Member, str] = Dispatch()
    member = Member()
    dispatch.follow(bytes(32), member)
    dispatch.follow(NAME, member)
    assert dispatch.find(ONE, bytes(32)) is None
    with pytest.raises(RemoteProtocolError, match="not in the run"):
        dispatch.find(SPARE, NAME)
    dispatch.forget(member)
    assert dispatch.find(SPARE, NAME) is None


def test_each_message_is_for_exactly_one_role() -> None:
    assert role_of(Leaving(NAME)) is Role.MEMBER
    assert role_of(Failed(plan=NAME, reason="")) is Role.COMMITTER
    assert role_of(Sync(plan=NAME)) is Role.STAGE


def test_a_chain_sends_its_messages_only_after_storing_its_promises() -> None:
    chain = StoredChain(PaxosChain(REQUESTER, PLAN, Random(1)))
    chain.reach(PLAN.members)
    chain.wish(Change(lost=(ONE,)), NAME)
    now, seen = 0.0, 0
    while now < 30.0 and not seen:
        now = max(now, chain.deadline)
        chain.wake(now)
        if chain.is_storing:
            assert chain.take() == ([], [])
            assert chain.deadline == float("inf"), (
                "the chain has a deadline while its promises are being stored"
            )
            assert chain.core.durable
            chain.stored()
        sends, events = chain.take()
        seen += len(sends)
        assert not events
    assert seen, "the member did not ask the others"


def test_a_decision_is_reported_after_its_promise_is_stored() -> None:
    chain = StoredChain(PaxosChain(REQUESTER, ALONE, Random(1)))
    chain.wish(Change(admitted=(OTHER,)), plan_hash(ALONE))
    found: list[object] = []
    while not found:
        chain.wake(max(0.0, chain.deadline))
        if chain.is_storing:
            assert chain.take() == ([], [])
            chain.stored()
        found += chain.take()[1]
    assert isinstance(found[0], PlanDecided)
    chain.close()
    chain.reach(PLAN.members)
    assert chain.deadline == float("inf")
