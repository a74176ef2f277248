"""The step from one plan to the next: a committee decides a `Change`, and the next plan follows from it.

Pure and deterministic. A change is checked against the parent plan alone. Whether a lost peer is really lost
is judged by the proposer and by the majority that accepts the change.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from partition.plan.plan import (
    HEIGHT_MAX,
    NO_HASH,
    ROSTER_MAX,
    STAGES_MAX,
    Count,
    Hash,
    Peer,
    Peers,
    Plan,
    StageNumber,
    StagePlan,
    StepNumber,
    decode_plan,
    encode_plan,
    plan_hash,
    rates_left,
)

CHANGE_BYTES_MAX = 64 * 1024
JOININGS_MAX = 64
Cuts = Annotated[tuple[Count, ...], msgspec.Meta(max_length=STAGES_MAX - 1)]
Stages = Annotated[tuple[StagePlan, ...], msgspec.Meta(max_length=STAGES_MAX)]


class Joining(msgspec.Struct, frozen=True, array_like=True):
    """A peer that holds a further replica of `stage` from now on. It may already be on the roster and hold a
    stage, even this one: then it gets a new `rate` and keeps its state. With rate 0 it is a standby."""

    peer: Peer
    stage: StageNumber
    rate: Count


class Change(msgspec.Struct, frozen=True, array_like=True):
    """The difference between a plan and the next one.

    `lost` leave the roster: they are dead or gone, or have lost their stage's state. A peer in both `lost`
    and `joined` returns without state. `admitted` join the roster without a stage. `trainers` are the
    trainers of the next plan, the first of which is the committer; () keeps the remaining ones. `restored` is
    the checkpoint of `step` committed steps to which every stage returns; without it, the replicas keep their
    state. `fork` is the name of the instance in which some members continue without the majority. `cuts`
    moves the borders between stages: it has the end of each stage except the last, as a layer; () keeps the
    borders. Moved layers come from the checkpoint, so borders move only together with `restored`. `is_final`:
    the restored state is the result of the run. `stages` are all stages of the next plan if their number
    changes; () keeps the number. They too need `restored`, and each of their holders held a stage before or
    is in `joined`.
    """

    lost: Peers = ()
    joined: Annotated[tuple[Joining, ...], msgspec.Meta(max_length=JOININGS_MAX)] = ()
    admitted: Peers = ()
    trainers: Peers = ()
    restored: Hash = NO_HASH
    step: StepNumber = 0
    fork: Hash = NO_HASH
    cuts: Cuts = ()
    is_final: bool = False
    stages: Stages = ()


def encode_change(change: Change) -> bytes:
    """Return the bytes of the change, which are the value to agree on."""
    return encode(change)


def decode_change(data: bytes) -> Change:
    """Decode a change. Raises RemoteProtocolError if it is invalid."""
    change: Change = decode(data, Change, bytes_max=CHANGE_BYTES_MAX)
    return change


def successor(plan: Plan, change: Change) -> Plan:
    """Return the plan after `plan`. Raises RemoteProtocolError if the change is invalid, for example if a
    stage would have no replica, or no member would train.

    Remaining trainers keep their order. If none remains, the new trainer is the first of the roster's members
    without a stage or, if there are none, the first of the others, in the order of peer ids. Any member of
    the roster can fetch the data.
    """
    lost = set(change.lost)
    joined = {row.peer: row for row in change.joined}
    if len(joined) != len(change.joined):
        raise RemoteProtocolError("a change lets a peer join twice")
    if not lost <= set(plan.roster):
        raise RemoteProtocolError("a change loses a peer that was not on the roster")
    if any(row.stage >= len(change.stages or plan.stages) for row in change.joined):
        raise RemoteProtocolError("a change adds to a stage that does not exist")
    if change.restored == NO_HASH and change.step:
        raise RemoteProtocolError("a change names a step without a checkpoint")
    if change.is_final and change.restored == NO_HASH:
        raise RemoteProtocolError("a change names a result without a checkpoint")
    if plan.height + 1 >= HEIGHT_MAX:
        raise RemoteProtocolError("a chain of plans is too long")
    roster = tuple(sorted((set(plan.roster) - lost) | set(joined) | set(change.admitted)))
    if len(roster) > ROSTER_MAX:
        raise RemoteProtocolError(f"a roster has {len(roster)} members, at most {ROSTER_MAX} are allowed")
    stages = _given_stages(plan, change) if change.stages else _kept_stages(plan, change)
    kept = tuple(peer for peer in (change.trainers or plan.trainers) if peer in roster)
    new = Plan(
        run=plan.run,
        parent=plan_hash(plan),
        height=plan.height + 1,
        roster=roster,
        trainers=kept or standby_trainers(roster, stages)[:1],
        microbatches=plan.microbatches,
        stages=tuple(stages),
        step=change.step,
        restored=change.restored,
        fork=plan.fork if change.fork == NO_HASH else change.fork,
        is_final=plan.is_final or change.is_final,
    )
    return decode_plan(encode_plan(new))  # raises if others could not decode the plan


def _kept_stages(plan: Plan, change: Change) -> list[StagePlan]:
    """Return the same number of stages as before, each with its remaining and joining replicas."""
    gone = {*change.lost, *(row.peer for row in change.joined)}
    spans = _spans(plan, change)
    stages = []
    for number, stage in enumerate(plan.stages):
        left = [
            (peer, rate) for peer, rate in zip(stage.replicas, stage.rates, strict=True) if peer not in gone
        ]
        left += [(row.peer, row.rate) for row in change.joined if row.stage == number]
        if not left:
            raise RemoteProtocolError(f"stage {number + 1} of {len(plan.stages)} would have no replica")
        peers, rates = zip(*left, strict=True)
        stages.append(StagePlan(*spans[number], peers, rates_left(stage, rates)))
    return stages


def _given_stages(plan: Plan, change: Change) -> list[StagePlan]:
    """Return the stages listed in a change. Raises RemoteProtocolError unless every holder held a stage
    before or joins the stage."""
    if change.restored == NO_HASH:
        raise RemoteProtocolError("a change of the number of stages has no checkpoint to take them from")
    if change.cuts:
        raise RemoteProtocolError("a change has both stages and cuts")
    if change.stages[-1].last_layer != plan.stages[-1].last_layer:
        raise RemoteProtocolError("a change has stages of another model")
    held = {peer for stage in plan.stages for peer in stage.replicas} - set(change.lost)
    joined = {(row.peer, row.stage) for row in change.joined}
    given = {(peer, number) for number, stage in enumerate(change.stages) for peer in stage.replicas}
    joining = {row.peer for row in change.joined}
    if not joined <= given or any(peer in joining or peer not in held for peer, _ in given - joined):
        raise RemoteProtocolError("a change gives a stage to a peer that does not join it")
    return list(change.stages)


def _spans(plan: Plan, change: Change) -> list[tuple[int, int]]:
    """Return the layers of each stage of the next plan. Raises RemoteProtocolError if the cuts are
    invalid."""
    borders = tuple(stage.last_layer for stage in plan.stages)
    if change.cuts:
        if change.restored == NO_HASH:
            raise RemoteProtocolError("a change moves layers without a checkpoint to take them from")
        if len(change.cuts) != len(borders) - 1:
            raise RemoteProtocolError("a change has a wrong number of cuts")
        borders = (*change.cuts, borders[-1])
    spans = list(pairwise((0, *borders)))
    if any(first >= last for first, last in spans):
        raise RemoteProtocolError("a change leaves a stage without layers")
    return spans


def standby_trainers(roster: Sequence[bytes], stages: Sequence[StagePlan]) -> tuple[bytes, ...]:
    """Return the peers that would train if no trainer were left, in order."""
    busy = {peer for stage in stages for peer in stage.replicas}
    return tuple(sorted(roster, key=lambda peer: (peer in busy, peer)))
