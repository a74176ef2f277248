"""The evidence for other members' steps, in runs whose members train apart between rounds: pure.

In such runs the members are at different steps, and any of them may claim any step. Not here: the transfer of
a state.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from crypto.identity import PeerId
from gossip.claims import ClaimedCount, LikelySteps, agreed_count, lower_median, newcomer_steps
from gossip.roster import Report

LIKELY_ROUNDS = 10
"""Number of rounds that a member may credibly be ahead of most others."""

Reports = Mapping[PeerId, Report]


def likely_steps(
    reports: Reports, local_steps: int, passed_over: Collection[PeerId] = (), *, are_tried: bool = False
) -> LikelySteps:
    """Return the credible steps of the other members, except those in `passed_over`: their lower median, plus
    or minus LIKELY_ROUNDS rounds of `local_steps`. `are_tried`: the state is tested before use."""
    steps = _steps({peer: report for peer, report in reports.items() if peer not in passed_over})
    return replace(newcomer_steps(steps, LIKELY_ROUNDS * local_steps, are_equal=False), is_newest=are_tried)


def middle_step(reports: Reports) -> int:
    """Return the lower median of the members' steps."""
    return lower_median(_steps(reports))


def likely_rounds(reports: Reports, rounds: int) -> int:
    """Return the claimed `rounds` of a state, but at most LIKELY_ROUNDS above the members' lower median."""
    made = [report.rounds for report in reports.values() if report.has_state]
    return min(rounds, lower_median(made) + LIKELY_ROUNDS)


def is_another_further(reports: Reports, step: int, local_steps: int) -> bool:
    """Return whether another member credibly claims more than `step` steps."""
    last = likely_steps(reports, local_steps).last
    return any(claim.is_between(step + 1, last) for claim in _steps(reports))


def is_behind(reports: Reports, rounds: int) -> bool:
    """Return whether the others have held a round in which a member with `rounds` averages should have taken
    part."""
    return agreed_count([report.rounds for report in reports.values() if report.has_state]) > rounds


def _steps(reports: Reports) -> list[ClaimedCount]:
    return [report.step for report in reports.values() if report.has_state]
