"""The geometric median by the smoothed Weiszfeld algorithm (Pillutla, Kakade and Harchaoui 2022, "Robust
aggregation for federated learning", algorithm 2)."""

import numpy as np

from gossip.averaging.robust.inputs import Vectors, Weights, distances_from, in_order, mix, usable
from gossip.averaging.robust.median import median
from gossip.averaging.robust.reduction import Vector

ITERATIONS_MAX = 64
"""It converges linearly; three to ten are enough where honest vectors lie in one cloud."""
SMOOTHING = 1e-6
"""A vector nearer than this part of the median distance pulls no harder."""
CONVERGED = 1e-7
"""A step shorter than this part of the median distance is the last. Float32 rounds by about as much."""


def geometric_median(vectors: Vectors, weights: Weights, f: int = 0) -> Vector:
    """Return approximately the point with the least sum of distances from all vectors.

    It is at most 2 (n - f) / (n - 2 f) times as far from any point as the honest vector farthest from that
    point. Every member counts once.
    """
    vectors, weights, f = usable(vectors, weights, f, 2 * f + 1, "geometric median")
    vectors, weights = in_order(vectors, weights)
    # Not from the mean: one vector at 1e30 would take all iterations.
    value = median(vectors, weights).astype(np.float64)
    for _ in range(ITERATIONS_MAX):
        distances = distances_from(vectors, value)
        scale = np.sort(distances)[(len(distances) - 1) // 2]
        if not scale:  # half of them are here, so no point is nearer to all
            break
        pulls = 1 / np.maximum(distances, SMOOTHING * scale)
        step = mix(vectors, pulls / pulls.sum(), value)
        value = value + step
        if np.sqrt(np.square(step).sum()) <= CONVERGED * scale:
            break
    return value.astype(vectors.dtype)
