"""The coordinate-wise trimmed mean (Yin, Chen, Ramchandran and Bartlett 2018, "Byzantine-robust distributed
learning: towards optimal statistical rates", option II)."""

import numpy as np

from gossip.averaging.robust.inputs import Vectors, Weights, blocks_of, usable
from gossip.averaging.robust.reduction import Vector
from gossip.averaging.robust.sorting import sorted_rows, sorted_with


def trimmed_mean(vectors: Vectors, weights: Weights, f: int = 0) -> Vector:
    """Return the weighted mean of each coordinate, without its f smallest and its f largest values.

    The cut counts members, not weight. So with f liars each remaining value lies between two honest values,
    and so does their mean, with any weights.
    """
    vectors, weights, f = usable(vectors, weights, f, 2 * f + 1, "trimmed mean")
    are_equal = bool((weights == weights[0]).all())
    found = np.empty(vectors.shape[1], vectors.dtype)
    last = len(vectors) - f
    for block in blocks_of(vectors.shape[1]):
        if are_equal:
            rows = sorted_rows(vectors[:, block])
            sums = rows[f].astype(np.float64)
            for row in rows[f + 1 : last]:
                sums += row
            sums /= last - f
        else:
            rows, theirs = sorted_with(vectors[:, block], weights)
            sums, total = np.zeros(len(rows[0])), np.zeros(len(rows[0]))
            for row, weight in zip(rows[f:last], theirs[f:last], strict=True):
                sums += row * weight
                total += weight
            sums /= total
        # Rounding must not leave the range either. Adding 0 turns -0 into 0.
        found[block] = np.clip(sums, rows[f], rows[last - 1]) + 0.0
    return found
