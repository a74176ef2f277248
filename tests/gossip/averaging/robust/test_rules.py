"""Each robust rule stays near the mean without liars and near the honest vectors with some, and gives the
same result in any order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.averaging.robust.centered_clipping import ITERATIONS, centered_clipping
from gossip.averaging.robust.geometric_median import geometric_median
from gossip.averaging.robust.inputs import Vectors, Weights
from gossip.averaging.robust.krum import krum, multi_krum
from gossip.averaging.robust.median import median
from gossip.averaging.robust.nearest_neighbours import mix_nearest
from gossip.averaging.robust.trimmed_mean import trimmed_mean

Rule = Callable[..., Any]


def mixed_mean(vectors: Vectors, weights: Weights, f: int = 0) -> Any:
    return trimmed_mean(*mix_nearest(vectors, weights, f))


MEMBERS_MIN: dict[Rule, Callable[[int], int]] = {
    median: lambda f: 2 * f + 1,
    trimmed_mean: lambda f: 2 * f + 1,
    centered_clipping: lambda f: 2 * f + 1,
    geometric_median: lambda f: 2 * f + 1,
    mixed_mean: lambda f: 2 * f + 1,
    krum: lambda f: 2 * f + 3,
    multi_krum: lambda f: 2 * f + 3,
}
ROBUST = list(MEMBERS_MIN)
COORDINATE_WISE = [median, trimmed_mean]
LIES = ["large", "sign", "tiny spread", "one coordinate", "random"]


def lies_of(kind: str, honest: Vectors, count: int, draws: np.random.Generator) -> Vectors:
    """Return vectors of liars that know what all other members send."""
    centre = honest.mean(axis=0)
    match kind:
        case "large":
            rows = np.tile(centre * 0 + 1e30, (count, 1))
        case "sign":
            rows = np.tile(-10 * centre, (count, 1))
        case "tiny spread":  # a small shift is enough (Baruch et al. 2019)
            rows = np.tile(centre - 1.5 * honest.std(axis=0), (count, 1))
        case "one coordinate":
            rows = np.tile(centre, (count, 1))
            rows[:, 0] = -1e30
        case _:
            rows = draws.standard_normal((count, honest.shape[1])) * 10.0 ** draws.integers(-3, 20)
    return rows.astype(honest.dtype)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Vectors, Vectors, int, int]:
    """Draw honest vectors, those of f liars, f, and a seed."""
    seed, f = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 5))
    draws = np.random.default_rng(seed)
    count = f + 3 + draw(st.integers(0, 6))
    shape = (count, draw(st.integers(1, 40)))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    honest = (draws.standard_normal(shape) + draws.standard_normal(shape[1]) * 3).astype(dtype)
    return honest, lies_of(draw(st.sampled_from(LIES)), honest, f, draws), f, seed


@pytest.mark.parametrize("rule", ROBUST)
@settings(max_examples=40, deadline=None)
@given(groups())
def test_the_order_of_members_does_not_affect_the_result(rule: Rule, group: Any) -> None:
    honest, lies, f, seed = group
    vectors = np.concatenate([honest, lies])
    draws = np.random.default_rng(seed)
    weights = draws.choice([1.0, 1.0, 2.0, 3.5], len(vectors))
    order = draws.permutation(len(vectors))
    found = rule(vectors, weights, f)
    assert found.dtype == vectors.dtype
    assert found.tobytes() == rule(vectors[order], weights[order], f).tobytes()


@pytest.mark.parametrize("rule", COORDINATE_WISE)
@settings(max_examples=100, deadline=None)
@given(groups())
def test_each_value_of_a_result_stays_within_the_honest_range(rule: Rule, group: Any) -> None:
    honest, lies, f, seed = group
    # Liars claim the largest weights that are accepted.
    weights = np.array([1.0] * len(honest) + [4.0] * len(lies))
    if seed % 2:
        weights = np.ones(len(weights))
    found = rule(np.concatenate([honest, lies]), weights, f)
    assert (found >= honest.min(axis=0)).all()
    assert (found <= honest.max(axis=0)).all()


@settings(max_examples=100, deadline=None)
@given(groups())
def test_the_geometric_median_stays_within_its_proven_radius(group: Any) -> None:
    honest, lies, f, _ = group
    n = len(honest) + len(lies)
    found = geometric_median(np.concatenate([honest, lies]), np.ones(n), f).astype(np.float64)
    centre = honest.mean(axis=0)
    radius = np.linalg.norm(honest - centre, axis=1).max()
    assert np.linalg.norm(found - centre) <= 2 * (n - f) / (n - 2 * f) * radius * 1.01 + 1e-5


@settings(max_examples=100, deadline=None)
@given(groups())
def test_centered_clipping_stays_within_its_proven_radius(group: Any) -> None:
    honest, lies, f, _ = group
    vectors = np.concatenate([honest, lies])
    centre = np.zeros(honest.shape[1], honest.dtype)
    found = centered_clipping(vectors, np.ones(len(vectors)), f, centre)
    farthest = np.linalg.norm(honest.astype(np.float64), axis=1).max()
    assert np.linalg.norm(found) <= (2**ITERATIONS - 1) * farthest * (1 + 1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_krum_chooses_an_honest_vector_if_lies_are_far_apart(seed: int, f: int) -> None:
    draws = np.random.default_rng(seed)
    honest = draws.standard_normal((f + 3, 20)).astype(np.float32)
    lies = (draws.standard_normal((f, 20)) * 1e6).astype(np.float32)
    vectors, weights = np.concatenate([honest, lies]), np.ones(2 * f + 3)
    assert any((krum(vectors, weights, f) == each).all() for each in honest)
    several = multi_krum(vectors, weights, f)
    assert (several >= honest.min(axis=0) - 1e-6).all()
    assert (several <= honest.max(axis=0) + 1e-6).all()


@pytest.mark.parametrize("rule", [trimmed_mean, mixed_mean])
def test_a_rule_for_zero_liars_is_the_weighted_mean(rule: Rule) -> None:
    draws = np.random.default_rng(3)
    vectors = draws.standard_normal((7, 40_000)).astype(np.float32)
    weights = np.ones(7) if rule is mixed_mean else draws.uniform(1, 4, 7)
    expected = np.average(vectors.astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(rule(vectors, weights, 0), expected, atol=1e-6)


@pytest.mark.parametrize("rule", ROBUST)
def test_without_liars_a_rule_is_near_the_mean(rule: Rule) -> None:
    draws = np.random.default_rng(4)
    truth = draws.standard_normal(2_000)
    vectors = (truth + 0.1 * draws.standard_normal((15, 2_000))).astype(np.float32)
    found = rule(vectors, np.ones(15), 3)
    error = np.sqrt(np.square(found - vectors.mean(axis=0)).mean())
    # Krum returns one member's vector with all of its noise; the other rules average most of the noise away.
    assert error < (0.11 if rule is krum else 0.03)


@pytest.mark.parametrize("rule", ROBUST)
def test_a_majority_of_equal_vectors_gives_that_vector(rule: Rule) -> None:
    vectors = np.tile(np.array([0.1, -3.7, 1e-20], np.float32), (9, 1))
    vectors[8] = 5.0
    np.testing.assert_array_equal(rule(vectors, np.ones(9), 2), vectors[0])


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_non_finite_values_of_liars_never_enter_a_result(rule: Rule, number: float) -> None:
    draws = np.random.default_rng(5)
    vectors = draws.standard_normal((9, 300)).astype(np.float32)
    vectors[2, 17] = vectors[6, 0] = number
    found = rule(vectors, np.ones(9), 2)
    assert np.isfinite(found).all()
    honest = np.delete(vectors, [2, 6], axis=0)
    assert found.tobytes() == rule(honest, np.ones(7), 0).tobytes()
    with pytest.raises(ValueError, match="2 vectors are not finite"):
        rule(vectors, np.ones(9), 1)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("f", [1, 2, 5])
def test_a_group_too_small_for_its_number_of_liars_is_refused(rule: Rule, f: int) -> None:
    least = MEMBERS_MIN[rule](f)
    vectors = np.random.default_rng(6).standard_normal((least, 10)).astype(np.float32)
    rule(vectors, np.ones(least), f)
    with pytest.raises(
        ValueError, match=f"{f} liars need a group of at least {least}; this one has {least - 1}"
    ):
        rule(vectors[1:], np.ones(least - 1), f)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_an_invalid_weight_is_refused(rule: Rule, weight: float) -> None:
    weights = np.ones(9)
    weights[4] = weight
    with pytest.raises(ValueError, match="every weight must be finite and above 0"):
        rule(np.ones((9, 3), np.float32), weights, 1)


def test_long_vectors_are_reduced_in_blocks_with_equal_results() -> None:
    vectors = np.random.default_rng(7).standard_normal((5, 50_001)).astype(np.float32)
    np.testing.assert_array_equal(median(vectors, np.ones(5), 2), np.median(vectors, axis=0))
    inner = np.sort(vectors, axis=0)[1:4].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(trimmed_mean(vectors, np.ones(5), 1), inner, rtol=1e-6, atol=1e-7)
