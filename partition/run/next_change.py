"""The choice of the plan's next change: which members are dropped, which replicas join stages, and which
members are admitted."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from crypto.identity import PeerId
from partition.plan.change import JOININGS_MAX, Change, Joining
from partition.plan.merging import Refused, merged_stages
from partition.plan.plan import NO_HASH, VOTERS_MIN, Plan, rates_left
from partition.run.settings import RunSettings


@dataclass(frozen=True)
class PlanInputs:
    """One member's knowledge. `wanted` is the number of replicas that each stage began with.

    `absent` members are on the roster but are dead, gone or failed, or have lost their stage; `leaving`
    members will go but still help. `recut` is the change of borders that the committer wants. `candidates`
    could take a stage, each with its rate, the best first. `restorable` is the newest checkpoint and its
    step, if any; the run returns to it only if a copy is reachable (`can_restore`). Only a member that `asks`
    knows of candidates.
    """

    plan: Plan
    absent: frozenset[PeerId]
    leaving: frozenset[PeerId] = frozenset()
    candidates: tuple[tuple[PeerId, int], ...] = ()
    wanted: tuple[int, ...] = ()
    restorable: tuple[bytes, int] | None = None
    can_restore: bool = True
    newcomers: tuple[PeerId, ...] = ()
    may_refill: bool = True
    asks: bool = True
    recut: Change | None = None
    refused: Refused = ()
    settings: RunSettings = field(default_factory=RunSettings)


@dataclass(frozen=True)
class NoViablePlan:
    """No plan can follow at present, with the reason to display. This may change within `waits_seconds`.
    `lost` are the members whose return would help."""

    reason: str
    waits_seconds: float
    lost: tuple[PeerId, ...] = ()


def next_change(view: PlanInputs) -> Change | NoViablePlan | None:
    """Return the change to decide next, None if nothing is to change."""
    plan = view.plan
    lost = set(plan.roster) & view.absent
    candidates = [row for row in view.candidates if plan.stage_of(row[0]) is None or row[0] in lost]
    left = [[peer for peer in stage.replicas if peer not in lost] for stage in plan.stages]
    joined: list[Joining] = []
    empty = [number for number, peers in enumerate(left) if not peers]
    held = {number: tuple(PeerId(peer) for peer in plan.stages[number].replicas) for number in empty}
    if empty and view.restorable is None:
        where = f"stage {empty[0] + 1} of {len(left)}"
        reason = f"{where} lost its last replica, and no checkpoint holds its parameters"
        return NoViablePlan(reason, view.settings.lost_seconds_max, held[empty[0]])
    if empty and not view.can_restore:
        where = f"stage {empty[0] + 1} of {len(left)}"
        reason = f"{where} has no replica left, and no reachable member has a copy of the newest checkpoint"
        return NoViablePlan(reason, view.settings.pause_seconds_max, lost=held[empty[0]])
    if view.asks and empty:
        candidates += _movable(plan, left)
    for number in empty[: len(candidates)]:
        peer, rate = candidates.pop(0)
        joined.append(Joining(peer, number, rate or max(plan.stages[number].rates)))
    candidates = [row for row in candidates if plan.stage_of(row[0]) is None or row[0] in lost]
    if len(joined) < len(empty):
        number = empty[len(joined)]
        if (merged := _merge(view, lost, joined)) is not None:
            return merged
        reason = f"stage {number + 1} of {len(left)} has no replica left"
        reason += ", and no member has room for it" if view.asks else ""
        return NoViablePlan(reason, view.settings.pause_seconds_max, lost=held[number])
    joined += _refills(view, lost, joined, candidates)
    admitted = tuple(peer for peer in view.newcomers if peer not in plan.roster and not lost)
    if not lost:
        voters = {*plan.roster, *(row.peer for row in joined), *admitted} - view.leaving
        admitted += choose_witnesses(voters, [peer for peer, _ in candidates])
    if not lost and not joined and not admitted:
        return None if view.recut is None or _keeps(view.recut, view.leaving) else view.recut
    if not set(plan.roster) - lost and not joined:
        return NoViablePlan("no member of the run is left", view.settings.pause_seconds_max)
    restored, step = view.restorable if empty and view.restorable else (NO_HASH, 0)
    return Change(
        lost=tuple(sorted(lost)), joined=tuple(joined), admitted=admitted, restored=restored, step=step
    )


def _keeps(change: Change, leaving: Collection[bytes]) -> bool:
    """Return whether a change gives a stage to a leaving member. The change then waits until the member has
    left."""
    if not change.stages:
        return bool(leaving)
    return any(peer in leaving for stage in change.stages for peer in stage.replicas)


def _refills(
    view: PlanInputs,
    lost: Collection[bytes],
    joined: Sequence[Joining],
    candidates: list[tuple[PeerId, int]],
) -> list[Joining]:
    """Return the joins to stages that have a replica; `joined` take the stages without one. Removes the
    joining peers from `candidates`."""
    plan, wanted = view.plan, wanted_now(view.plan, view.wanted)
    found: list[Joining] = []
    for number, stage in enumerate(plan.stages):
        staying = [peer for peer in stage.replicas if peer not in lost and peer not in view.leaving]
        # A leaving member that is the last of its stage is replaced before it goes. Other missing replicas
        # are filled in if there is a candidate.
        is_empty = all(peer in lost for peer in stage.replicas)
        is_last = not staying and not is_empty
        computing = sum(peer in stage.computing for peer in staying)
        is_short = bool(wanted) and computing + is_empty < wanted[number]
        refills = is_short and view.may_refill and not lost and not joined and not found
        standby = next((peer for peer in staying if peer in stage.standbys), None)
        if standby is not None:
            if refills and computing:  # without a computing replica, the standby starts computing by itself
                found.append(Joining(standby, number, max(stage.rates)))
        elif candidates and len(joined) + len(found) < JOININGS_MAX and (is_last or refills):
            peer, rate = candidates.pop(0)
            found.append(Joining(peer, number, rate))
    return found


def _movable(plan: Plan, left: Sequence[Collection[bytes]]) -> list[tuple[PeerId, int]]:
    """Return the standbys that could move to another stage, because their own stage keeps a computing
    replica. Rate 0 means: as fast as the member that is replaced."""
    return [
        (PeerId(peer), 0)
        for stage, peers in zip(plan.stages, left, strict=True)
        for peer in stage.standbys
        if peer in peers and any(other in peers for other in stage.computing)
    ]


def _merge(view: PlanInputs, lost: Collection[bytes], joined: Sequence[Joining]) -> Change | None:
    """Return the change by which neighbouring stages take the layers of stages without a replica; None if
    none of them can hold more. `joined` already take some of the empty stages."""
    plan = view.plan
    if not view.asks or view.restorable is None:
        return None
    groups = groups_left(plan, {*lost, *view.leaving}, joined)
    stages = merged_stages(plan, groups, view.refused)
    if stages is None:
        return None
    numbers = {peer: number for number, stage in enumerate(stages) for peer in stage.replicas}
    restored, step = view.restorable
    return Change(
        lost=tuple(sorted(lost)),
        joined=tuple(replace(row, stage=numbers[row.peer]) for row in joined if row.peer in numbers),
        restored=restored,
        step=step,
        stages=stages,
    )


def groups_left(
    plan: Plan, gone: Collection[bytes], joined: Sequence[Joining] = ()
) -> list[list[tuple[bytes, int]]]:
    """Return the remaining replicas of each stage with their rates: without the peers that are `gone`, and
    with the peers that join."""
    moved = {row.peer for row in joined}
    groups = []
    for number, stage in enumerate(plan.stages):
        group = [
            (peer, rate)
            for peer, rate in zip(stage.replicas, stage.rates, strict=True)
            if peer not in gone and peer not in moved
        ]
        group += [(row.peer, row.rate) for row in joined if row.stage == number]
        rates = rates_left(stage, [rate for _, rate in group])
        groups.append([(peer, rate) for (peer, _), rate in zip(group, rates, strict=True)])
    return groups


def wanted_now(plan: Plan, wanted: Sequence[int]) -> Sequence[int]:
    """Return the number of replicas that each stage of `plan` should have, given the initial numbers
    `wanted`. If the number of stages has changed, every stage should have the smallest of these, so that a
    further machine restores a stage before any stage gets a second replica."""
    return wanted if not wanted or len(wanted) == len(plan.stages) else (min(wanted),) * len(plan.stages)


def choose_witnesses(voters: Collection[bytes], candidates: Collection[PeerId]) -> tuple[PeerId, ...]:
    """Return the candidates that bring a run of two voters to VOTERS_MIN, the best first; none if it has more
    or fewer voters."""
    if len(voters) != VOTERS_MIN - 1:
        return ()
    return tuple(peer for peer in candidates if peer not in voters)[:1]


def ranked(
    free: Collection[tuple[PeerId, int]],
    *,
    first: Collection[bytes],
    trainers: Collection[bytes],
    roster: Collection[bytes],
    last: Collection[bytes],
) -> tuple[tuple[PeerId, int], ...]:
    """Order candidates, each with its rate: those in `first`, then members of the `roster`, then the fastest.
    Idle candidates precede `trainers`, which have work. The candidates in `last`, which declined recently,
    come last, so that a few that never accept do not keep the others from being asked."""

    def key(row: tuple[PeerId, int]) -> tuple[object, ...]:
        peer, rate = row
        return (peer not in first, peer in last, peer in trainers, peer not in roster, -rate, peer)

    return tuple(sorted(free, key=key))
