"""The plan of a run: its members, its feeders, and the holders of its layers. Frames, leases and steps carry
its hash.

A plan names its parent, so plans form a chain. Each plan except the first follows from its parent by a
`Change`, which a committee of the parent's roster decides (`partition.plan.paxos`). Any peer with the parent
and the change makes the same plan, to the byte. The first plan is made by the run's requester and signed
together with the manifest. Members are never dropped within a plan: a death leads to a new plan.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId

PLAN_BYTES_MAX = 64 * 1024
STAGES_MAX = 64
REPLICAS_MAX = 64
ROSTER_MAX = 1_024
TRAINERS_MAX = 16
MICROBATCHES_MAX = 4_096
COMMITTEE_MAX = 9
"""Maximum number of voters on the next plan. Nine answer quickly, and five of them decide; more voters would
not make a plan safer."""
VOTERS_MIN = 3
"""Minimum number of voters that can lose one and still decide. A run of two members gets a witness to reach
this number, if the swarm has one. A run of one member takes no witness, which would make it depend on others
without adding a replica."""
HEIGHT_MAX = 2**32
"""Limit of a plan's height. The number of an attempt to commit is computed from the height
(`partition.steps.routes.attempts`), and must fit into 63 bits."""
STEPS_MAX = 10_000_000
"""Maximum number of a run's steps. No number of samples or micro-batches derived from it comes near 2**53,
beyond which JSON readers no longer count exactly."""
HASH_BYTES = 32
NO_HASH = bytes(HASH_BYTES)
"""The hash that stands for "none"."""
FIRST_VALUES = bytes(HASH_BYTES - 1) + b"\x01"
"""The checkpoint name that stands for every stage's initial parameters. No blob has this hash."""

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Peer = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Height = Annotated[int, msgspec.Meta(ge=0, lt=HEIGHT_MAX)]
StepNumber = Annotated[int, msgspec.Meta(ge=0, le=STEPS_MAX)]
"""A step, or a number of steps done."""
StageNumber = Annotated[int, msgspec.Meta(ge=0, lt=STAGES_MAX)]
Peers = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=ROSTER_MAX)]


class StagePlan(msgspec.Struct, frozen=True, array_like=True):
    """Layers `first_layer` to `last_layer` (exclusive), and the peers that each hold all of them.

    `rates` are the replicas' own measurements, in FLOP/s; within a run, measurements by others override them.
    If some replicas have a rate, a replica with rate 0 is a *standby*. It takes part in every reduction and
    applies every step, so it holds the newest state; it computes no micro-batch while another replica can.
    """

    first_layer: Count
    last_layer: Count
    replicas: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=REPLICAS_MAX)]
    rates: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=REPLICAS_MAX)]

    @property
    def computing(self) -> tuple[bytes, ...]:
        """The replicas that get micro-batches."""
        if not any(self.rates):
            return self.replicas
        return tuple(peer for peer, rate in zip(self.replicas, self.rates, strict=True) if rate)

    @property
    def standbys(self) -> tuple[bytes, ...]:
        """The replicas that are standbys."""
        return tuple(peer for peer in self.replicas if peer not in self.computing)


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """One link of a run's chain of plans. It is immutable, and identified by `plan_hash`.

    `roster` has the admitted members, sorted: replicas, trainers, the requester, and keepers of copies.
    `trainers` feed samples, and the first of them also commits. `restored` is the checkpoint of `step`
    committed steps from which every stage begins; NO_HASH if the replicas keep their state. `fork` is the
    name of the latest fork, in this plan or an earlier one, by which some members continued without a
    majority; it identifies the branch, and is NO_HASH if there was none. `is_final`: all steps are done, and
    the state that this plan or an earlier one restored is the result.
    """

    run: Hash
    parent: Hash
    height: Height
    roster: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=ROSTER_MAX)]
    trainers: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=TRAINERS_MAX)]
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=MICROBATCHES_MAX)]
    stages: Annotated[tuple[StagePlan, ...], msgspec.Meta(min_length=1, max_length=STAGES_MAX)]
    step: StepNumber = 0
    restored: Hash = NO_HASH
    fork: Hash = NO_HASH
    is_final: bool = False

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The roster."""
        return tuple(PeerId(peer) for peer in self.roster)

    @property
    def committer(self) -> PeerId:
        """The trainer that opens and commits the steps."""
        return PeerId(self.trainers[0])

    @property
    def witnesses(self) -> tuple[PeerId, ...]:
        """The members that neither compute nor feed: they vote, and keep the chain and checkpoints."""
        busy = {peer for stage in self.stages for peer in stage.replicas} | set(self.trainers)
        return tuple(PeerId(peer) for peer in self.roster if peer not in busy)

    @property
    def standbys(self) -> tuple[PeerId, ...]:
        """The standbys of all stages, in the order of stages."""
        return tuple(PeerId(peer) for stage in self.stages for peer in stage.standbys)

    def stage_of(self, peer: PeerId) -> int | None:
        """Return the stage that `peer` holds, or None."""
        for index, stage in enumerate(self.stages):
            if peer in stage.replicas:
                return index
        return None


def rates_left(stage: StagePlan, rates: Sequence[int]) -> tuple[int, ...]:
    """Return the rates of the remaining and joining replicas of `stage`. If all of them are standbys, they
    compute from now on, and count as being as fast as the stage's fastest replica until they are measured."""
    return tuple(rates) if any(rates) else (max(stage.rates),) * len(rates)


