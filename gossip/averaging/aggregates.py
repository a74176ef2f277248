"""The rules by which an owner reduces several parts to one, by the names that a group agrees on.

| name | what | liars of n members survived |
|---|---|---|
| `mean` | the mean, by bounded weights | 0 |
| `median` | the coordinate-wise median | (n - 1) // 2 |
| `trimmed-mean` | the mean without the f largest and f smallest numbers, by bounded weights | f |
| `centered-clipping` | from the median, steps of a bounded length | f |
| `geometric-median` | the least sum of distances | f |
| `krum`, `multi-krum` | the vector nearest to its neighbours; the mean of such | f |
| `nnm-...` | each of the above but the mean, after nearest-neighbour mixing | f |

f is (n - 1) // 3, and 1 of 3. An owner holds its part of every member's vector, and applies the rule to each
chunk of it alone. That keeps what a rule promises of whole vectors: if for each chunk the squared distance of
the result from the mean of any n - f members is at most k times their mean squared distance from it, which is
(f, k)-robustness (Allouah et al. 2023), then the sums over all chunks are, with the same k. Nobody checks how
an owner reduces its own part.
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
"""The meaning of "auto" where strangers may join. No common lie of `benchmarks/liars.py` costs it more than a
point of accuracy, it loses 0.3 without liars, and it works in groups of three."""
WEIGHTED: tuple[Aggregate, ...] = (
    "mean",
    "trimmed-mean",
    "nnm-trimmed-mean",
    "multi-krum",
    "nnm-multi-krum",
)
"""Rules that use bounded claimed weights; in the others every member counts once."""
TRIMMED_SHARE = 3
"""Rules assume that less than one in this many members lies. Cutting a third at either end leaves a third of
each number's values, so honest values from different data are still averaged. With a quarter, five liars of
16 took a run on digits from an accuracy of 0.91 to 0.10. In a group of three one may lie too: groups form of
the ready members, and a lie in a small group would be passed on to all. In a group of two none may."""
_RULES: Mapping[str, Rule] = {
    "median": median,
    "trimmed-mean": trimmed_mean,
    "centered-clipping": centered_clipping,
    "geometric-median": geometric_median,
    "krum": krum,
    "multi-krum": multi_krum,
}


def liars_max(aggregate: Aggregate, members: int) -> int:
    """Return how many of `members` may lie without moving the result far from the honest one."""
    match aggregate:
        case "mean":
            return 0
        case "median":
            return (members - 1) // 2
        case _:
            return max((members - 1) // TRIMMED_SHARE, int(members >= 3))


def counted_weights(aggregate: Aggregate, weights: Sequence[float]) -> tuple[float, ...]:
    """Return what each claimed weight counts for."""
    return bounded_weights(weights) if aggregate in WEIGHTED else (1.0,) * len(weights)


def reduction_of(aggregate: Aggregate) -> Reduction:
    """Return the reduction of parts that follows the rule of this name."""
    return weighted_mean if aggregate == "mean" else partial(_by_chunk, aggregate)


def _by_chunk(aggregate: Aggregate, parts: Sequence[PartContribution]) -> Iterator[Vector]:
    """Yield the reduced chunks of a robust rule. A chunk of every member is decoded at once: 64 MiB of
    float32 in the largest group, and as much for those that are mixed."""
    f = liars_max(aggregate, len(parts))
    if not f:
        yield from weighted_mean(parts)
        return
    rule = rule_of(aggregate)
    weights = np.array([part.weight for part in parts])
    for number in range(parts[0].chunk_count):
        yield rule(np.stack([part.chunk(number) for part in parts]), weights, f)


def rule_of(aggregate: Aggregate) -> Rule:
    """Return a robust rule over stacked vectors, with its mixing; not the mean's."""
    is_mixed = aggregate.startswith(MIXED)
    found = _RULES[aggregate.removeprefix(MIXED)]
    is_krum = found in (krum, multi_krum)

    def reduce(vectors: Vectors, weights: Weights, f: int) -> Vector:
        # Krum says nothing in groups of three and four.
        rule = trimmed_mean if is_krum and len(vectors) < krum_members_min(f) else found
        return rule(*mix_nearest(vectors, weights, f)) if is_mixed else rule(vectors, weights, f)

    return reduce


def chosen(choice: str, *, is_private: bool, obstacle: str = "") -> Aggregate:
    """Return the rule for a choice: "auto" is DEFAULT where any peer may join the swarm, and the mean in a
    swarm with a key. So all members of a swarm choose alike.

    `obstacle` says why only the mean is possible, empty where any rule is. Raises ValueError.
    """
    if choice == "auto":
        return "mean" if is_private or obstacle else DEFAULT
    for rule in RULES:
        if choice == rule:
            if obstacle and rule != "mean":
                raise ValueError(f"aggregate {choice}: {obstacle}")
            return rule
    raise ValueError(f"aggregate {choice!r}: there are auto, {', '.join(RULES)}")


def obstacle_of(strategy: str, codec: str) -> str:
    """Return why a strategy or codec allows only the mean, empty if it allows any rule."""
    for name, is_sparse in (
        (f"codec {codec}", codec.startswith("topk")),
        (f"strategy {strategy}", strategy == "sparseloco"),
    ):
        if is_sparse:
            return f"{name} sends few numbers of each vector, which cannot be compared one by one"
    if strategy == "gossip":
        return "strategy gossip averages in pairs, and of two members nobody can say which lies"
    return ""
