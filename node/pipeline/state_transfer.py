"""Fetches a stage's state (parameters and moments) from replicas that have it, in ranges from several at
once.

It is for newcomers, and for replicas whose state differs from their peers'. The result is compared with the
committer's digest. A peer that declines, stalls or dies is left out, and its ranges are fetched from the
others.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Literal

import trio
from blake3 import blake3

from crypto.identity import PeerId
from node.errors import StageFailed, Unreachable
from node.protocols.calls import fetch
from node.protocols.runs import FetchState
from node.seams import Executor, Network, Stage
from partition.plan.plan import NO_HASH

STATE_RANGE_BYTES = 4 << 20
"""Length of one answer: sending it takes long compared with a round trip, but not too long on a slow link."""
RANGE_SECONDS_MAX = 30.0
PER_SOURCE = 2
"""Number of ranges requested at once from each source, so that one is sent while the other is read."""
Arena = Literal["parameters", "moments"]


async def fill(
    network: Network,
    executor: Executor,
    stage: Stage,
    *,
    plan: bytes,
    step: int,
    sources: Sequence[PeerId],
    digest: bytes,
) -> bytes:
    """Write the state after `step` steps into the stage's arenas; return the BLAKE3 hash of its parameters.

    Raises:
        StageFailed: the sources did not deliver the committer's state.
    """
    arenas: tuple[Arena, ...] = ("parameters", "moments")
    ranges = deque(
        (arena, begin, min(STATE_RANGE_BYTES, size - begin))
        for arena in arenas
        for size in (len(stage.vector(arena)),)
        for begin in range(0, size, STATE_RANGE_BYTES)
    )
    reasons: list[str] = []

    async def drain(source: PeerId) -> None:
        while ranges:
            arena, begin, length = ranges.popleft()
            request = FetchState(plan, step, arena, begin, length)
            try:
                data = await fetch(
                    network, source, request, seconds=RANGE_SECONDS_MAX, bytes_max=STATE_RANGE_BYTES
                )
                if len(data) != length:
                    raise Unreachable(
                        "refused", (f"received {len(data)} bytes of state; {length} were requested")
                    )
            except Unreachable as error:
                ranges.append((arena, begin, length))
                reasons.append(error.detail)
                return
            vector = stage.vector(arena)
            # Writing megabytes into untouched pages would block the event loop.
            await executor.run(partial(vector.__setitem__, slice(begin, begin + length), data))

    async with trio.open_nursery() as nursery:
        for source in sources:
            for _ in range(PER_SOURCE):
                nursery.start_soon(drain, source)
    if ranges:
        raise StageFailed(f"no peer delivered the state of step {step}: {'; '.join(reasons[-3:])}")
    found = await executor.run(lambda: blake3(stage.vector("parameters")).digest())
    if digest not in (NO_HASH, found):
        raise StageFailed(f"the received state of step {step} differs from the state that its replicas hold")
    return found
