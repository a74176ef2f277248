"""The link model: when a message arrives, or that it never does. Pure: no trio, no clock.

What happens to a message is a keyed hash of (seed, sender, receiver, protocol, its number on that
link), so it does not depend on what other links carry or on the order in which a driver asks.
"""

import math
import struct
from dataclasses import dataclass

from crypto.identity import PeerId
from sim.network.instants import TICKS_PER_SECOND, after, ticks
from sim.seeds import DRAW_BYTES, draw

_DRAW = struct.Struct("<II")
_DRAWS_PER_HASH = DRAW_BYTES // _DRAW.size
_DRAW_RANGE = 2.0**32


@dataclass(frozen=True)
class LinkModel:
    """How links behave.

    `nearest_seconds`, `farthest_seconds`: each pair of peers has one one-way latency, drawn evenly
    between these, the same in both directions. `jitter_seconds`: each message adds 0 to this much.
    `loss`: the share of datagrams that never arrive; streams lose nothing. `bytes_per_second`: what
    one stream carries in one direction.
    """

    nearest_seconds: float = 0.05
    farthest_seconds: float = 0.05
    jitter_seconds: float = 0.0
    loss: float = 0.0
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.nearest_seconds <= self.farthest_seconds < math.inf:
            raise ValueError("want 0 <= nearest_seconds <= farthest_seconds < inf")
        if not 0 <= self.jitter_seconds < math.inf:
            raise ValueError("want 0 <= jitter_seconds < inf")
        if not 0 <= self.loss <= 1:
            raise ValueError("loss is a share, 0 to 1")
        if not self.bytes_per_second > 0:
            raise ValueError("want bytes_per_second > 0")


class Link:
    """One direction between two peers for one protocol. `post` decides the fate of each datagram."""

    __slots__ = ("_draws", "_key", "_model", "_seed", "_sequence", "_ticks", "latency_seconds")

    def __init__(
        self, model: LinkModel, seed: int, key: tuple[PeerId, PeerId, str], latency_seconds: float
    ) -> None:
        self.latency_seconds = latency_seconds
        self._model = model
        self._seed = seed
        self._key = key
        # What always takes the same time needs no draws: None.
        self._draws = b"" if model.loss > 0 or model.jitter_seconds > 0 else None
        self._ticks = ticks(latency_seconds)
        self._sequence = 0

    def post(self, now: float) -> tuple[int, float]:
        """One datagram leaves at the instant `now`: (its number on the link, when it arrives).

        It arrives at inf if it is lost.
        """
        sequence = self._sequence
        self._sequence = sequence + 1
        if self._draws is None:
            return sequence, (round(now * TICKS_PER_SECOND) + self._ticks) / TICKS_PER_SECOND
        offset = sequence % _DRAWS_PER_HASH
        if offset == 0:
            self._draws = draw(self._seed, "link", *self._key, sequence)
        fate, jitter = _DRAW.unpack_from(self._draws, offset * _DRAW.size)
        model = self._model
        if fate < model.loss * _DRAW_RANGE:
            return sequence, math.inf
        return sequence, after(now, self.latency_seconds + model.jitter_seconds * jitter / _DRAW_RANGE)


class Links:
    """All links of one simulation, under one model and seed."""

    def __init__(self, model: LinkModel, seed: int) -> None:
        self.model = model
        self._seed = seed
        self._links: dict[tuple[PeerId, PeerId, str], Link] = {}

    def link(self, sender: PeerId, receiver: PeerId, protocol: str) -> Link:
        """The one link from `sender` to `receiver` for `protocol`."""
        key = (sender, receiver, protocol)
        link = self._links.get(key)
        if link is None:
            latency_seconds = self.latency_seconds(sender, receiver)
            link = self._links[key] = Link(self.model, self._seed, key, latency_seconds)
        return link

    def latency_seconds(self, one: PeerId, other: PeerId) -> float:
        """The one-way latency between two peers, without jitter; the same in both directions."""
        model = self.model
        if model.nearest_seconds == model.farthest_seconds:
            return model.nearest_seconds
        low, high = min(one, other), max(one, other)
        share = int.from_bytes(draw(self._seed, "distance", low, high)[:4], "little") / _DRAW_RANGE
        return model.nearest_seconds + (model.farthest_seconds - model.nearest_seconds) * share
