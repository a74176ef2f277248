"""Calls that reach an attempt as one batch: an exception in one call is raised only in its caller."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np
import pytest
import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.averaging.attempt import Attempt, Sends
from gossip.averaging.messages import CHUNK_BYTES_MAX, PROTOCOL
from node.averaging.runner import Runner
from node.errors import StreamEnded
from node.seams import Stream
from sim.executor import SimExecutor
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import SimClock, SimNetworkFabric
from sim.worlds.scheduling import run_virtually
from tests.gossip.averaging.network import PATIENCE, group_of, members_of
from tests.gossip.swarm import HashSigner, peer_of

ITEMS = 64
BROKEN, DEAD = peer_of(1), peer_of(2)
T = TypeVar("T")


class _Faulty(Attempt):
    """A core that raises an unexpected exception for one peer."""

    def lost(self, now: float, peer: PeerId) -> Sends:
        if peer == BROKEN:
            raise ZeroDivisionError("a fault in the core")
        return super().lost(now, peer)


class _Busy(SimExecutor):
    """An executor that takes a second per batch, so that further calls gather meanwhile."""

    handed_over = 0

    async def run(self, function: Callable[[], T], *, seconds: float = 0.0, apart: bool = False) -> T:
        self.handed_over += 1
        await trio.sleep(1.0)
        return await super().run(function, seconds=seconds, apart=apart)


async def _hear(stream: Stream) -> None:
    with suppress(StreamEnded):
        while True:
            await stream.receive_with_payload(CHUNK_BYTES_MAX)


def test_a_call_that_fails_ends_only_its_caller() -> None:
    async def play() -> None:
        fabric = SimNetworkFabric(SimLinks(NetworkModel(), 1))
        group = group_of(members_of(4), ITEMS)
        own, others = fabric.attach(peer_of(0)), [fabric.attach(peer_of(number)) for number in range(1, 4)]
        for number, other in enumerate(others, 1):
            other.handle(PROTOCOL, _hear)
            own.learn(peer_of(number), other.addresses)
        clock, executor = SimClock(), _Busy()
        vector = np.ones(ITEMS, np.float32)
        attempt = _Faulty(HashSigner(peer_of(0)), group, vector, 1.0, clock.monotonic(), PATIENCE)
        refused: list[RemoteProtocolError] = []
        runner = Runner(attempt, own, clock, executor, lambda _, error: refused.append(error))
        over: list[PeerId] = []

        async def lose(peer: PeerId) -> None:
            await runner.lose(peer)
            over.append(peer)

        async def lose_broken() -> None:
            with pytest.raises(ZeroDivisionError, match="a fault in the core"):
                await runner.lose(BROKEN)
            over.append(BROKEN)

        async with trio.open_nursery() as nursery:
            for other in others:
                await nursery.start(other.run)
            nursery.start_soon(runner.run)
            await trio.sleep(0.5)  # the attempt is starting: calls from now on form one batch
            nursery.start_soon(lose_broken)
            nursery.start_soon(lose, DEAD)
            await trio.sleep(1.0)
            assert executor.handed_over == 2
            assert over == []
            await trio.sleep(1.0)
            assert sorted(over) == sorted([BROKEN, DEAD])
            assert not attempt.is_closed, "the failed call closed the attempt"
            assert not refused
            await runner.cancel()
            assert (await runner.result()).reason  # type: ignore[union-attr]  # it was cancelled
            nursery.cancel_scope.cancel()

    run_virtually(play)
