"""Columns with fewer nodes than stages: each stage has a node, and stages move only if the move pays."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.identity import PeerId
from partition.plan.columns import find_takers, moves_that_pay
from partition.plan.cost import LayerCost
from partition.plan.merging import Refused
from partition.plan.plan import NO_HASH, Plan, StagePlan
from partition.plan.problem import Constraints, Link, PeerCost, Problem


def peer(number: int) -> PeerId:
    return PeerId(bytes([number]) * 32)


def plan_of(lengths: list[int]) -> Plan:
    first, stages = 0, []
    for number, length in enumerate(lengths):
        stages.append(StagePlan(first, first + length, (peer(number + 1),), (1,)))
        first += length
    roster = tuple(sorted(peer for stage in stages for peer in stage.replicas))
    return Plan(bytes(32), NO_HASH, 0, roster, roster[:1], 4, tuple(stages))


@st.composite
def columns(draw: st.DrawFn) -> tuple[Plan, dict[int, PeerId], dict[PeerId, int], Refused]:
    """Draw a plan, the holders of some of its stages, rates, and earlier refusals."""
    plan = plan_of(draw(st.lists(st.integers(1, 3), min_size=2, max_size=6)))
    held = [number for number in range(1, len(plan.stages)) if draw(st.booleans())]
    holders = {number: peer(number + 1) for number in (0, *held)}
    rates = {each: draw(st.integers(1, 9)) for each in holders.values()}
    rows = [
        (name, stage.first_layer, stage.last_layer)
        for name in holders.values()
        for stage in plan.stages
        if draw(st.integers(0, 4)) == 0
    ]
    return plan, holders, rates, rows


@given(columns())
def test_every_empty_stage_goes_to_a_node_that_did_not_refuse_it(
    drawn: tuple[Plan, dict[int, PeerId], dict[PeerId, int], Refused],
) -> None:
    plan, holders, rates, refused = drawn
    found = find_takers(plan, holders, rates, refused)
    if found is None:
        assert refused
        return
    missing = set(range(len(plan.stages))) - holders.keys()
    assert found.by_stage.keys() == missing
    for stage, taker in found.by_stage.items():
        row = plan.stages[stage]
        assert taker in holders.values()
        assert (taker, row.first_layer, row.last_layer) not in refused
    assert found.nodes == len(holders)
    assert found.slower >= 1


@given(columns())
def test_a_nodes_stages_are_adjacent(
    drawn: tuple[Plan, dict[int, PeerId], dict[PeerId, int], Refused],
) -> None:
    plan, holders, rates, _ = drawn
    found = find_takers(plan, holders, rates, ())
    assert found is not None
    column = [{**holders, **found.by_stage}[stage] for stage in range(len(plan.stages))]
    changes = sum(one != other for one, other in pairwise(column))
    assert changes == len(set(column)) - 1


def moves(free_rate: int, steps_left: int, column: str = "aaa") -> list[tuple[tuple[int, ...], PeerId]]:
    """Return which of three stages node 9 would get, if their layers take it this many times as long as node
    1.
    """
    layers = tuple(LayerCost(1 << 20, 10**8, 1 << 20, 10_000) for _ in range(6))
    holders = [peer({"a": 1, "b": 2}[each]) for each in column]
    rates = {**dict.fromkeys(holders, 1), peer(9): free_rate}
    peers = tuple(
        PeerCost(name.hex(), 8 << 30, (rate * 10**7,) * 6, (2 * rate * 10**7,) * 6)
        for name, rate in rates.items()
    )
    limits = Constraints(replicas=1)
    problem = Problem(layers, peers, microbatches=8, default_link=Link(10**9, 10_000), constraints=limits)
    return moves_that_pay(
        problem,
        plan_of([2, 2, 2]),
        holders,
        [peer(9)],
        steps_left=steps_left,
        seconds=1.0,
        gain_percent_min=20,
        pause_nanoseconds=5 * 10**9,
    )


def test_a_joining_node_gets_stages_but_never_the_heads_stage() -> None:
    assert [stages for stages, _ in moves(1, steps_left=1_000)] == [(1, 2), (2,)]


def test_only_a_holder_of_two_stages_gives_one() -> None:
    assert [stages for stages, _ in moves(1, 1_000, "aab")] == [(1,)]


@pytest.mark.parametrize(("free_rate", "steps_left"), [(9, 1_000), (1, 5)])
def test_nothing_moves_to_a_slow_node_or_shortly_before_the_end(free_rate: int, steps_left: int) -> None:
    assert moves(free_rate, steps_left) == []
