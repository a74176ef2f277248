"""Settings of a run in local mode: the table `[train]` of RUN.toml with `mode = "local"`.

`gossip.averaging.strategies` explains the names of strategies. Nothing here averages.
"""

from math import isfinite
from typing import Annotated, Literal

import msgspec

LOCAL_STEPS_MAX = 100_000
EVALUATIONS_MAX = 1_000_000
COLUMNS_MAX = 16
"""Maximum number of arrays of a data set that stays with its owners. Their names must fit into a manifest of
900 bytes."""

StrategyName = Literal["average", "gossip", "diloco", "noloco", "sparseloco", "asynchronous"]
CodecName = Literal["float32", "bfloat16", "float16", "int8", "int4", "topk64", "topk256"]
Weighting = Literal["samples", "equal"]
AggregateName = Literal[
    "auto",
    "mean",
    "median",
    "trimmed-mean",
    "centered-clipping",
    "geometric-median",
    "krum",
    "multi-krum",
    "nnm-median",
    "nnm-trimmed-mean",
    "nnm-centered-clipping",
    "nnm-geometric-median",
    "nnm-krum",
    "nnm-multi-krum",
]


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One array of a data set: its name, numpy's name for its type, and the shape of one sample."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,64}\Z")]
    dtype: Annotated[str, msgspec.Meta(pattern=r"^(bool|u?int(8|16|32|64)|float(16|32|64))\Z")]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...], msgspec.Meta(max_length=8)]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{','.join(map(str, self.shape))}]"


class OwnData(msgspec.Struct, frozen=True, array_like=True):
    """The data set that each member must have if data stays with its owners: it has the local name `name` and
    these columns. `window` is the number of bytes in a sample of text, 0 for other data."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}\Z")]
    columns: Annotated[tuple[Column, ...], msgspec.Meta(min_length=1, max_length=COLUMNS_MAX)]
    window: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0

    def __str__(self) -> str:
        return ", ".join(map(str, self.columns))


class LocalSettings(msgspec.Struct, frozen=True, array_like=True):
    """The settings of a run whose members train apart: every member makes `local_steps` optimizer steps on
    its own shard, then averages in a group.

    `strategy` determines what is averaged and how the result is used, `codec` the encoding, and `weighting`
    the weight of each member. The model is evaluated every `evaluate_every` rounds. The run has converged
    after `patience` evaluations that did not improve the lowest loss by at least `improvement`. If `patience`
    is 0, the run ends only after its last step.

    With `own_data` no data travels: every member trains on its own data set, and reveals only that the set
    has these columns.

    A member applies the share `damping` of a round's result, w <- (1 - damping) w + damping mean. In rounds
    after its last step it applies the whole result, so that a run ends with a mean of its members. Only
    strategies without outer steps use `damping`.

    `aggregate` is the rule that combines the vectors of a round. "auto" is "nnm-trimmed-mean" if any peer may
    join the swarm, and the mean in a swarm with a key.
    """

    local_steps: Annotated[int, msgspec.Meta(ge=1, le=LOCAL_STEPS_MAX)] = 20
    strategy: StrategyName = "average"
    codec: CodecName = "float32"
    weighting: Weighting = "samples"
    evaluate_every: Annotated[int, msgspec.Meta(ge=1, le=EVALUATIONS_MAX)] = 1
    patience: Annotated[int, msgspec.Meta(ge=0, le=EVALUATIONS_MAX)] = 0
    improvement: float = 0.0
    own_data: OwnData | None = None
    aggregate: AggregateName = "auto"
    damping: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0

    @property
    def is_federated(self) -> bool:
        """Whether data stays with its owners."""
        return self.own_data is not None

    def __post_init__(self) -> None:
        if not (isfinite(self.improvement) and self.improvement >= 0):
            raise ValueError("an improvement must be finite and not negative")
