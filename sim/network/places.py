"""A peer's region and access, and temporary disturbances of its connection. No I/O."""

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

from crypto.identity import PeerId
from sim.network.clocks import LocalClock
from sim.network.machines import RoutedMachine
from sim.network.model import Access, NetworkModel
from sim.network.nat import Translator
from sim.network.queues import Fifo, Uplink
from sim.seeds import draw

BYTES_PER_MBIT = 125_000
PLAIN_ACCESS = Access(share=1.0)
"""The access of peers in no share: a public address and no limit."""
RIGHT = LocalClock()

_RANGE = 2.0**32
_REST_MIN = 0.011
"""A remaining share below this is treated as a rounding error."""


class Place:
    """The network location of one peer. `key` determines its distances to others; `sides` is its side in each
    active split; `kept_share` is the share of messages that its own connection does not lose."""

    __slots__ = (
        "access", "clock", "deaf", "down", "has_datagrams", "kept_share", "key", "machine", "nat", "peer",
        "region", "sides", "up",
    )  # fmt: skip

    def __init__(self, peer: PeerId, model: NetworkModel, seed: int, who: int | bytes) -> None:
        """Draw all values for `who`: a peer's number, or its name if it has none."""
        drawn = draw(seed, "place", who)
        self.peer = peer
        self.key = int.from_bytes(drawn[:8], "little")
        self.clock = _clock(model, drawn[16:24])
        self.region = _share_at([region.share for region in model.regions], drawn[8:12])
        shares = [access.share for access in model.access]
        rest = max(0.0, 1.0 - sum(shares))
        classes = (*model.access, PLAIN_ACCESS)
        self.access = access = classes[_share_at([*shares, rest if rest > _REST_MIN else 0.0], drawn[12:16])]
        self.kept_share = 1.0 - access.loss if access.loss else 1.0  # most places share one float object
        self.sides: tuple[int | None, ...] = ()
        self.deaf = False
        self.has_datagrams = True
        self.nat = None if access.nat == "none" else Translator(access.nat)
        self.machine: RoutedMachine | None = None
        up, down = access.up_mbit_per_second, access.down_mbit_per_second
        wait = access.queue_seconds
        self.up = Uplink(up * BYTES_PER_MBIT, wait) if up < math.inf else None
        self.down = Fifo(down * BYTES_PER_MBIT, wait) if down < math.inf else None


def _clock(model: NetworkModel, drawn: bytes) -> LocalClock:
    if not (model.clock_offset_seconds or model.clock_drift):
        return RIGHT
    offset, drift = (int.from_bytes(part, "little") / _RANGE * 2 - 1 for part in (drawn[:4], drawn[4:]))
    return LocalClock(round(offset * model.clock_offset_seconds, 6), drift * model.clock_drift)


def _share_at(shares: Sequence[float], drawn: bytes) -> int:
    """Return the index of the share into which a drawn figure falls; 0 if there are no shares."""
    bounds = list(accumulate(shares))
    if not bounds or bounds[-1] <= 0:
        return 0
    return min(bisect(bounds, int.from_bytes(drawn, "little") / _RANGE * bounds[-1]), len(shares) - 1)
