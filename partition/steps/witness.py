"""Times of replicas for a micro-batch, as their committer observes them rather than as the replicas claim.

A replica can begin a pass once the previous stage (or the next stage, in the backward direction) has reported
its own pass, and once the replica's latest pass is done. The time from then until it reports the pass is an
upper bound for its computing and the transfer of a frame. A replica cannot hide slowness by reporting early:
this only makes its neighbour's pass seem longer, and no work is done sooner. So a replica that claims to
compute faster than it does is detected, unless others lie for it.
"""

from collections import deque

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.steps.messages import Counted, Open, Progress

STEPS_KEPT = 5
PASSES_MIN = 2
"""Minimum number of passes in a step. The first pass also loads libraries, so more than one is needed."""


class Witness:
    """One committer's observations under one plan."""

    def __init__(self, plan: Plan) -> None:
        self._last_stage = len(plan.stages) - 1
        self._places = {
            PeerId(peer): number for number, row in enumerate(plan.stages) for peer in row.replicas
        }
        self._step: int | None = None
        self._numbers = range(0)
        self._opened = 0.0
        self._ready: dict[tuple[int, int, bool], float] = {}
        self._free: dict[PeerId, float] = {}
        self._passes: dict[tuple[PeerId, bool], list[float]] = {}
        self._found: dict[PeerId, deque[float]] = {}

    def opened(self, now: float, message: Open) -> None:
        """Note that a step was opened, or was opened again with other owners."""
        if message.train and message.step != self._step:
            self._close()
            self._step, self._opened = message.step, now
            self._numbers = range(message.first, message.first + len(message.stages[0].owners))
            self._ready.clear()
            self._free.clear()
            self._passes.clear()

    def heard(self, now: float, sender: PeerId, message: Progress | Counted) -> None:
        """Note a replica's report of a pass."""
        stage = message.stage
        if message.step != self._step or self._places.get(sender) != stage:
            return
        if message.microbatch not in self._numbers:
            return
        is_back = isinstance(message, Counted)
        key = stage, message.microbatch, is_back
        if key in self._ready:
            return  # repeated, or taken over by another replica
        self._ready[key] = now
        if is_back and stage < self._last_stage:
            begun = self._ready.get((stage + 1, message.microbatch, True))
        elif stage:
            begun = self._ready.get((stage - 1, message.microbatch, False))
        else:
            begun = self._opened
        if begun is not None:
            taken = now - max(begun, self._free.get(sender, 0.0))
            self._passes.setdefault((sender, is_back), []).append(taken)
        self._free[sender] = now

    def _close(self) -> None:
        """Keep the times of the previous step."""
        for peer, stage in self._places.items():
            ways = [self._passes.get((peer, is_back), []) for is_back in (False, True)]
            if stage == self._last_stage:
                ways = ways[1:]  # the last stage does both passes together
            if all(len(way) >= PASSES_MIN for way in ways):
                total = sum(sorted(way)[len(way) // 2] for way in ways)
                self._found.setdefault(peer, deque(maxlen=STEPS_KEPT)).append(total)

    def nanoseconds(self) -> dict[PeerId, int]:
        """Return the time of a micro-batch on each replica for which there are enough observations."""
        return {peer: int(1e9 * sorted(row)[len(row) // 2]) for peer, row in self._found.items()}
