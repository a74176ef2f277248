"""The real Executor seam: functions in threads, stages in processes. The event loop never computes."""

import os
from collections.abc import Callable
from typing import TypeVar

import trio

from node.runs.host import StageHost

T = TypeVar("T")


class RealExecutor:
    """Computes on this machine; implements `node.seams.Executor`.

    `threads` is how many functions may run at once; by default one per core.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._limiter = trio.CapacityLimiter(threads or os.cpu_count() or 1)

    async def run(self, function: Callable[[], T], *, seconds: float = 0.0) -> T:  # noqa: ARG002 - simulated only
        """Run `function` in a thread; it cannot be cancelled once it runs, so it should be short."""
        return await trio.to_thread.run_sync(function, limiter=self._limiter)

    async def open_stage(self, specification: bytes) -> StageHost:
        """Start a stage process; see `StageHost.open` for what it raises."""
        return await StageHost.open(specification)
