"""The share of one member in a mean: claimed weights, bounded by the group's own median.

Others cannot check how many samples a peer has seen, so its claim counts for at most a few times the median
of its group. The bound depends only on the weights in the commit, which every member holds, so all members
compute the same shares. It bounds a member's share; protection against what a member does with its share is
in `gossip.averaging.robust`.
"""

from collections.abc import Sequence

WEIGHT_MEDIANS_MAX = 4.0
"""A member's weight is at most this many times the lower median of its group. The machines of a run differ by
about this factor in samples between two rounds. A faster machine counts a little less than its work."""


def bounded_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights, each bounded by WEIGHT_MEDIANS_MAX times their lower median.

    Because it is the lower median, the smaller claim of two bounds the larger. As long as fewer than half of
    a group lie, it lies between the smallest and the largest honest weight.
    """
    most = WEIGHT_MEDIANS_MAX * sorted(weights)[(len(weights) - 1) // 2]
    return tuple(min(weight, most) for weight in weights)
