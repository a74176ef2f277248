"""Code that the rules share: validated inputs, one order of members, distances in bounded memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossip.averaging.robust.reduction import BLOCK_ITEMS, Vector

Vectors = NDArray[np.floating[Any]]
"""[members, values]"""
Weights = NDArray[np.float64]
"""[members]"""
DOT_ITEMS = 1 << 13
PRODUCTS = 1 << 18
"""Maximum size of a dot product, in values, and of a matrix product, in multiplications, that BLAS computes
in the calling thread. For larger ones BLAS uses a thread on each core, and these threads wait for each other
if several nodes share the cores: a round with eight nodes took twice as long."""


def usable(
    vectors: Vectors, weights: Weights, f: int, members_min: int, rule: str
) -> tuple[Vectors, Weights, int]:
    """Return the inputs of a rule: the finite vectors, their weights, and how many of the vectors may still
    be lies.

    Raises ValueError if there are fewer than `members_min` members, an invalid weight, or more than `f`
    vectors that are not finite.
    """
    if vectors.ndim != 2 or weights.shape != (len(vectors),):
        raise ValueError(f"{rule}: {weights.shape} weights for vectors of shape {vectors.shape}")
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise ValueError(f"{rule}: every weight must be finite and above 0")
    if f < 0 or len(vectors) < members_min:
        raise ValueError(
            f"{rule}: {f} liars need a group of at least {members_min}; this one has {len(vectors)}"
        )
    finite = np.array([np.isfinite(vector).all() for vector in vectors])
    left_out = len(vectors) - int(finite.sum())
    if left_out > f:
        raise ValueError(f"{rule}: {left_out} vectors are not finite, but only {f} liars can be survived")
    if left_out:
        vectors, weights = vectors[finite], weights[finite]
    return vectors, weights, f - left_out


def in_order(vectors: Vectors, weights: Weights) -> tuple[Vectors, Weights]:
    """Sort the members by their values, so that sums round the same way in any order of arrival."""
    keys = [(v.tobytes(), w) for v, w in zip(vectors, weights, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    if order == list(range(len(order))):
        return vectors, weights
    return vectors[order], weights[order]


def blocks_of(items: int) -> Iterator[slice]:
    """Yield the ranges in which a vector is processed."""
    for begin in range(0, items, BLOCK_ITEMS):
        yield slice(begin, min(begin + BLOCK_ITEMS, items))


def distances_from(vectors: Vectors, centre: Vector) -> Weights:
    """Return the Euclidean distance of each vector from a centre, in float64; inf if it overflows."""
    squares = np.zeros(len(vectors))
    with np.errstate(over="ignore"):
        for block in blocks_of(vectors.shape[1]):
            middle = centre[block].astype(np.float64)
            for number, vector in enumerate(vectors):
                squares[number] += np.square(vector[block] - middle).sum()
    return np.sqrt(squares)


def squared_distances(vectors: Vectors) -> NDArray[np.float64]:
    """Return the squared distance of each pair of vectors, [members, members].

    Within a block it computes in the vectors' own precision. It does not use products of vectors: honest
    vectors are near each other and far from zero, so rounding would lose their distance.
    """
    squares = np.zeros((len(vectors), len(vectors)))
    spare = np.empty((len(vectors), DOT_ITEMS), vectors.dtype)
    with np.errstate(over="ignore"):
        for begin in range(0, vectors.shape[1], DOT_ITEMS):
            rows = vectors[:, begin : begin + DOT_ITEMS]
            for number in range(len(rows) - 1):
                apart = spare[number + 1 :, : rows.shape[1]]
                np.subtract(rows[number + 1 :], rows[number], out=apart)
                squares[number, number + 1 :] += np.vecdot(apart, apart)
    if vectors.dtype != np.float64 and not np.isfinite(squares).all():
        # There are differences beyond 1e19, whose squares float32 cannot represent.
        return squared_distances(vectors.astype(np.float64))
    return squares + squares.T


def mix(vectors: Vectors, factors: Weights, base: Vector | None = None) -> Vector:
    """Return sum(factor (vector - base)) in float64, member by member; vectors with factor 0 are left out."""
    total = np.zeros(vectors.shape[1])
    for block in blocks_of(vectors.shape[1]):
        for vector, factor in zip(vectors, factors, strict=True):
            if factor:
                term = vector[block].astype(np.float64)
                term -= 0.0 if base is None else base[block]
                total[block] += factor * term
    return total


def mixes(vectors: Vectors, factors: NDArray[np.float64], near: Vector) -> Vectors:
    """Return `factors` @ `vectors`, [rows of factors, values]. Each row of `factors` must add up to 1.

    It computes in the vectors' own precision, using differences from `near`. So a mix of equal vectors is
    exact, and rounding loses little if most vectors are near it.
    """
    found = np.empty((len(factors), vectors.shape[1]), vectors.dtype)
    step = max(PRODUCTS // vectors.shape[0] // len(factors), 1)
    narrow = factors.astype(vectors.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, vectors.shape[1], step):
            block = slice(begin, begin + step)
            apart = vectors[:, block] - near[block]
            if np.isfinite(apart).all():
                found[:, block] = narrow @ apart + near[block]
            else:  # skip factor 0, because infinity times 0 is not a number
                found[:, block] = factors @ vectors[:, block].astype(np.float64)
    return found
