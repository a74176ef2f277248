"""The start of an averaging round is cancelled because a head attaches again."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import trio

from crypto.encoding import encode
from gossip.averaging.robust.reduction import Vector
from node.averaging.participation import Participation
from node.averaging.rounds import Round
from node.local.rounds import Rounds
from node.local.stage_server import StageServer
from node.local.trainer import LocalTrainer
from node.seams import Network
from partition import stage as api
from partition.run.local import column_messages as column
from partition.run.local_settings import LocalSettings
from tests.node.local.test_silent_heads import ask, attach, scenario, work


class Copied:
    """A trainer after one step, whose second copy takes as long as the test wants."""

    def __init__(self) -> None:
        self.step, self.samples, self.is_idle = 1, 8, False
        self.shard = SimpleNamespace(rows=())
        self.copies = 0
        self.begun, self.goes_on = trio.Event(), trio.Event()

    async def copy_out(self, *, moments: bool) -> Vector:
        del moments
        self.copies += 1
        if self.copies == 2:
            self.begun.set()
            await self.goes_on.wait()
        return np.zeros(4, np.float32)


class Alone:
    """A participation whose rounds end as soon as they start."""

    aggregate = "mean"

    def __init__(self) -> None:
        self.rounds = 0

    async def compute(self, work: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return work()

    async def average(self, vector: Vector, *_: object) -> Round:
        self.rounds += 1
        return cast("Round", SimpleNamespace(vector=vector, shares={}, error=""))


def test_a_head_may_attach_again_while_a_round_starts() -> None:
    trainer, part = Copied(), Alone()

    async def test(server: StageServer, holder: Network, head: Network, other: Network) -> None:
        rounds = Rounds(
            other.peer,
            LocalSettings(local_steps=1),
            cast("LocalTrainer", trainer),
            cast("Participation", part),
            trio.current_time,
        )
        await rounds.open()
        async with trio.open_nursery() as nursery:

            async def between() -> None:
                if rounds.schedule.is_due(trainer.step, is_idle=False):
                    await rounds.begin(nursery)

            server.between = between
            first, _ = await ask(head, holder, attach())
            await first.send(encode(column.Do()), encode(api.Apply(0, 1, 1.0)))
            await trainer.begun.wait()
            second, attached = await ask(head, holder, attach())
            assert isinstance(attached, column.Attached)
            trainer.goes_on.set()
            assert isinstance(await work(second, api.Apply(0, 1, 1.0)), column.Did)
        assert (trainer.copies, part.rounds) == (3, 1)

    scenario(test)
