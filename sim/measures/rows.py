"""A row of a measurement in long form, and the little arithmetic that all measures share. Pure."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

QUANTILES = (("p50", 0.5), ("p95", 0.95), ("max", 1.0))


class Row(NamedTuple):
    """One figure at one moment of virtual time. `label` tells apart what has the same metric: a protocol, a
    peer, a quantile; empty where there is only one. The unit ends the name of the metric."""

    time_seconds: float
    metric: str
    label: str
    value: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed, one of them (nearest rank); nan of none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(values: Iterable[float]) -> float:
    """nan of none."""
    total, count = 0.0, 0
    for value in values:
        total += value
        count += 1
    return total / count if count else math.nan


def quantiles(values: Iterable[float]) -> dict[str, float | None]:
    """`p50`, `p95` and `max`; None of no values at all."""
    ordered = sorted(values)
    return {name: known(quantile(ordered, share)) for name, share in QUANTILES}


def known(value: float) -> float | None:
    """None for what cannot be said: JSON has no nan."""
    return round(value, 6) if math.isfinite(value) else None
