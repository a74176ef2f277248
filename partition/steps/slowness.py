"""Replicas that compute slower than promised, by measured times.

A promise is a replica's fastest time in its first steps under a plan, or its time by the plan's rates
relative to the other replicas of its stage, whichever is faster. It takes SLOW_STEPS in a row to be marked: a
machine is busy with something else for seconds at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.plan import Plan, StagePlan

PROMISE_STEPS = 5
"""Steps under a plan in which a replica shows its speed."""
SLOW_STEPS = 5
SLOW_RATE = 0.5
"""The share of the promised rate below which a replica is slow; above RECOVERED_RATE it no longer is."""
RECOVERED_RATE = 0.7


@dataclass(frozen=True)
class Slowness:
    """A replica of a stage computes at `rate` of what was promised; 1.0: again as promised."""

    stage: int
    peer: PeerId
    rate: float


class SlowReplicas:
    """The slow replicas of one run, as its committer sees them."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin another plan."""
        self._best: dict[PeerId, int] = {}
        self._seen: dict[PeerId, int] = {}
        self._below: dict[PeerId, int] = {}
        self._marked: set[PeerId] = set()

    def stepped(self, plan: Plan, paces: Mapping[PeerId, int]) -> list[Slowness]:
        """Note the nanoseconds that each replica takes for a micro-batch, 0 for unknown. Return the
        changes."""
        changed = []
        for number, stage in enumerate(plan.stages):
            for peer, promised in self._promises(stage, paces).items():
                rate = promised / paces[peer]
                self._below[peer] = self._below.get(peer, 0) + 1 if rate < SLOW_RATE else 0
                if peer not in self._marked and self._below[peer] >= SLOW_STEPS:
                    self._marked.add(peer)
                    changed.append(Slowness(number, peer, rate))
                elif peer in self._marked and rate >= RECOVERED_RATE:
                    self._marked.remove(peer)
                    changed.append(Slowness(number, peer, 1.0))
        return changed

    def _promises(self, stage: StagePlan, paces: Mapping[PeerId, int]) -> dict[PeerId, float]:
        """Return the promised nanoseconds for a micro-batch of each measured replica of a stage."""
        rates = {PeerId(peer): rate for peer, rate in zip(stage.replicas, stage.rates, strict=True)}
        known = {peer: paces[peer] for peer in rates if paces.get(peer)}
        promises: dict[PeerId, float] = {}
        for peer, pace in known.items():
            self._seen[peer] = self._seen.get(peer, 0) + 1
            if self._seen[peer] <= PROMISE_STEPS:
                self._best[peer] = min(pace, self._best.get(peer, pace))
            # Its time by the plan relative to the others, half of which are not slow.
            beside = sorted(
                known[other] * rates[other] / max(1, rates[peer]) for other in known if other != peer
            )
            by_plan = beside[len(beside) // 2] if beside else float(pace)
            promises[peer] = min(float(self._best[peer]), by_plan)
        return promises
