"""Further stages of this node, which replaces machines that are gone while no other node is free.

Each has its own process in the node's slot, its own state, rounds and roster. The cut of the model never
changes, because only equal stages can be averaged. Not here: which stages to take (`merging`).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.averaging.snapshot import Snapshot
from node.content.datasets import Batches
from node.errors import StageFailed, Unreachable, UsageError
from node.local.context import LocalRunsService
from node.local.crew import Crew
from node.local.held_stage import AveragedStage
from node.local.holder import ColumnHolder
from node.local.keeper import Keeper
from node.local.stage_server import HELD_MAX
from node.local.stages import open_part
from node.local.trainer import LocalTrainer
from node.placement.admission import build_stage_spec, needed_bytes
from node.protocols.manifest import Run
from partition.model.graph import Graph
from partition.plan.plan import Plan
from partition.run.asks import Declined, Done
from partition.run.ending import Ending
from partition.run.local.member_ending import MemberEnding


@dataclass(frozen=True)
class Material:
    """All that a run's stages need on this node: the model, its cut, the data, and the peers that may hand
    over parameters."""

    graph: Graph
    plan: Plan
    batches: Batches
    holders: Sequence[PeerId]
    payload_bytes_max: int


class FurtherStages:
    """The further stages of a member whose own stage is `own`. `run` drives them."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        ending: Ending,
        door: TicketGate,
        crew: Crew,
        material: Material,
        finish: MemberEnding,
        *,
        own: int,
    ) -> None:
        self._service = service
        self._run = run
        self._ending = ending
        self._door = door
        self._crew = crew
        self._material = material
        self._finish = finish
        self._own = own
        self._holders: dict[int, ColumnHolder] = {}
        self.making_room: Callable[[int], None] = lambda _stage: None
        """Called before this member joins the roster of a stage."""
        self._opening: set[int] = set()
        self._to_open, self._wanted = trio.open_memory_channel[tuple[int, Snapshot | None]](HELD_MAX)

    @property
    def stages(self) -> set[int]:
        """The further stages that are held or being opened."""
        return {*self._holders, *self._opening}

    async def copies(self) -> dict[int, Snapshot]:
        """Return the states of the further stages that have one."""
        held = {stage: holder.held for stage, holder in self._holders.items() if holder.held.has_state}
        return {stage: await each.copy() for stage, each in held.items()}

    async def stand_in(self, peer: PeerId, stage: int) -> Done | Declined:
        """Answer a head that asks for this stage: hold it if the peer is this member's head and there is
        room."""
        if self._crew.head not in (None, peer):
            return Declined("it works for another head")
        if reason := await self.refusal(stage):
            return Declined(reason)
        self.hold(stage)
        return Done()

    async def refusal(self, stage: int) -> str:
        """Return the reason why this node cannot hold this stage too; empty if it can."""
        stages = {self._own, *self.stages, stage}
        if len(stages) > HELD_MAX:
            return f"a node holds at most {HELD_MAX} stages of a run"
        service, material = self._service, self._material
        if stage in self.stages or stage == self._own:
            return ""
        sums = [
            partial(needed_bytes, self._run.manifest, material.graph, material.plan, each) for each in stages
        ]
        needed = await service.seams.executor.run(lambda: sum(work() for work in sums), apart=True)
        offered = service.machine.memory_bytes
        if needed > offered:
            return f"the stages need {needed / 1e9:.2f} GB of memory, but {offered / 1e9:.2f} GB are offered"
        return ""

    def hold(self, stage: int, carried: Snapshot | None = None) -> None:
        """Open this stage here. Its state is `carried` over from an earlier life of this member, or comes
        from copies or other members."""
        if stage not in self.stages and stage != self._own:
            self._opening.add(stage)
            self._crew.taken.add(stage)
            self.making_room(stage)
            self._to_open.send_nowait((stage, carried))

    def release(self, stage: int) -> None:
        """Stop holding this stage, if it is a further one."""
        if (holder := self._holders.get(stage)) is not None:
            holder.rules.is_released = True

    async def run(self) -> None:
        """Open and run the requested stages until cancelled; then close all."""
        try:
            async with trio.open_nursery() as nursery:
                async for stage, carried in self._wanted:
                    nursery.start_soon(self._hold, stage, carried)
        finally:
            with trio.CancelScope(shield=True):
                for stage in list(self._holders):
                    await self._close(stage)

    async def _hold(self, stage: int, carried: Snapshot | None) -> None:
        failures = (StageFailed, Unreachable, UsageError, OSError, RemoteProtocolError, ValueError)
        try:
            async with trio.open_nursery() as nursery:
                # On failure the head sees that the stage is missing, and looks for a different holder.
                with suppress(*failures):
                    holder = await self._open(stage, nursery)
                    self._opening.discard(stage)
                    holder.held.carried = carried
                    await holder.work()
                nursery.cancel_scope.cancel()  # a round in progress does not need this stage any more
        finally:
            self._opening.discard(stage)
            with trio.CancelScope(shield=True):
                await self._close(stage)

    async def _open(self, stage: int, nursery: trio.Nursery) -> ColumnHolder:
        """Open a stage. Raises StageFailed, UsageError, OSError, RemoteProtocolError."""
        service, run, material = self._service, self._run, self._material
        build = partial(build_stage_spec, run, material.graph, material.plan, stage, service.machine)
        specification, _, data = await service.seams.executor.run(build, apart=True)
        opened = await service.seams.executor.open_stage(data)
        try:
            await service.models.fill(opened, specification, material.holders)
            part = open_part(service.averaging, run, stage, self._door)
        except BaseException:
            with trio.CancelScope(shield=True):
                await opened.aclose()
            raise
        me = service.signer.peer
        trainer = LocalTrainer(run, specification, opened, material.batches, service.seams.executor, me)
        keeper = Keeper(service, run, self._door.admission, self._own, copy_of=stage)
        held = AveragedStage(run, self._ending, part, keeper, trainer, me)
        held.rounds.sends_less = service.sends_less
        holder = ColumnHolder(
            held,
            stage,
            self._door,
            self._ending,
            self._finish,
            payload_bytes_max=material.payload_bytes_max,
            is_further=True,
        )
        self._holders[stage] = holder
        self._crew.further[stage] = holder
        await held.open(nursery)
        if self._crew.column is not None:
            self._crew.column.hold_here(stage, holder.server)
        return holder

    async def _close(self, stage: int) -> None:
        holder = self._holders.pop(stage, None)
        self._crew.further.pop(stage, None)
        self._crew.taken.discard(stage)
        if self._crew.column is not None:
            self._crew.column.drop_here(stage)
        if holder is not None:
            holder.server.close()
            await holder.held.close()
