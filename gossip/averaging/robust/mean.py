"""The weighted mean: the baseline for every other rule, and moved anywhere by one liar."""

from gossip.averaging.robust.inputs import Vectors, Weights, in_order, mix, usable
from gossip.averaging.robust.reduction import Vector


def mean(vectors: Vectors, weights: Weights, f: int = 0) -> Vector:
    """Return sum(w x) / sum(w). Raises ValueError for any `f` above 0."""
    if f:
        raise ValueError(f"mean: it survives no liar; {f} were asked for")
    vectors, weights = in_order(*usable(vectors, weights, f, 1, "mean")[:2])
    return mix(vectors, weights / weights.sum()).astype(vectors.dtype)
