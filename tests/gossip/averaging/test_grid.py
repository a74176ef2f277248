"""The grid follows the number of peers, and spreads their values to all in as many rounds as it has axes."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.identity import PeerId
from gossip.averaging.grid import Grid, axes_of
from tests.gossip.swarm import peer_of


def rounds_to_agree(count: int, group_size: int, absence: float = 0.0, seed: int = 0) -> int:
    """Return how many rounds pass until the variance of one value per peer is below 1e-9."""
    draws = np.random.default_rng(seed)
    peers = [peer_of(number) for number in range(count)]
    grid = Grid(b"run", seed, peers, group_size)
    values = dict(zip(peers, draws.standard_normal(count), strict=True))
    mean = np.mean(list(values.values()))
    cells = {peer: grid.start(peer) for peer in peers}
    for number in range(50):
        groups: dict[bytes, list[PeerId]] = {}
        for peer in peers:
            if draws.random() >= absence:
                groups.setdefault(grid.key(number, cells[peer]), []).append(peer)
        for group in groups.values():
            assert len(group) <= group_size or absence
            values.update(dict.fromkeys(group, np.mean([values[peer] for peer in group])))
            held = {peer: cells[peer][grid.axis(number)] for peer in group}
            cells.update(grid.moved(number, cells[group[0]], held))
        if np.var(list(values.values())) < 1e-9:
            assert absence or abs(np.mean(list(values.values())) - mean) < 1e-9
            return number + 1
    return 50


@pytest.mark.parametrize(
    ("count", "group_size", "axes"),
    [
        (1024, 32, (32, 32)),
        (512, 32, (16, 32)),
        (509, 32, (17, 30)),
        (512, 8, (8, 8, 8)),
        (8, 2, (2, 2, 2)),
        (20, 32, (20,)),
        (1, 32, (1,)),
    ],
)
def test_axes_follow_the_number_of_peers(count: int, group_size: int, axes: tuple[int, ...]) -> None:
    assert axes_of(count, group_size) == axes


@settings(max_examples=200)
@given(st.integers(1, 3_000), st.integers(2, 64))
def test_every_number_of_peers_has_a_nearly_full_grid(count: int, group_size: int) -> None:
    axes = axes_of(count, group_size)
    assert max(axes) <= max(group_size, 1)
    if len(axes) <= 3:
        assert count <= prod(axes) <= 1.34 * count
    grid = Grid(b"run", 1, [peer_of(number) for number in range(min(count, 40))], group_size)
    cells = [grid.start(peer_of(number)) for number in range(min(count, 40))]
    assert len(set(cells)) == len(cells) or len(axes) > 3
    for cell in (*cells, grid.start(peer_of(10_000))):
        assert all(0 <= at < side for at, side in zip(cell, grid.axes, strict=True))


def test_a_full_grid_gives_the_mean_after_one_round_per_axis() -> None:
    assert rounds_to_agree(1024, 32) == 2
    assert rounds_to_agree(512, 32) == 2
    assert rounds_to_agree(512, 8) == 3


def test_eight_peers_in_groups_of_two_agree_by_the_third_round() -> None:
    assert rounds_to_agree(8, 2) == 3


def test_any_number_of_peers_agrees_within_few_rounds() -> None:
    assert np.mean([rounds_to_agree(509, 32, seed=seed) for seed in range(10)]) <= 5
    assert np.mean([rounds_to_agree(61, 8, seed=seed) for seed in range(10)]) <= 6


def test_with_absent_peers_the_rounds_needed_match_the_paper() -> None:
    # Ryabinin et al. report 5.9 rounds; this is the mean over a few seeds.
    found = [rounds_to_agree(1024, 32, 0.01, seed) for seed in range(5)]
    assert 5.2 <= np.mean(found) <= 6.6
