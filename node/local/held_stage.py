"""The parameters of one stage on this node: taken over from other members, averaged, saved, and handed on.

A head uses this for the first stage; a holder uses it for its own stage and each further one. Not here: what
the stage computes, and for whom (`node.local.member`, `node.local.holder`).
"""

from collections.abc import Awaitable, Callable
from math import inf
from typing import assert_never

import trio

from crypto.identity import PeerId
from gossip.newcomers import is_another_further, is_behind, likely_rounds, likely_steps
from node.averaging.participation import Participation
from node.averaging.snapshot import Snapshot
from node.errors import Unreachable
from node.local.keeper import Keeper
from node.local.rounds import Rounds
from node.local.trainer import LocalTrainer
from node.local.trial import Trial, go_back, place_of
from node.protocols.manifest import Run
from partition.run.ending import Ending
from partition.run.local.member_stage import (
    BeginRound,
    HandOn,
    KeepState,
    LookFurther,
    MemberStage,
    NoteOwnState,
    NotTaken,
    ReportStage,
    RestoreOwnState,
    Resume,
    TryState,
    UseRound,
)

Attempt = NoteOwnState | TryState | RestoreOwnState
Deed = Resume | LookFurther | Attempt | ReportStage | UseRound | BeginRound | HandOn | KeepState


async def _nothing() -> None: ...


class AveragedStage(MemberStage):
    """A stage and the rounds that average it. `part` is its roster; `trainer` has the parameters."""

    def __init__(
        self,
        run: Run,
        ending: Ending,
        part: Participation,
        keeper: Keeper,
        trainer: LocalTrainer,
        me: PeerId,
    ) -> None:
        assert run.manifest.local is not None, "the run is in local mode"
        self.trial: Trial | None = None
        """Tests other members' states; None if the stage cannot be tested alone."""
        self.taken_over: Callable[[], Awaitable[None]] = _nothing
        """Called after other members' parameters were taken over."""
        self.carried: Snapshot | None = None
        """The state to resume from instead of the saved one."""
        self.trainer = trainer
        self.part = part
        self._keeper = keeper
        self.averaging = Rounds(me, run.manifest.local, trainer, part, keeper.now)
        super().__init__(
            trainer, self.averaging.schedule, ending,
            saves=keeper.schedule, reports=lambda: part.roster.reports, now=keeper.now,
        )  # fmt: skip
        self._run = run
        self._local_steps = run.manifest.local.local_steps

    async def open(self, nursery: trio.Nursery) -> None:
        """Prepare for the rounds, which run in `nursery`, starting with the model's initial parameters."""
        self._nursery = nursery
        await self.averaging.open()

    async def do(self, deed: Deed) -> object:
        """Carry out a deed of this stage. Raises StageFailed."""
        match deed:
            case Resume():
                return await self._resume()
            case LookFurther():
                return is_another_further(self.part.roster.reports, self.step, self._local_steps)
            case NoteOwnState():
                place = await place_of(self.trainer)
                return place, inf if self.trial is None else await self.trial.loss_max()
            case TryState():
                return await self._try_state(deed)
            case RestoreOwnState(own=own):
                await go_back(self.trainer, own[0])
            case ReportStage():
                self.report()
            case UseRound():
                made = await self.averaging.use()
                return made is not None and bool(made.error) and self._is_behind
            case BeginRound():
                await self.averaging.begin(self._nursery)
            case HandOn():
                if self.part.states.wants_state(self.step):
                    self.part.states.offer(await self.copy())
            case KeepState():
                self._keeper.keep(await self.copy(), self._nursery)
            case _:
                assert_never(deed)
        return None

    @property
    def axes(self) -> int:
        return self.averaging.axes

    def report(self) -> None:
        """Report the progress of this stage to the other members."""
        trainer = self.trainer
        self.part.tell(
            step=trainer.step,
            samples=trainer.samples,
            rounds=self.rounds.count,
            lineage=self._run.id,
            has_state=self.has_state,
        )

    # Resuming

    async def _resume(self) -> bool:
        """Resume from the carried or saved state; return whether there was one."""
        trainer = self.trainer
        own = self.carried or await self._keeper.load(trainer.state_bytes_max)
        if own is None:
            return False
        try:
            self.averaging.take_over(own.table.rounds, await trainer.take_over(own))
        except ValueError:
            return False
        await self.taken_over()
        return True

    async def _try_state(self, deed: TryState) -> NotTaken | None:
        """Take over the state of another member, unless the trial refuses it or it does not fit this run.
        Return None, or why no state was taken over."""
        (own, loss_max), passed_over = deed.own, deed.passed_over
        part, trainer, trial, steps = self.part, self.trainer, self.trial, self._run.manifest.steps
        reports, found = part.roster.reports, None
        likely = likely_steps(reports, self._local_steps, passed_over, are_tried=trial is not None)
        try:
            found = await part.states.fetch(
                0, steps, bytes_max=trainer.state_bytes_max, passed_over=passed_over, likely=likely
            )
            outer = await trainer.take_over(found)
            if trial is not None and (fault := await trial.fault(own, loss_max)):
                raise ValueError(fault)
            self.averaging.take_over(likely_rounds(part.roster.reports, found.table.rounds), outer)
        except Unreachable as error:
            return NotTaken(error.detail)
        except ValueError as error:
            part.counters["states_refused"] += 1
            return NotTaken(str(error), () if found is None else found.holders)
        await self.taken_over()
        return None

    async def renew(self, step: int) -> bool:
        """Take over another holder's present state, if it is of this step or later; return whether there was
        one."""
        try:
            found = await self.part.states.fetch(
                step, self._run.manifest.steps, bytes_max=self.trainer.state_bytes_max
            )
            self.averaging.take_over(found.table.rounds, await self.trainer.take_over(found))
        except (Unreachable, ValueError):
            return False
        return True

    async def copy(self) -> Snapshot:
        """Return this stage's state."""
        return await self.trainer.snapshot(self.rounds.count, self._run.id, self.averaging.outer)

    @property
    def _is_behind(self) -> bool:
        """Return whether others held a round in which this member should have taken part."""
        return self.rounds.needs_all and is_behind(self.part.roster.reports, self.rounds.count)

    async def close(self) -> None:
        """Stop holding the stage."""
        self.has_state = False
        self.part.close()
        with trio.CancelScope(shield=True):
            await self.trainer.stage.aclose()
