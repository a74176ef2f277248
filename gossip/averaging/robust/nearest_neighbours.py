"""Nearest-neighbour mixing (Allouah et al. 2023, "Fixing by mixing: a recipe for optimal Byzantine ML under
heterogeneity"): a step before another rule."""

import numpy as np

from gossip.averaging.robust.inputs import Vectors, Weights, in_order, mixes, squared_distances, usable


def mix_nearest(vectors: Vectors, weights: Weights, f: int = 0) -> tuple[Vectors, Weights, int]:
    """Return the vectors, each replaced by the mean of the n - f that are nearest to it, itself among them;
    with their weights and `f`, as the next rule takes them.

    Honest vectors that differ since their data does come nearer to each other, so that fewer lies fit between
    them. Every member counts once.
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
