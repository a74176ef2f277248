"""The rules by which members hand on copies of stages that they do not hold, while nobody else has them.

A requester that only follows its run keeps copies of the first stage, a head those of the other stages of its
column. Each lends them while the stage has no holder: in the roster of that stage, with the copy as its
state.
"""

from typing import Literal

from partition.run.local.crew import MemberCrew
from partition.run.local.head_watch import HEADLESS_SECONDS

Lending = Literal["copy", "lend", "rest"]
"""The deed for a copy now: renew it where that is due, hand it on, or neither."""


class FollowerLending:
    """The copies of the first stage at a requester that only follows its run of so many `stages`."""

    def __init__(self, crew: MemberCrew, stages: int) -> None:
        self._crew = crew
        self._stages = stages
        self._trained_at: float | None = None

    def look(self, now: float) -> Lending:
        """Return what to do with the copy. Heads that train have newer numbers."""
        if self._crew.training:
            self._trained_at, self._crew.awaits_head = now, False
            return "copy"
        return "lend"

    def looked(self, now: float, *, is_lent: bool) -> None:
        """Note whether the copy is handed on while no head trains."""
        self._crew.awaits_head = not is_lent and self._is_awaited(now)

    def _is_awaited(self, now: float) -> bool:
        """Return whether a head that was there may come back with its disk. A run of one stage can begin anew
        after that; in columns the others hold numbers that untrained ones do not fit."""
        if self._trained_at is None:
            return False
        return self._stages > 1 or now - self._trained_at < HEADLESS_SECONDS


def head_lending(crew: MemberCrew, stage: int) -> Lending | None:
    """Return what a head does with its copy of another stage of its column; None: nothing, and it takes back
    what it lends. It takes that back before it renews the copy, too."""
    holders, is_only = crew.holders_of, not crew.training  # else others hold the stage, with newer numbers
    if holders is None or stage in crew.taken:
        return None
    if stage not in holders.attached:
        return "lend" if is_only else "rest"
    return "copy" if is_only else None
