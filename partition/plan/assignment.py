"""Assignment of micro-batches to replicas: pure functions of rates, loads and the plan's trainers.

The committer deals the micro-batches of a stage to its replicas and announces the result in an Open
(`partition.steps.messages`). The feeder of a micro-batch needs no announcement, because every member computes
it from the plan.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace

from blake3 import blake3

from crypto.identity import PeerId
from partition.plan.plan import Plan

LANES = 64
"""Number of lanes. Micro-batch m is in lane m % 64, and its samples lie in the shard of that lane
(`node.content.shards`), so a trainer needs only the shards of its lanes."""
_SCALE = 10**18


def deal(
    numbers: Sequence[int], places: Sequence[int], rates: Sequence[int], loads: Sequence[int] = ()
) -> dict[int, int]:
    """Deal each number to the one of `places` that would finish it first; earlier places win ties.

    `rates` and `loads` (the remaining work of each place; empty if there is none) cover all places, including
    those not in `places`.
    """
    # A heap keeps this fast, because a plan may come from an unknown peer: 4,096 numbers on 64 replicas, in
    # up to 64 stages.
    counts = {place: loads[place] if loads else 0 for place in places}
    ends = [
        ((counts[place] + 1) * _SCALE // max(1, rates[place]), order, place)
        for order, place in enumerate(places)
    ]
    heapify(ends)
    owners: dict[int, int] = {}
    for number in numbers:
        _, order, place = ends[0]
        owners[number] = place
        counts[place] += 1
        heapreplace(ends, ((counts[place] + 1) * _SCALE // max(1, rates[place]), order, place))
    return owners


def feeder_of(plan: Plan, train: bool, microbatch: int) -> PeerId:
    """Return the trainer that sends this micro-batch's inputs and labels: the first trainer of its lane."""
    if len(plan.trainers) == 1:
        return PeerId(plan.trainers[0])
    return PeerId(max(plan.trainers, key=_weights(train, microbatch % LANES)))


def lanes_of(trainers: Sequence[bytes], me: bytes) -> tuple[list[int], list[int]]:
    """Return the lanes of training micro-batches that `me` feeds, and the lanes for which it is second.

    By rendezvous hashing (Thaler and Ravishankar 1998), a lane's first trainer is the one with the highest
    BLAKE3 hash of the trainer and the lane. If a trainer leaves, only its own lanes move, each to the lane's
    second trainer.
    """
    own: list[int] = []
    next_: list[int] = []
    for lane in range(LANES):
        ranked = sorted(trainers, key=_weights(True, lane), reverse=True)[:2]
        if ranked[0] == me:
            own.append(lane)
        elif me in ranked:
            next_.append(lane)
    return own, next_


def _weights(train: bool, lane: int) -> Callable[[bytes], bytes]:
    name = (b"train" if train else b"held out") + lane.to_bytes(8, "big")
    return lambda trainer: blake3(trainer + name).digest()
