"""The rules by which members lend copies of stages that they do not hold, while the stage has no holder.

A requester that only follows its run keeps copies of the first stage; a head keeps copies of its column's
other stages. To lend a copy, the member enters the roster of that stage, with the copy as its state.
"""

from dataclasses import dataclass

from partition.run.local.courses import Course, Sleep
from partition.run.local.crew import MemberCrew
from partition.run.local.head_watch import HEADLESS_SECONDS
from partition.run.local.keeping import LOOK_SECONDS, StageCopying


@dataclass(frozen=True)
class LendStage:
    """Lend the copy of a stage, if there is one. The answer is whether it is lent."""

    stage: int


@dataclass(frozen=True)
class TakeBack:
    """Stop lending the copy of a stage. No answer."""

    stage: int


class FollowerLending:
    """The copies of the first stage, at a requester that only follows its run of `stages` stages."""

    def __init__(self, crew: MemberCrew, stages: int, copying: StageCopying) -> None:
        self._crew = crew
        self._stages = stages
        self._copying = copying
        self._trained_at: float | None = None

    def lend(self) -> Course[None]:
        """Renew the copy while heads train, because they have newer parameters, and lend it while no head
        trains; endlessly."""
        crew, now, is_lent = self._crew, self._copying.now, False
        while True:
            if crew.training:
                self._trained_at, crew.awaits_head = now(), False
                if is_lent:
                    is_lent = False
                    yield TakeBack(0)
                yield from self._copying.copy(0)
            elif not is_lent:
                since = now()
                is_lent = yield LendStage(0)
                crew.awaits_head = not is_lent and self._is_awaited(since)
            yield Sleep(LOOK_SECONDS)

    def _is_awaited(self, now: float) -> bool:
        """Return whether a lost head may return with its disk. After a while, a run of one stage can begin
        anew. A run in columns cannot, because untrained parameters do not fit those of the other stages."""
        if self._trained_at is None:
            return False
        return self._stages > 1 or now - self._trained_at < HEADLESS_SECONDS


def lend_stages(crew: MemberCrew, copying: StageCopying) -> Course[None]:
    """Renew a head's copies of its column's other stages, and lend those that have no holder; endlessly."""
    while True:
        for stage in copying.schedules:
            # if other heads train, holders have newer parameters than the copy
            holders, is_only = crew.holders_of, not crew.training
            if holders is None or stage in crew.taken:
                yield TakeBack(stage)
            elif stage in holders.attached:
                yield TakeBack(stage)
                if is_only:
                    yield from copying.copy(stage, holders.attached[stage])
            elif is_only:
                yield LendStage(stage)
        yield Sleep(LOOK_SECONDS)
