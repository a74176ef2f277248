"""Prices of a class of operators, fitted to the measured times of some of them."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from partition.plan.operations import Amount
from partition.plan.rates import MEBI_BITS, MEGA, OperatorPace


def fit(amounts: Sequence[Amount], seconds: Sequence[float]) -> OperatorPace:
    """Return the prices of a call, a million FLOPs and a MiB that minimise the largest relative error."""
    rows = np.array(
        [[row.calls, row.flops / MEGA, row.touched_bytes / (1 << MEBI_BITS)] for row in amounts], dtype=float
    )
    times = np.array(seconds, dtype=float)
    scaled = rows / times[:, None]
    best, prices = np.inf, np.zeros(3)
    for count in (1, 2, 3):
        for columns in combinations(range(3), count):
            found, *_ = np.linalg.lstsq(scaled[:, columns], np.ones(len(times)), rcond=None)
            if (found < 0).any():
                continue
            error = float(((scaled[:, columns] @ found - 1) ** 2).sum())
            # An additional price must improve the fit clearly, because it is used for model shapes beyond the
            # timed ones.
            if error < 0.98 * best:
                best, prices = error, np.zeros(3)
                prices[list(columns)] = found
    call, megaflop, mebibyte = (min(2**53, round(float(price) * 1e12)) for price in prices)
    return OperatorPace(call, megaflop, mebibyte)
