"""How a member of a run in local mode takes over the state of others."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

import trio

from crypto.identity import PeerId
from gossip.claims import LikelySteps, lower_median, newcomer_steps
from node.averaging.participation import Participation
from node.errors import StageFailed, Unreachable
from node.local.rounds import Rounds
from node.local.trainer import LocalTrainer

CATCH_UPS_MAX = 5
"""Attempts to take over a state, before a newcomer gives up."""
LIKELY_ROUNDS = 10
"""A member is hardly so many rounds ahead of most others."""


def likely_steps(part: Participation, local_steps: int, passed_over: Collection[PeerId] = ()) -> LikelySteps:
    """Return how far the others may well be, but for some: the lower half of them, and some rounds more or
    less. One alone may claim any step."""
    reports = part.roster.reports.items()
    steps = [report.step for peer, report in reports if report.has_state and peer not in passed_over]
    likely = newcomer_steps(steps, LIKELY_ROUNDS * local_steps, are_equal=False)
    return replace(likely, is_newest=True)  # its loss is looked at before it is used


async def catch_up(
    part: Participation,
    trainer: LocalTrainer,
    rounds: Rounds,
    *,
    steps: int,
    local_steps: int,
    is_usable: Callable[[], Awaitable[bool]] | None,
) -> bool:
    """Take over the state of those that are furthest, of `steps` at most; whether one was. Where `is_usable`
    is given, it says whether what was taken over is a state to go on from; if none is, the own one is back.

    Raises:
        StageFailed: nobody hands one over.
    """
    reason = ""
    useless: set[PeerId] = set()
    first = await trainer.copy_out(moments=True) if is_usable is not None else None
    for _ in range(CATCH_UPS_MAX):
        others = [peer for peer, report in part.roster.reports.items() if report.has_state]
        if not set(others) - useless:
            break  # nobody is left that was further
        likely = likely_steps(part, local_steps, useless)
        try:
            found = await part.fetch(
                0, steps, bytes_max=trainer.state_bytes_max, passed_over=useless, likely=likely
            )
            outer = await trainer.take_over(found)
            if is_usable is not None and not await is_usable():
                useless.update(found.holders)
                raise ValueError("the state of others is worse than none")
            made = [report.rounds for report in part.roster.reports.values() if report.has_state]
            most = lower_median(made) + LIKELY_ROUNDS
            rounds.take_over(min(found.table.rounds, most), outer)
        except Unreachable as error:
            reason = error.detail
        except ValueError as error:
            reason = str(error)
        else:
            return True
        await trio.sleep(1.0)
    else:
        raise StageFailed(f"no member handed over its state: {reason}")
    if useless and first is not None:
        await trainer.begin_again(first)
    return False
