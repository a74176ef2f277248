"""A requester that claims everything gets no larger share of a provider than an honest one. Virtual time."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.placement.turns import DEBT_SECONDS_MAX, PRIORITY_MAX, QUANTUM_SECONDS
from tests.node.turn_world import TICK_SECONDS, Requester, World

SIX_HOURS = 6 * 3_600.0
OFF_MAX = 0.1
HONEST = 10


def greedy(run_seconds: float = 60.0, **changes: Any) -> Requester:
    return Requester("x", run_seconds, priority=PRIORITY_MAX, **changes)


def share(world: World, name: str = "x") -> float:
    return world.played[name] / sum(world.played.values())


@pytest.mark.parametrize(
    ("slots", "outstanding", "has_fresh_keys"),
    [([1], 1, False), ([1], 1, True), ([1], 10, True), ([1, 2, 1], 10, False), ([1, 2, 1], 10, True)],
    ids=str,
)
def test_a_requester_that_claims_everything_gets_one_honest_share(
    slots: list[int], outstanding: int, has_fresh_keys: bool
) -> None:
    """The honest requesters have been served for half an hour. Each keeps one run submitted; together they
    submit some hundreds.
    """
    honest = [Requester(f"h{number}", 60.0) for number in range(HONEST)]
    other = greedy(outstanding=outstanding, has_fresh_keys=has_fresh_keys, begins_at=1_800.0)
    seconds = 1_800.0 + max(7_500.0, 20_000.0 / sum(slots))
    world = World(slots, [*honest, other], counted_from=1_800.0).play(seconds)
    mean = sum(world.played[each.name] for each in honest) / HONEST
    assert world.played["x"] <= (1 + OFF_MAX) * mean, dict(world.played)
    assert sum(world.begun[each.name] for each in honest) >= 100


@pytest.mark.parametrize("has_fresh_keys", [False, True])
def test_a_contributor_keeps_its_share_against_priority_nine(has_fresh_keys: bool) -> None:
    """The runs last an hour. Without weights for contributions the other requester would get 99.7 % of the
    slot."""
    other = greedy(3_600.0, has_fresh_keys=has_fresh_keys, outstanding=2)
    world = World([1], [Requester("h", 3_600.0, weight=8.0), other]).play(SIX_HOURS)
    assert share(world, "h") >= 8 / 9 - OFF_MAX
    assert world.waits["h"] <= 2 * QUANTUM_SECONDS + TICK_SECONDS


def test_sixteen_rotating_keys_leave_half_to_the_largest_contributor() -> None:
    other = greedy(outstanding=16, keys_kept=16)
    world = World([1], [Requester("h", 60.0, weight=8.0), other]).play(SIX_HOURS / 2)
    assert share(world, "h") >= 0.5 - OFF_MAX


def test_a_long_run_continues_despite_new_keys_of_priority_nine() -> None:
    """The competitor submits a stream of short runs, each with a new key. The honest run gets half of the
    time, and never pauses longer than two quanta.
    """
    other = greedy(300.0, has_fresh_keys=True, outstanding=2)
    world = World([1], [Requester("h", 7_200.0), other]).play(SIX_HOURS)
    assert share(world, "h") >= 0.5 - OFF_MAX / 2
    assert world.preempted["h"] >= 2, "the long run did not give the slot up and get it back several times"
    assert world.waits["h"] <= 2 * QUANTUM_SECONDS


@given(
    others=st.lists(
        st.tuples(st.sampled_from([120.0, 3_600.0]), st.integers(0, 9), st.booleans(), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    ),
    weight=st.sampled_from([1.0, 2.0, 8.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=12, deadline=None)
def test_a_requesters_wait_is_limited_under_any_competition(
    others: list[tuple[float, int, bool, int]], weight: float, seed: int
) -> None:
    requesters = [Requester("h", 900.0, weight=weight)]
    for number, (seconds, priority, has_fresh_keys, outstanding) in enumerate(others):
        requesters.append(
            Requester(
                f"x{number}",
                seconds,
                outstanding,
                priority=priority,
                has_fresh_keys=has_fresh_keys,
                keys_kept=outstanding,
            )
        )
    world = World([1], requesters, seed).play(SIX_HOURS / 2)
    keys = sum(each.outstanding for each in requesters)
    assert world.waits["h"] <= keys * 2 * QUANTUM_SECONDS + DEBT_SECONDS_MAX
    assert world.played["h"] > 0
