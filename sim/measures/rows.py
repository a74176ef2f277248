"""A row of a measurement in long form, and arithmetic that all measures share. Pure."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

QUANTILES = (("p50", 0.5), ("p95", 0.95), ("max", 1.0))


class Row(NamedTuple):
    """One figure at one moment of virtual time. `label` distinguishes rows of one metric: a protocol, a peer,
    a quantile; empty where there is only one. The metric's name ends in its unit."""

    time_seconds: float
    metric: str
    label: str
    value: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that `share` of all do not exceed, by nearest rank; nan of none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(values: Iterable[float]) -> float:
    """Return the mean; nan of none."""
    total, count = 0.0, 0
    for value in values:
        total += value
        count += 1
    return total / count if count else math.nan


def quantiles(values: Iterable[float]) -> dict[str, float | None]:
    """Return `p50`, `p95` and `max`; None of no values."""
    ordered = sorted(values)
    return {name: known(quantile(ordered, share)) for name, share in QUANTILES}


def known(value: float) -> float | None:
    """Return None for nan, which JSON does not have."""
    return round(value, 6) if math.isfinite(value) else None
