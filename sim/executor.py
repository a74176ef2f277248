"""The Executor seam of the simulation: computes immediately, then lets the modelled time pass.

In the reverse order, a timeout of some virtual seconds could fire during a real computation. Stages run the
real `partition.execute` in this process, on plain memory instead of shared arenas.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import IO, Any, TypeVar

import numpy as np
import trio

from crypto.encoding import decode
from crypto.errors import LocalProtocolError
from node.content.npz import unpack_here
from node.errors import StageFailed
from node.seams import Arrays, Stage
from node.stages.framing import refusal
from node.stages.process import SPECIFICATION_BYTES_MAX
from partition.codecs.choice import Cost
from partition.codecs.codec import Codec
from partition.stage import Refused, Reply, Request, StageSpecification, timed
from partition.stage_layout import arena_bytes
from sim.network.instants import after, nearest_instant
from sim.network.pace import PeerPace

T = TypeVar("T")


CODEC_COSTS: Mapping[Codec, Cost] = MappingProxyType(
    {
        "raw": Cost(2e-5, 4.5e9, 6.5e9),
        "zstd": Cost(2e-4, 0.6e9, 1.0e9, 0.85),
        "float16": Cost(1e-4, 1.2e9, 2.6e9),
        "float16+zstd": Cost(3e-4, 0.7e9, 1.2e9, 0.92),
        "bfloat16": Cost(1e-4, 2.4e9, 5.5e9),
        "bfloat16+zstd": Cost(3e-4, 0.6e9, 1.7e9, 0.69),
        "int8": Cost(1e-4, 1.9e9, 5.8e9),
        "int8+zstd": Cost(3e-4, 1.2e9, 2.5e9, 0.9),
        "int4": Cost(1e-4, 1.6e9, 4.9e9),
        "int4+zstd": Cost(3e-4, 1.3e9, 2.8e9, 0.88),
    }
)
"""Costs per codec: seconds to begin, bytes per second to encode and to decode, and the share of the size that
zstd leaves. Values for GPT activations."""


def no_time(request: Request) -> float:
    """Return 0 seconds: the cost model of a stage whose computation is free."""
    del request
    return 0.0


class SimExecutor:
    """The executor of one peer. `stage_seconds(request)` models the time of one request to a stage. `pace` is
    the peer's pace: a peer may be slow, or frozen and later continue where it stopped."""

    def __init__(
        self, stage_seconds: Callable[[Request], float] = no_time, pace: PeerPace | None = None
    ) -> None:
        self._stage_seconds = stage_seconds
        self._pace = pace or PeerPace()

    async def run(self, function: Callable[[], T], *, seconds: float = 0.0, apart: bool = False) -> T:
        del apart  # no caller waits for a thread here
        result = function()
        await compute_for(seconds, self._pace)
        return result

    async def calibrate(self, sample: "np.ndarray[Any, np.dtype[Any]]") -> Mapping[Codec, Cost]:
        """Return codec costs measured on one core of 2024, the same on every machine."""
        del sample
        await trio.lowlevel.checkpoint()
        return CODEC_COSTS

    async def unpack(self, archive: IO[bytes], out: IO[bytes], *, allow_unfenced: bool) -> Arrays:
        """Unpack in this process, because the data of a simulation is its own."""
        del allow_unfenced
        await trio.lowlevel.checkpoint()
        return unpack_here(archive, out)

    def keep_stage_ready(self, machine: tuple[int, str] | None) -> None:
        """Do nothing: a simulated stage opens immediately."""

    async def replace_stage(self, stage: Stage, specification: bytes) -> Stage:
        await stage.aclose()
        return await self.open_stage(specification)

    async def open_stage(self, specification: bytes) -> Stage:
        await trio.lowlevel.checkpoint()
        wanted: StageSpecification = decode(
            specification, StageSpecification, bytes_max=SPECIFICATION_BYTES_MAX
        )
        return SimStage(wanted, self._stage_seconds, self._pace)


class SimStage:
    """A `node.seams.Stage` without a process of its own. Calls are queued, and after one has failed all
    fail."""

    def __init__(
        self, specification: StageSpecification, stage_seconds: Callable[[Request], float], pace: PeerPace
    ) -> None:
        # Imported here, so that simulations of control traffic do not load torch.
        from partition.execute import StageExecutor

        sizes = arena_bytes(specification)
        self._arenas = {name: memoryview(bytearray(size)) for name, size in sizes.items()}
        self._executor = StageExecutor(specification, self._arenas)
        self._stage_seconds = stage_seconds
        self._pace = pace
        self._lock = trio.Lock()
        self._failure: str | None = None

    async def call(self, request: object) -> Reply:
        """Handle one request and return its reply once the modelled time has passed; calls are served in
        order.

        Raises:
            StageFailed: the stage refused the request, or is closed, or a previous call was cancelled;
                PayloadRefused if only a payload was wrong, StageDiverged if a number is not finite.
        """
        if not isinstance(request, Request):
            raise LocalProtocolError(f"a {type(request).__name__} is not a request to a stage")
        async with self._lock:
            self._check()
            seconds = self._stage_seconds(request)
            reply = timed(self._executor.handle(request), round(seconds * self._pace.factor * 1e9))
            try:
                await compute_for(seconds, self._pace)
            except trio.Cancelled:
                self._failure = "a call to the stage was cancelled while it was served"
                raise
            self._check()
        if isinstance(reply, Refused):
            raise refusal(reply)
        return reply

    def vector(self, name: str) -> memoryview:
        if name not in self._arenas:
            raise StageFailed(f"the stage is closed, or has no arena '{name}'")
        return self._arenas[name]

    async def aclose(self) -> None:
        self._failure = "the stage has been closed"
        self._arenas = {}
        await trio.lowlevel.checkpoint()

    def _check(self) -> None:
        if self._failure is not None:
            raise StageFailed(self._failure)


async def compute_for(seconds: float, pace: PeerPace) -> None:
    """Wait as long as the peer needs for a computation that takes `seconds` at the normal pace."""
    left = seconds * pace.factor
    await stand_still(pace)
    while True:
        stood_seconds = pace.stood_seconds
        await sleep_for(left)
        left = pace.stood_seconds - stood_seconds
        if left <= 0:
            return


async def stand_still(pace: PeerPace) -> None:
    """Wait while the peer is frozen. Not a checkpoint if it is not frozen."""
    while pace.still_until > nearest_instant(trio.current_time()):  # noqa: ASYNC110 - it may be moved
        await trio.sleep_until(pace.still_until)


async def sleep_for(seconds: float) -> None:
    """Sleep for whole microseconds, so that several tasks can wake at the same instant."""
    if seconds <= 0:
        await trio.lowlevel.checkpoint()
    else:
        await trio.sleep_until(after(nearest_instant(trio.current_time()), seconds))
