"""Centered clipping (Karimireddy, He and Jaggi 2021, "Learning from history for Byzantine robust
optimization", algorithm 2), with a radius that follows the group."""

import numpy as np

from gossip.averaging.robust.inputs import Vectors, Weights, distances_from, in_order, mix, usable
from gossip.averaging.robust.median import median
from gossip.averaging.robust.reduction import Vector

ITERATIONS = 3
"""Number of iterations. The paper uses one from a good centre; from a poor centre, each iteration about
halves the distance."""


def centered_clipping(
    vectors: Vectors, weights: Weights, f: int = 0, centre: Vector | None = None, iterations: int = ITERATIONS
) -> Vector:
    """Return v after repeating v <- v + mean(clip(x - v)). It starts from `centre`, the previous round's
    result; if that is None, from the median.

    Each difference is clipped to the lower median of all their lengths, which is at most that of an honest
    member. So one iteration moves no further than an honest member is away, and all `iterations` together at
    most 2**iterations - 1 times the largest honest distance from the centre. Every member counts equally.
    """
    vectors, weights, f = usable(vectors, weights, f, 2 * f + 1, "centered clipping")
    vectors, weights = in_order(vectors, weights)
    value = (median(vectors, weights) if centre is None else centre).astype(np.float64)
    for _ in range(iterations):
        distances = distances_from(vectors, value)
        radius = np.sort(distances)[(len(distances) - 1) // 2]
        factors = np.minimum(1.0, radius / np.maximum(distances, np.finfo(np.float64).tiny))
        value = value + mix(vectors, factors / len(vectors), value)
    return value.astype(vectors.dtype)
