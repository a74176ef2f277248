"""The model of a simulated network, as described by the table `[network]` of a scenario file. Only data.

`sim.network.links` applies it to bare cores and to whole nodes. A contradictory model is refused at
construction with a ValueError, which msgspec turns into its ValidationError while decoding.
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
"""none: a public address. full-cone: every host may send to a mapping. restricted: only hosts that were
sent to may send. symmetric: a different mapping for each peer. blocked: UDP is dropped, and streams only
go out."""

_SHARES_NOISE = 0.01
"""Tolerance for the sum of shares, so that three shares of 0.33 are a whole."""


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A region with a `share` of all peers. `inside_seconds` is the one-way latency within it, drawn evenly
    between the two figures for each pair of peers."""

    name: str
    share: Share
    inside_seconds: tuple[Seconds, Seconds] = (0.005, 0.02)


class Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a share of the peers is connected. Peers in no share have a public address and no limit.

    Each direction is a queue with a rate. A datagram that would wait for more than `queue_seconds` is lost;
    streams wait. `loss` is the lost share of the messages sent by this peer, and of those sent to it.

    `nat` filters the messages of peers that do nothing about it. `router` is one of the laboratory's routers,
    and peers behind it act like nodes: they keep places at relays, punch holes, and send on paths
    (`sim.network.routers`). `behind_one` peers share each router. A network can use `nat` or `router`, but
    not both.
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

    Without regions, each pair of peers has one one-way latency, drawn evenly between `nearest_seconds` and
    `farthest_seconds`. With regions, `between_seconds` has one row per region (from) with one figure per
    region (to); links are asymmetric if the two figures of a pair differ. Within a region its own
    `inside_seconds` apply. Without `between_seconds`, the nearest and farthest apply between regions.
    `jitter_seconds`: each message takes from 0 to this much longer. `loss`, `duplication`, `reordering`:
    shares of datagrams that never arrive, arrive twice, or are held back by up to `reorder_seconds`. Streams
    lose nothing.

    The clock of each peer is wrong by up to `clock_offset_seconds`, and gains or loses up to `clock_drift` of
    each second.
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
            raise ValueError(f"between_seconds must have {count} rows of {count} figures, one per region")
        if sum(access.share for access in self.access) > 1 + _SHARES_NOISE:
            raise ValueError("the shares of access sum up to more than 1")
        if any(access.nat != "none" for access in self.access) and self.has_routers:
            raise ValueError("access uses both nat and router: use only one of them")

    @property
    def has_routers(self) -> bool:
        """Whether any peer is behind a router that must be traversed."""
        return any(access.router != "none" for access in self.access)

    @property
    def is_limited(self) -> bool:
        """Whether the bandwidth of any peer is limited."""
        return any(
            min(access.up_mbit_per_second, access.down_mbit_per_second) < math.inf for access in self.access
        )
