"""Merging of stages: neighbouring stages take the layers of a stage without a replica.

New borders are chosen among the old borders, because only these are known to be legal cuts. Of all possible
merges, the one is chosen whose slowest stage has the fewest layers for its rate. No peer is asked to hold
layers that it has refused.
"""

from collections.abc import Collection, Sequence
from fractions import Fraction

from partition.plan.plan import Plan, StagePlan

Refused = Collection[tuple[bytes, int, int]]
"""Refusals: a peer, and the first layer and the end of the layers that it refused."""
Group = Sequence[tuple[bytes, int]]
"""The remaining replicas of a stage, each with its rate."""


def merged_stages(plan: Plan, groups: Sequence[Group], refused: Refused = ()) -> tuple[StagePlan, ...] | None:
    """Return the stages of a plan like `plan` in which only the groups with a replica hold stages; None if
    these groups cannot hold all layers.

    `groups` has one group for each of the plan's stages, in order.
    """
    places = [number for number, group in enumerate(groups) if group]
    if not places:
        return None
    borders = [0, *(stage.last_layer for stage in plan.stages)]
    # Keyed by the end border of the stages so far: the slowest pace, and the stages.
    best: dict[int, tuple[Fraction, tuple[StagePlan, ...]]] = {0: (Fraction(0), ())}
    for index, place in enumerate(places):
        is_last = index + 1 == len(places)
        ends = [len(plan.stages)] if is_last else range(place + 1, places[index + 1] + 1)
        found: dict[int, tuple[Fraction, tuple[StagePlan, ...]]] = {}
        for begin, (worst, stages) in best.items():
            for end in ends:
                stage = _stage(borders[begin], borders[end], groups[place], refused)
                if stage is None:
                    continue
                pace = max(worst, stage_pace(stage))
                if end not in found or pace < found[end][0]:
                    found[end] = pace, (*stages, stage)
        best = found
    return best[len(plan.stages)][1] if best else None


def _stage(first: int, last: int, group: Group, refused: Refused) -> StagePlan | None:
    """Return a stage with these layers, held by the members of a group that have not refused them or fewer of
    them; None if no member is left."""
    able = [
        (peer, rate)
        for peer, rate in group
        if not any(peer == other and first <= begin and end <= last for other, begin, end in refused)
    ]
    if not able:
        return None
    peers, rates = zip(*able, strict=True)
    return StagePlan(first, last, peers, rates)


def stage_pace(stage: StagePlan) -> Fraction:
    """Return the number of layers of a stage per FLOP/s of all its replicas."""
    return Fraction(stage.last_layer - stage.first_layer, max(1, sum(stage.rates)))


def slowest_pace(plan: Plan) -> Fraction:
    """Return the pace of the slowest stage; all layers count equally."""
    return max(map(stage_pace, plan.stages))