def encode_plan(plan: Plan) -> bytes:
    """Return the bytes of a plan, for hashing and sending."""
    return encode(plan)


def plan_hash(plan: Plan) -> bytes:
    """Return the BLAKE3 hash of the plan's bytes."""
    return blake3(encode(plan)).digest()


def decode_plan(data: bytes) -> Plan:
    """Decode and check a plan. Raises RemoteProtocolError if it is invalid."""
    plan: Plan = decode(data, Plan, bytes_max=PLAN_BYTES_MAX)
    check_plan(plan)
    return plan


def check_plan(plan: Plan) -> None:
    """Check that a plan is self-consistent. Raises RemoteProtocolError if it is not."""
    if (plan.height == 0) != (plan.parent == NO_HASH):
        raise RemoteProtocolError("a plan without a parent is not the first, or the first plan has a parent")
    roster = set(plan.roster)
    if list(plan.roster) != sorted(roster):
        raise RemoteProtocolError("a plan's roster is not sorted, or names a peer twice")
    if len(set(plan.trainers)) != len(plan.trainers) or not roster.issuperset(plan.trainers):
        raise RemoteProtocolError("a plan names a trainer twice, or one that is not on the roster")
    position = 0
    seen: set[bytes] = set()
    for stage in plan.stages:
        if stage.first_layer != position or stage.last_layer <= stage.first_layer:
            raise RemoteProtocolError("a plan's stages do not follow each other")
        if len(stage.replicas) != len(stage.rates):
            raise RemoteProtocolError("a plan's stage has more or fewer rates than replicas")
        if len(set(stage.replicas)) != len(stage.replicas) or seen & set(stage.replicas):
            raise RemoteProtocolError("a plan gives a peer two stages")
        seen |= set(stage.replicas)
        position = stage.last_layer
    if not seen <= roster:
        raise RemoteProtocolError("a plan has a replica that is not on the roster")


def committee(plan: Plan, among: tuple[bytes, ...] | None = None) -> tuple[PeerId, ...]:
    """Return the members that decide the successor of `plan`: those of its roster that are nearest to
    hash(run, plan), the nearest first.

    The proposers have the same order. A peer id cannot be chosen so that it is in the committee, because the
    roster was decided before the hash was known. `among`: choose from these members only, if they decide
    alone.
    """
    target = int.from_bytes(blake3(plan.run + plan_hash(plan)).digest())
    peers = plan.roster if among is None else among
    ranked = sorted(peers, key=lambda peer: int.from_bytes(blake3(peer).digest()) ^ target)
    return tuple(PeerId(peer) for peer in ranked[:COMMITTEE_MAX])
