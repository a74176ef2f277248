"""A requester's part in a contest for a free slot: it asks all providers at once.

Placement leases one provider after the other, after measuring links, so at the last provider a requester that
asks all concurrently would be without competition.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence

import trio

from crypto.facts import Fact
from crypto.identity import PeerId
from node.errors import Unreachable
from node.protocols.manifest import Run
from node.protocols.runs import EnterQueue, Reply, Request
from partition.run.asks import Declined, Done
from partition.run.decliners import Decliners

Ask = Callable[[PeerId, Request, float], Awaitable[Reply]]

CONTEST_MEMBERS_MIN = 8
"""Among fewer members a free slot goes to whoever asks first: that requester is ahead by one run a provider,
which few providers have soon made up for, and a run need not wait for others."""
ENTERED_MAX = 64
"""Providers that are asked at once: more than the stages of most runs, and little to send."""
ENTER_SECONDS_MAX = 2.0
"""A provider answers from memory; one that takes longer is left to the placement. No more than a contest."""
CONTEST_SECONDS_MAX = 5
"""No provider has a requester wait for longer before it asks again."""
MISSED_SECONDS = 10.0
"""A provider that gave its slot to another comes last for so long: it may be the run's turn soon."""


async def enter_queues(
    run: Run,
    providers: Sequence[PeerId],
    ask: Ask,
    decliners: Decliners,
    revision: Fact | None,
    monotonic: Callable[[], float],
) -> None:
    """Say to all providers that the run wants a slot; those that have none for it come last."""
    providers = _others(run, providers, decliners.now(monotonic()))
    for peer, declined in (await _ask_all(EnterQueue(run.fact, revision), providers, ask)).items():
        if declined is not None and not declined.is_contested:
            decliners.note(peer, monotonic())


async def settle(
    run: Run,
    providers: Sequence[PeerId],
    ask: Ask,
    decliners: Decliners,
    revision: Fact | None,
    monotonic: Callable[[], float],
    contest_seconds: float,
) -> None:
    """Wait for the contests to end; providers whose slot another requester won come last for a while."""
    await trio.sleep(min(CONTEST_SECONDS_MAX, contest_seconds))
    providers = _others(run, providers, decliners.now(monotonic()))
    for peer, declined in (await _ask_all(EnterQueue(run.fact, revision), providers, ask)).items():
        if declined is not None:
            decliners.note(peer, monotonic(), MISSED_SECONDS)


def _others(run: Run, providers: Sequence[PeerId], last: Collection[PeerId]) -> list[PeerId]:
    return [peer for peer in providers if peer != run.requester and peer not in last][:ENTERED_MAX]


async def _ask_all(request: EnterQueue, peers: Sequence[PeerId], ask: Ask) -> dict[PeerId, Declined | None]:
    """Return the providers' answers, None for a slot that is free for the run."""
    answers: dict[PeerId, Declined | None] = {}

    async def put(peer: PeerId) -> None:
        try:
            reply = await ask(peer, request, ENTER_SECONDS_MAX)
        except Unreachable:
            return
        if isinstance(reply, Done):
            answers[peer] = None
        elif isinstance(reply, Declined):
            answers[peer] = reply

    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(put, peer)
    return answers
