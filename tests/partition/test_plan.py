"""Plans from other peers: valid plans are decoded unchanged, and all others are refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import (
    COMMITTEE_MAX,
    HEIGHT_MAX,
    MICROBATCHES_MAX,
    NO_HASH,
    PLAN_BYTES_MAX,
    Plan,
    StagePlan,
    committee,
    decode_plan,
    encode_plan,
    plan_hash,
)

A, B, C, D, E = (PeerId(bytes([number]) * 32) for number in range(5))
PLAN = Plan(
    run=bytes(32),
    parent=bytes([1]) * 32,
    height=3,
    roster=(A, B, C, D),
    trainers=(A,),
    microbatches=8,
    stages=(StagePlan(0, 2, (C, A), (5, 6)), StagePlan(2, 5, (B,), (7,))),
)
FIRST, LAST = PLAN.stages


def test_a_plan_survives_the_wire_with_its_hash() -> None:
    again = decode_plan(encode_plan(PLAN))
    assert again == PLAN
    assert plan_hash(again) == plan_hash(PLAN)


def test_different_plans_have_different_hashes() -> None:
    assert plan_hash(replace(PLAN, height=4)) != plan_hash(PLAN)


def test_members_are_the_roster_and_the_first_trainer_commits() -> None:
    assert PLAN.members == (A, B, C, D)
    assert replace(PLAN, trainers=(D, A)).committer == D
    assert [PLAN.stage_of(peer) for peer in PLAN.members] == [0, 1, 0, None]


def test_the_largest_values_survive_the_wire() -> None:
    stages = (replace(FIRST, rates=(2**63 - 1, 0)), replace(LAST, last_layer=2**63 - 1))
    plan = replace(PLAN, height=HEIGHT_MAX - 1, microbatches=MICROBATCHES_MAX, stages=stages)
    assert decode_plan(encode_plan(plan)) == plan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": ()}, "length >= 1"),
        ({"stages": (LAST,)}, "do not follow each other"),
        ({"stages": (FIRST, FIRST)}, "do not follow each other"),
        ({"stages": (replace(FIRST, last_layer=0),)}, "do not follow each other"),
        ({"stages": (replace(FIRST, rates=(1,)),)}, "more or fewer rates"),
        ({"stages": (replace(FIRST, replicas=(A, A)),)}, "two stages"),
        ({"stages": (FIRST, replace(LAST, replicas=(A,)))}, "two stages"),
        ({"stages": (replace(FIRST, replicas=(b"short", B)),)}, "length >= 32"),
        ({"height": HEIGHT_MAX}, "<"),
        ({"height": 0}, "is not the first"),
        ({"parent": NO_HASH}, "is not the first"),
        ({"microbatches": 0}, ">= 1"),
        ({"microbatches": MICROBATCHES_MAX + 1}, "<="),
        ({"trainers": ()}, "length >= 1"),
        ({"trainers": (b"",)}, "length >= 32"),
        ({"trainers": (A, A)}, "a trainer twice"),
        ({"trainers": (E,)}, "one that is not on the roster"),
        ({"roster": ()}, "length >= 1"),
        ({"roster": (B, A, C, D)}, "not sorted"),
        ({"roster": (A, A, B, C, D)}, "names a peer twice"),
        ({"roster": (A, C, D)}, "a replica that is not on the roster"),
        ({"run": bytes(31)}, "length >= 32"),
    ],
)
def test_an_inconsistent_plan_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode_plan(encode(replace(PLAN, **change)))


def test_an_oversized_plan_is_refused_undecoded() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode_plan(bytes(PLAN_BYTES_MAX + 1))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_plan(data)


@given(st.integers(0, len(encode_plan(PLAN)) - 1), st.integers(0, 255))
def test_an_altered_byte_is_refused_or_makes_another_plan(place: int, value: int) -> None:
    data = bytearray(encode_plan(PLAN))
    data[place] = value
    try:
        plan = decode_plan(bytes(data))
    except RemoteProtocolError:
        return
    assert (plan_hash(plan) == plan_hash(PLAN)) == (plan == PLAN)


# Members that decide what comes next


def crowded(members: int, run: bytes = bytes(32)) -> Plan:
    roster = tuple(sorted(bytes([number, 1]) * 16 for number in range(members)))
    return replace(
        PLAN, run=run, roster=roster, trainers=roster[:1], stages=(StagePlan(0, 1, roster[:1], (1,)),)
    )


@given(st.integers(1, 200), st.binary(min_size=32, max_size=32))
def test_a_committee_is_part_of_the_roster_and_the_same_for_all(members: int, run: bytes) -> None:
    plan = crowded(members, run)
    seats = committee(plan)
    assert len(seats) == len(set(seats)) == min(members, COMMITTEE_MAX)
    assert set(seats) <= set(plan.roster)
    assert committee(decode_plan(encode_plan(plan))) == seats


def test_nearly_every_plan_has_a_different_committee() -> None:
    seats = {committee(replace(crowded(200), height=height)) for height in range(1, 51)}
    assert len(seats) > 40


def test_a_restricted_committee_keeps_its_order() -> None:
    plan = crowded(12)
    everybody = sorted(plan.roster, key=lambda peer: (committee(plan) + plan.roster).index(peer))
    few = (everybody[7], everybody[1], everybody[4])
    assert committee(plan, few) == (everybody[1], everybody[4], everybody[7])
