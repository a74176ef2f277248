"""A requester's part in a contest for a free slot: it asks all providers at the same time.

Placement leases one provider after the other, after measuring links. Without
this file, a requester that asks all providers at the same time would have no competition at the last one.
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
"""Minimum number of members for contests. Among fewer, a free slot goes to whoever asks first. Such a
requester is ahead by one run per provider, which evens out quickly with few providers, and runs need not
wait."""
ENTERED_MAX = 64
"""Maximum number of providers asked at once; more than the stages of most runs."""
ENTER_SECONDS_MAX = 2.0
"""How long a provider may take to answer, which it does from memory. It is at most as long as a contest;
slower providers are left to placement."""
CONTEST_SECONDS_MAX = 5
"""Longest time that a provider may make a requester wait before it asks again."""
MISSED_SECONDS = 10.0
"""How long a provider that gave its slot to another requester is asked last. It may be this run's turn
soon."""


async def enter_queues(
    run: Run,
    providers: Sequence[PeerId],
    ask: Ask,
    decliners: Decliners,
    revision: Fact | None,
    monotonic: Callable[[], float],
) -> None:
    """Tell all providers that the run wants a slot; those that have none for it are asked last."""
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
    """Wait for the contests to end. Providers whose slot another requester won are asked last for a while."""
    await trio.sleep(min(CONTEST_SECONDS_MAX, contest_seconds))
    providers = _others(run, providers, decliners.now(monotonic()))
    for peer, declined in (await _ask_all(EnterQueue(run.fact, revision), providers, ask)).items():
        if declined is not None:
            decliners.note(peer, monotonic(), MISSED_SECONDS)


def _others(run: Run, providers: Sequence[PeerId], last: Collection[PeerId]) -> list[PeerId]:
    return [peer for peer in providers if peer != run.requester and peer not in last][:ENTERED_MAX]


async def _ask_all(request: EnterQueue, peers: Sequence[PeerId], ask: Ask) -> dict[PeerId, Declined | None]:
    """Return the providers' answers; None stands for a slot that is free for the run."""
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
