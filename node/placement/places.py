"""Locations and devices of members, for runs that ask for a region, for nearness or for devices.

Locations are claims that round trips correct; devices are uncorrected claims.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from crypto.identity import PeerId, parse_peer
from gossip.coordinates import Coordinate
from gossip.places import Claim, Located, distance_seconds, locate
from node.placement.leases import Offer, PlacementFailed
from node.protocols.manifest import PlaceWish, Run
from node.services.membership import Membership
from node.services.metadata import read_metadata
from partition.plan.plan import Plan

DEVICE_ORDER = ("cuda", "mps", "cpu")
NEAR_SECONDS = 0.03
"""The round trip that `near` stands for if a run gives no `max_rtt_milliseconds`."""

Attempt = Callable[[Sequence[Offer], bool], Awaitable[Plan]]


class Places:
    """The locations of the members listed by node `me`. `own` returns the name that its owner gave its
    location."""

    def __init__(self, me: PeerId, membership: Membership, own: Callable[[], str]) -> None:
        self._me = me
        self._membership = membership
        self._own = own

    def located(self) -> dict[PeerId, Located]:
        """Return the location of each live member, including this node."""
        return locate(self._claims())

    def _claims(self) -> dict[PeerId, Claim]:
        coordinates = self._membership.coordinates
        known = coordinates.places()
        claims = {self._me: Claim(self._own(), coordinates.here)}
        for member in self._membership.members:
            if member.live and member.peer != self._me:
                metadata = read_metadata(member.metadata)
                location = "" if metadata is None else metadata.location
                claims[member.peer] = Claim(location, known.get(member.peer))
        return claims

    def choose(self, run: Run, offers: Sequence[Offer]) -> list[Offer]:
        """Return the offers; peers that do not meet the run's wishes are marked as having no slot."""
        wish = run.manifest.place
        if wish is None:
            return list(offers)
        found = list(offers)
        if wish.devices:
            found = on_devices(found, wish.devices)
        if wish.gflops_min:
            found = at_least(found, wish.gflops_min * 1e9)
        if not (wish.location or wish.near or wish.max_rtt_milliseconds):
            return found
        claims = self._claims()
        fitting = self._fitting(wish, run.requester, claims)
        return [replace(offer, has_slot=offer.has_slot and offer.peer in fitting) for offer in found]

    def devices_near(self, offers: Iterable[Offer]) -> list[tuple[str, int]]:
        """Return the kinds of devices with a slot near this node and their numbers, the most frequent first;
        among equals GPUs come first. Members with an unknown round trip count as near."""
        claims = self._claims()
        here = self._membership.coordinates.here
        kinds: Counter[str] = Counter()
        for offer in offers:
            claim = claims.get(offer.peer)
            there = None if claim is None else claim.coordinate
            is_near = there is None or here is None or distance_seconds(here, there) <= NEAR_SECONDS
            if offer.has_slot and is_near and offer.device in DEVICE_ORDER:
                kinds[offer.device] += 1
        return sorted(kinds.items(), key=lambda each: (-each[1], DEVICE_ORDER.index(each[0])))

    def preferred(self, run: Run, offers: Sequence[Offer]) -> list[Offer]:
        """Return the offers with a slot that meet the run's wishes, those on its preferred devices first."""
        wish = run.manifest.place
        order = {device: number for number, device in enumerate(wish.devices)} if wish is not None else {}
        free = [offer for offer in self.choose(run, offers) if offer.has_slot]
        return sorted(free, key=lambda offer: order.get(offer.device, 0))  # type: ignore[call-overload]  # any text

    def _fitting(self, wish: PlaceWish, requester: PeerId, claims: dict[PeerId, Claim]) -> set[PeerId]:
        found = locate(claims)
        fitting = {peer for peer, row in found.items() if wish.location in ("", row.location)}
        if not wish.near and not wish.max_rtt_milliseconds:
            return fitting
        most = wish.max_rtt_milliseconds / 1000 or NEAR_SECONDS
        return {peer for peer in fitting if self._is_near(peer, wish.near, most, requester, claims, found)}

    @staticmethod
    def _is_near(
        peer: PeerId,
        near: str,
        most: float,
        requester: PeerId,
        claims: dict[PeerId, Claim],
        found: dict[PeerId, Located],
    ) -> bool:
        """Return whether a peer is within `most` seconds of the requester, of a peer, or of a location's
        median."""
        center = requester if not near else _peer(near)
        if center == peer:
            return True
        place = claims[peer].coordinate
        ends: list[Coordinate] = []
        for other, claim in claims.items():
            is_end = other == center if center is not None else found[other].location == near
            if is_end and other != peer and claim.coordinate is not None:
                ends.append(claim.coordinate)
        if place is None or not ends:
            return False
        return sorted(distance_seconds(place, end) for end in ends)[(len(ends) - 1) // 2] <= most

    def keeping(self, run: Run, attempt: Attempt, tell: Callable[[str], None]) -> Attempt:
        """Return a function that attempts to place a run within its wishes, and mentions them in failures. If
        the run lists devices in an order, it is placed on the first that suffice, and `tell` gets the reason
        if others are used."""
        wish = run.manifest.place
        if wish is None:
            return attempt

        async def within(offers: Sequence[Offer], is_last: bool) -> Plan:
            chosen = self.choose(run, offers)
            for count in range(1, len(wish.devices)):
                first = on_devices(chosen, wish.devices[:count])
                if any(offer.has_slot for offer in first):
                    with suppress(PlacementFailed):
                        return await attempt(first, False)
            try:
                plan = await attempt(chosen, is_last)
                if said := devices_text(wish, chosen, plan):
                    tell(said)
                return plan
            except PlacementFailed as error:
                there = sum(offer.has_slot for offer in chosen)
                slots = sum(offer.has_slot for offer in offers)
                said = f"{error.reason}; of {slots} with a slot {there} are {wish_text(wish)}"
                raise PlacementFailed(said, error.wait_seconds) from None

        return within

    def told_of(self, document: dict[str, Any]) -> dict[str, Any]:
        """Add the accepted location of each peer to a `peerloom/peers/1` document."""
        found = self.located()
        rows = [
            {**row, "place": place_document(found.get(parse_peer(row["peer"])))} for row in document["peers"]
        ]
        return {**document, "peers": rows}

    def own_document(self) -> dict[str, Any] | None:
        """Return this node's accepted location."""
        return place_document(self.located()[self._me])


def _peer(text: str) -> PeerId | None:
    try:
        return parse_peer(text)
    except ValueError:
        return None


def place_document(located: Located | None) -> dict[str, Any] | None:
    """Return a peer's location as a document: as claimed, and as it counts."""
    if located is None:
        return None
    return {
        "claimed": located.claimed,
        "location": located.location,
        "is_doubted": located.is_doubted,
    }


def on_devices(offers: Iterable[Offer], devices: Collection[str]) -> list[Offer]:
    """Return the offers, with slots only for peers with one of these devices."""
    return [replace(offer, has_slot=offer.has_slot and offer.device in devices) for offer in offers]


def at_least(offers: Iterable[Offer], flops_per_second: float) -> list[Offer]:
    """Return the offers, with slots only for peers that are this fast by their own and others'
    measurements."""
    return [
        replace(offer, has_slot=offer.has_slot and offer.flops_per_second >= flops_per_second)
        for offer in offers
    ]


def devices_text(wish: PlaceWish, offers: Iterable[Offer], plan: Plan) -> str:
    """Return a text with a plan's devices if they are not all of the first wanted kind; else ""."""
    kinds = {offer.peer: offer.device for offer in offers}
    held = [kinds.get(PeerId(peer), "") for stage in plan.stages for peer in stage.replicas]
    if not wish.devices or set(held) <= {wish.devices[0]}:
        return ""
    found = " and ".join(f"{held.count(kind)} on {kind}" for kind in wish.devices if kind in held)
    placed = "1 stage is placed" if len(held) == 1 else f"{len(held)} stages are placed"
    return f"too few peers with a slot on {wish.devices[0]}: {placed}, {found}"


def wish_text(wish: PlaceWish) -> str:
    """Return a run's wishes as a text."""
    parts: Iterable[str] = (
        f"in {wish.location}" if wish.location else "",
        f"near {wish.near}" if wish.near else "",
        f"within {wish.max_rtt_milliseconds} ms" if wish.max_rtt_milliseconds else "",
        f"on {' or '.join(wish.devices)}" if wish.devices else "",
        f"at {wish.gflops_min:g} GFLOP/s or more" if wish.gflops_min else "",
    )
    return " ".join(part for part in parts if part)
