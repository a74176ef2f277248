"""The strategies of `gossip.averaging.strategies` by the names that users write, and what each requires."""

from typing import Literal, get_args

from gossip.averaging import strategies
from gossip.averaging.group import GROUP_MEMBERS_MAX
from gossip.averaging.robust.reduction import Vector

StrategyName = Literal["average", "gossip", "diloco", "noloco", "sparseloco", "asynchronous"]
NAMES: tuple[str, ...] = get_args(StrategyName)
GROUP_SIZE = 8
"""The size of a Moshpit group. If one member of such a group dies, the others lose little, and three rounds
mix 512 peers."""
STALE_ROUNDS_MAX = 4
"""Maximum age of an asynchronous mean, in rounds of local steps; an older mean is discarded."""
OUTER = ("diloco", "noloco", "sparseloco")
"""Strategies with outer steps. They average only parameters; each peer keeps its own moments."""
TAKEN_IN_PART = ("average", "gossip", "asynchronous")
"""Strategies without outer steps: a peer may apply only a share of a round's result (`strategies.damped`)."""
EVERY_ROUND = ("diloco", "sparseloco")
"""Strategies whose members share phi: a peer that missed a round must take over the state of the others."""


def make_strategy(name: str, theta: Vector, local_steps: int, codec: str) -> strategies.Strategy:
    """Return the strategy with this name for vectors like `theta`, the values with which all members begin.
    Raises ValueError."""
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
    raise ValueError(f"unknown strategy {name!r}; use one of {', '.join(NAMES)}")


def group_size(grouping: strategies.Grouping) -> int:
    """Return the maximum size of a group."""
    return {"pairs": 2, "moshpit": GROUP_SIZE, "all": GROUP_MEMBERS_MAX}[grouping]
