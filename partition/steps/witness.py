"""What each replica takes for a micro-batch, as its committer sees it: not what the replica says of itself.

A replica can begin a pass once the stage before it (or after it, on the way back) has said that its own is
done, and once its last one is. From then until it says that the pass is done is at most what it took: its
computing, and the way of a frame. What it says too early its neighbour pays for, and no work is done sooner
by that: so a replica that claims to compute faster than it does is found out, unless others lie for it.
"""

from collections import deque

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.steps.messages import Counted, Open, Progress

STEPS_KEPT = 5
PASSES_MIN = 2
"""In a step; the first one waits for whatever is loaded on the way."""


class Witness:
    """One committer's, under one plan."""

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
        """A step is opened, or again with other owners."""
        if message.train and message.step != self._step:
            self._close()
            self._step, self._opened = message.step, now
            self._numbers = range(message.first, message.first + len(message.stages[0].owners))
            self._ready.clear()
            self._free.clear()
            self._passes.clear()

    def heard(self, now: float, sender: PeerId, message: Progress | Counted) -> None:
        """A replica says that a pass is done."""
        stage = message.stage
        if message.step != self._step or self._places.get(sender) != stage:
            return
        if message.microbatch not in self._numbers:
            return
        is_back = isinstance(message, Counted)
        key = stage, message.microbatch, is_back
        if key in self._ready:
            return  # said again, or another has taken it over
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
        """Keep what the step before took."""
        for peer, stage in self._places.items():
            ways = [self._passes.get((peer, is_back), []) for is_back in (False, True)]
            if stage == self._last_stage:
                ways = ways[1:]  # it goes back at once
            if all(len(way) >= PASSES_MIN for way in ways):
                total = sum(sorted(way)[len(way) // 2] for way in ways)
                self._found.setdefault(peer, deque(maxlen=STEPS_KEPT)).append(total)

    def nanoseconds(self) -> dict[PeerId, int]:
        """Return what a micro-batch takes on each replica of which enough was seen."""
        return {peer: int(1e9 * sorted(row)[len(row) // 2]) for peer, row in self._found.items()}
