"""The history of a plan as newcomers receive it: which sources are trusted, and its limited length."""

import pytest

from crypto.errors import RemoteProtocolError
from crypto.facts import IdentitySigner
from crypto.identity import Identity
from partition.plan import history as histories
from partition.plan.change import Change, Joining, encode_change, successor
from partition.plan.history import History, extend, first_history, replay
from partition.plan.plan import NO_HASH, Plan, StagePlan, plan_hash

SIGNERS = [IdentitySigner(Identity(bytes([number]) * 32), "swarm") for number in range(1, 6)]
REQUESTER, HOLDER, NEWCOMER, SECOND, OUTSIDER = SIGNERS
FIRST = Plan(
    run=bytes(32),
    parent=NO_HASH,
    height=0,
    roster=tuple(sorted((REQUESTER.peer, HOLDER.peer))),
    trainers=(REQUESTER.peer,),
    microbatches=4,
    stages=(StagePlan(0, 2, (HOLDER.peer,), (1,)),),
)
JOIN = Change(joined=(Joining(NEWCOMER.peer, 0, 1),))
NEXT = Change(lost=(HOLDER.peer,), admitted=(SECOND.peer,))


def told(history: History, by: IdentitySigner, parent: Plan, *changes: Change) -> History:
    return extend(by, history, plan_hash(parent), [encode_change(change) for change in changes])


def assert_refused(history: History, match: str) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        replay(REQUESTER, REQUESTER.peer, history)


def test_a_newcomer_learns_the_history_from_a_member_and_passes_it_on() -> None:
    first = first_history(REQUESTER, FIRST)
    assert replay(OUTSIDER, REQUESTER.peer, first) == (FIRST, REQUESTER.peer)
    second, third = successor(FIRST, JOIN), successor(successor(FIRST, JOIN), NEXT)
    history = told(first, HOLDER, FIRST, JOIN)
    assert replay(OUTSIDER, REQUESTER.peer, history) == (second, HOLDER.peer)
    history = told(history, NEWCOMER, second, NEXT)
    assert replay(OUTSIDER, REQUESTER.peer, history) == (third, NEWCOMER.peer)
    assert replay(OUTSIDER, REQUESTER.peer, told(history, SECOND, third)) == (third, SECOND.peer)


def test_a_first_plan_by_another_signer_is_invalid() -> None:
    assert_refused(first_history(HOLDER, FIRST), "not signed by the requester")
    assert_refused(first_history(REQUESTER, successor(FIRST, JOIN)), "not the first")


def test_a_peer_that_was_never_admitted_admits_no_peer() -> None:
    first = first_history(REQUESTER, FIRST)
    own = Change(admitted=(OUTSIDER.peer,))
    assert_refused(told(first, OUTSIDER, FIRST, own), "author was not a member")
    history = told(first, HOLDER, FIRST, JOIN, NEXT)
    third = successor(successor(FIRST, JOIN), NEXT)
    assert_refused(
        told(history, HOLDER, third, own), "author was not a member"
    )  # lost by then, so it cannot know


def test_a_segment_is_valid_only_at_the_plan_it_was_signed_for() -> None:
    first = first_history(REQUESTER, FIRST)
    assert_refused(told(first, HOLDER, successor(FIRST, JOIN), NEXT), "author was not a member")
    body = told(first, HOLDER, FIRST, JOIN).segments[0]
    forged = type(body)(NEWCOMER.peer, body.body, body.signature)
    assert_refused(History(first.base, (forged,)), "wrong signature")


def test_a_history_has_a_limited_length(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = first_history(REQUESTER, FIRST), successor(FIRST, JOIN)
    history = told(told(first, HOLDER, FIRST, JOIN), HOLDER, second)
    for name, limit in (
        ("CHANGES_MAX", 0),
        ("ROSTERS_MAX", 2),
        ("HISTORY_BYTES_MAX", 99),
        ("SEGMENTS_MAX", 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(histories, name, limit)
            assert_refused(history, "history has|too long|bytes")
    replay(REQUESTER, REQUESTER.peer, history)
