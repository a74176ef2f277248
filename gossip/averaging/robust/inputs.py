"""What rules have in common: checked inputs, one order of members, distances in bounded memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from gossip.averaging.codecs import view_of
from gossip.averaging.reduction import BLOCK_ITEMS, Vector

Vectors = NDArray[np.floating[Any]]
"""[members, numbers]"""
Weights = NDArray[np.float64]
"""[members]"""


def usable(
    vectors: Vectors, weights: Weights, f: int, members_min: int, rule: str
) -> tuple[Vectors, Weights, int]:
    """Return what a rule works on: finite vectors, their weights, and how many of them may still be lies.

    Raises ValueError: fewer than `members_min`, a weight that is none, or more than `f` vectors that are not
    finite.
    """
    if vectors.ndim != 2 or weights.shape != (len(vectors),):
        raise ValueError(f"{rule}: {weights.shape} weights for vectors of shape {vectors.shape}")
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise ValueError(f"{rule}: a weight is finite and above 0")
    if f < 0 or len(vectors) < members_min:
        raise ValueError(f"{rule}: {f} liars need a group of {members_min} at least; this has {len(vectors)}")
    finite = np.array([np.isfinite(vector).all() for vector in vectors])
    left_out = len(vectors) - int(finite.sum())
    if left_out > f:
        raise ValueError(f"{rule}: {left_out} vectors are not finite, and {f} liars are to be survived")
    if left_out:
        vectors, weights = vectors[finite], weights[finite]
    return vectors, weights, f - left_out


def in_order(vectors: Vectors, weights: Weights) -> tuple[Vectors, Weights]:
    """Return members in an order that follows from what they hold, so that sums round alike in any order."""
    keys = [
        (blake3(view_of(np.ascontiguousarray(v))).digest(), w) for v, w in zip(vectors, weights, strict=True)
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return vectors[order], weights[order]


def blocks_of(items: int) -> Iterator[slice]:
    """Yield the ranges in which a vector is worked on."""
    for begin in range(0, items, BLOCK_ITEMS):
        yield slice(begin, min(begin + BLOCK_ITEMS, items))


def distances_from(vectors: Vectors, centre: Vector) -> Weights:
    """Return the Euclidean distance of each vector from a centre, in float64; inf where that overflows."""
    squares = np.zeros(len(vectors))
    with np.errstate(over="ignore"):
        for block in blocks_of(vectors.shape[1]):
            middle = centre[block].astype(np.float64)
            for number, vector in enumerate(vectors):
                squares[number] += np.square(vector[block] - middle).sum()
    return np.sqrt(squares)


def squared_distances(vectors: Vectors) -> NDArray[np.float64]:
    """Return the squared distance of each pair of vectors, [members, members]."""
    squares = np.zeros((len(vectors), len(vectors)))
    with np.errstate(over="ignore"):
        for block in blocks_of(vectors.shape[1]):
            rows = vectors[:, block].astype(np.float64)
            for number in range(len(rows) - 1):
                squares[number, number + 1 :] += np.square(rows[number + 1 :] - rows[number]).sum(axis=1)
    return squares + squares.T


def mix(vectors: Vectors, factors: Weights, base: Vector | None = None) -> Vector:
    """Return sum(factor (vector - base)) in float64, member after member; those of factor 0 do not enter."""
    total = np.zeros(vectors.shape[1])
    for block in blocks_of(vectors.shape[1]):
        for vector, factor in zip(vectors, factors, strict=True):
            if factor:
                term = vector[block].astype(np.float64)
                term -= 0.0 if base is None else base[block]
                total[block] += factor * term
    return total
