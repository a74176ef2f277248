"""Peers that compute their own grid positions meet in the planned groups, and recover when their positions
drift apart."""

import numpy as np
import pytest

from crypto.identity import PeerId
from gossip.averaging.group import Group, GroupMember, Terms
from gossip.averaging.walk import TURNS_AHEAD_MAX, GridWalk, Spot
from tests.gossip.swarm import peer_of

TERMS = Terms("butterfly", "float32", bytes(32), 1, "float32")


def group_of(members: dict[PeerId, int], turn: int) -> Group:
    rows = tuple(GroupMember(peer, bytes(16), 1, True, at) for peer, at in sorted(members.items()))
    return Group(b"run", turn, 0, TERMS, rows)


def walks_of(count: int) -> dict[PeerId, GridWalk]:
    return {peer_of(number): GridWalk(b"run", peer_of(number)) for number in range(count)}


def average(walks: dict[PeerId, GridWalk], values: dict[PeerId, float], size: int) -> None:
    """Run one round of all peers, each at the position that it computes itself."""
    spots: dict[PeerId, Spot] = {}
    for peer, walk in walks.items():
        spot = walk.spot([other for other in walks if other != peer], size)
        assert spot is not None
        spots[peer] = spot
    for key in {spot.key for spot in spots.values()}:
        met = {peer: spot.coordinate for peer, spot in spots.items() if spot.key == key}
        assert len(met) <= size
        mean = float(np.mean([values[peer] for peer in met]))
        turn = walks[min(met)].turn
        for peer in met:
            values[peer] = mean
            if len(met) > 1:
                walks[peer].averaged(group_of(met, turn), spots[peer])
            else:
                walks[peer].failed()


@pytest.mark.parametrize(("count", "size", "rounds"), [(8, 2, 3), (64, 8, 2), (64, 4, 3), (512, 8, 3)])
def test_peers_reach_the_mean_after_one_round_per_axis(count: int, size: int, rounds: int) -> None:
    draws = np.random.default_rng(1)
    walks = walks_of(count)
    values = {peer: float(draws.standard_normal()) for peer in walks}
    mean = float(np.mean(list(values.values())))
    for _ in range(rounds):
        average(walks, values, size)
    assert np.allclose(list(values.values()), mean, atol=1e-12)


def test_a_peer_one_round_behind_catches_up_with_its_group() -> None:
    first, second = (walk for walk in walks_of(2).values())
    group = group_of({peer_of(0): 0, peer_of(1): 0}, 6)
    first.averaged(group, None)
    second.failed()
    second.averaged(group, None)
    assert first.turn == second.turn == 7


def test_a_claimed_round_number_far_ahead_is_not_believed() -> None:
    walk = walks_of(1)[peer_of(0)]
    walk.averaged(group_of({peer_of(0): 0, peer_of(1): 0}, TURNS_AHEAD_MAX + 1), None)
    assert walk.turn == 1


def test_there_is_no_grid_if_all_fit_into_one_group() -> None:
    walk = walks_of(1)[peer_of(0)]
    assert walk.spot([peer_of(1)], 8) is None
    assert walk.spot([peer_of(number) for number in range(1, 9)], 8) is not None
    assert walk.axes == (3, 3)
    assert walk.spot([peer_of(1)], 8) is None


@pytest.mark.parametrize("count", [256, 362])
def test_peers_that_only_estimate_their_number_still_reach_one_mean(count: int) -> None:
    """Estimates are off by 3 %, so near the border between two grid sizes half of the peers use a different
    grid."""
    draws = np.random.default_rng(1)
    walks = walks_of(count)
    values = {peer: float(draws.standard_normal()) for peer in walks}
    mean = float(np.mean(list(values.values())))
    estimates = {peer: round(count * (1 + 0.03 * draws.standard_normal())) for peer in walks}
    for _ in range(10):
        met: dict[bytes, dict[PeerId, Spot]] = {}
        for peer, walk in walks.items():
            spot = walk.spot((), 16, estimates[peer])
            assert spot is not None
            met.setdefault(spot.key, {})[peer] = spot
        for spots in met.values():
            middle = float(np.mean([values[peer] for peer in spots]))
            members = {peer: spot.coordinate for peer, spot in spots.items()}
            for peer, spot in spots.items():
                values[peer] = middle
                if len(spots) > 1:
                    walks[peer].averaged(group_of(members, walks[peer].turn), spot)
                else:
                    walks[peer].failed()
    assert float(np.var(list(values.values()))) < 1e-4
    assert float(np.mean(list(values.values()))) == pytest.approx(mean, abs=1e-9)
