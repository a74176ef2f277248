"""Takes over the state of other members, for a member of a run in local mode."""

from math import inf

import trio

from crypto.identity import PeerId
from gossip.claims import lower_median
from gossip.newcomers import LIKELY_ROUNDS, likely_steps
from node.averaging.participation import Participation
from node.averaging.snapshot import Snapshot
from node.errors import StageFailed, Unreachable
from node.local.rounds import Rounds
from node.local.trainer import LocalTrainer
from node.local.trial import Trial, go_back, place_of

CATCH_UPS_MAX = 5
"""Number of attempts to take over a state before a newcomer gives up."""


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
    """Take over another member's state, of step `steps` at most; return whether one was taken over. States
    that `trial` refuses, or that do not fit this run, are skipped. If none is left, this member's own state
    is restored.

    Raises:
        StageFailed: no peer hands over its state, and this member `is_needed` to have one.
    """
    reason = ""
    useless: set[PeerId] = set()
    own = await place_of(trainer)
    limit = inf if trial is None else await trial.loss_max()
    for _ in range(CATCH_UPS_MAX):
        others = [peer for peer, report in part.roster.reports.items() if report.has_state]
        if not set(others) - useless:
            break  # no further member has a usable state
        likely = likely_steps(part.roster.reports, local_steps, useless, are_tried=trial is not None)
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
