"""Copies of the other stages of a column at its head, for the node that holds one after its only holder.

Holders keep their own states. Where a column is the only one, nobody else has the numbers of a stage whose
holder dies, and the next would begin it with untrained ones, which undoes what the whole model has learnt.
So the head fetches them now and then, as often as members put their own away, and hands them on while it
looks for another holder (`partition.run.local.lending`). For that it is in the roster of that stage, and
averages nothing.
"""

from collections.abc import Callable, Sequence

import trio

from node.averaging.door import TicketGate
from node.averaging.participation import Participation
from node.averaging.signature import run_key
from node.averaging.transfer import fetch_state
from node.errors import Unreachable, UsageError
from node.local.context import LocalRunsService
from node.local.copies import LOOK_SECONDS
from node.local.crew import Crew
from node.local.keeper import Keeper
from node.local.stages import open_part, roster_of
from node.local.trainer import state_bytes_max
from node.placement.admission import Machine, build_stage_spec
from node.protocols.manifest import Run
from partition.model.graph import Graph
from partition.plan.plan import Plan
from partition.run.local.keeping import FETCH_SHARE
from partition.run.local.lending import head_lending


def state_sizes(run: Run, graph: Graph, plan: Plan, machine: Machine) -> list[int]:
    """Return the most bytes of a snapshot of each stage of a run."""
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
        """`step` is the head's own, `bytes_max` bounds the state of each stage."""
        self._service = service
        self._now = service.seams.clock.monotonic
        self._run = run
        self._crew = crew
        self._door = door
        self._step = step
        self._bytes_max = bytes_max
        self._not_before = 0.0
        stages = range(1, len(bytes_max))
        self._keepers = {stage: Keeper(service, run, door.admission, 0, copy_of=stage) for stage in stages}
        self._lent: dict[int, Participation | None] = {}
        """By stage that is missing; None where there is no copy to hand on."""

    async def run(self) -> None:
        """Fetch copies, and hand them on, until cancelled."""
        try:
            while True:
                if self._crew.column is not None:
                    for stage in self._keepers:
                        await self._look(stage)
                await trio.sleep(LOOK_SECONDS)
        finally:
            for stage in list(self._lent):
                self.take_back(stage)

    async def _look(self, stage: int) -> None:
        deed = head_lending(self._crew, stage)
        if deed in (None, "copy"):
            self.take_back(stage)
        if deed == "lend":
            if stage not in self._lent:
                self._lent[stage] = await self._lend(stage)
            part = self._lent[stage]
            if part is not None:
                self._door.show(part.roster.claims)
        is_time = self._now() >= self._not_before
        if deed == "copy" and is_time and self._keepers[stage].is_due(self._step()):
            await self._copy(stage)

    async def _copy(self, stage: int) -> None:
        """Fetch the state of the holder, and put it away."""
        assert self._crew.column is not None
        holder, service, begun = self._crew.column.holder(stage), self._service, self._now()
        name, signature = roster_of(self._run, stage)
        if holder is None:
            return
        try:
            found = await fetch_state(
                service.seams.network,
                service.seams.executor,
                [holder],
                run_key(name),
                signature,
                0,
                bytes_max=self._bytes_max[stage],
                refuse=service.refuse,
                step_max=self._run.manifest.steps,
                rng=self._service.seams.rng,
            )
        except Unreachable:
            return  # it is gone, or hands it over later
        self._keepers[stage].begin(found.table.step)
        await self._keepers[stage].save(found)
        self._not_before = self._now() + FETCH_SHARE * (self._now() - begun)

    async def _lend(self, stage: int) -> Participation | None:
        """Hand the copy on, where there is one."""
        found = await self._keepers[stage].load(self._bytes_max[stage])
        if found is None or stage in self._crew.taken:
            return None
        try:
            part = open_part(self._service.averaging, self._run, stage, self._door)
        except UsageError:
            return None  # in too many runs
        part.states.offer(found)
        step, rounds = found.table.step, found.table.rounds
        part.tell(step=step, samples=0, rounds=rounds, lineage=self._run.id, has_state=True)
        return part

    def take_back(self, stage: int) -> None:
        """Stop handing a copy on: the stage has a holder again, or this node is to hold it."""
        part = self._lent.pop(stage, None)
        if part is not None:
            part.close()
