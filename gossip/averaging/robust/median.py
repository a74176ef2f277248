"""The coordinate-wise median (Yin, Chen, Ramchandran and Bartlett 2018, "Byzantine-robust distributed
learning: towards optimal statistical rates", option I)."""

import numpy as np

from gossip.averaging.robust.inputs import Vectors, Weights, blocks_of, usable
from gossip.averaging.robust.reduction import Vector
from gossip.averaging.robust.sorting import sorted_rows


def median(vectors: Vectors, weights: Weights, f: int = 0) -> Vector:
    """Return the median of each coordinate, or the mean of the two middle values.

    Every member counts equally, regardless of its weight. So as long as fewer than half of the members lie,
    each coordinate stays within the honest members' range.
    """
    vectors, _, _ = usable(vectors, weights, f, 2 * f + 1, "median")
    found = np.empty(vectors.shape[1], vectors.dtype)
    low, high = (len(vectors) - 1) // 2, len(vectors) // 2
    for block in blocks_of(vectors.shape[1]):
        rows = sorted_rows(vectors[:, block])
        # Halve first, because the sum of two large values may overflow. Adding 0 turns -0 into 0.
        middle = rows[low] if low == high else rows[low] * 0.5 + rows[high] * 0.5
        found[block] = np.clip(middle, rows[low], rows[high]) + 0.0
    return found
