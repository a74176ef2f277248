"""The model of a simulated network, as the table `[network]` of a scenario file describes it. Only data.

`sim.network.links` applies it, to bare cores and to whole nodes alike. A contradictory model is refused at
construction: ValueError, which msgspec turns into its ValidationError while decoding.
"""

import math
from typing import Annotated, Literal

import msgspec

from sim.network.machines import BEHIND_ONE_MAX
from sim.network.routers import Preset

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Mbit = Annotated[float, msgspec.Meta(gt=0)]
Nat = Literal["none", "full-cone", "restricted", "symmetric", "blocked"]
"""none: a public address. full-cone: anyone may send once a mapping is there. restricted: only whom it has
sent to. symmetric: another mapping for each peer. blocked: UDP is dropped, streams go out only."""

_SHARES_NOISE = 0.01
"""So that three shares of 0.33 are a whole."""


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place: `share` of all peers live there; `inside_seconds` is the one-way latency within it, drawn
    evenly between the two figures for each pair of peers."""

    name: str
    share: Share
    inside_seconds: tuple[Seconds, Seconds] = (0.005, 0.02)


class Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a share of the peers is connected; the peers in no share have a public address and no limit.

    Both directions are a queue with a rate. A datagram that would wait for more than `queue_seconds` is lost;
    streams wait. `loss`: of what this peer sends and of what is sent to it.

    `nat` filters the messages of peers that do nothing about it. `router` is one of the laboratory's, and
    peers behind it do what nodes do: they keep places at relays, punch, and speak on paths
    (`sim.network.routers`); `behind_one` peers share each. A network has one of the two.
    """

    share: Share
    up_mbit_per_second: Mbit = float("inf")
    down_mbit_per_second: Mbit = float("inf")
    queue_seconds: Seconds = 0.25
    nat: Nat = "none"
    router: Preset = "none"
    behind_one: Annotated[int, msgspec.Meta(ge=1, le=BEHIND_ONE_MAX)] = 1
    loss: Share = 0.0


class NetworkModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All links of a scenario.

    Without regions each pair of peers has one one-way latency, drawn evenly between `nearest_seconds` and
    `farthest_seconds`. With regions, `between_seconds` holds one row a region (from) with one figure a
    region (to): asymmetric where the two figures of a pair differ. Within a region its own `inside_seconds`
    hold, and without `between_seconds` the nearest and farthest hold between regions. `jitter_seconds`: each
    message adds 0 to this much. `loss`, `duplication`, `reordering`: shares of datagrams that never arrive,
    arrive twice, or are held back by up to `reorder_seconds`. Streams lose nothing.

    The clock of each peer is wrong by up to `clock_offset_seconds`, and gains or loses up to `clock_drift`
    of each second.
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

    def __post_init__(self) -> None:
        if self.nearest_seconds > self.farthest_seconds:
            raise ValueError("nearest_seconds is above farthest_seconds")
        count = len(self.regions)
        if count and abs(sum(region.share for region in self.regions) - 1) > _SHARES_NOISE:
            raise ValueError("the shares of the regions do not sum up to 1")
        if len({region.name for region in self.regions}) < count:
            raise ValueError("two regions have the same name")
        if any(region.inside_seconds[0] > region.inside_seconds[1] for region in self.regions):
            raise ValueError("inside_seconds of a region: the first figure is above the second")
        rows = self.between_seconds
        if rows and (len(rows) != count or any(len(row) != count for row in rows)):
            raise ValueError(f"between_seconds wants {count} rows of {count} figures, one a region")
        if sum(access.share for access in self.access) > 1 + _SHARES_NOISE:
            raise ValueError("the shares of access sum up to more than 1")
        if any(access.nat != "none" for access in self.access) and self.has_routers:
            raise ValueError("access with nat beside access with router: use one of them")

    @property
    def has_routers(self) -> bool:
        """Whether any peer is behind a router that it has to get through."""
        return any(access.router != "none" for access in self.access)

    @property
    def is_limited(self) -> bool:
        """Whether the bandwidth of any peer is limited."""
        return any(
            min(access.up_mbit_per_second, access.down_mbit_per_second) < math.inf for access in self.access
        )
