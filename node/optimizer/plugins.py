"""A user's own strategies and codecs, found by entry point: `peerloom.strategies` and `peerloom.codecs`.

    [project.entry-points."peerloom.strategies"]
    mine = "my_package:MyStrategy"        # called as MyStrategy(theta, local_steps=..., codec=...)
    [project.entry-points."peerloom.codecs"]
    mine = "my_package:MyCodec"           # called as MyCodec(dtype), "float32" or "float64"

They are loaded only in this process, and only by a name in the user's own script: peers cannot make them
load. All peers of a run need the same strategy and codec, because their names are part of the run's
signature.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from gossip.averaging.catalogue import NAMES, make_strategy
from gossip.averaging.codecs import Codec, codec_of
from gossip.averaging.robust.reduction import Vector
from gossip.averaging.strategies import Strategy

STRATEGIES, CODECS = "peerloom.strategies", "peerloom.codecs"
Make = Callable[[Vector], Strategy]


def strategy_maker(name: str, local_steps: int, codec: str) -> Make:
    """Return the factory that makes the strategy with this name from the initial values of training. Raises
    ValueError."""
    if name in NAMES:
        return lambda theta: make_strategy(name, theta, local_steps, codec)
    own = _loaded(STRATEGIES, name)
    if own is None:
        raise ValueError(f"no strategy {name!r}: there are {', '.join(NAMES)}, and entry points {STRATEGIES}")
    return lambda theta: own(theta, local_steps=local_steps, codec=codec)


def own_codecs(name: str, dtype: str) -> dict[str, Codec]:
    """Return a user's own codec with this name; empty for a built-in codec. Raises ValueError if there is
    none."""
    try:
        codec_of(name, dtype)
    except ValueError as error:
        own = _loaded(CODECS, name)
        if own is None:
            raise ValueError(f"{error}, and entry points {CODECS}") from None
        return {name: own(dtype)}
    return {}


def _loaded(group: str, name: str) -> Any:
    found = [each for each in entry_points(group=group) if each.name == name]
    return found[0].load() if found else None
