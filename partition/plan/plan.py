"""The plan of a run: who holds which layers, who feeds, who planned. Frames, leases and steps carry its hash.

A plan names its parent, so plans form a chain; agreement on each height by a committee is not here
yet: in the skeleton the live member with the lowest peer id decides alone (`planner_of`), which is
the placeholder ARCHITECTURE.md names.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId

PLAN_BYTES_MAX = 64 * 1024
STAGES_MAX = 64
REPLICAS_MAX = 64
MICROBATCHES_MAX = 4_096
HEIGHT_MAX = 2**32
"""Attempts to commit are numbered from the plan's height (steps.trainer), and must fit 63 bits."""
HASH_BYTES = 32

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Peer = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class StagePlan(msgspec.Struct, frozen=True, array_like=True):
    """Layers `first_layer` to before `last_layer`, and the peers that each hold all of them.

    `rates` are the replicas' measured FLOP/s: micro-batches are dealt in their proportion.
    """

    first_layer: Count
    last_layer: Count
    replicas: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=REPLICAS_MAX)]
    rates: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=REPLICAS_MAX)]


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """One link of a run's chain of plans; immutable, known by `plan_hash`."""

    run: Hash
    parent: Hash
    height: Annotated[int, msgspec.Meta(ge=0, lt=HEIGHT_MAX)]
    planner: Peer
    trainer: Peer
    requester: Peer
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=MICROBATCHES_MAX)]
    stages: Annotated[tuple[StagePlan, ...], msgspec.Meta(min_length=1, max_length=STAGES_MAX)]

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Everybody with a part in the plan, by peer id: replicas, trainer, planner, requester."""
        replicas = {PeerId(peer) for stage in self.stages for peer in stage.replicas}
        return tuple(sorted(replicas | {PeerId(self.trainer), PeerId(self.planner), PeerId(self.requester)}))

    def stage_of(self, peer: PeerId) -> int | None:
        """The stage `peer` holds, or None."""
        for index, stage in enumerate(self.stages):
            if peer in stage.replicas:
                return index
        return None


def encode_plan(plan: Plan) -> bytes:
    """The bytes that are hashed and sent."""
    return encode(plan)


def plan_hash(plan: Plan) -> bytes:
    """BLAKE3 of the plan's bytes."""
    return blake3(encode(plan)).digest()


def decode_plan(data: bytes) -> Plan:
    """A plan that makes sense, whoever sent it; else RemoteProtocolError."""
    plan: Plan = decode(data, Plan, bytes_max=PLAN_BYTES_MAX)
    position = 0
    seen: set[bytes] = set()
    for stage in plan.stages:
        if stage.first_layer != position or stage.last_layer <= stage.first_layer:
            raise RemoteProtocolError("a plan whose stages do not follow each other")
        if len(stage.replicas) != len(stage.rates):
            raise RemoteProtocolError("a plan with a replica without a rate")
        if len(set(stage.replicas)) != len(stage.replicas) or seen & set(stage.replicas):
            raise RemoteProtocolError("a plan that gives a peer two stages")
        seen |= set(stage.replicas)
        position = stage.last_layer
    return plan


def follows(plan: Plan, last: Plan) -> bool:
    """Whether `plan` may come after `last`: the same run and stages, of nobody but its members."""
    if (plan.height, plan.parent) != (last.height + 1, plan_hash(last)):
        return False
    if (plan.run, plan.requester, plan.microbatches) != (last.run, last.requester, last.microbatches):
        return False
    if not {plan.planner, plan.trainer} <= set(last.members) or len(plan.stages) != len(last.stages):
        return False
    return all(
        (new.first_layer, new.last_layer) == (old.first_layer, old.last_layer)
        and set(new.replicas) <= set(old.replicas)
        for new, old in zip(plan.stages, last.stages, strict=True)
    )


def planner_of(live: Iterable[PeerId]) -> PeerId:
    """Who plans: the live member with the lowest peer id.

    PLACEHOLDER for the plan chain (single-decree Paxos per height among a committee): two sides of
    a partition would both plan here. Nothing else in the code may depend on this choice.
    """
    return min(live)
