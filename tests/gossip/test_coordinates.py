"""Network coordinates predict the round trips of a simulated world, and liars have little effect."""

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from gossip.coordinates import (
    DIMENSIONS,
    ERROR_MAX,
    FARTHEST,
    PEERS_KEPT_MAX,
    STEP_MAX,
    UNIT_SECONDS,
    Coordinate,
    Coordinates,
)
from tests.gossip.swarm import peer_of

coordinates = st.builds(
    Coordinate,
    st.tuples(*[st.integers(-FARTHEST, FARTHEST)] * DIMENSIONS),
    st.integers(0, FARTHEST),
    st.integers(0, int(ERROR_MAX * 100)),
)


def world(count: int, liars: int, rounds: int = 300) -> float:
    """Return the median relative error over honest pairs, after each peer has pinged `rounds` others."""
    rng = Random(7)
    places = [(rng.uniform(0, 0.08), rng.uniform(0, 0.08)) for _ in range(count)]
    heights = [rng.uniform(0.001, 0.01) for _ in range(count)]

    def takes(one: int, other: int) -> float:
        return math.dist(places[one], places[other]) + heights[one] + heights[other]

    peers = [Coordinates(Random(number)) for number in range(count)]
    for _ in range(rounds):
        for one in range(count):
            other = rng.randrange(count)
            if other == one:
                continue
            said = peers[other].here
            if other < liars:
                said = Coordinate(tuple(rng.randrange(-FARTHEST, FARTHEST) for _ in range(DIMENSIONS)), 0, 0)
            peers[one].learn(peer_of(other), said, takes(one, other) * rng.uniform(1.0, 1.1))
    errors = sorted(
        abs(peers[one].round_trip_seconds(peers[other].here) - takes(one, other)) / takes(one, other)
        for one in range(liars, count)
        for other in range(liars, one)
    )
    return errors[len(errors) // 2]


def test_round_trips_are_predicted_within_a_sixth() -> None:
    assert world(60, 0) < 0.17


def test_liars_among_a_tenth_of_peers_shift_others_coordinates_little() -> None:
    assert world(60, 6) < 0.45


@given(st.lists(st.tuples(st.integers(0, 9), coordinates, st.floats(-1, 100)), max_size=40))
def test_a_coordinate_stays_in_its_bounds_and_moves_slowly(
    samples: list[tuple[int, Coordinate, float]],
) -> None:
    mine = Coordinates(Random(1))
    for number, there, seconds in samples:
        before = mine.here
        mine.learn(peer_of(number), there, seconds)
        moved = math.dist(before.point, mine.here.point) * UNIT_SECONDS
        assert moved <= STEP_MAX + DIMENSIONS * UNIT_SECONDS
        assert decode(encode(mine.here), Coordinate, bytes_max=100) == mine.here


def test_samples_are_kept_for_a_bounded_number_of_peers() -> None:
    mine = Coordinates(Random(1))
    there = Coordinates(Random(2)).here
    for number in range(PEERS_KEPT_MAX + 20):
        mine.learn(peer_of(number), there, 0.05)
    assert len(mine._samples) == PEERS_KEPT_MAX
