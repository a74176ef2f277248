"""The interval between checkpoints, which depends on their cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.steps.save_interval import INTERVAL_SECONDS_MAX, SHARE_MAX, SaveInterval


def interval(least: int, step_seconds: float, cost_seconds: float) -> SaveInterval:
    found = SaveInterval(least)
    found.step_took(step_seconds)
    found.checkpoint_took(20, cost_seconds)
    return found


def test_cheap_checkpoints_are_made_as_often_as_requested() -> None:
    assert interval(20, 0.1, 0.03).steps == 20
    assert SaveInterval(20).steps == 20
    assert SaveInterval(20).seconds == 0.0


@given(st.integers(1, 1_000), st.floats(0.001, 100.0), st.floats(0.0, 5.0))
def test_checkpoints_take_a_small_share_of_the_time(least: int, step: float, cost: float) -> None:
    found = interval(least, step, cost)
    assert found.steps % least == 0
    assert cost <= SHARE_MAX * found.seconds * (1 + 1e-9)
    if found.steps > least:
        assert cost > SHARE_MAX * (found.steps - least) * step * (1 - 1e-9), (
            "checkpoints are made less often than necessary"
        )


def test_a_claim_cannot_disable_checkpoints() -> None:
    assert interval(20, 0.1, 2.0**32).seconds <= INTERVAL_SECONDS_MAX + 20 * 0.1
    assert interval(20, 0.1, float("nan")).steps == 20


def test_the_slowest_stage_of_the_newest_checkpoint_counts() -> None:
    found = interval(10, 0.1, 0.04)
    found.checkpoint_took(20, 0.1)
    found.checkpoint_took(20, 0.06)
    assert found.seconds == pytest.approx(5.0)
    found.checkpoint_took(30, 0.02)
    assert found.steps == 10
    found.checkpoint_took(20, 9.0)
    assert found.steps == 10, "a late answer for an old checkpoint changed the interval"


def test_a_run_without_checkpoints_gets_none() -> None:
    assert interval(0, 0.1, 5.0).steps == 0


def slowed(found: SaveInterval, step_seconds: float, slow_seconds: float, times: int) -> SaveInterval:
    """Return the interval after checkpoints that take no time themselves, each made during three steps that
    take this long."""
    for _ in range(times):
        found.began()
        for _ in range(3):
            found.step_took(slow_seconds)
        found.ended()
        for _ in range(10):
            found.step_took(step_seconds)
    return found


def test_the_slowdown_of_steps_during_a_copy_counts() -> None:
    found = slowed(interval(10, 0.1, 0.0), 0.1, 0.2, 12)
    assert found.seconds == pytest.approx(0.3 / SHARE_MAX, rel=0.1)
    slowed(found, 0.1, 0.1, 12)
    assert found.steps == 10, "checkpoints still have a cost although steps with a copy are as fast as others"


def test_an_unfinished_checkpoint_gives_no_measurement() -> None:
    found = interval(10, 0.1, 0.0)
    found.began()
    for _ in range(1_000):
        found.step_took(5.0)
    assert found.steps == 10
    found.ended()
    assert found.seconds <= INTERVAL_SECONDS_MAX + 10 * 0.1
