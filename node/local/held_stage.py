"""The numbers of one stage on this node: taken over from others, averaged with them, kept, and handed on.

A head has them of the first stage, a holder of its own and of each that it holds for a machine that is gone.
Not here: what the stage computes, and for whom (`node.local.member`, `node.local.holder`).
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import trio

from crypto.identity import PeerId
from gossip.newcomers import is_another_further, is_behind
from gossip.roster import Report
from node.averaging.participation import Participation
from node.averaging.snapshot import Snapshot
from node.errors import Unreachable
from node.local.catch_up import catch_up
from node.local.keeper import Keeper
from node.local.rounds import Rounds
from node.local.trainer import LocalTrainer
from node.local.trial import Trial
from node.protocols.manifest import Run
from partition.run.ending import Ending
from partition.run.local.member_stage import MemberStage
from partition.run.local.reports import is_begun


async def _nothing() -> None: ...


class AveragedStage(MemberStage):
    """A stage and the rounds that average it. `part` is its roster, `trainer` has the numbers."""

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
        """The trial of others' states, where a stage can be tried alone."""
        self.taken_over: Callable[[], Awaitable[None]] = _nothing
        """Called when the numbers are others' now."""
        self.trainer = trainer
        self.part = part
        self._keeper = keeper
        self.averaging = Rounds(me, run.manifest.local, trainer, part, keeper.now)
        super().__init__(
            trainer, self.averaging.schedule, ending, reports=lambda: self.reports, now=keeper.now
        )
        self._run = run
        self._local_steps = run.manifest.local.local_steps

    async def open(self) -> None:
        """Prepare for the rounds, with the numbers that the model begins with."""
        await self.averaging.open()

    @property
    def reports(self) -> Mapping[PeerId, Report]:
        """Return the reports of the others that hold this stage."""
        return self.part.roster.reports

    @property
    def axes(self) -> int:
        return self.averaging.axes

    def report(self) -> None:
        """Tell the others how far this stage is."""
        trainer = self.trainer
        self.part.tell(
            step=trainer.step,
            samples=trainer.samples,
            rounds=self.rounds.count,
            lineage=self._run.id,
            has_state=self.has_state,
        )

    # Where it goes on from

    async def begin(self, carried: Snapshot | None = None) -> None:
        """Go on from the state of the others, or from the last one here where nobody is further: `carried`,
        or what was kept. Raises StageFailed."""
        trainer = self.trainer
        own = carried or await self._keeper.load(trainer.state_bytes_max)
        reports, is_resumed = self.reports, False
        if own is not None:
            with suppress(ValueError):
                self.averaging.take_over(own.table.rounds, await trainer.take_over(own))
                await self.taken_over()
                self._keeper.begin(trainer.step)
                is_resumed = True
        is_further = is_another_further(reports, trainer.step, self._local_steps)
        if is_further if is_resumed else is_begun(reports):
            await self.catch_up(is_needed=not is_resumed)

    async def catch_up(self, *, is_needed: bool = True) -> None:
        """Take over the state of others. Raises StageFailed: it `is_needed`, and nobody hands one over."""
        is_taken = await catch_up(
            self.part,
            self.trainer,
            self.averaging,
            steps=self._run.manifest.steps,
            local_steps=self._local_steps,
            trial=self.trial,
            is_needed=is_needed,
        )
        if is_taken:
            await self.taken_over()

    async def renew(self, step: int) -> bool:
        """Take over a state of this step or later, as another holds it now; return whether there was one."""
        try:
            found = await self.part.states.fetch(
                step, self._run.manifest.steps, bytes_max=self.trainer.state_bytes_max
            )
            self.averaging.take_over(found.table.rounds, await self.trainer.take_over(found))
        except (Unreachable, ValueError):
            return False
        return True

    # Between two steps

    async def average(self, nursery: trio.Nursery, *, is_still: bool) -> None:
        """Use a round that is over, and begin the next unless the numbers are to be `is_still`."""
        rounds = self.averaging
        made = await rounds.use()
        if made is not None and made.error and self._is_behind:
            await self.catch_up()
        self.note_end()
        if is_still:
            return
        if rounds.is_due and self.training:
            await rounds.begin(nursery)
        elif rounds.is_due:
            rounds.skip()

    async def hand_on(self) -> None:
        """Make a copy for those that wait for one."""
        if self.part.states.wants_state(self.trainer.step):
            self.part.states.offer(await self.copy())

    async def copy(self) -> Snapshot:
        """Return this stage's state."""
        return await self.trainer.snapshot(self.rounds.count, self._run.id, self.averaging.outer)

    async def keep(self, nursery: trio.Nursery, *, is_training: bool) -> None:
        """Put the state away, if that is due."""
        if self._keeper.is_due(self.trainer.step):
            await self._keeper.keep(self.trainer, self.averaging, nursery, is_training=is_training)

    @property
    def _is_behind(self) -> bool:
        """Whether others held a round that this member had to be in."""
        return self.rounds.needs_all and is_behind(self.reports, self.rounds.count)

    async def close(self) -> None:
        """Hold it no more."""
        self.has_state = False
        self.part.close()
        with trio.CancelScope(shield=True):
            await self.trainer.stage.aclose()
