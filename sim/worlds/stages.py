"""The Executor seam of a node in a stack: real arithmetic, modelled time, and a record of the contents of
sums.

A request to a stage is computed immediately, then takes the time of the cost model: operations divided by the
peer's rate for passes, bytes divided by its memory's rate for the rest. If a scenario gives the time of a
pass, all times are scaled by it.

A stage's admission is computed once per process, since it is the same for all nodes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from node.errors import StageFailed
from node.seams import Stage
from node.stages.process import SPECIFICATION_BYTES_MAX
from partition import stage as api
from partition.plan.cost import BACKWARD_FLOPS_RATIO
from partition.stage_layout import gradient_bytes
from sim.executor import SimExecutor, SimStage
from sim.network.pace import PeerPace

BYTES_PER_FLOP = 2.0
"""Bytes that a core moves from or to memory in the time of one operation: 10 GB/s at 5 GFLOP/s."""
SUMMED, STEPPED = 3, 6
"""Number of passes over the gradients' bytes in memory. Summing: two sums and their result. Stepping: totals,
gradients, and parameters and moments, read and written."""
KNOWN_STAGES_MAX = 64

Applied = Callable[[api.StageSpecification, int, tuple[int, ...]], None]
"""Called for each step that a stage applied: its specification, the step, the micro-batches in its sums."""


class NodeExecutor(SimExecutor):
    """The executor of one life of one peer.

    `flops_per_second` is the peer's rate, `speed` that rate relative to an ordinary peer. `pass_seconds` is
    the time of a forward pass at speed 1; 0 derives it from operations.
    """

    def __init__(
        self,
        flops_per_second: float,
        speed: float,
        pass_seconds: Callable[[bytes], float],
        pace: PeerPace,
        applied: Applied,
    ) -> None:
        """`pass_seconds` is called with a specification's `run`."""
        super().__init__(pace=pace)
        self._flops_per_second = flops_per_second
        self._speed = speed
        self._pass_seconds = pass_seconds
        self._applied = applied

    async def open_stage(self, specification: bytes) -> Stage:
        """Open a stage. Raises StageFailed if it is not admitted."""
        wanted, forward_flops = _admitted(specification)
        natural = forward_flops / self._flops_per_second
        given = self._pass_seconds(wanted.run) / self._speed
        cost = StageCost(wanted, natural, given or natural, BYTES_PER_FLOP * self._flops_per_second)
        stage = SimStage(wanted, cost.seconds, self._pace)
        return WatchedStage(wanted, stage, self._applied)


def settled() -> AbstractContextManager[None]:
    """Make torch compute on one thread and deterministically within this context."""
    from partition.execute.process import one_thread

    return one_thread()


@lru_cache(maxsize=KNOWN_STAGES_MAX)
def _admitted(specification: bytes) -> tuple[api.StageSpecification, float]:
    """Return an admitted stage, and the operations of a forward pass. Raises StageFailed."""
    from partition.execute.admit import admit

    try:
        wanted: api.StageSpecification = decode(
            specification, api.StageSpecification, bytes_max=SPECIFICATION_BYTES_MAX
        )
        return wanted, admit(wanted).flops / (1 + BACKWARD_FLOPS_RATIO)
    except RemoteProtocolError as error:
        raise StageFailed(str(error)) from None


class StageCost:
    """The cost of one stage's requests in seconds; a forward pass takes `forward_seconds`.

    `natural_seconds` is the time derived from operations. Times derived from bytes are scaled in the same
    proportion.
    """

    def __init__(
        self,
        specification: api.StageSpecification,
        natural_seconds: float,
        forward_seconds: float,
        bytes_per_second: float,
    ) -> None:
        self._forward_seconds = forward_seconds
        self._recomputes = specification.recompute
        self._is_last = specification.graph.entries[0].loss is not None
        self._gradient_bytes = gradient_bytes(specification)
        stretch = forward_seconds / natural_seconds if natural_seconds > 0 else 1.0
        self._seconds_per_byte = stretch / bytes_per_second

    def seconds(self, request: api.Request) -> float:
        """Return the seconds of a request. Computing takes time; freeing memory does not."""
        match request:
            case api.Forward():
                goes_back = request.train and self._is_last
                return self._forward_seconds * (1 + BACKWARD_FLOPS_RATIO if goes_back else 1)
            case api.Backward():
                return self._forward_seconds * (BACKWARD_FLOPS_RATIO + self._recomputes)
            case api.Norm():
                return SUMMED * self._gradient_bytes * self._seconds_per_byte
            case api.Apply():
                return STEPPED * self._gradient_bytes * self._seconds_per_byte
        return 0.0


class WatchedStage:
    """A stage that behaves like `stage`, and records from its answers which micro-batches are in the sums."""

    def __init__(self, specification: api.StageSpecification, stage: Stage, applied: Applied) -> None:
        entry = specification.graph.entries[0]
        self._specification = specification
        self._stage = stage
        self._applied = applied
        self._goes_back_at_once = entry.loss is not None or not entry.backward_outputs
        self._counted: set[int] = set()

    async def call(self, request: object) -> object:
        """See `node.seams.Stage`."""
        reply = await self._stage.call(request)
        match request:
            case api.Forward() if request.train and self._goes_back_at_once:
                self._count(request.microbatch, request.sign)
            case api.Backward():
                self._count(request.microbatch, request.sign)
            case api.Apply():
                self._applied(self._specification, request.step, tuple(sorted(self._counted)))
                self._counted.clear()
            case api.Discard() | api.Restore() | api.Reload():
                self._counted.clear()
        return reply

    def _count(self, microbatch: int, sign: int) -> None:
        if sign > 0:
            self._counted.add(microbatch)
        else:
            self._counted.discard(microbatch)

    def vector(self, name: str) -> memoryview:
        """See `node.seams.Stage`."""
        return self._stage.vector(name)

    async def aclose(self) -> None:
        """See `node.seams.Stage`."""
        await self._stage.aclose()
