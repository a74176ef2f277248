"""Placing a run again: for peers that gossip has not told of yet, or that a requester waits for."""

from collections.abc import Awaitable, Callable, Sequence

import trio

from node.runs.placement import NotPlaced, Offer
from node.seams import Clock
from partition.plan.plan import Plan

HEARSAY_SECONDS = 1.0
"""News of a newcomer may reach the requester so much later than a person: some rounds of gossip."""


async def place_in_time(
    attempt: Callable[[Sequence[Offer]], Awaitable[Plan]],
    offers: Callable[[], Sequence[Offer]],
    *,
    clock: Clock,
    wait_seconds: float,
    lacks: Callable[[str], None],
    is_over: Callable[[], bool],
) -> Plan:
    """Attempt to place among the `offers` until it succeeds, for `wait_seconds` or until the run `is_over`.

    `lacks` is told each new reason why it waits. Without waiting, an attempt is made again only where new
    peers have offered meanwhile.

    Raises:
        NotPlaced: of the last attempt.
    """
    until, said = clock.monotonic() + wait_seconds, ""
    while True:
        asked = offers()
        try:
            return await attempt(asked)
        except NotPlaced as error:
            waits = clock.monotonic() < until and not is_over()
            if waits and str(error) != said:
                said = str(error)
                lacks(f"waiting for peers: {said}")
            await trio.sleep(HEARSAY_SECONDS)
            known = {offer.peer for offer in asked}
            if not waits and all(offer.peer in known for offer in offers()):
                raise
