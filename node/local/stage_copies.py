"""Copies of a column's other stages, kept at its head for successors of a stage's only holder.

Holders keep their own states. If there is only one column, no other node has the state of a stage whose
holder dies. The next holder would begin with untrained values, which ruins the whole model. So the head
fetches the states as often as members save their own, and lends them while it looks for a new holder
(`partition.run.local.lending`). To do so it is in the roster of the stage, but averages nothing.
"""

from collections.abc import Callable, Sequence

from node.averaging.door import TicketGate
from node.averaging.participation import Participation
from node.errors import UsageError
from node.local.context import LocalRunsService
from node.local.courses import follow
from node.local.crew import Crew
from node.local.keeper import Keeper
from node.local.stages import open_part
from node.local.trainer import state_bytes_max
from node.placement.admission import Machine, build_stage_spec
from node.protocols.manifest import Run
from partition.model.graph import Graph
from partition.plan.plan import Plan
from partition.run.local.keeping import FIRST_STEP, CopyStage, StageCopy, StageCopying
from partition.run.local.lending import LendStage, TakeBack, lend_stages


def state_sizes(run: Run, graph: Graph, plan: Plan, machine: Machine) -> list[int]:
    """Return the maximum size of a snapshot for each stage of a run."""
    stages = range(len(plan.stages))
    return [state_bytes_max(build_stage_spec(run, graph, plan, stage, machine)[0]) for stage in stages]


class StageCopies:
    """The copies of one head."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        crew: Crew,
        door: TicketGate,
        *,
        step: Callable[[], int],
        bytes_max: Sequence[int],
    ) -> None:
        """`step` returns the head's own step; `bytes_max` bounds the state of each stage."""
        self._service = service
        self._run = run
        self._crew = crew
        self._door = door
        self._bytes_max = bytes_max
        stages = range(1, len(bytes_max))
        self._keepers = {
            stage: Keeper(service, run, door.admission, 0, copy_of=stage, first=FIRST_STEP)
            for stage in stages
        }
        schedules = {stage: keeper.schedule for stage, keeper in self._keepers.items()}
        self._copying = StageCopying(schedules, step=step, now=service.seams.clock.monotonic)
        self._lent: dict[int, Participation | None] = {}
        """Lent copies, by missing stage; None if there is no copy to lend."""

    async def run(self) -> None:
        """Fetch copies, and lend them, until cancelled."""
        try:
            await follow(lend_stages(self._crew, self._copying), self._do)
        finally:
            for stage in list(self._lent):
                self.take_back(stage)

    async def _do(self, deed: CopyStage | LendStage | TakeBack) -> StageCopy | None:
        match deed:
            case TakeBack(stage=stage):
                self.take_back(stage)
            case LendStage(stage=stage):
                if stage not in self._lent:
                    self._lent[stage] = await self._lend(stage)
                if (part := self._lent[stage]) is not None:
                    self._door.show(part.roster.claims)
            case CopyStage(stage=stage, holder=holder):
                assert holder is not None, "a head copies from its holders"
                return await self._keepers[stage].copy_from(holder, self._bytes_max[stage])
        return None

    async def _lend(self, stage: int) -> Participation | None:
        """Lend the copy of a stage, if there is one."""
        found = await self._keepers[stage].load(self._bytes_max[stage])
        if found is None or stage in self._crew.taken:
            return None
        try:
            part = open_part(self._service.averaging, self._run, stage, self._door)
        except UsageError:
            return None  # this node averages in too many runs already
        part.states.offer(found)
        step, rounds = found.table.step, found.table.rounds
        part.tell(step=step, samples=0, rounds=rounds, lineage=self._run.id, has_state=True)
        return part

    def take_back(self, stage: int) -> None:
        """Stop lending a copy, because the stage has a holder again, or this node will hold it."""
        part = self._lent.pop(stage, None)
        if part is not None:
            part.close()
