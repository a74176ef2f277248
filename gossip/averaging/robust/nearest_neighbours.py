"""Nearest-neighbour mixing (Allouah et al. 2023, "Fixing by mixing: a recipe for optimal Byzantine ML under
heterogeneity"): a step before another rule."""

import numpy as np

from gossip.averaging.robust.inputs import Vectors, Weights, in_order, mixes, squared_distances, usable


def mix_nearest(vectors: Vectors, weights: Weights, f: int = 0) -> tuple[Vectors, Weights, int]:
    """Return the vectors, each replaced by the mean of the n - f vectors nearest to it, including itself,
    together with their weights and `f`, as inputs of the next rule.

    Honest vectors differ because their data differ. Mixing brings them closer to each other, so that fewer
    lies fit between them. Every member counts equally.
    """
    vectors, weights, f = usable(vectors, weights, f, 2 * f + 1, "nearest-neighbour mixing")
    vectors, weights = in_order(vectors, weights)
    count = len(vectors) - f
    squares = squared_distances(vectors)
    nearest = np.argsort(squares, axis=1, kind="stable")[:, :count]
    factors = np.zeros((len(vectors), len(vectors)))
    np.put_along_axis(factors, nearest, 1 / count, axis=1)
    middle = np.take_along_axis(squares, nearest, axis=1).sum(axis=1).argmin()
    return mixes(vectors, factors, vectors[middle]), weights, f
