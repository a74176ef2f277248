"""Krum and multi-Krum (Blanchard, El Mhamdi, Guerraoui and Stainer 2017, "Machine learning with adversaries:
Byzantine tolerant gradient descent")."""

import numpy as np
from numpy.typing import NDArray

from gossip.averaging.robust.inputs import Vectors, Weights, in_order, mix, squared_distances, usable
from gossip.averaging.robust.reduction import Vector


def krum_members_min(f: int) -> int:
    """Return the size of the smallest group in which `f` members may lie."""
    return 2 * f + 3


def krum(vectors: Vectors, weights: Weights, f: int = 0) -> Vector:
    """Return the vector with the least sum of squared distances to its n - f - 2 nearest others."""
    vectors, weights, f = usable(vectors, weights, f, krum_members_min(f), "Krum")
    vectors, weights = in_order(vectors, weights)
    best: Vector = vectors[int(np.argmin(_scores(vectors, f)))].copy()
    return best


def multi_krum(vectors: Vectors, weights: Weights, f: int = 0) -> Vector:
    """Return the weighted mean of the n - f - 2 vectors with the smallest such sums. That is the largest
    number for which its proof holds (El Mhamdi, Guerraoui and Rouault 2018)."""
    vectors, weights, f = usable(vectors, weights, f, krum_members_min(f), "multi-Krum")
    vectors, weights = in_order(vectors, weights)
    chosen = np.sort(np.argsort(_scores(vectors, f), kind="stable")[: len(vectors) - f - 2])
    return mix(vectors[chosen], weights[chosen] / weights[chosen].sum()).astype(vectors.dtype)


def _scores(vectors: Vectors, f: int) -> NDArray[np.float64]:
    squares = squared_distances(vectors)
    np.fill_diagonal(squares, np.inf)  # a vector is not its own neighbour
    nearest = np.sort(squares, axis=1)[:, : len(vectors) - f - 2]
    scores: NDArray[np.float64] = nearest.sum(axis=1)
    return scores
