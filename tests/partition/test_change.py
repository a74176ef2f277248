"""From one plan to the next: an accepted change gives a valid plan, the same plan for all members."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.chain import follow, fork_name, forked, staying
from partition.plan.change import (
    CHANGE_BYTES_MAX,
    JOININGS_MAX,
    Change,
    Joining,
    decode_change,
    encode_change,
    successor,
)
from partition.plan.plan import (
    HEIGHT_MAX,
    NO_HASH,
    REPLICAS_MAX,
    ROSTER_MAX,
    STEPS_MAX,
    TRAINERS_MAX,
    Plan,
    StagePlan,
    decode_plan,
    encode_plan,
    plan_hash,
)
from tests.partition.fake_stage import peer

A, B, C, D, E, F = (PeerId(bytes([number]) * 32) for number in range(1, 7))
PLAN = Plan(
    run=bytes(32),
    parent=bytes([1]) * 32,
    height=3,
    roster=(A, B, C, D, E),
    trainers=(D, A),
    microbatches=8,
    stages=(StagePlan(0, 2, (C, A), (5, 6)), StagePlan(2, 5, (B,), (7,))),
)
CHECKPOINT = bytes([9]) * 32


def after(**fields: Any) -> Plan:
    return successor(PLAN, Change(**fields))


def test_an_empty_change_still_makes_the_next_plan() -> None:
    assert after() == replace(PLAN, parent=plan_hash(PLAN), height=4)


def test_a_lost_peer_leaves_roster_stages_and_trainers() -> None:
    plan = after(lost=(A, E))
    assert plan.roster == (B, C, D)
    assert [stage.replicas for stage in plan.stages] == [(C,), (B,)]
    assert [stage.rates for stage in plan.stages] == [(5,), (7,)]
    assert plan.trainers == (D,)


def test_a_joining_peer_comes_last_in_its_stage() -> None:
    plan = after(joined=(Joining(F, 1, 3), Joining(E, 0, 4)))
    assert plan.roster == (A, B, C, D, E, F)
    assert plan.stages[0] == StagePlan(0, 2, (C, A, E), (5, 6, 4))
    assert plan.stages[1] == StagePlan(2, 5, (B, F), (7, 3))


def test_a_holder_that_joins_another_stage_leaves_the_first() -> None:
    plan = after(joined=(Joining(A, 1, 2),))
    assert [stage.replicas for stage in plan.stages] == [(C,), (B, A)]


def test_a_peer_that_is_lost_and_rejoins_starts_empty() -> None:
    plan = after(lost=(B,), joined=(Joining(B, 1, 2),))
    assert plan.roster == PLAN.roster
    assert plan.stages[1] == StagePlan(2, 5, (B,), (2,))


def test_an_admitted_peer_has_no_stage() -> None:
    plan = after(admitted=(F,))
    assert plan.roster == (A, B, C, D, E, F)
    assert plan.stages == PLAN.stages


def test_if_no_trainer_is_left_a_member_without_a_stage_trains() -> None:
    assert after(lost=(A, D)).trainers == (E,)
    assert after(lost=(A, D, E)).trainers == (B,)


def test_a_checkpoint_and_a_fork_apply_to_one_plan_only() -> None:
    plan = after(restored=CHECKPOINT, step=6)
    assert (plan.restored, plan.step) == (CHECKPOINT, 6)
    assert (successor(plan, Change()).restored, successor(plan, Change()).step) == (NO_HASH, 0)


CROWD = tuple(sorted(peer(f"c{number}") for number in range(ROSTER_MAX)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lost": (B,)}, "stage 2 of 2 would have no replica"),
        ({"lost": (F,)}, "was not on the roster"),
        ({"joined": (Joining(E, 0, 1), Joining(E, 1, 1))}, "join twice"),
        ({"joined": (Joining(E, 2, 1),)}, "a stage that does not exist"),
        ({"step": 4}, "without a checkpoint"),
        ({"trainers": (A, A)}, "a trainer twice"),
        ({"admitted": CROWD}, "a roster has"),
        ({"joined": tuple(Joining(each, 0, 1) for each in CROWD[: REPLICAS_MAX - 1])}, "length <="),
        ({"admitted": CROWD[:100], "trainers": CROWD[: TRAINERS_MAX + 1]}, "length <="),
    ],
)
def test_a_change_that_gives_no_valid_plan_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        after(**fields)


def test_a_chain_ends_before_heights_overflow() -> None:
    with pytest.raises(RemoteProtocolError, match="too long"):
        successor(replace(PLAN, height=HEIGHT_MAX - 1), Change())


def test_a_plan_too_large_to_be_sent_is_refused() -> None:
    # Every member holds a stage. This is within each single limit but over the limit of bytes.
    names = [bytes([number // 64, number % 64]) * 16 for number in range(ROSTER_MAX)]
    rows = tuple(
        StagePlan(index, index + 1, tuple(names[index * 64 : index * 64 + 63]), (2**60,) * 63)
        for index in range(16)
    )
    roster = tuple(sorted(name for row in rows for name in row.replicas))
    plan = replace(PLAN, roster=roster, trainers=(roster[0],), stages=rows)
    with pytest.raises(RemoteProtocolError, match="at most"):
        successor(plan, Change())


# Any change

names = st.sampled_from((A, B, C, D, E, F))
some = st.lists(names, max_size=4).map(tuple)
changes = st.builds(
    Change,
    lost=some,
    joined=st.lists(st.builds(Joining, names, st.integers(0, 2), st.integers(0, 2**63 - 1)), max_size=3).map(
        tuple
    ),
    admitted=some,
    trainers=some,
    restored=st.just(NO_HASH) | st.just(CHECKPOINT),
    step=st.just(0) | st.integers(0, STEPS_MAX),
)


@given(st.lists(changes, min_size=1, max_size=5))
def test_every_change_is_refused_or_makes_a_valid_plan(rows: list[Change]) -> None:
    plan = PLAN
    for change in rows:
        try:
            new = successor(plan, change)
        except RemoteProtocolError:
            continue
        assert decode_plan(encode_plan(new)) == new
        assert (new.parent, new.height, new.run) == (plan_hash(plan), plan.height + 1, plan.run)
        assert not set(change.lost) & set(new.roster) - {row.peer for row in change.joined} - set(
            change.admitted
        )
        assert all(row.peer in new.stages[row.stage].replicas for row in change.joined)
        assert [(stage.first_layer, stage.last_layer) for stage in new.stages] == [(0, 2), (2, 5)]
        again, same = follow(decode_plan(encode_plan(plan)), encode_change(change))
        assert (encode_plan(again), same) == (encode_plan(new), change)
        plan = new


@given(changes)
def test_every_change_survives_the_wire(change: Change) -> None:
    assert decode_change(encode_change(change)) == change


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_one_change(data: bytes) -> None:
    try:
        follow(PLAN, data)
    except RemoteProtocolError:
        return
    assert encode_change(decode_change(data)) == data


@given(changes, st.integers(0, 300), st.integers(0, 255))
def test_an_altered_byte_is_refused_or_makes_another_plan(change: Change, place: int, value: int) -> None:
    data = bytearray(encode_change(change))
    data[place % len(data)] = value
    try:
        new, other = follow(PLAN, bytes(data))
    except RemoteProtocolError:
        return
    assert (bytes(data) == encode_change(change)) == (other == change)
    assert new.height == PLAN.height + 1


def test_an_oversized_change_is_refused_undecoded() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode_change(bytes(CHANGE_BYTES_MAX + 1))
    rows = tuple(Joining(each, 0, 1) for each in CROWD[: JOININGS_MAX + 1])
    with pytest.raises(RemoteProtocolError):
        decode_change(encode(Change(joined=rows)))


# Forks


@given(changes, st.sets(st.sampled_from(PLAN.roster), min_size=1))
def test_a_fork_keeps_only_its_members(change: Change, members: set[bytes]) -> None:
    few = tuple(sorted(members))
    value = forked(PLAN, change, few)
    assert forked(PLAN, value, few) == value
    try:
        new, again = follow(PLAN, encode_change(value))
    except RemoteProtocolError:
        return
    assert staying(PLAN, new) == few
    assert new.fork == again.fork == fork_name(PLAN, few)


def test_a_fork_named_by_other_members_is_refused() -> None:
    fork = fork_name(PLAN, (B, C))
    follow(PLAN, encode_change(Change(lost=(A, D, E), fork=fork)))
    with pytest.raises(RemoteProtocolError, match="name does not follow"):
        follow(PLAN, encode_change(Change(lost=(A, D), fork=fork)))


# Borders


def test_borders_move_only_with_a_checkpoint_and_leave_no_stage_empty() -> None:
    plan = PLAN
    last = plan.stages[-1].last_layer
    saved = Change(restored=bytes([7]) * 32, step=4)
    moved = successor(plan, replace(saved, cuts=(1,)))
    assert [(stage.first_layer, stage.last_layer) for stage in moved.stages] == [(0, 1), (1, last)]
    assert [stage.replicas for stage in moved.stages] == [stage.replicas for stage in plan.stages]
    assert decode_change(encode_change(replace(saved, cuts=(1,)))) == replace(saved, cuts=(1,))
    for wrong in (
        Change(cuts=(1,)),
        *(replace(saved, cuts=cuts) for cuts in ((0,), (last,), (1, 2), (1, 1))),
    ):
        with pytest.raises(RemoteProtocolError):
            successor(plan, wrong)
