"""Checks, on request of other peers, whether a stage fits this machine, with bounded work.

A check cuts the model into stages, in Python. This takes a tenth of a second for a transformer with a hundred
layers, and a second or two for a graph made to be slow. So checks run one at a time, apart from the threads
that wait for the disk, with a rate limit for each peer, and answers are cached.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import trio

from crypto.encoding import encode
from crypto.identity import PeerId
from crypto.token_buckets import Buckets
from node.placement.admission import Machine, rejection_reason
from node.protocols.manifest import Run
from node.protocols.permits import Permits
from node.seams import Clock, Executor
from partition.model.graph import Graph
from partition.plan.plan import Plan

RATE = 0.5
"""Checks per second that one peer may cause. Planning asks each provider once."""
BURST = 8
"""Number of checks that one peer may cause at once, because a planner whose plan is refused tries others."""
PEERS_MAX = 1_024
"""Maximum number of peers whose checks are counted."""
WAITING_MAX = 8
"""Maximum number of waiting checks; each peer may have one."""
REMEMBERED_MAX = 256
"""Maximum number of cached answers, one line each."""

BUSY = "busy: too many lease requests are being checked"


class LeaseChecks:
    """The lease checks of the node `me`; `machine` returns the resources that it offers to a stage now."""

    def __init__(self, me: PeerId, executor: Executor, clock: Clock, machine: Callable[[], Machine]) -> None:
        self._me = me
        self._executor = executor
        self._clock = clock
        self._machine = machine
        self._buckets = Buckets[PeerId](RATE, BURST, PEERS_MAX)
        self._permits = Permits(WAITING_MAX, 1, patience_seconds=0.0, clock=clock)
        self._turn = trio.Lock()
        self._answers: OrderedDict[bytes, str | None] = OrderedDict()

    def known(self, run: Run, plan: Plan, stage: int) -> str | None:
        """Return the cached reason why this stage cannot be placed here; None if there is none."""
        return self._answers.get(_key(run, plan, stage, self._machine()))

    async def rejection_reason(
        self, asker: PeerId, run: Run, graph: Graph, plan: Plan, stage: int
    ) -> str | None:
        """Return why this stage cannot be placed here, as a text for people; None if it can."""
        key = _key(run, plan, stage, self._machine())
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        now = self._clock.monotonic()
        if asker != self._me and not self._buckets.of(asker, now).take(now):
            return BUSY
        with self._permits.take(asker) as permit:
            if permit is None:
                return BUSY
            async with self._turn:
                work = partial(rejection_reason, run, graph, plan, stage, self._machine())
                answer = await self._executor.run(work, apart=True)
            self._answers[key] = answer
            while len(self._answers) > REMEMBERED_MAX:
                self._answers.popitem(last=False)
        return answer


def _key(run: Run, plan: Plan, stage: int, machine: Machine) -> bytes:
    """Return a key of all values on which the answer depends."""
    manifest = run.manifest
    rows = [(row.first_layer, row.last_layer, len(row.replicas)) for row in plan.stages]
    settings = (manifest.microbatches, manifest.optimizer, manifest.autocast, manifest.recompute)
    gives = machine.threads, machine.device, machine.memory_bytes
    return encode((manifest.graph_hash, manifest.sizes_max, manifest.metrics, settings, rows, stage, gives))
