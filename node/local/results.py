"""The result of a run in local mode on one member's disk: its own, or that of a conclusion it prefers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import trio

from node.checkpoints.weights import join_stages, keep, weights_name
from node.local.context import LocalRunsService
from node.protocols.manifest import Run
from node.runs.completion import fetch_result
from partition.model.graph import Graph
from partition.run.conclusions import Conclusion, Sends
from partition.run.ending import Ending
from partition.run.local.fetched import next_deed

FETCHES_MIN = 5
FETCH_SECONDS = 120.0
"""How often, and for how long, a member tries to fetch a result that others say they hold."""


class Holder(Protocol):
    """The member. `judges` says whether it looks at a result before it holds it, `trusts` whether it holds
    one that it cannot look at; `is_over`, whether the run is."""

    is_over: bool

    @property
    def judges(self) -> bool: ...
    @property
    def trusts(self) -> bool: ...


class LocalResults:
    """The results of one run."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        ending: Ending,
        tell: Callable[[Ending, Callable[[float], Sends]], None],
        member: Holder,
    ) -> None:
        self.lock = trio.Lock()
        """Held while the file is written or read."""
        self._service = service
        self._now = service.seams.clock.monotonic
        self._run = run
        self._ending = ending
        self._tell = tell
        self._member = member
        self._fetching = trio.CancelScope()

    async def keep(self, graph: Graph, exported: Sequence[bytes]) -> str | None:
        """Keep this member's own model, from its stages; its hash, None where another conclusion came
        meanwhile. The caller holds `lock`."""
        storage, work = self._service.seams.storage, self._service.seams.executor.run
        data = await work(partial(join_stages, self._run, graph, exported))
        if self._ending.best is not None:
            return None
        await work(partial(storage.delete, weights_name(self._run.text)))  # of one that was given up
        return await work(partial(keep, storage, self._run.text, data))

    async def fetch(self, conclusion: Conclusion) -> None:
        """Have the result of this conclusion here, then hold it, or have it looked at. One fetch at a time: a
        slow one of a conclusion that was given up must not write over the result that is settled on."""
        self._fetching.cancel()
        async with self.lock:
            with trio.CancelScope() as self._fetching:
                await self._fetch(conclusion)

    async def _fetch(self, conclusion: Conclusion) -> None:
        ending, begun, attempts = self._ending, self._now(), 0
        is_here = conclusion.outcome != "done"
        while conclusion == ending.best and not ending.holds and not self._member.is_over:
            is_here = is_here or await self._fetch_once(conclusion)
            if is_here:
                member = self._member
                deed = next_deed(ending, conclusion, judges=member.judges, trusts=member.trusts)
                if deed == "try":
                    self._tell(ending, lambda _: ending.fetched(conclusion))
                    return
                if deed == "hold":
                    self._tell(ending, lambda now: ending.hold(now, conclusion))
                    return
            attempts += 1
            if attempts >= FETCHES_MIN and self._now() - begun >= FETCH_SECONDS:
                self._tell(ending, lambda now: ending.give_up(now, conclusion, is_missing=True))
            await trio.sleep(1.0)

    async def _fetch_once(self, conclusion: Conclusion) -> bool:
        service = self._service
        # What was kept for a conclusion that is given up must not stay in its place.
        await service.seams.executor.run(partial(service.seams.storage.delete, weights_name(self._run.text)))
        for holder in self._ending.holders:
            if not await fetch_result(service, self._run, holder, conclusion.weights):  # type: ignore[arg-type]  # of a smaller shape
                return True
        return False
