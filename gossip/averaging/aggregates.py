"""How an owner makes one part of several: the rules that a group may agree on, by name.

| name | what | liars of n members survived |
|---|---|---|
| `mean` | the mean, by bounded weights | 0 |
| `median` | the coordinate-wise median; every member counts once | (n - 1) // 2 |
| `trimmed-mean` | the mean without the f largest and f smallest numbers | f: (n - 1) // 3, and 1 of 3 |

An owner holds its part of every member's vector, and these rules look at one number at a time, so each owner
applies them to its own part. What an owner itself makes of its part nobody checks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, assert_never, get_args

import numpy as np

from gossip.averaging.group import Aggregate
from gossip.averaging.reduction import BLOCK_ITEMS, Contribution, Reduction, Vector, weighted_mean
from gossip.averaging.robust.median import median
from gossip.averaging.robust.trimmed_mean import trimmed_mean
from gossip.averaging.weights import bounded_weights

Choice = Literal["auto", "mean", "median", "trimmed-mean"]
"""How a person asks for a rule: "auto" leaves it to `chosen`."""
RULES: tuple[Aggregate, ...] = get_args(Aggregate)
TRIMMED_SHARE = 3
"""Less than one in so many members is cut at either end, so a third of each number's values stay, and honest
values that differ since their data does are averaged still. By a quarter, five liars of 16 took a run on
digits from an accuracy of 0.91 to 0.10 (`benchmarks/liars.py`). Of three members one is cut too: groups form
of those that are ready, and a lie of a small group would be passed on to all. Of two nobody can be."""


def liars_max(aggregate: Aggregate, members: int) -> int:
    """Return how many of so many members may lie without moving any number out of the honest range."""
    match aggregate:
        case "mean":
            return 0
        case "median":
            return (members - 1) // 2
        case "trimmed-mean":
            return max((members - 1) // TRIMMED_SHARE, int(members >= 3))
        case _:
            assert_never(aggregate)


def counted_weights(aggregate: Aggregate, weights: Sequence[float]) -> tuple[float, ...]:
    """Return what each claimed weight counts for."""
    return (1.0,) * len(weights) if aggregate == "median" else bounded_weights(weights)


def reduction_of(aggregate: Aggregate) -> Reduction:
    """Return what reduces a part by the rule of this name."""
    return weighted_mean if aggregate == "mean" else partial(_by_number, aggregate)


def _by_number(aggregate: Aggregate, parts: Sequence[Contribution]) -> Iterator[Vector]:
    """Yield the reduced chunks of a rule that looks at one number at a time.

    The chunks of all members are decoded at once, 64 MiB of float32 in the largest group, and stacked in
    blocks.
    """
    f = liars_max(aggregate, len(parts))
    if not f and aggregate == "trimmed-mean":
        yield from weighted_mean(parts)
        return
    rule = median if aggregate == "median" else trimmed_mean
    weights = np.array([part.weight for part in parts])
    for number in range(parts[0].chunk_count):
        chunks = [part.chunk(number) for part in parts]
        reduced = np.empty_like(chunks[0])
        for begin in range(0, len(reduced), BLOCK_ITEMS):
            block = slice(begin, begin + BLOCK_ITEMS)
            reduced[block] = rule(np.stack([chunk[block] for chunk in chunks]), weights, f)
        del chunks  # before the next are decoded
        yield reduced


def chosen(choice: str, *, is_private: bool, obstacle: str = "") -> Aggregate:
    """Return the rule that a choice stands for: "auto" is the trimmed mean where anybody may join the swarm,
    and the mean in a swarm with a key. So all members of a swarm choose alike.

    `obstacle` says why nothing but the mean can be here, empty where any rule can. Raises ValueError.
    """
    if choice == "auto":
        return "mean" if is_private or obstacle else "trimmed-mean"
    for rule in RULES:
        if choice == rule:
            if obstacle and rule != "mean":
                raise ValueError(f"aggregate {choice}: {obstacle}")
            return rule
    raise ValueError(f"aggregate {choice!r}: there are {', '.join(get_args(Choice))}")


def obstacle_of(strategy: str, codec: str) -> str:
    """Return why a strategy or codec leaves nothing but the mean, empty where it does not."""
    for name, is_sparse in (
        (f"codec {codec}", codec.startswith("topk")),
        (f"strategy {strategy}", strategy == "sparseloco"),
    ):
        if is_sparse:
            return f"{name} sends few numbers of each vector, which cannot be compared one by one"
    if strategy == "gossip":
        return "strategy gossip averages in pairs, and of two members nobody can say which lies"
    return ""
