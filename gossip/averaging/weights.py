"""How much of a mean one member may be: claimed weights, bounded by the group's own median.

Nobody can check how many samples a peer has seen, so its claim is worth no more than a few times what half of
its group claims. The bound is a pure function of the weights in the commit, which every member holds, so all
of them weigh alike. It bounds a share; what a member does with its share is for `gossip.averaging.robust`.
"""

from collections.abc import Sequence

WEIGHT_MEDIANS_MAX = 4.0
"""A member weighs at most so many times the lower median of its group. That is about how much the machines of
a run differ in what they gather between two rounds; a faster one counts for a little less than it did."""


def bounded_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights, none above WEIGHT_MEDIANS_MAX times their lower median.

    The lower median: of two members the smaller claim bounds the larger, and as long as fewer than half of a
    group lie it is at most the largest honest weight and at least the smallest.
    """
    most = WEIGHT_MEDIANS_MAX * sorted(weights)[(len(weights) - 1) // 2]
    return tuple(min(weight, most) for weight in weights)
