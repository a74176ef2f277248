"""Checks for others whether a stage fits this machine, with bounded work.

A check cuts the model, in Python: a tenth of a second for a transformer of a hundred layers, a second or two
for a graph made to be slow. So checks run one at a time, apart from the threads that wait for the disk, with
a rate limit for each peer, and answers are cached.
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
"""Checks a second that one peer may have computed. Planning asks each provider once."""
BURST = 8
"""At once: a planner tries other plans where it is refused."""
PEERS_MAX = 1_024
"""Peers whose checks are counted."""
WAITING_MAX = 8
"""Checks that wait for their turn; one of each peer."""
REMEMBERED_MAX = 256
"""Answers, of a line each."""

BUSY = "busy: too many leases are looked at"


class LeaseChecks:
    """The checks of the node `me`; `machine` is its present offer to a stage."""

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
        """Return the cached reason why this stage cannot be here."""
        return self._answers.get(_key(run, plan, stage, self._machine()))

    async def rejection_reason(
        self, asker: PeerId, run: Run, graph: Graph, plan: Plan, stage: int
    ) -> str | None:
        """Why this stage cannot be here, in words for a person; None if it can."""
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
    """All that the answer depends on."""
    manifest = run.manifest
    rows = [(row.first_layer, row.last_layer, len(row.replicas)) for row in plan.stages]
    settings = (manifest.microbatches, manifest.optimizer, manifest.autocast, manifest.recompute)
    gives = machine.threads, machine.device, machine.memory_bytes
    return encode((manifest.graph_hash, manifest.sizes_max, manifest.metrics, settings, rows, stage, gives))
