"""A row of a measurement in long form, and the arithmetic shared by all measures. Pure."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

QUANTILES = (("p50", 0.5), ("p95", 0.95), ("max", 1.0))


class Row(NamedTuple):
    """One figure at one moment of virtual time. `label` distinguishes the rows of one metric (by a protocol,
    a peer, a quantile); it is empty if a metric has only one. The metric's name ends in its unit."""

    time_seconds: float
    metric: str
    label: str
    value: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that a `share` of all values do not exceed, by nearest rank; nan if there are no
    values."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(values: Iterable[float]) -> float:
    """Return the mean; nan if there are no values."""
    total, count = 0.0, 0
    for value in values:
        total += value
        count += 1
    return total / count if count else math.nan


def quantiles(values: Iterable[float]) -> dict[str, float | None]:
    """Return `p50`, `p95` and `max`; each is None if there are no values."""
    ordered = sorted(values)
    return {name: known(quantile(ordered, share)) for name, share in QUANTILES}


def known(value: float) -> float | None:
    """Return the value, or None if it is nan, which JSON does not have."""
    return round(value, 6) if math.isfinite(value) else None
