"""From one split of layers to the next: which layers move, the benefit, and when nothing moves."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.plan.cost import LayerCost
from partition.plan.forecast import forecast
from partition.plan.problem import Constraints, Infeasible, Link, PeerCost, Problem, Split
from partition.plan.rebalance import HYSTERESIS_PERCENT, diff, measured, move_borders, rebalance
from partition.plan.solver import solve
from tests.partition.planned import is_allowed, layers_in_order, problems

MIB = 1 << 20
LAYERS = tuple(LayerCost(4 * MIB, 10**8, MIB, 10_000) for _ in range(24))


def three(rates: tuple[int, int, int], **rest: object) -> Problem:
    """Return three peers whose layers take this many microseconds, on fast links."""
    peers = tuple(
        PeerCost(f"peer-{number}", 8 << 30, (rate * 1000,) * 24, (2 * rate * 1000,) * 24)
        for number, rate in enumerate(rates)
    )
    given = {"microbatches": 64, "default_link": Link(10**9, 10_000), "constraints": Constraints(replicas=1)}
    return Problem(LAYERS, peers, **(given | rest))  # type: ignore[arg-type]  # of any field


def test_a_throttled_peer_gives_layers_only_to_its_neighbours() -> None:
    old = solve(three((4000, 2000, 1000)))
    throttled = three((4000, 2000, 3000))
    decision = rebalance(throttled, old)
    assert decision.is_change
    assert decision.split.groups == old.groups
    best = forecast(throttled, solve(throttled)).step_nanoseconds
    assert best >= 0.9 * forecast(throttled, decision.split).step_nanoseconds
    order = [group[0] for group in old.groups]
    names = [throttled.peers[place].name for place in order]
    for move in decision.moves:
        (source,) = move.sources
        assert abs(names.index(move.peer) - names.index(source)) == 1


def test_a_gain_within_the_hysteresis_moves_nothing() -> None:
    old = solve(three((4000, 2000, 1000)))
    decision = rebalance(three((4000, 2000, 1030)), old)
    assert not decision.is_change
    assert decision.split == old
    assert decision.gain_percent < HYSTERESIS_PERCENT


def test_layers_that_take_too_long_to_move_stay() -> None:
    old = solve(three((4000, 2000, 1000)))
    slow = replace(three((4000, 2000, 3000)), default_link=Link(2_000, 10_000))
    decision = rebalance(replace(slow, hides_links=True), old)
    assert not decision.is_change


def test_a_split_that_no_longer_fits_is_changed_at_any_cost() -> None:
    problem = three((4000, 2000, 1000))
    old = solve(problem)
    peers = (*problem.peers[:2], replace(problem.peers[2], memory_bytes=600 * MIB))
    decision = rebalance(replace(problem, peers=peers), old)
    assert decision.is_change
    assert "no longer fits" in decision.reason


def test_moved_bytes_are_parameters_and_moments_of_new_layers() -> None:
    problem = three((1000, 1000, 1000))
    old = Split(((0, 8), (8, 16), (16, 24)), ((0,), (1,), (2,)), 1, 1)
    new = Split(((0, 10), (10, 16), (16, 24)), ((0,), (1,), (2,)), 1, 1)
    (move,) = diff(problem, old, new)
    assert (move.peer, move.first, move.last, move.sources) == ("peer-0", 8, 10, ("peer-1",))
    assert move.bytes == 2 * 3 * 4 * MIB
    assert diff(problem, old, old) == ()


def test_a_newcomer_fetches_all_of_its_stage_from_those_that_hold_it() -> None:
    problem = three((1000, 1000, 1000))
    old = Split(((0, 12), (12, 24)), ((0,), (1,)), 1, 1)
    new = Split(((0, 12), (12, 24)), ((0, 2), (1,)), 1, 1)
    (move,) = diff(problem, old, new)
    assert (move.peer, move.first, move.last, move.sources) == ("peer-2", 0, 12, ("peer-0",))


@given(problems(), st.integers(1, 50), st.data())
@settings(max_examples=25, deadline=None)
def test_the_next_split_is_always_complete_and_allowed(
    problem: Problem, factor: int, data: st.DataObject
) -> None:
    try:
        old = solve(problem)
    except Infeasible:
        return
    place = data.draw(st.integers(0, len(problem.peers) - 1))
    slower = replace(
        problem.peers[place],
        forward=tuple(factor * time for time in problem.peers[place].forward),
        backward=tuple(factor * time for time in problem.peers[place].backward),
    )
    changed = replace(
        problem, peers=tuple(slower if row == place else peer for row, peer in enumerate(problem.peers))
    )
    decision = rebalance(changed, old)
    assert layers_in_order(decision.split) == list(range(len(problem.layers)))
    assert is_allowed(changed, decision.split.ranges, decision.split.groups)
    if not decision.moves:
        assert decision.split == old or diff(changed, old, decision.split) == ()


def test_the_lack_of_any_fitting_split_is_reported() -> None:
    problem = three((1000, 1000, 1000))
    old = solve(problem)
    peers = tuple(replace(peer, memory_bytes=1) for peer in problem.peers)
    with pytest.raises(Infeasible):
        rebalance(replace(problem, peers=peers), old)


def test_measured_times_replace_claims() -> None:
    """A peer that claims ten times its rate ends with the share that its real rate deserves."""
    honest = three((1000, 1000, 1000))
    liar = replace(honest, peers=(*honest.peers[:2], *three((1000, 1000, 100)).peers[2:]))
    split = solve(liar)
    assert max(last - first for first, last in split.ranges) > 12
    found = {
        honest.peers[place].name: 3_000_000 * (last - first)
        for (first, last), (place,) in zip(split.ranges, split.groups, strict=True)
    }
    assert measured(liar, split, found) == honest
    decision = move_borders(measured(liar, split, found), split, steps_left=100)
    assert [last - first for first, last in decision.split.ranges] == [8, 8, 8]


def test_an_unmeasured_peer_is_scaled_like_the_others() -> None:
    problem = three((1000, 1000, 1000))
    split = Split(((0, 8), (8, 16), (16, 24)), ((0,), (1,), (2,)), 1, 1)
    found = measured(problem, split, {"peer-0": 8 * 6_000_000, "peer-1": 8 * 6_000_000})
    assert found == three((2000, 2000, 2000))
    assert measured(problem, split, {}) == problem


@pytest.mark.parametrize("liar", ["peer-0", "peer-1", "peer-2"])
def test_a_peer_that_claims_to_take_centuries_breaks_no_plan(liar: str) -> None:
    problem = three((1000, 1000, 1000))
    split = Split(((0, 8), (8, 16), (16, 24)), ((0,), (1,), (2,)), 1, 1)
    decision = move_borders(measured(problem, split, {liar: 2**63 - 1}), split, steps_left=100)
    assert layers_in_order(decision.split) == list(range(24))


def test_borders_stay_if_the_remaining_steps_do_not_pay_for_the_pause() -> None:
    old = solve(three((4000, 2000, 1000)))
    throttled = three((4000, 2000, 3000))
    pause = 5_000_000_000
    assert move_borders(throttled, old, steps_left=1_000, pause_nanoseconds=pause).is_change
    assert not move_borders(throttled, old, steps_left=2, pause_nanoseconds=pause).is_change
    assert not move_borders(three((4000, 2000, 1030)), old, steps_left=10**6).is_change


@given(problems(), st.lists(st.integers(1, 10**9), min_size=8, max_size=8), st.integers(0, 10**4))
@settings(max_examples=25, deadline=None)
def test_moved_borders_keep_every_peer_in_its_stage_and_fit(
    problem: Problem, times: list[int], steps_left: int
) -> None:
    try:
        old = solve(problem)
    except Infeasible:
        return
    names = [problem.peers[place].name for group in old.groups for place in group]
    now = measured(problem, old, dict(zip(names, times, strict=False)))
    decision = move_borders(now, old, steps_left=steps_left)
    assert decision.split.groups == old.groups
    assert layers_in_order(decision.split) == list(range(len(problem.layers)))
    assert is_allowed(now, decision.split.ranges, decision.split.groups)
