"""Network coordinates whose distances are round trips: Vivaldi with a height, as in Serf.

Dabek, Cox, Kaashoek and Morris 2004 ("Vivaldi: A Decentralized Network Coordinate System"), sections 2.5 to
2.7 and 5.4 (heights: the part of every path that a peer's own access adds). Each answered probe acts as a
spring between two peers. A peer's claimed coordinate is unproved, so one sample moves us by at most STEP_MAX,
and only the median of a peer's latest samples counts. So the lies of a minority have little effect.

Pure arithmetic in seconds. On the wire, a coordinate is in whole tenths of a millisecond.
"""

import math
from collections import OrderedDict
from random import Random
from typing import Annotated

import msgspec

from crypto.identity import PeerId

DIMENSIONS = 4
UNIT_SECONDS = 1e-4
FARTHEST = 100_000
"""Maximum distance from the origin, in units: 10 s, longer than any path on Earth."""
ROUND_TRIP_SECONDS_MAX = 10.0
ERROR_MAX = 1.5
"""The relative error of a peer without samples. A claimed error counts as at least ERROR_MIN."""
ERROR_MIN = 0.05
ADJUSTMENT = 0.25
"""The paper's c_c and c_e: the share of a spring's pull that is applied."""
STEP_MAX = 0.02
"""Maximum move caused by one sample, in seconds."""
HEIGHT_MIN = 1e-4
SAMPLES_KEPT = 3
PEERS_KEPT_MAX = 64
"""Number of peers whose latest samples and coordinates are kept, the most recent ones."""

Length = Annotated[int, msgspec.Meta(ge=-FARTHEST, le=FARTHEST)]
Height = Annotated[int, msgspec.Meta(ge=0, le=FARTHEST)]
Share = Annotated[int, msgspec.Meta(ge=0, le=int(ERROR_MAX * 100))]


class Coordinate(msgspec.Struct, frozen=True, array_like=True):
    """A coordinate that a peer claims: a point and a height in units, and its relative error in
    hundredths."""

    point: Annotated[tuple[Length, ...], msgspec.Meta(min_length=DIMENSIONS, max_length=DIMENSIONS)]
    height: Height
    error: Share


class Coordinates:
    """One peer's estimate of its own coordinate, which it reports as `here`."""

    __slots__ = ("_error", "_height", "_point", "_rng", "_samples", "here")

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._point = [0.0] * DIMENSIONS
        self._height = HEIGHT_MIN
        self._error = ERROR_MAX
        self._samples: OrderedDict[PeerId, tuple[list[float], Coordinate]] = OrderedDict()
        self.here = self._said()

    def learn(self, peer: PeerId, there: Coordinate, round_trip_seconds: float) -> None:
        """Learn from a ping answered by `peer`, which claims the coordinate `there`."""
        if not 0 < round_trip_seconds <= ROUND_TRIP_SECONDS_MAX:
            return
        measured = self._median(peer, there, round_trip_seconds)
        point = [value * UNIT_SECONDS for value in there.point]
        height = there.height * UNIT_SECONDS
        apart = math.dist(self._point, point)
        distance = apart + self._height + height
        theirs = max(there.error / 100, ERROR_MIN)
        weight = self._error / (self._error + theirs)
        relative = abs(distance - measured) / measured
        self._error += (min(relative, ERROR_MAX) - self._error) * ADJUSTMENT * weight
        self._error = min(max(self._error, ERROR_MIN), ERROR_MAX)
        force = max(-STEP_MAX, min(STEP_MAX, ADJUSTMENT * weight * (measured - distance)))
        self._move(point, apart, height, force)
        self.here = self._said()

    def round_trip_seconds_to(self, peer: PeerId) -> float | None:
        """Return the recently measured round trip to `peer`; None if there is none."""
        kept = self._samples.get(peer)
        return None if kept is None else sorted(kept[0])[(len(kept[0]) - 1) // 2]

    def places(self) -> dict[PeerId, Coordinate]:
        """Return the claimed coordinates of the peers pinged recently."""
        return {peer: place for peer, (_, place) in self._samples.items()}

    def round_trip_seconds(self, there: Coordinate) -> float:
        """Estimate the round trip to a peer at `there`."""
        point = [value * UNIT_SECONDS for value in there.point]
        return math.dist(self._point, point) + self._height + there.height * UNIT_SECONDS

    def _move(self, point: list[float], apart: float, height: float, force: float) -> None:
        """Move away from a point by `force`, or towards it if negative. The height takes a share of the
        move."""
        if apart > UNIT_SECONDS:
            way = [(mine - other) / apart for mine, other in zip(self._point, point, strict=True)]
        else:  # two peers at the same point are moved apart in a random direction
            drawn = [self._rng.gauss(0.0, 1.0) for _ in range(DIMENSIONS)]
            length = math.hypot(*drawn) or 1.0
            way = [value / length for value in drawn]
        farthest = FARTHEST * UNIT_SECONDS
        self._point = [
            max(-farthest, min(farthest, mine + force * step))
            for mine, step in zip(self._point, way, strict=True)
        ]
        if apart > UNIT_SECONDS:
            grown = self._height + (self._height + height) * force / apart
            self._height = min(max(grown, HEIGHT_MIN), self._height + STEP_MAX, farthest)

    def _median(self, peer: PeerId, there: Coordinate, seconds: float) -> float:
        samples, _ = self._samples.pop(peer, ([], there))
        samples = [*samples[1 - SAMPLES_KEPT :], seconds]
        self._samples[peer] = samples, there
        if len(self._samples) > PEERS_KEPT_MAX:
            self._samples.popitem(last=False)
        return sorted(samples)[(len(samples) - 1) // 2]

    def _said(self) -> Coordinate:
        point = tuple(round(value / UNIT_SECONDS) for value in self._point)
        return Coordinate(point, round(self._height / UNIT_SECONDS), round(self._error * 100))
