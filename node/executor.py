"""The real Executor seam: functions run in threads and stages in processes. The event loop never computes."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, TypeVar

import numpy as np
import trio

from node.content.unpacking import unpack_fenced
from node.seams import Arrays, Stage
from node.stages.host import StageHost
from node.stages.program import Spare
from node.storage.budget import ScratchBudget
from partition.codecs.choice import Cost, calibrate
from partition.codecs.codec import Codec

T = TypeVar("T")


class RealExecutor:
    """Computes on this machine; implements `node.seams.Executor`.

    `threads` is the maximum number of functions that run simultaneously; by default one per core. `scratch`
    limits what stage processes write to the disk.
    """

    def __init__(self, threads: int | None = None, *, scratch: ScratchBudget | None = None) -> None:
        self._limiter = trio.CapacityLimiter(threads or os.cpu_count() or 1)
        self._scratch = scratch
        self._spare = Spare(scratch)
        self._apart = trio.CapacityLimiter(1)

    async def run(
        self,
        function: Callable[[], T],
        *,
        seconds: float = 0.0,  # noqa: ARG002 - simulated only
        apart: bool = False,
    ) -> T:
        """Run `function` in a thread. It should be short, because it cannot be cancelled once it runs."""
        return await trio.to_thread.run_sync(function, limiter=self._apart if apart else self._limiter)

    async def calibrate(self, sample: "np.ndarray[Any, np.dtype[Any]]") -> Mapping[Codec, Cost]:
        """Measure every codec in a thread, in CPU time of that thread; this takes about 0.1 s."""
        return await self.run(lambda: calibrate(time.thread_time, sample))

    async def unpack(self, archive: IO[bytes], out: IO[bytes], *, allow_unfenced: bool) -> Arrays:
        """Read an npz file in a sandboxed process; see `node.content.unpacking` for the errors."""
        return await unpack_fenced(archive, out, allow_unfenced=allow_unfenced, budget=self._scratch)

    async def open_stage(self, specification: bytes) -> StageHost:
        """Open a stage in its own process; see `StageHost.open` for the errors."""
        return await StageHost.open(specification, scratch=self._scratch, spare=self._spare)

    async def replace_stage(self, stage: Stage, specification: bytes) -> StageHost:
        """Close a stage and open the run's next one, in the same process if possible."""
        if not isinstance(stage, StageHost):
            await stage.aclose()
            return await self.open_stage(specification)
        return await StageHost.open(specification, scratch=self._scratch, spare=self._spare, after=stage)

    def spare_bytes(self) -> int:
        """Return the memory used by the spare process; 0 if there is none."""
        return self._spare.memory_bytes

    def keep_stage_ready(self, machine: tuple[int, str] | None) -> None:
        """Keep a preloaded process ready for the next stage. `machine` is its number of threads and its
        device; None ends the process."""
        if machine is None:
            self._spare.drop()
            return
        with suppress(OSError):  # in that case the stage starts its own process, and reports why it cannot
            self._spare.keep(*machine)
