"""How the members of a run in local mode train together: `[train]` of RUN.toml with `mode = "local"`.

What the names stand for is in `gossip.averaging.strategies`; nothing here averages anything.
"""

from math import isfinite
from typing import Annotated, Literal

import msgspec

LOCAL_STEPS_MAX = 100_000
EVALUATIONS_MAX = 1_000_000

StrategyName = Literal["average", "gossip", "diloco", "noloco", "sparseloco", "asynchronous"]
CodecName = Literal["float32", "bfloat16", "float16", "int8", "int4", "topk64", "topk256"]
Weighting = Literal["samples", "equal"]


class LocalSettings(msgspec.Struct, frozen=True, array_like=True):
    """Every member makes `local_steps` optimizer steps on its own shard, then averages in a group.

    `strategy` says what is averaged and what comes of it, `codec` how it is sent, `weighting` how much each
    counts. The model is evaluated every `evaluate_every` rounds. After `patience` evaluations that did not
    improve the lowest loss by `improvement` at least the run has converged; 0: it ends by its steps alone.
    """

    local_steps: Annotated[int, msgspec.Meta(ge=1, le=LOCAL_STEPS_MAX)] = 20
    strategy: StrategyName = "average"
    codec: CodecName = "float32"
    weighting: Weighting = "samples"
    evaluate_every: Annotated[int, msgspec.Meta(ge=1, le=EVALUATIONS_MAX)] = 1
    patience: Annotated[int, msgspec.Meta(ge=0, le=EVALUATIONS_MAX)] = 0
    improvement: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.improvement) and self.improvement >= 0):
            raise ValueError("an improvement is finite and not negative")
