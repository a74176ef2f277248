"""Distributions of sessions and absences: quantiles, means, and residual lifetimes. No I/O.

A lifetime is drawn as the quantile of a number between 0 and 1. The residual lifetime of a session in
progress (the equilibrium distribution of renewal theory) is a uniform share of a session drawn with a
probability proportional to its length, because an observer meets long sessions more often.

bathtub: preemptible machines, in the form that Kadupitiya, Jadhao and Sharma 2020 (HPDC, "Modeling the
Temporally Constrained Preemptions of Transient Cloud VMs") fitted,

    F(t) = A (1 - exp(-t / a) + exp((t - b) / c)):

many machines stop early, few in the middle, many shortly before the hard stop at b, and all that remain at b.
"""

import math
from random import Random
from statistics import NormalDist

from sim.churn.model import Distribution

_NORMAL = NormalDist()
_SHARE_MIN = 2.0**-53
"""Minimum distance of a drawn quantile from 0 and 1, whose values may be infinite."""

# Parameters of the bathtub, as shares of its hard stop; they are within the range of the published fits.
_BATHTUB_SHARE = 0.47
_BATHTUB_EARLY = 1.0 / 24
_BATHTUB_LATE = 0.8 / 24
_BISECTIONS = 40


def quantile_seconds(distribution: Distribution, share: float) -> float:
    """Return the length that a `share` (0 to 1) of all lengths do not exceed; inf for the distribution
    "forever"."""
    share = min(max(share, _SHARE_MIN), 1 - _SHARE_MIN)
    scale, shape = distribution.scale_seconds, distribution.shape
    match distribution.distribution:
        case "weibull":
            return scale * math.pow(-math.log1p(-share), 1 / shape)
        case "lognormal":
            return scale * math.exp(shape * _NORMAL.inv_cdf(share))
        case "exponential":
            return -scale * math.log1p(-share)
        case "constant":
            return scale
        case "bathtub":
            return scale * _bathtub_quantile(share)
    return math.inf


def mean_seconds(distribution: Distribution) -> float:
    """Return the mean; inf for the distribution "forever"."""
    scale, shape = distribution.scale_seconds, distribution.shape
    match distribution.distribution:
        case "weibull":
            return scale * math.gamma(1 + 1 / shape)
        case "lognormal":
            return scale * math.exp(shape**2 / 2)
        case "exponential" | "constant":
            return scale
        case "bathtub":
            return scale * _bathtub_mean()
    return math.inf


def rest_seconds(distribution: Distribution, rng: Random) -> float:
    """Draw the residual lifetime of a session or an absence that is in progress at a random moment."""
    scale, shape = distribution.scale_seconds, distribution.shape
    match distribution.distribution:
        case "weibull":
            # If its density is weighted by its length, a Weibull variable is a power of a gamma variable.
            whole = scale * math.pow(rng.gammavariate(1 + 1 / shape, 1.0), 1 / shape)
        case "lognormal":
            whole = scale * math.exp(shape**2 + shape * rng.gauss(0.0, 1.0))
        case "exponential":
            return rng.expovariate(1 / scale)
        case "constant":
            whole = scale
        case "bathtub":
            # No length exceeds the stop, so rejection sampling draws in proportion to the length.
            whole = scale * _bathtub_quantile(rng.random())
            while rng.random() * scale > whole:
                whole = scale * _bathtub_quantile(rng.random())
        case _:
            return math.inf
    return whole * rng.random()


def _bathtub_share(time: float) -> float:
    """Return the share of sessions that have ended at `time`, where the hard stop is at time 1."""
    if time >= 1:
        return 1.0
    early, late = math.exp(-time / _BATHTUB_EARLY), math.exp((time - 1) / _BATHTUB_LATE)
    return _BATHTUB_SHARE * (1 - early + late)


def _bathtub_quantile(share: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _bathtub_share(middle) < share:
            low = middle
        else:
            high = middle
    return high


def _bathtub_mean() -> float:
    early = _BATHTUB_EARLY * (1 - math.exp(-1 / _BATHTUB_EARLY))
    late = _BATHTUB_LATE * (1 - math.exp(-1 / _BATHTUB_LATE))
    return 1 - _BATHTUB_SHARE * (1 - early + late)
