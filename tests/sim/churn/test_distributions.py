"""Session lengths: quantiles agree with means, and the remaining session times agree with renewal theory."""

import math
from random import Random
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.churn.distributions import mean_seconds, quantile_seconds, rest_seconds
from sim.churn.model import Distribution
from sim.churn.profiles import PROFILES

FINITE = [
    Distribution("weibull", 100.0, 0.6),
    Distribution("weibull", 100.0, 2.0),
    Distribution("lognormal", 100.0, 0.8),
    Distribution("exponential", 100.0),
    Distribution("constant", 100.0),
    Distribution("bathtub", 86_400.0),
]
STEPS = 20_000


def quantiles(distribution: Distribution) -> list[float]:
    """Divide the distribution into many equal shares, and return the middle value of each."""
    return [quantile_seconds(distribution, (step + 0.5) / STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("distribution", FINITE, ids=lambda each: each.distribution)
def test_the_mean_of_a_distribution_matches_its_quantiles(distribution: Distribution) -> None:
    assert sum(quantiles(distribution)) / STEPS == pytest.approx(mean_seconds(distribution), rel=0.01)


@pytest.mark.parametrize("distribution", FINITE, ids=lambda each: each.distribution)
def test_the_mean_remaining_session_matches_the_inspection_paradox(
    distribution: Distribution,
) -> None:
    found = quantiles(distribution)
    # The mean is E[X^2] / 2 E[X], above half the mean session, because long sessions are observed more often.
    want = sum(seconds**2 for seconds in found) / sum(found) / 2
    rng = Random(1)
    rests = [rest_seconds(distribution, rng) for _ in range(STEPS)]
    assert sum(rests) / STEPS == pytest.approx(want, rel=0.06)


@given(
    st.sampled_from(FINITE),
    st.lists(st.floats(0, 1), min_size=2, max_size=20).map(sorted),
)
def test_session_quantiles_never_decrease(distribution: Distribution, shares: list[float]) -> None:
    found = [quantile_seconds(distribution, share) for share in shares]
    assert found == sorted(found)
    assert all(0 <= seconds < math.inf for seconds in found)


def test_bathtub_sessions_end_early_or_at_the_final_limit() -> None:
    found = [seconds / 3600 for seconds in quantiles(Distribution("bathtub", 86_400.0))]
    per_hour = [sum(hour <= seconds < hour + 1 for seconds in found) for hour in range(24)]
    assert per_hour[0] > 20 * per_hour[12]
    assert per_hour[23] > 20 * per_hour[12]
    at_the_stop = sum(seconds > 24 - 1e-6 for seconds in found)
    assert at_the_stop == pytest.approx(0.06 * STEPS, rel=0.05)
    assert max(found) <= 24


def test_a_session_of_kind_forever_never_ends() -> None:
    forever = Distribution("forever")
    assert (
        quantile_seconds(forever, 0.0)
        == mean_seconds(forever)
        == rest_seconds(forever, Random(1))
        == math.inf
    )


def test_every_kind_of_distribution_is_tested_here() -> None:
    kinds = get_args(get_type_hints(Distribution)["distribution"])
    assert {each.distribution for each in FINITE} | {"forever"} == set(kinds)


def test_a_fifth_of_kad_peers_and_most_spot_machines_are_up() -> None:
    shares = {}
    for name, (sessions, absences) in PROFILES.items():
        here, away = mean_seconds(sessions), mean_seconds(absences)
        shares[name] = here / (here + away) if here < math.inf else 1.0
    assert shares["kad"] == pytest.approx(0.21, abs=0.01)
    assert shares["bittorrent"] == pytest.approx(0.31, abs=0.01)
    assert shares["spot"] == pytest.approx(0.98, abs=0.01)
