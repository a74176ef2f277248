"""Repeated attempts to place a run, for peers that gossip has not announced yet or that a requester waits
for."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from math import inf

import trio

from crypto.identity import PeerId
from node.errors import Unreachable
from node.placement.leases import Ask, Offer, PlacementFailed, about
from node.placement.searching import merge_offers
from node.protocols.runs import EnterQueue, LeaseRequest, Reply, Request, WithdrawRun
from node.seams import Clock
from partition.plan.plan import Plan
from partition.run.asks import Declined

GOSSIP_GRACE_SECONDS = 1.0
"""How many seconds later than a person the requester may learn of a newcomer, because the news takes some
rounds of gossip."""

AGAIN_SECONDS_MAX = 5.0
AGAIN_SHARE = 0.05
"""A waiting requester asks all providers again after this share of the time that it has waited. Otherwise a
hundred waiting requesters would send two thousand requests per second to twenty providers. A slot stays empty
for at most this time."""
LAW = "the requester that used least and waits longest is next; priority orders your own runs only"
"""The rule by which busy providers choose (`node.placement.turns`), for people."""
NEWS_SECONDS = 10.0
"""Minimum seconds between two reasons reported to a waiting requester, except after the first."""
WITHDRAW_SECONDS_MAX = 5.0
SEARCH_SECONDS = 60.0
"""Seconds between a waiting requester's searches of the swarm."""


class QueuePlaces:
    """The providers in whose queues a run may be, according to their answers."""

    def __init__(self, run: bytes, ask: Ask) -> None:
        self._run = run
        self._ask = ask
        self._peers: set[PeerId] = set()

    async def ask(self, peer: PeerId, request: Request, seconds: float) -> Reply:
        """Send a request, and note whether the provider queues the run. Raises Unreachable."""
        reply = await self._ask(peer, request, seconds)
        if isinstance(request, EnterQueue) or (
            isinstance(request, LeaseRequest) and request.stage is not None
        ):
            (self._peers.add if isinstance(reply, Declined) else self._peers.discard)(peer)
        return reply

    async def withdraw(self) -> None:
        """Withdraw the run from the queues; a provider that misses the message drops the run after a time."""

        async def tell(peer: PeerId) -> None:
            with suppress(Unreachable):
                await self._ask(peer, WithdrawRun(self._run), WITHDRAW_SECONDS_MAX)

        async with trio.open_nursery() as nursery:
            for peer in sorted(self._peers):
                nursery.start_soon(tell, peer)


class _News:
    """Reports why a run waits and when it may begin, if that has changed substantially."""

    def __init__(self, lacks: Callable[[str], None], clock: Clock) -> None:
        self._lacks = lacks
        self._clock = clock
        self._said = ("", "")
        self._at = -inf

    def tell(self, reason: str, wait_seconds: int | None) -> None:
        """Report a reason if it is new, and not too soon after the previous one."""
        said, now = (reason, "" if wait_seconds is None else about(wait_seconds)), self._clock.monotonic()
        if said == self._said or (self._said[0] and now - self._at < NEWS_SECONDS):
            return
        self._said, self._at = said, now
        begins = "" if wait_seconds is None else f"; it may begin in about {said[1]} ({LAW})"
        self._lacks(f"waiting for peers: {reason}{begins}")


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
    """Attempt to place a run among the `offers` until it succeeds, for `wait_seconds` or until the run
    `is_over`.

    `lacks` is called with each new reason for waiting. If the listed members do not suffice, `search` looks
    for others. Without waiting, an attempt is only repeated if either has found new peers. The last attempt,
    called with True, may use fewer peers than requested.

    Raises:
        PlacementFailed: the error of the last attempt.
    """
    begun, search_at = clock.monotonic(), 0.0
    until = begun + wait_seconds
    news = _News(lacks, clock)
    found: Sequence[Offer] = ()
    while True:
        asked = merge_offers(offers(), found)
        try:
            return await attempt(asked, False)
        except PlacementFailed as error:
            waits = clock.monotonic() < until and not is_over()
            if waits:
                news.tell(error.reason, error.wait_seconds)
            waited = clock.monotonic() - begun if waits else 0.0
            await trio.sleep(max(GOSSIP_GRACE_SECONDS, min(AGAIN_SECONDS_MAX, AGAIN_SHARE * waited)))
            known = {offer.peer for offer in asked}
            if any(offer.peer not in known for offer in offers()):
                continue
            has_failed, found = bool(found), ()
            if not has_failed and clock.monotonic() >= search_at:
                search_at = clock.monotonic() + SEARCH_SECONDS
                found = [each for each in await search() if each.peer not in known]
            if not found and not waits:
                return await attempt(asked, True)
