"""The accepted location of each peer follows from its claim, and from round trips that confirm or contradict
the claim."""

from random import Random

import pytest

from crypto.identity import Identity, PeerId
from gossip.coordinates import UNIT_SECONDS, Coordinate
from gossip.places import ERROR_TRUSTED, Claim, Located, distance_seconds, locate

PEERS = [Identity(bytes([number]) * 32).peer for number in range(12)]


def at(east_seconds: float, error: int = 10) -> Coordinate:
    return Coordinate((round(east_seconds / UNIT_SECONDS), 0, 0, 0), 10, error)


def regions(rng: Random, liars: int = 0) -> dict[PeerId, Claim]:
    """Return six peers in the east and six that are 100 ms away; the first peer in the east claims to be in
    the west."""
    found = {}
    for number, peer in enumerate(PEERS):
        is_east = number < 6
        claimed = "west" if number < liars or not is_east else "east"
        found[peer] = Claim(claimed, at((0.1 if is_east else 0.0) + rng.uniform(0, 0.008)))
    return found


@pytest.mark.parametrize("liars", [0, 1, 2])
def test_a_wrong_location_is_doubted_and_right_ones_are_not(liars: int) -> None:
    for seed in range(20):
        found = locate(regions(Random(seed), liars))
        for number, peer in enumerate(PEERS):
            if number < liars:
                assert found[peer] == Located("west", "east", is_doubted=True)
            else:
                assert not found[peer].is_doubted
                assert found[peer].location == ("east" if number < 6 else "west")


def test_a_peer_without_a_claim_is_placed_with_its_neighbours() -> None:
    claims = regions(Random(1))
    claims[PEERS[0]] = Claim("", at(0.101))
    claims[PEERS[1]] = Claim("", at(0.5))
    found = locate(claims)
    assert found[PEERS[0]] == Located("", "east")
    assert found[PEERS[1]] == Located("", "")


def test_an_unmeasured_claim_is_accepted() -> None:
    claims = regions(Random(1), liars=1)
    claims[PEERS[0]] = Claim("west", at(0.1, error=ERROR_TRUSTED + 1))
    assert locate(claims)[PEERS[0]] == Located("west", "west")
    assert locate({PEERS[0]: Claim("moon", at(0.1))})[PEERS[0]] == Located("moon", "moon")


def test_a_distance_is_between_the_points_plus_both_heights() -> None:
    assert distance_seconds(at(0.0), at(0.05)) == pytest.approx(0.052)
