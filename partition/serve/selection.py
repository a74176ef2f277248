"""Selection of the largest logits of a row, and of the logit that a draw selects, without sorting the row.

A draw at temperature T selects the first logit, counted from the largest, at which the sum of exponentials
passes a given share of the whole sum. Logits are put into buckets by size. The sums of whole buckets show the
right bucket, and only that one is sorted (quickselect by weight). Sums in a different order differ in their
last bits. If a draw is so close to the edge of a logit that this could matter, it is left to a full sort.
"""

import numpy as np

from partition.codecs.base import Array

_BUCKETS = 4_096
"""Number of buckets. A flat row of 150,000 logits leaves some hundred in each."""
_DEPTH = 50.0
"""Maximum distance below the largest logit at which logits get buckets of their own. All smaller logits
together weigh less than the error of rounding."""
_SPAN_MIN = 1e-6
"""Minimum range of logits. Logits that lie closer together share a bucket."""


def best_logits(row: Array, count: int) -> tuple[Array, Array]:
    """Return the ids and values of the `count` largest logits, in descending order; among equal logits, the
    lowest id comes first."""
    count = min(count, len(row))
    if count == 1:
        first = int(np.argmax(row))
        return np.array([first], np.int64), row[first : first + 1]
    edge = np.partition(row, len(row) - count)[len(row) - count]
    above, at = np.flatnonzero(row > edge), np.flatnonzero(row == edge)
    ids = np.concatenate([above, at[: count - len(above)]])
    ids = ids[np.lexsort((ids, -row[ids].astype(np.float64)))]
    return ids.astype(np.int64), row[ids]


def find_drawn(row: Array, temperature: float, top_p: float, min_p: float, drawn: float) -> int | None:
    """Return the index of the logit that the number `drawn` in [0, 1) selects, as a full sort would find it;
    None if it is too close to an edge. `temperature` is above 0."""
    with np.errstate(over="ignore"):
        wide = row.astype(np.float64)
        largest = wide.max()
        if not np.isfinite(largest):
            return None
        # Subtract before dividing, as in the full sort: quotients may be infinite, and then have no
        # difference.
        buckets = _Buckets(row, (largest - wide) / temperature)
    kept = buckets.total
    if top_p < 1:
        found = buckets.find(top_p * buckets.total)
        if found is None:
            return None
        kept = found[1]
    if min_p > 0:
        weights = buckets.weights
        if (np.abs(weights - min_p) <= buckets.doubt * min_p).any():
            return None
        kept = min(kept, float(weights[weights > min_p].sum()))
    found = buckets.find(drawn * kept)
    return None if found is None else found[0]


class _Buckets:
    """A row's logits by size. `below` is how far each lies below the largest, in units of the temperature.
    `weights` are their exponentials, 1 for the largest."""

    def __init__(self, row: Array, below: Array) -> None:
        self.weights = np.exp(-below)
        self.total = float(self.weights.sum())
        self.doubt = 4 * np.finfo(np.float64).eps * (len(row) + 8)
        """Maximum error of a sum, relative to the total: each of its additions rounds once."""
        self._row = row
        span = min(max(float(below.max()), _SPAN_MIN), _DEPTH)
        self._places = np.minimum(below * (_BUCKETS / span), _BUCKETS - 1).astype(np.int32)
        self._ends = np.cumsum(np.bincount(self._places, weights=self.weights, minlength=_BUCKETS))

    def find(self, sought: float) -> tuple[int, float] | None:
        """Return the first logit, counted from the largest, at which the sum of weights passes `sought`, and
        that sum; None if `sought` is too close to the sum there or just before."""
        doubt = self.doubt * self.total
        bucket = int(np.searchsorted(self._ends, sought))
        if bucket == _BUCKETS:
            return None
        ids = np.flatnonzero(self._places == bucket)
        ids = ids[np.argsort(-self._row[ids].astype(np.float64), kind="stable")]
        begin = float(self._ends[bucket - 1]) if bucket else 0.0
        ends = begin + np.cumsum(self.weights[ids])
        at = int(np.searchsorted(ends, sought))
        if at == len(ids):
            return None
        before = float(ends[at - 1]) if at else begin
        if (before > 0 and sought - before <= doubt) or float(ends[at]) - sought <= doubt:
            return None
        return int(ids[at]), float(ends[at])
