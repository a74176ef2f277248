"""The result of a run in local mode on one member's disk: its own, or the result of a conclusion that it
prefers."""

from collections.abc import Sequence
from functools import partial

import trio

from node.checkpoints.weights import join_stages, keep, weights_name
from node.local.context import LocalRunsService
from node.local.courses import follow
from node.protocols.manifest import Run
from node.runs.completion import fetch_result
from partition.model.graph import Graph
from partition.run.conclusions import Conclusion
from partition.run.ending import Ending
from partition.run.local.member_ending import FetchResult, MemberEnding


class LocalResults:
    """The results of one run."""

    def __init__(self, service: LocalRunsService, run: Run, ending: Ending, finish: MemberEnding) -> None:
        self.lock = trio.Lock()
        """Held while the file is written or read."""
        self._service = service
        self._run = run
        self._ending = ending
        self._finish = finish
        self._fetching = trio.CancelScope()

    async def keep(self, graph: Graph, exported: Sequence[bytes]) -> str | None:
        """Store this member's own model, made of its stages. Return its hash, or None if a different
        conclusion came meanwhile. The caller holds `lock`."""
        storage, work = self._service.seams.storage, self._service.seams.executor.run
        data = await work(partial(join_stages, self._run, graph, exported))
        if self._ending.best is not None:
            return None
        await work(partial(storage.delete, weights_name(self._run.text)))  # the file of an abandoned result
        return await work(partial(keep, storage, self._run.text, data))

    async def fetch(self, conclusion: Conclusion) -> None:
        """Fetch the result of this conclusion, then keep it or have it checked. Only one fetch runs at a
        time: a slow fetch for an abandoned conclusion must not overwrite the final result."""
        self._fetching.cancel()
        async with self.lock:
            with trio.CancelScope() as self._fetching:
                await follow(self._finish.obtain(conclusion), self._fetch)

    async def _fetch(self, deed: FetchResult) -> bool:
        service = self._service
        # The file of an abandoned conclusion must not remain under the result's name.
        await service.seams.executor.run(partial(service.seams.storage.delete, weights_name(self._run.text)))
        for holder in deed.holders:
            if not await fetch_result(service, self._run, holder, deed.weights):  # type: ignore[arg-type]  # of a smaller shape
                return True
        return False
