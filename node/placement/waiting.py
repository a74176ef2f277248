"""Placing a run again: for peers that gossip has not told of yet, or that a requester waits for."""

from collections.abc import Awaitable, Callable, Sequence

import trio

from node.placement.leases import Offer, PlacementFailed
from node.placement.searching import merge_offers
from node.seams import Clock
from partition.plan.plan import Plan

GOSSIP_GRACE_SECONDS = 1.0
"""News of a newcomer may reach the requester so much later than a person: some rounds of gossip."""

SEARCH_SECONDS = 60.0
"""A requester that waits looks through the swarm so often."""


async def place_in_time(
    attempt: Callable[[Sequence[Offer], bool], Awaitable[Plan]],
    offers: Callable[[], Sequence[Offer]],
    search: Callable[[], Awaitable[Sequence[Offer]]],
    *,
    clock: Clock,
    wait_seconds: float,
    lacks: Callable[[str], None],
    is_over: Callable[[], bool],
) -> Plan:
    """Attempt to place among the `offers` until it succeeds, for `wait_seconds` or until the run `is_over`.

    `lacks` is told each new reason why it waits. Where the listed members do not do, a `search` looks for
    others. Without waiting, an attempt is made again only where either has found new peers. The last attempt,
    with True, may make do with fewer peers than were asked for.

    Raises:
        PlacementFailed: of the last attempt.
    """
    until, said, search_at = clock.monotonic() + wait_seconds, "", 0.0
    found: Sequence[Offer] = ()
    while True:
        asked = merge_offers(offers(), found)
        try:
            return await attempt(asked, False)
        except PlacementFailed as error:
            waits = clock.monotonic() < until and not is_over()
            if waits and str(error) != said:
                said = str(error)
                lacks(f"waiting for peers: {said}")
            await trio.sleep(GOSSIP_GRACE_SECONDS)
            known = {offer.peer for offer in asked}
            if any(offer.peer not in known for offer in offers()):
                continue
            has_failed, found = bool(found), ()
            if not has_failed and clock.monotonic() >= search_at:
                search_at = clock.monotonic() + SEARCH_SECONDS
                found = [each for each in await search() if each.peer not in known]
            if not found and not waits:
                return await attempt(asked, True)
