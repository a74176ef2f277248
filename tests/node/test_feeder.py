"""A trainer's shell prepares the data of the next step before the step begins, within limits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import trio
from msgspec.structs import replace

from crypto.facts import IdentitySigner
from crypto.identity import Identity
from node.pipeline.feeder import FeederShell
from partition.plan.plan import plan_hash
from partition.steps.frames import Frame
from sim.executor import SimExecutor
from tests.partition.small_plan import PLAN, opening

SIGNER = IdentitySigner(Identity(bytes(32)), "test")
ALONE = replace(PLAN, trainers=(SIGNER.peer,), roster=tuple(sorted((*PLAN.roster, SIGNER.peer))))
STEPS = 2


class Data:
    """A source of data that records which micro-batches were made."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.test = self.train

    async def ready(self, microbatch: int, *, train: bool, again: bool) -> None:
        """Return immediately, because the whole source is local."""

    def train(self, microbatch: int) -> tuple[list[Any], list[Any]]:
        self.made.append(microbatch)
        return [np.full((1, 2), microbatch, np.float32)], [np.zeros(1, np.int64)]


class CountingExecutor(SimExecutor):
    """A thread runner that records its calls."""

    trips = 0

    async def run(self, function: Any, **how: Any) -> Any:
        self.trips += 1
        return await super().run(function, **how)


async def fed(
    *steps: int, executor: SimExecutor | None = None, of: int = STEPS, **limits: int
) -> tuple[list[int], int]:
    """Open these steps of a run with `of` steps. Return the micro-batches that were made, and the number of
    frames that were sent. `limits` are passed to the shell."""
    data, sent = Data(), []
    manifest = SimpleNamespace(steps=of, evaluations=0, sizes=())
    seams = SimpleNamespace(
        core=lambda kind, *arguments: kind(*arguments), executor=executor or SimExecutor()
    )
    shell: Any = FeederShell
    feeds = shell(
        SIGNER,
        SimpleNamespace(manifest=manifest),
        ALONE,
        data,
        seams,
        lambda _, message, *__: sent.append(message),
        **limits,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feeds.run)
        for step in steps:
            message = replace(opening(step=step), plan=plan_hash(ALONE))
            feeds.receive(0.0, SIGNER.peer, message)
            await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
    return data.made, sum(isinstance(message, Frame) for message in sent)


async def test_the_data_of_the_next_step_is_made_early_and_sent_later() -> None:
    assert await fed(0) == ([0, 1, 2, 3], 4)
    assert await fed(0, 1) == ([0, 1, 2, 3], 8), "a micro-batch was made twice, or beyond the last step"


async def test_the_amount_of_data_made_in_advance_is_limited() -> None:
    assert await fed(0, ahead_bytes_max=1) == ([0, 1, 2], 4)


async def test_small_micro_batches_are_made_in_a_single_thread_call() -> None:
    executor = CountingExecutor()
    await fed(0, executor=executor)
    first, executor.trips = executor.trips, 0
    assert await fed(0, 1, executor=executor, of=3) == ([0, 1, 2, 3, 4, 5], 8)
    assert executor.trips == first + 1, (
        "the next micro-batches took several calls although their size was known"
    )
