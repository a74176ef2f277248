"""What a simulated network is like, as a scenario file says it: the table `[network]`. Only data."""

from typing import Annotated, Literal

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Mbit = Annotated[float, msgspec.Meta(gt=0)]
Nat = Literal["none", "full-cone", "restricted", "symmetric", "blocked"]
"""none: a public address. full-cone: anyone may send once a mapping is there. restricted: only whom it has
sent to. symmetric: another mapping for each peer. blocked: UDP is dropped, streams go out only."""


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place: `share` of all peers live there; `inside_seconds` is the one-way latency within it."""

    name: str
    share: Share
    inside_seconds: tuple[Seconds, Seconds] = (0.005, 0.02)


class Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a share of the peers is connected. A queue holds `queue_seconds` of
    traffic; what comes on top is lost."""

    share: Share
    up_mbit_per_second: Mbit = float("inf")
    down_mbit_per_second: Mbit = float("inf")
    queue_seconds: Seconds = 0.25
    nat: Nat = "none"
    loss: Share = 0.0


class NetworkModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All links of a scenario.

    Without regions each pair of peers has one one-way latency, drawn evenly between `nearest_seconds` and
    `farthest_seconds`. With regions, `between_seconds` holds one row a region (from) with one figure a
    region (to): asymmetric where the two figures of a pair differ. `jitter_seconds`: each message adds 0 to
    this much. `loss`, `duplication`, `reordering`: shares of datagrams that never arrive, arrive twice, or
    are held back by up to `reorder_seconds`. Streams lose nothing.
    """

    nearest_seconds: Seconds = 0.05
    farthest_seconds: Seconds = 0.05
    jitter_seconds: Seconds = 0.0
    loss: Share = 0.0
    duplication: Share = 0.0
    reordering: Share = 0.0
    reorder_seconds: Seconds = 0.1
    regions: tuple[Region, ...] = ()
    between_seconds: tuple[tuple[Seconds, ...], ...] = ()
    access: tuple[Access, ...] = ()
    clock_offset_seconds: Seconds = 0.0
    clock_drift: Annotated[float, msgspec.Meta(ge=0, le=0.1)] = 0.0
