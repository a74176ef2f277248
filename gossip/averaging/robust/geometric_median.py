"""The geometric median by the smoothed Weiszfeld algorithm (Pillutla, Kakade and Harchaoui 2022, "Robust
aggregation for federated learning", algorithm 2)."""

import numpy as np

from gossip.averaging.robust.inputs import Vectors, Weights, distances_from, in_order, mix, usable
from gossip.averaging.robust.median import median
from gossip.averaging.robust.reduction import Vector

ITERATIONS_MAX = 64
"""Maximum number of iterations. The algorithm converges linearly; three to ten are enough if the honest
vectors form one cloud."""
SMOOTHING = 1e-6
"""Relative to the median distance: the pull of a vector does not increase any more below this distance."""
CONVERGED = 1e-7
"""Relative to the median distance: a step shorter than this is the last one. Float32 rounds by about this
much."""


def geometric_median(vectors: Vectors, weights: Weights, f: int = 0) -> Vector:
    """Return an approximation of the point with the least sum of distances from all vectors.

    Its distance from any point is at most 2 (n - f) / (n - 2 f) times the distance of the honest vector
    farthest from that point. Every member counts equally.
    """
    vectors, weights, f = usable(vectors, weights, f, 2 * f + 1, "geometric median")
    vectors, weights = in_order(vectors, weights)
    # Do not start from the mean: a single vector at 1e30 would use up all iterations.
    value = median(vectors, weights).astype(np.float64)
    for _ in range(ITERATIONS_MAX):
        distances = distances_from(vectors, value)
        scale = np.sort(distances)[(len(distances) - 1) // 2]
        if not scale:  # half of the vectors are here, so no point is nearer to all
            break
        pulls = 1 / np.maximum(distances, SMOOTHING * scale)
        step = mix(vectors, pulls / pulls.sum(), value)
        value = value + step
        if np.sqrt(np.square(step).sum()) <= CONVERGED * scale:
            break
    return value.astype(vectors.dtype)
