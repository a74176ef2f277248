"""The strategies of `gossip.averaging.strategies` by the names that people write, and what each needs."""

from typing import Literal, get_args

from gossip.averaging import strategies
from gossip.averaging.group import GROUP_MEMBERS_MAX
from gossip.averaging.robust.reduction import Vector

StrategyName = Literal["average", "gossip", "diloco", "noloco", "sparseloco", "asynchronous"]
NAMES: tuple[str, ...] = get_args(StrategyName)
GROUP_SIZE = 8
"""The size of a Moshpit group: a part of a group that dies costs the others little, and three rounds mix 512
peers."""
STALE_ROUNDS_MAX = 4
"""Age in rounds of local steps at which an asynchronous mean is dropped."""
OUTER = ("diloco", "noloco", "sparseloco")
"""Strategies with outer steps, on parameters alone: moments stay each peer's own."""
TAKEN_IN_PART = ("average", "gossip", "asynchronous")
"""Strategies without outer steps: a peer may apply a share of a round's result (`strategies.damped`)."""
EVERY_ROUND = ("diloco", "sparseloco")
"""Strategies whose members share phi: a peer that missed a round takes over the others' state."""


def make_strategy(name: str, theta: Vector, local_steps: int, codec: str) -> strategies.Strategy:
    """Return the strategy of this name for numbers like `theta`, which all members begin with. Raises
    ValueError."""
    match name:
        case "average":
            return strategies.ParameterMean(local_steps, "moshpit", codec)
        case "gossip":
            return strategies.ParameterMean(local_steps, "pairs", codec)
        case "asynchronous":
            return strategies.Asynchronous(local_steps, STALE_ROUNDS_MAX * local_steps, codec=codec)
        case "diloco":
            return strategies.DiLoCo(theta, local_steps, codec=codec)
        case "noloco":
            return strategies.NoLoCo(theta, local_steps, codec=codec)
        case "sparseloco":
            sparse = codec if codec.startswith("topk") else "topk64"
            return strategies.SparseLoCo(theta, local_steps, codec=sparse)
    raise ValueError(f"no strategy {name!r}: there are {', '.join(NAMES)}")


def group_size(grouping: strategies.Grouping) -> int:
    """Return the largest size of a group."""
    return {"pairs": 2, "moshpit": GROUP_SIZE, "all": GROUP_MEMBERS_MAX}[grouping]
