"""Which replica takes which micro-batch: pure functions of the plan and of who has been dropped.

Every member computes the same answer from the same two inputs, so no routes travel. Dropping a
peer moves only the micro-batches it had: the others keep theirs, with their sums.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace

from crypto.identity import PeerId
from partition.plan.plan import Plan, StagePlan

_SCALE = 10**18


def deal(positions: Sequence[int], replicas: Sequence[PeerId], rates: Sequence[int]) -> dict[int, PeerId]:
    """Give each position to the replica that would finish it first, given its rate. Ties go by order."""
    # A heap, because a plan is a stranger's claim: 4,096 positions on 64 replicas, in up to 64 stages.
    ends = [(_SCALE // max(1, rate), index, 1) for index, rate in enumerate(rates)]
    heapify(ends)
    owners: dict[int, PeerId] = {}
    for position in positions:
        _, index, count = ends[0]
        owners[position] = replicas[index]
        heapreplace(ends, ((count + 1) * _SCALE // max(1, rates[index]), index, count + 1))
    return owners


def stage_owners(stage: StagePlan, microbatches: int, dropped: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """The owner of each position of a step in one stage; empty when no replica is left.

    `dropped` is in the order of the drops, which everybody learns from the trainer in that order.
    """
    replicas = [PeerId(peer) for peer in stage.replicas]
    rates = list(stage.rates)
    owners = deal(range(microbatches), replicas, rates)
    for peer in dropped:
        if peer not in replicas:
            continue
        index = replicas.index(peer)
        del replicas[index], rates[index]
        if not replicas:
            return ()
        orphans = [position for position, owner in owners.items() if owner == peer]
        owners |= deal(orphans, replicas, rates)
    return tuple(owners[position] for position in range(microbatches))


class Routes:
    """Owners of every stage under a plan; `owner(stage, microbatch)` by global micro-batch number."""

    def __init__(self, plan: Plan, dropped: Sequence[PeerId]) -> None:
        self._microbatches = plan.microbatches
        self._owners = tuple(stage_owners(stage, plan.microbatches, dropped) for stage in plan.stages)

    def owner(self, stage: int, microbatch: int) -> PeerId:
        """Who computes `microbatch` in `stage`."""
        return self._owners[stage][microbatch % self._microbatches]

    def live(self, stage: int) -> bool:
        """Whether the stage still has a replica."""
        return bool(self._owners[stage])
