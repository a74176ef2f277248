"""Which members are judged stuck when a run makes no progress. For whole histories see `test_steps_walk`."""

from typing import Any

import pytest
from msgspec.structs import replace

from crypto.identity import PeerId
from partition.steps.messages import Waiting
from partition.steps.stall_detector import (
    ASKS,
    PATIENCE_FACTOR,
    PATIENCE_SECONDS,
    PATIENCE_SECONDS_MIN,
    ROUND_SECONDS_MAX,
    StallDetector,
)
from tests.partition.fake_stage import peer

ONE, TWO, THREE = ALL = [peer(name) for name in ("one", "two", "three")]


def begun() -> StallDetector:
    overdue = StallDetector(ALL)
    overdue.begin(0.0, "committing", 3, 7)
    return overdue


def waiting(left: int, *peers: PeerId, **other: Any) -> Waiting:
    return Waiting(plan=bytes(32), step=3, attempt=7, left=left, peers=peers, **other)


def stuck_of(overdue: StallDetector, **answers: Waiting) -> set[PeerId]:
    """Ask the late members twice, and return the members judged stuck."""
    for _ in range(ASKS):
        assert overdue.stuck(overdue.due, ALL) == {}
        for name, answer in answers.items():
            overdue.answered(overdue.due - 1, peer(name), answer)
    return set(overdue.stuck(overdue.due, ALL))


def test_patience_depends_on_the_measured_durations() -> None:
    overdue = begun()
    assert overdue.due == PATIENCE_SECONDS
    overdue.reported(5.0)
    assert overdue.due == 5.0 + PATIENCE_SECONDS
    overdue.end(20.0)
    overdue.begin(30.0, "committing", 4, 7)
    assert overdue.due == 30.0 + PATIENCE_FACTOR * 20.0
    overdue.begin(30.0, "applying", 4, 7)
    assert overdue.due == 30.0 + PATIENCE_SECONDS
    overdue.end(30.5)
    overdue.begin(31.0, "applying", 5, 7)
    assert overdue.due == 31.0 + PATIENCE_SECONDS_MIN


def test_a_silent_replica_is_stuck() -> None:
    assert stuck_of(begun(), one=waiting(4, TWO), two=waiting(1)) == {THREE}


def test_a_replica_that_waits_for_no_other_is_stuck() -> None:
    assert stuck_of(begun(), one=waiting(4, TWO), two=waiting(1), three=waiting(4, TWO)) == {TWO}


def test_the_replica_that_most_others_wait_for_is_stuck() -> None:
    answers = {"one": waiting(4, THREE), "two": waiting(4, THREE), "three": waiting(4, ONE)}
    assert stuck_of(begun(), **answers) == {THREE}
    # Two lacks a summand, so it cannot send the sums that the others need from it.
    answers = {"one": waiting(1, TWO, for_sums=True), "three": waiting(1, TWO, for_sums=True)}
    assert stuck_of(begun(), two=waiting(2, ONE), **answers) == {ONE}


def test_one_of_two_replicas_that_wait_for_each_other_is_stuck() -> None:
    overdue = StallDetector(ALL[:2])
    overdue.begin(0.0, "committing", 3, 7)
    for _ in range(ASKS):
        assert overdue.stuck(overdue.due, ALL[:2]) == {}
        overdue.answered(1.0, ONE, waiting(1, TWO))
        overdue.answered(1.0, TWO, waiting(1, ONE))
    assert set(overdue.stuck(overdue.due, ALL[:2])) == {TWO}


def test_reported_progress_is_believed_for_a_limited_time() -> None:
    overdue = begun()
    left, now = 10_000, 0.0
    while now < ROUND_SECONDS_MAX:
        left, now = left - 1, overdue.due
        assert overdue.stuck(now, ALL) == {}
        for name in ALL:
            overdue.answered(now, name, waiting(left, ONE))
    found: set[PeerId] = set()
    for _ in range(ASKS + 1):
        found.update(overdue.stuck(overdue.due, ALL))
        for name in ALL:
            left -= 1
            overdue.answered(overdue.due - 1, name, waiting(left, ONE))
    assert found == {ONE}


def test_a_committer_that_stalled_itself_asks_again() -> None:
    overdue = begun()
    for _ in range(ASKS):
        overdue.stuck(overdue.due, ALL)
    assert overdue.stuck(overdue.due + 60.0, ALL) == {}
    assert overdue.stuck(overdue.due, ALL) == {}
    assert set(overdue.stuck(overdue.due, ALL)) == set(ALL)


@pytest.mark.parametrize("changes", [{"step": 2}, {"attempt": 8}])
def test_an_answer_about_another_attempt_is_ignored(changes: dict[str, int]) -> None:
    overdue = begun()
    for _ in range(ASKS):
        overdue.stuck(overdue.due, ALL)
        for name in ALL:
            overdue.answered(1.0, name, replace(waiting(1), **changes))
    assert set(overdue.stuck(overdue.due, [ONE])) == {ONE}
