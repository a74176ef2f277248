"""Decides, from the committer's knowledge, whether a run should get an additional stage on an idle machine.
No I/O.

Not here: when this is decided, and the measurements (`node.runs.rebalancing`); the change to a plan with a
different number of stages (`partition.run.recutting`).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from crypto.identity import PeerId
from partition.plan.change import Change, Joining
from partition.plan.plan import Plan, StagePlan
from partition.plan.problem import Infeasible, Problem, Split
from partition.plan.rebalance import diff, step_nanoseconds
from partition.plan.solver import solve
from partition.plan.tables import Tables
from partition.run.pauses import GAIN_PERCENT_MIN

IDLE_MAX = 3
"""Number of idle peers to choose from: the fastest, and two more in case its links are slow."""


def another_stage(
    problem: Problem,
    plan: Plan,
    idle: Mapping[PeerId, int],
    *,
    steps_left: int,
    pause_nanoseconds: int,
) -> Change | None:
    """Return the change to a plan with one more stage, computed by one of the `idle` peers (each with its
    rate in FLOP/s). None if no such plan is worth the pause and the copying.

    `problem` is the measured problem with the holders of `plan` and the idle peers.
    """
    holders = {PeerId(peer).hex() for stage in plan.stages for peer in stage.computing}
    before = _among(problem, holders, problem.constraints.stages)
    old = split_of(before, plan)
    now = step_nanoseconds(before, old, Tables(before))
    if now is None:
        return None
    best: tuple[int, Change] | None = None
    for peer, rate in idle.items():
        wider = _among(problem, holders | {peer.hex()}, len(plan.stages) + 1)
        tables = Tables(wider)
        try:
            split = solve(wider, tables)
        except Infeasible:
            continue
        if all(wider.peers[place].name != peer.hex() for group in split.groups for place in group):
            continue
        time = step_nanoseconds(wider, split, tables)
        assert time is not None
        moved = sum(move.bytes for move in diff(wider, old, split, before))
        # Assume that all copying goes over unmeasured links.
        cost = pause_nanoseconds + moved * 1_000_000_000 // max(1, wider.default_link.bytes_per_second)
        pays = 100 * now >= (100 + GAIN_PERCENT_MIN) * time and 2 * cost <= steps_left * (now - time)
        if pays and (best is None or time < best[0]):
            best = time, _change(plan, wider, split, peer, rate)
    return None if best is None else best[1]


def _among(problem: Problem, names: Collection[str], stages: int) -> Problem:
    """Return the problem restricted to these peers, with this number of stages."""
    rules = replace(problem.constraints, stages=stages, replicas=0)
    return replace(
        problem, peers=tuple(peer for peer in problem.peers if peer.name in names), constraints=rules
    )


def _change(plan: Plan, problem: Problem, split: Split, peer: PeerId, rate: int) -> Change:
    rates: dict[bytes, int] = {}
    for stage in plan.stages:
        rates |= zip(stage.replicas, stage.rates, strict=True)
    rates[peer] = rate  # a standby has no rate in the plan
    stages = []
    for (first, last), group in zip(split.ranges, split.groups, strict=True):
        peers = tuple(bytes.fromhex(problem.peers[place].name) for place in group)
        stages.append(StagePlan(first, last, peers, tuple(rates[each] for each in peers)))
    number = next(number for number, stage in enumerate(stages) if peer in stage.replicas)
    joined = (Joining(peer, number, rate),) if plan.stage_of(peer) is None else ()
    return Change(joined=joined, stages=tuple(stages))


def split_of(problem: Problem, plan: Plan) -> Split:
    """Return a plan as the solver's split of `problem`, which may have more peers."""
    places = {peer.name: place for place, peer in enumerate(problem.peers)}
    groups = tuple(
        tuple(sorted(places[PeerId(peer).hex()] for peer in stage.computing)) for stage in plan.stages
    )
    return Split(tuple((stage.first_layer, stage.last_layer) for stage in plan.stages), groups, 0, 0)
