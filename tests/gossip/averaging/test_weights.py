"""Claimed weights are bounded by the group's median, the same way at every member."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.averaging.group import WEIGHT_MAX, WEIGHT_MIN, is_weight
from gossip.averaging.weights import WEIGHT_MEDIANS_MAX, bounded_weights
from tests.gossip.averaging.network import Averaging, group_of, members_of, vectors_of
from tests.gossip.swarm import peer_of

ITEMS = 4 * 4_096
WEIGHTS = st.lists(st.floats(WEIGHT_MIN, WEIGHT_MAX), min_size=2, max_size=64)


@pytest.mark.parametrize("mode", ["butterfly", "exchange"])
def test_a_claimed_weight_of_a_trillion_does_not_dominate_the_mean(mode: str) -> None:
    vectors = vectors_of(range(5), ITEMS)
    vectors[0] = np.full(ITEMS, 1_000.0, np.float32)
    world = Averaging(group_of(members_of(5), ITEMS, mode=mode), vectors, {0: WEIGHT_MAX})
    world.start()
    world.run()
    results = list(world.successes.values())
    assert len(results) == 5
    assert len({result.vector.tobytes() for result in results}) == 1
    for result in results:
        assert result.shares[peer_of(0)] == pytest.approx(4 / 8)
        assert result.shares[peer_of(0)] <= share_max(5)
        assert sum(result.shares.values()) == pytest.approx(1.0)


def share_max(members: int) -> float:
    """Return the largest share of one member: `members // 2` others weigh at least the lower median."""
    return WEIGHT_MEDIANS_MAX / (WEIGHT_MEDIANS_MAX + members // 2)


@given(WEIGHTS)
def test_no_member_has_more_than_the_maximum_share_of_weight(weights: list[float]) -> None:
    bounded = bounded_weights(weights)
    # If the lower median itself is the largest weight, all members with that weight count alike.
    assert max(bounded) / sum(bounded) <= share_max(len(weights)) + 1e-9


@given(WEIGHTS)
def test_weights_near_the_median_are_unchanged(weights: list[float]) -> None:
    middle = sorted(weights)[(len(weights) - 1) // 2]
    for weight, bounded in zip(weights, bounded_weights(weights), strict=True):
        assert bounded == min(weight, WEIGHT_MEDIANS_MAX * middle)


@given(WEIGHTS, st.randoms())
def test_the_order_of_members_changes_no_bound(weights: list[float], random: object) -> None:
    shuffled = list(weights)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis draws a random.Random
    assert sorted(bounded_weights(shuffled)) == sorted(bounded_weights(weights))


@pytest.mark.parametrize("weight", [0.0, -1.0, 5e-324, 1e13, float("nan"), float("inf"), -float("inf")])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    assert not is_weight(weight)
