"""Locations of peers: their owners' claims, checked against measured round trips. No I/O.

A location is a word that owners agree on (`eu-west`). It stands for the position of the peers that claim it,
in the space of round trips (`gossip.coordinates`). A claim is doubted if the peer is much farther from the
others with this claim than from the peers of a different location; in that case the different location
counts. The distance to a location is the lower median over at least two peers, so false claims of a minority
move no other peer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from crypto.identity import PeerId
from gossip.coordinates import UNIT_SECONDS, Coordinate

ERROR_TRUSTED = 60
"""Coordinates with a larger relative error than this, in hundredths, are ignored."""
DOUBT_FACTOR = 2.0
DOUBT_SECONDS = 0.01
"""A claim is doubted if the peer is farther from the claimed location than from another one, both by this
factor and by this difference."""
UNCLAIMED_SECONDS = 0.025
"""A peer without a claim is assigned the location of other peers within this distance."""
ANCHORS_MIN = 2


@dataclass(frozen=True)
class Claim:
    """A peer's claimed location; `coordinate` is None if it is unknown."""

    location: str
    coordinate: Coordinate | None = None


@dataclass(frozen=True)
class Located:
    """A peer's accepted location; `is_doubted` is set if it differs from the claim."""

    claimed: str
    location: str
    is_doubted: bool = False


def distance_seconds(one: Coordinate, other: Coordinate) -> float:
    """Return the round trip between two coordinates."""
    apart = math.dist(one.point, other.point) + one.height + other.height
    return float(apart * UNIT_SECONDS)


def locate(claims: Mapping[PeerId, Claim]) -> dict[PeerId, Located]:
    """Return the accepted location of each peer."""
    anchors: dict[str, list[tuple[PeerId, Coordinate]]] = {}
    for peer, claim in sorted(claims.items()):
        place = _trusted(claim)
        if claim.location and place is not None:
            anchors.setdefault(claim.location, []).append((peer, place))
    return {peer: _located(peer, claim, anchors) for peer, claim in claims.items()}


def _located(peer: PeerId, claim: Claim, anchors: Mapping[str, list[tuple[PeerId, Coordinate]]]) -> Located:
    place = _trusted(claim)
    if place is None:
        return Located(claim.location, claim.location)
    found = {}
    for location, rows in anchors.items():
        away = sorted(distance_seconds(place, where) for other, where in rows if other != peer)
        if len(away) >= ANCHORS_MIN:
            found[location] = away[(len(away) - 1) // 2]
    if not found:
        return Located(claim.location, claim.location)
    nearest = min(found, key=lambda location: (found[location], location))
    if not claim.location:
        return Located("", nearest if found[nearest] <= UNCLAIMED_SECONDS else "")
    claimed = found.get(claim.location)
    if claimed is None or nearest == claim.location:
        return Located(claim.location, claim.location)
    most = max(DOUBT_FACTOR * found[nearest], found[nearest] + DOUBT_SECONDS)
    if claimed <= most:
        return Located(claim.location, claim.location)
    return Located(claim.location, nearest, is_doubted=True)


def _trusted(claim: Claim) -> Coordinate | None:
    place = claim.coordinate
    return place if place is not None and place.error <= ERROR_TRUSTED else None
