"""The share of one member in a mean: claimed weights, bounded by the group's own median.

Others cannot check how many samples a peer has seen, so its claim counts for at most a few times the median
of its group. The bound is a pure function of the weights in the commit, which every member holds, so all of
them weigh alike. It bounds a share; what a member does with its share is for `gossip.averaging.robust`.
"""

from collections.abc import Sequence

WEIGHT_MEDIANS_MAX = 4.0
"""A member weighs at most this many lower medians of its group: about as much as the machines of a run differ
in samples between two rounds. A faster machine counts for a little less than its work."""


def bounded_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights, none above WEIGHT_MEDIANS_MAX times their lower median.

    With the lower median the smaller claim of two bounds the larger. As long as fewer than half of a group
    lie, it lies between the smallest and the largest honest weight.
    """
    most = WEIGHT_MEDIANS_MAX * sorted(weights)[(len(weights) - 1) // 2]
    return tuple(min(weight, most) for weight in weights)
