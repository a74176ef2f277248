"""The rules by which an owner reduces several parts to one, by the names that a group agrees on.

| name | what | liars of n members survived |
|---|---|---|
| `mean` | the mean, by bounded weights | 0 |
| `median` | the coordinate-wise median | (n - 1) // 2 |
| `trimmed-mean` | the mean without the f largest and f smallest values, by bounded weights | f |
| `centered-clipping` | from the median, steps of a bounded length | f |
| `geometric-median` | the least sum of distances | f |
| `krum`, `multi-krum` | the vector nearest to its neighbours; the mean of several such vectors | f |
| `nnm-...` | each of the above but the mean, after nearest-neighbour mixing | f |

f is (n - 1) // 3, or 1 if n is 3. An owner holds its part of every member's vector, and applies the rule to
each chunk of it separately. What a rule guarantees for whole vectors still holds. (f, k)-robustness (Allouah
et al. 2023) says that the squared distance of the result from the mean of any n - f members is at most k
times those members' mean squared distance from their mean. If that holds for each chunk, it holds for the
sums over all chunks, with the same k. Nobody checks how an owner reduces its own part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import get_args

import numpy as np

from gossip.averaging.group import Aggregate
from gossip.averaging.robust.centered_clipping import centered_clipping
from gossip.averaging.robust.geometric_median import geometric_median
from gossip.averaging.robust.inputs import Vectors, Weights
from gossip.averaging.robust.krum import krum, krum_members_min, multi_krum
from gossip.averaging.robust.median import median
from gossip.averaging.robust.nearest_neighbours import mix_nearest
from gossip.averaging.robust.reduction import PartContribution, Reduction, Vector, weighted_mean
from gossip.averaging.robust.trimmed_mean import trimmed_mean
from gossip.averaging.weights import bounded_weights

Rule = Callable[[Vectors, Weights, int], Vector]
RULES: tuple[Aggregate, ...] = get_args(Aggregate)
MIXED = "nnm-"
"""Prefix of the name of a rule that is applied after nearest-neighbour mixing."""
DEFAULT: Aggregate = "nnm-trimmed-mean"
"""The meaning of "auto" if strangers may join. None of the common lies in `benchmarks/liars.py` costs this
rule more than one point of accuracy, it loses 0.3 without liars, and it works in groups of three."""
WEIGHTED: tuple[Aggregate, ...] = (
    "mean",
    "trimmed-mean",
    "nnm-trimmed-mean",
    "multi-krum",
    "nnm-multi-krum",
)
"""Rules that use bounded claimed weights. In the other rules every member counts equally."""
TRIMMED_SHARE = 3
"""Rules assume that fewer than one in this many members lie. Cutting a third at either end leaves the middle
third of the values, so honest values from different data are still averaged. With a quarter, five liars of 16
reduced the accuracy of a run on digits from 0.91 to 0.10. In a group of three, one member may lie too,
because groups form from the ready members and a lie in a small group would spread to all. In a group of two,
none may."""
_RULES: Mapping[str, Rule] = {
    "median": median,
    "trimmed-mean": trimmed_mean,
    "centered-clipping": centered_clipping,
    "geometric-median": geometric_median,
    "krum": krum,
    "multi-krum": multi_krum,
}


def liars_max(aggregate: Aggregate, members: int) -> int:
    """Return how many of `members` may lie without moving the result far from the honest result."""
    match aggregate:
        case "mean":
            return 0
        case "median":
            return (members - 1) // 2
        case _:
            return max((members - 1) // TRIMMED_SHARE, int(members >= 3))


def counted_weights(aggregate: Aggregate, weights: Sequence[float]) -> tuple[float, ...]:
    """Return how much each claimed weight counts."""
    return bounded_weights(weights) if aggregate in WEIGHTED else (1.0,) * len(weights)


def reduction_of(aggregate: Aggregate) -> Reduction:
    """Return the reduction of parts for the rule with this name."""
    return weighted_mean if aggregate == "mean" else partial(_by_chunk, aggregate)


def _by_chunk(aggregate: Aggregate, parts: Sequence[PartContribution]) -> Iterator[Vector]:
    """Yield the reduced chunks of a robust rule. One chunk of every member is decoded simultaneously: 64 MiB
    of float32 in the largest group, and the same again for mixed vectors."""
    f = liars_max(aggregate, len(parts))
    if not f:
        yield from weighted_mean(parts)
        return
    rule = rule_of(aggregate)
    weights = np.array([part.weight for part in parts])
    for number in range(parts[0].chunk_count):
        yield rule(np.stack([part.chunk(number) for part in parts]), weights, f)


def rule_of(aggregate: Aggregate) -> Rule:
    """Return a robust rule (not the mean) over stacked vectors, including its mixing."""
    is_mixed = aggregate.startswith(MIXED)
    found = _RULES[aggregate.removeprefix(MIXED)]
    is_krum = found in (krum, multi_krum)

    def reduce(vectors: Vectors, weights: Weights, f: int) -> Vector:
        # Krum is not defined in groups of three and four.
        rule = trimmed_mean if is_krum and len(vectors) < krum_members_min(f) else found
        return rule(*mix_nearest(vectors, weights, f)) if is_mixed else rule(vectors, weights, f)

    return reduce


def chosen(choice: str, *, is_private: bool, obstacle: str = "") -> Aggregate:
    """Return the rule for a choice. "auto" is DEFAULT if any peer may join the swarm, and the mean in a swarm
    with a key, so all members of a swarm choose the same rule.

    `obstacle` says why only the mean is possible; it is empty if any rule is. Raises ValueError.
    """
    if choice == "auto":
        return "mean" if is_private or obstacle else DEFAULT
    for rule in RULES:
        if choice == rule:
            if obstacle and rule != "mean":
                raise ValueError(f"aggregate {choice}: {obstacle}")
            return rule
    raise ValueError(f"unknown aggregate {choice!r}; use auto or one of {', '.join(RULES)}")


def obstacle_of(strategy: str, codec: str) -> str:
    """Return why a strategy or codec allows only the mean; empty if it allows any rule."""
    for name, is_sparse in (
        (f"codec {codec}", codec.startswith("topk")),
        (f"strategy {strategy}", strategy == "sparseloco"),
    ):
        if is_sparse:
            return (
                f"{name} sends only a few values of each vector, so vectors cannot be compared value by value"
            )
    if strategy == "gossip":
        return (
            "strategy gossip averages in pairs, and between two members it cannot be decided which one lies"
        )
    return ""
