"""Merged stages hold each layer once, each has a holder, and no stage goes to a peer that refused it."""

from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from partition.plan.change import Change, Joining, decode_change, encode_change, successor
from partition.plan.merging import Refused, merged_stages, slowest_pace, stage_pace
from partition.plan.plan import NO_HASH, Plan, StagePlan

SAVED = b"s" * 32


def peer(number: int) -> bytes:
    return bytes([number]) * 32


@st.composite
def losses(draw: st.DrawFn) -> tuple[Plan, list[list[tuple[bytes, int]]], Refused]:
    """Draw a plan, the remaining holders of each stage, and stages that some peers cannot hold."""
    names = iter(range(1, 250))
    first, stages = 0, []
    for _ in range(draw(st.integers(1, 6))):
        last = first + draw(st.integers(1, 4))
        replicas = tuple(peer(next(names)) for _ in range(draw(st.integers(1, 3))))
        rates = tuple(draw(st.integers(0, 9)) for _ in replicas)
        stages.append(StagePlan(first, last, replicas, rates))
        first = last
    roster = tuple(sorted(peer for stage in stages for peer in stage.replicas))
    plan = Plan(bytes(32), NO_HASH, 0, roster, roster[:1], 4, tuple(stages))
    groups = [
        [row for row in zip(stage.replicas, stage.rates, strict=True) if draw(st.booleans())]
        for stage in stages
    ]
    living = [peer for group in groups for peer, _ in group]
    layers = st.integers(0, first)
    refused = draw(st.lists(st.tuples(st.sampled_from(living), layers, layers), max_size=6)) if living else []
    return plan, groups, refused


def ways(plan: Plan, groups: list[list[tuple[bytes, int]]], refused: Refused) -> list[list[StagePlan]]:
    """Yield all ways to merge, one by one."""
    places = [number for number, group in enumerate(groups) if group]
    if not places:
        return []
    borders = [0, *(stage.last_layer for stage in plan.stages)]
    found = []
    for cuts in product(*(range(one + 1, other + 1) for one, other in pairwise(places))):
        stages = []
        ends = zip((0, *cuts), (*cuts, len(plan.stages)), places, strict=True)
        for begin, end, place in ends:
            low, high = borders[begin], borders[end]
            rows = [
                row
                for row in groups[place]
                if not any(name == row[0] and low <= one and other <= high for name, one, other in refused)
            ]
            stages.append(StagePlan(low, high, tuple(row[0] for row in rows), tuple(row[1] for row in rows)))
        if all(stage.replicas for stage in stages):
            found.append(stages)
    return found


@given(losses())
def test_the_best_way_to_merge_is_found_and_follows_from_the_plan(
    case: tuple[Plan, list[list[tuple[bytes, int]]], Refused],
) -> None:
    plan, groups, refused = case
    found, able = merged_stages(plan, groups, refused), ways(plan, groups, refused)
    if found is None:
        assert not able
        return
    worst: Fraction = max(map(stage_pace, found))
    assert worst == min(max(map(stage_pace, stages)) for stages in able)
    living = {peer for group in groups for peer, _ in group}
    lost = tuple(sorted(set(plan.roster) - living))
    change = Change(lost=lost, restored=SAVED, step=3, stages=found)
    assert decode_change(encode_change(change)) == change
    after = successor(plan, change)
    assert after.stages == found
    assert slowest_pace(after) == worst
    assert set(after.roster) == living


PLAN = Plan(
    bytes(32),
    NO_HASH,
    0,
    (peer(1), peer(2), peer(3)),
    (peer(1),),
    4,
    (StagePlan(0, 2, (peer(1),), (5,)), StagePlan(2, 4, (peer(2),), (5,))),
)
ONE = (StagePlan(0, 4, (peer(1),), (5,)),)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"restored": NO_HASH, "step": 0}, "no checkpoint"),
        ({"cuts": (1,)}, "both stages and cuts"),
        ({"stages": (StagePlan(0, 3, (peer(1),), (5,)),)}, "another model"),
        ({"stages": (StagePlan(0, 4, (peer(3),), (5,)),)}, "does not join"),
        ({"stages": (StagePlan(0, 4, (peer(2),), (5,)),)}, "does not join"),
        ({"stages": (StagePlan(0, 2, (peer(1),), (5,)), StagePlan(3, 4, (peer(4),), (5,)))}, "does not join"),
        ({"joined": (Joining(peer(4), 0, 5),)}, "does not join"),
        ({"joined": (Joining(peer(4), 1, 5),)}, "does not exist"),
    ],
)
def test_an_impossible_change_of_stages_is_refused(changes: dict[str, object], words: str) -> None:
    fields: dict[str, object] = {"lost": (peer(2),), "restored": SAVED, "step": 3, "stages": ONE}
    assert successor(PLAN, Change(**fields)).stages == ONE  # type: ignore[arg-type]  # fields by name
    with pytest.raises(RemoteProtocolError, match=words):
        successor(PLAN, Change(**(fields | changes)))  # type: ignore[arg-type]  # fields by name


def test_one_stage_is_split_with_a_joining_peer() -> None:
    merged = successor(PLAN, Change(lost=(peer(2),), restored=SAVED, step=3, stages=ONE))
    two = (StagePlan(0, 3, (peer(1),), (5,)), StagePlan(3, 4, (peer(4),), (7,)))
    change = Change(joined=(Joining(peer(4), 1, 7),), restored=SAVED, step=5, stages=two)
    split = successor(merged, change)
    assert split.stages == two
    assert peer(4) in split.roster
