"""How a member of a run in local mode takes over the state of others."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from math import inf

import trio

from crypto.identity import PeerId
from gossip.claims import LikelySteps, lower_median, newcomer_steps
from gossip.roster import Report
from node.averaging.participation import Participation
from node.averaging.snapshot import Snapshot
from node.errors import StageFailed, Unreachable
from node.local.rounds import Rounds
from node.local.trainer import LocalTrainer
from node.local.trial import Trial, go_back, place_of

CATCH_UPS_MAX = 5
"""Attempts to take over a state, before a newcomer gives up."""
LIKELY_ROUNDS = 10
"""A member is hardly so many rounds ahead of most others."""


def is_begun(reports: Iterable[Report]) -> bool:
    """Return whether one of these members has made a step: until then all hold the run's first values."""
    return any(report.has_state and report.step.reaches(1) for report in reports)


def likely_steps(
    part: Participation, local_steps: int, passed_over: Collection[PeerId] = (), *, are_tried: bool = False
) -> LikelySteps:
    """Return how far the others may well be, but for some: the lower half of them, and some rounds more or
    less. One alone may claim any step. `are_tried`: the state is looked at before it is used."""
    reports = part.roster.reports.items()
    steps = [report.step for peer, report in reports if report.has_state and peer not in passed_over]
    likely = newcomer_steps(steps, LIKELY_ROUNDS * local_steps, are_equal=False)
    return replace(likely, is_newest=are_tried)


async def catch_up(
    part: Participation,
    trainer: LocalTrainer,
    rounds: Rounds,
    *,
    steps: int,
    local_steps: int,
    trial: Trial | None,
    is_needed: bool,
) -> bool:
    """Take over the state of others, of `steps` at most; whether one was. Those that `trial` refuses, or that
    are not of this run, are passed over; if no other is left, the own one is back.

    Raises:
        StageFailed: nobody hands one over, and this member cannot do without (`is_needed`).
    """
    reason = ""
    useless: set[PeerId] = set()
    own = await place_of(trainer)
    limit = inf if trial is None else await trial.loss_max()
    for _ in range(CATCH_UPS_MAX):
        others = [peer for peer, report in part.roster.reports.items() if report.has_state]
        if not set(others) - useless:
            break  # nobody is left that was further
        likely = likely_steps(part, local_steps, useless, are_tried=trial is not None)
        found: Snapshot | None = None
        try:
            found = await part.states.fetch(
                0, steps, bytes_max=trainer.state_bytes_max, passed_over=useless, likely=likely
            )
            outer = await trainer.take_over(found)
            if trial is not None and (fault := await trial.fault(own, limit)):
                raise ValueError(fault)
            made = [report.rounds for report in part.roster.reports.values() if report.has_state]
            most = lower_median(made) + LIKELY_ROUNDS
            rounds.take_over(min(found.table.rounds, most), outer)
        except Unreachable as error:
            reason = error.detail
        except ValueError as error:
            reason = str(error)
            useless.update(() if found is None else found.holders)
            part.counters["states_refused"] += 1
        else:
            return True
        await trio.sleep(1.0)
    else:
        if is_needed and not useless:
            raise StageFailed(f"no member handed over its state: {reason}")
    if useless:
        await go_back(trainer, own)
    return False
