"""Searches by capability start with peers whose network coordinates are near."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.coordinates import DIMENSIONS, UNIT_SECONDS, Coordinate, Coordinates
from node.services.adverts import ERROR_TOLD_MAX, MOVED_SECONDS_MIN, estimate_seconds, settled
from tests.gossip.swarm import peer_of


def place(*point: int, height: int = 0, error: int = 10) -> Coordinate:
    return Coordinate((point[0], point[1], point[2], point[3]), height, error)


def test_a_nearer_peer_has_a_smaller_estimated_round_trip() -> None:
    here = Coordinates(Random(1))
    near, far = (0.01, 0.0, 0.0, 0.0, 0.001), (0.1, 0.0, 0.0, 0.0, 0.001)
    nearest, farthest = (estimate_seconds(here, there) for there in (near, far))
    assert nearest is not None
    assert farthest == pytest.approx(nearest + 0.09, abs=2e-4)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=DIMENSIONS + 3))
def test_any_claimed_coordinates_give_a_bounded_estimate_or_none(there: list[float]) -> None:
    found = estimate_seconds(Coordinates(Random(1)), there)
    assert found is None or 0.0 <= found <= 40.0


def test_coordinates_are_published_once_reliable_and_only_after_moves() -> None:
    assert settled((), place(1, 2, 3, 4, error=ERROR_TOLD_MAX + 1)) == ()
    told = settled((), place(100, 0, 0, 0, height=7))
    assert told == pytest.approx((100 * UNIT_SECONDS, 0.0, 0.0, 0.0, 7 * UNIT_SECONDS))
    step = int(MOVED_SECONDS_MIN / UNIT_SECONDS)
    assert settled(told, place(100 + step - 1, 0, 0, 0, height=7)) == told
    assert settled(told, place(100 + step + 1, 0, 0, 0, height=7)) != told


def test_two_peers_estimate_the_round_trip_that_they_measured() -> None:
    one, other = Coordinates(Random(1)), Coordinates(Random(2))
    for _ in range(200):
        one.learn(peer_of(2), other.here, 0.08)
        other.learn(peer_of(1), one.here, 0.08)
    assert estimate_seconds(one, settled((), other.here)) == pytest.approx(0.08, rel=0.2)
