"""Replicas that compute more slowly than promised, according to measured times.

A promise is the faster of two times: a replica's fastest time in its first steps under a plan, or its time
according to the plan's rates, relative to the other replicas of its stage. A replica is marked as slow only
after SLOW_STEPS successive slow steps, because a machine may be busy with other work for some seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.plan import Plan, StagePlan

PROMISE_STEPS = 5
"""Number of steps under a plan in which a replica shows its speed."""
SLOW_STEPS = 5
SLOW_RATE = 0.5
"""A replica is slow below this share of its promised rate. It has recovered above RECOVERED_RATE."""
RECOVERED_RATE = 0.7


@dataclass(frozen=True)
class Slowness:
    """A replica of a stage computes at `rate` times its promised rate; 1.0 means that it has recovered."""

    stage: int
    peer: PeerId
    rate: float


class SlowReplicas:
    """The slow replicas of one run, as its committer sees them."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a new plan."""
        self._best: dict[PeerId, int] = {}
        self._seen: dict[PeerId, int] = {}
        self._below: dict[PeerId, int] = {}
        self._marked: set[PeerId] = set()

    def stepped(self, plan: Plan, paces: Mapping[PeerId, int]) -> list[Slowness]:
        """Note the nanoseconds that each replica takes for a micro-batch, 0 if unknown. Return the
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
            # Its time according to the plan, relative to the median of the other replicas, of which at least
            # half are assumed not to be slow.
            beside = sorted(
                known[other] * rates[other] / max(1, rates[peer]) for other in known if other != peer
            )
            by_plan = beside[len(beside) // 2] if beside else float(pace)
            promises[peer] = min(float(self._best[peer]), by_plan)
        return promises
