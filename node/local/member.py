"""This node's membership in one run in local mode: the node trains, averages, hands its state on, and ends.

There is no plan. Members announce themselves (`gossip.roster`). A death makes the groups smaller and spreads
a shard over the other members, and a single member can continue alone. Not here: how the members agree on the
end (`partition.run.ending`). A requester that holds no stage follows its run without training.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.averaging.participation import Participation
from node.averaging.snapshot import Snapshot
from node.checkpoints.weights import export_bytes_max
from node.errors import StageFailed, Unreachable, UsageError
from node.local.context import LocalRunsService, training_data
from node.local.copies import Copies
from node.local.crew import Crew
from node.local.evaluations import Evaluations
from node.local.further import FurtherStages, Material
from node.local.head import ColumnHead
from node.local.held_stage import AveragedStage
from node.local.holder import ColumnHolder
from node.local.keeper import Keeper
from node.local.merging import Regrouping
from node.local.recruiter import Recruiter
from node.local.results import LocalResults
from node.local.stage_copies import StageCopies, state_sizes
from node.local.stages import local_plan, open_part, stage_count
from node.local.start import meet
from node.local.succession import Succession
from node.local.telling import Teller
from node.local.trainer import LocalTrainer, state_bytes_max
from node.placement.admission import build_stage_spec
from node.protocols.manifest import Run
from node.runs.manifest_builder import make_batches
from partition.model.graph import Graph
from partition.plan.plan import Plan
from partition.run.admission import Admission
from partition.run.asks import Declined, Done
from partition.run.conclusions import ModelEvaluated, Sends
from partition.run.ending import Ending
from partition.run.local.keeping import FIRST_STEP
from partition.run.local.member_ending import MemberEnding
from partition.run.local.regrouping import MERGE_SECONDS, RESUMED_SECONDS
from partition.run.local.start_barrier import StartBarrier
from partition.stage import StageSpecification
from partition.stage_layout import payload_bytes_max

LOOK_SECONDS = 0.5
"""Seconds between updates of the shards and of the ending rules after changes of the participants."""


class LocalMember:
    """The membership of this node in one run. `live` drives it until the run is over here, or this node has
    left it."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        ending: Ending,
        door: TicketGate,
        stage: int = 0,
        *,
        is_training: bool,
        holders: Sequence[PeerId],
        tell: Callable[[Ending, Callable[[float], Sends]], None],
        inviter: PeerId | None = None,
        is_resumed: bool = False,
        carried: Mapping[int, Snapshot] | None = None,
        teller: Teller | None = None,
    ) -> None:
        """`tell` lets a call act on the core of the ending. `holders` may hand over the run's files.
        `inviter` has asked this node to take part. `is_resumed` means that it took part before a restart. If
        this node replaces the head, `carried` has the states of the stages that it holds, and `teller` is the
        one of its previous membership."""
        assert run.manifest.local is not None, "the run is in local mode"
        self.run = run
        self.ending = ending
        self._door = door
        self.crew = Crew(service.signer.peer, run, ending, door.admission, is_training=is_training)
        self.teller = teller or Teller(run, service.seams.clock, service.publish)
        self.stopped_by: Fact | None = None
        self.begun = trio.Event()
        """Set once some member trains, or this one cannot continue."""
        self.reason = ""
        """Why this member left; empty if it did not."""
        self._service = service
        self._now = service.seams.clock.monotonic
        self._holders = list(dict.fromkeys([*holders, run.requester]))
        self._tell = tell
        self._life = trio.CancelScope()
        self._part: Participation | None = None
        self._trainer: LocalTrainer | None = None
        self._held: AveragedStage | None = None
        self._further: FurtherStages | None = None
        self._is_resumed = is_resumed
        self._carried = carried
        self.successor: dict[int, Snapshot] | None = None
        """The states with which this node continues as the head, if it is to replace the head."""
        self._stage = stage
        self._stages = stage_count(run)
        self._finish = MemberEnding(
            run.id, run.manifest.local, self.crew,
            requester=run.requester, stage=stage, stages=self._stages,
            tell=partial(tell, ending), now=self._now, live=lambda: service.live(),
        )  # fmt: skip
        self.heads = self._finish.heads
        self.results = LocalResults(service, run, ending, self._finish)
        self._evaluations = Evaluations(service, run, self._finish, self.crew, self.results, self.teller)
        self.keeper = Keeper(service, run, door.admission, stage, first=None if is_training else FIRST_STEP)
        self._graph: Graph | None = None
        self._head: ColumnHead | None = None
        self._holder: ColumnHolder | None = None
        self._recruiter = Recruiter(service, run, door, self.crew, self._stages)
        self._barrier = StartBarrier(run.id, inviter)

    # Properties

    @property
    def has_state(self) -> bool:
        """Whether this member has parameters to continue from."""
        return self._finish.has_state

    @property
    def is_over(self) -> bool:
        """Whether the run is over here."""
        return self._finish.is_over

    @property
    def step(self) -> int:
        """The number of local steps made here."""
        return 0 if self._trainer is None else self._trainer.step

    # Running

    async def live(self) -> bool:
        """Take part until the run is over here, or this node cannot continue (`reason`). Return whether other
        members take part."""
        had_others = False
        with trio.CancelScope() as self._life:
            try:
                await self._take_part()
            except StageFailed as error:
                self.reason = str(error)
            except Unreachable as error:
                self.reason = error.detail
            except (UsageError, OSError) as error:
                self.reason = str(error)
            had_others = bool(self.crew.training)
        with trio.CancelScope(shield=True):
            await self._close()
        self.begun.set()
        return had_others

    def cancel(self, reason: str = "") -> None:
        """Stop taking part. Either the run is over here or, if a `reason` is given, it continues without this
        node."""
        self._finish.is_over, self.reason = not reason, reason or self.reason
        self._life.cancel()

    async def _close(self) -> None:
        self._finish.has_state = False
        if self._part is not None:
            self._part.close()
            self._part = None
        self.crew.close()
        self._held = self._head = self._holder = self._further = None
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            await trainer.stage.aclose()

    async def _take_part(self) -> None:
        service, manifest = self._service, self.run.manifest
        if self.crew.is_training:
            service.readiness.expect()  # its process loads while the graph and the data are transferred
        graph = self._graph = await service.models.get(manifest.graph_hash, self._holders)
        try:
            plan = await service.seams.executor.run(
                partial(local_plan, self.run, graph, self.crew.me), apart=True
            )
            build = partial(build_stage_spec, self.run, graph, plan, self._stage, service.machine)
            specification, _, data = await service.seams.executor.run(build, apart=True)
        except (RemoteProtocolError, ValueError) as error:
            raise StageFailed(f"this model cannot be cut into stages: {error}") from None
        part = self._part = self.crew.part = open_part(service.averaging, self.run, self._stage, self._door)
        if self.crew.is_training:
            # announces that this member is opening its stage
            part.tell(step=0, samples=0, rounds=0, lineage=self.run.id, has_state=False)
            await self._open(graph, plan, specification, data)
        self.teller.running()
        failure: Exception | None = None
        bytes_max = state_bytes_max(specification)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            if self._held is None:
                copies = Copies(self.run, self.keeper, self.crew, part, bytes_max=bytes_max)
                nursery.start_soon(copies.run)
            if not self._stage:
                nursery.start_soon(self._recruiter.run)
            if self._further is not None:
                await self._stand_in(self._further, graph, plan, nursery)
            try:
                if self._held is not None:
                    await self._train(self._held, nursery)
                await trio.sleep_forever()
            except (StageFailed, Unreachable, UsageError, OSError) as error:
                # raised outside of an exception group, because the caller distinguishes these errors
                failure = error
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _train(self, held: AveragedStage, nursery: trio.Nursery) -> None:
        if self._carried is None:  # otherwise this member already knows that there is no head
            crew, live = self.crew, self._service.live
            await meet(self._barrier, crew, self._stage, held.part, self._door, lambda: live(), self._now)
        await held.open(nursery)
        if self._holder is not None:
            await self._holder.work()
        if self._head is not None:
            await self._head.train()

    async def _open(self, graph: Graph, plan: Plan, specification: StageSpecification, data: bytes) -> None:
        service, manifest = self._service, self.run.manifest
        dataset = await training_data(service, self.run, graph, self._holders)
        opened = await service.seams.executor.open_stage(data)
        try:
            await service.models.fill(opened, specification, self._holders)
            batches = make_batches(dataset, manifest, graph)
        except BaseException:
            await opened.aclose()
            raise
        executor, stage = service.seams.executor, opened
        bytes_max = max(payload_bytes_max(specification), export_bytes_max(graph))
        if not self._stage and self._stages > 1:
            stage = self.crew.open_column(service, plan, opened, bytes_max)
        trainer = self._trainer = service.seams.part(LocalTrainer)(
            self.run, specification, stage, batches, executor, self.crew.me, in_flight=self._stages
        )
        assert self._part is not None
        held = self._held = AveragedStage(
            self.run, self.ending, self._part, self.keeper, trainer, self.crew.me
        )
        held.rounds.sends_less = self._service.sends_less
        held.carried = (self._carried or {}).get(0)
        if self._stage:
            holder = self._holder = ColumnHolder(
                held, self._stage, self._door, self.ending, self._finish, payload_bytes_max=bytes_max
            )
            holder.begun = self._has_begun
            self.crew.open_server(holder.server)
        else:
            self._head = ColumnHead(
                service, self.run, self.crew, self._door, held, graph,
                finish=self._finish, evaluations=self._evaluations, teller=self.teller,
                barrier=self._barrier, begun=self.begun.set,
            )  # fmt: skip
        if self._stages > 1:
            material = Material(graph, plan, batches, self._holders, bytes_max)
            self._further = FurtherStages(
                service, self.run, self.ending, self._door, self.crew, material, self._finish, own=self._stage
            )

    async def _stand_in(
        self, further: FurtherStages, graph: Graph, plan: Plan, nursery: trio.Nursery
    ) -> None:
        """Be ready to replace machines that die: a head replaces the holders of its column, and a holder
        replaces the head."""
        service, head = self._service, self._head
        sizes = await service.seams.executor.run(
            partial(state_sizes, self.run, graph, plan, service.machine), apart=True
        )
        nursery.start_soon(further.run)
        if head is None:
            own, step = self._stage, lambda: self.step
            succession = Succession(
                service, self.run, self._door, self.crew, own=own, bytes_max=sizes[0], step=step
            )
            nursery.start_soon(self._succeed, succession)
            return
        kept = StageCopies(service, self.run, self.crew, self._door, step=lambda: self.step, bytes_max=sizes)
        further.making_room = kept.take_back
        nursery.start_soon(kept.run)
        patience = None if self._carried is None else MERGE_SECONDS
        patience = RESUMED_SECONDS if self._is_resumed else patience
        regrouping = Regrouping(
            service, self.run, self.crew, further, self._recruiter, graph, plan,
            step=lambda: self.step, tell=self.teller.running, patience_seconds=patience,
        )  # fmt: skip
        head.further, head.regrouping, head.course.regrouping = further, regrouping, regrouping.rules
        nursery.start_soon(regrouping.run)
        for stage, state in (self._carried or {}).items():
            further.hold(stage, state)  # except for the first stage, which is this member's own

    async def stand_in(self, peer: PeerId, stage: int) -> Done | Declined:
        """Answer a member that asks this one to hold a further stage. Only this member's head may ask, if its
        column lacks the stage."""
        if self._further is None or not (self._stage and stage and self.has_state):
            return Declined("it is a member already")
        return await self._further.stand_in(peer, stage)

    async def as_head(self, states: Mapping[int, Snapshot]) -> "LocalMember":
        """Return this node's next membership in the run, as its head, with the states that it holds."""
        member = LocalMember(
            self._service,
            self.run,
            self.ending,
            self._door,
            is_training=True,
            holders=self._holders,
            tell=self._tell,
            carried=states,
            teller=self.teller,
        )
        await member.keeper.remember(member.keeper.part(is_training=True))
        await member.keeper.save(states[0])  # replaces the state of the previous stage
        return member

    async def _succeed(self, succession: Succession) -> None:
        """End this membership as a holder once the head is gone for good. `node.local.service` then begins
        one as the head, with the states that are here."""
        await succession.wait()
        if self._held is None or not self.has_state or self.ending.best is not None:
            return
        if (first := await succession.load()) is None:
            return  # the copy is damaged
        others = {} if self._further is None else await self._further.copies()
        self.successor = {0: first, self._stage: await self._held.copy(), **others}
        self._life.cancel()

    def _has_begun(self) -> None:
        self.begun.set()
        self._service.readiness.stand_by()

    # Ending

    def evaluation_heard(self, heard: ModelEvaluated) -> None:
        """Record another member's evaluation."""
        self._evaluations.heard(self.step, heard)

    # Other members

    @property
    def admission(self) -> Admission:
        """The known members."""
        return self._door.admission

    def admitted(self, peer: PeerId) -> None:
        """Admit a peer that has proved its membership."""
        for part in self.crew.parts:
            part.admitted(peer)

    async def _look(self) -> None:
        """Follow changes of the participants."""
        while True:
            training = self.crew.training
            if training:
                self.begun.set()
            self._finish.look()
            if self._trainer is not None:
                self._trainer.shard.set_members([self.crew.me, *training])
            for part in self.crew.parts:
                self._door.show(part.roster.claims)
            await trio.sleep(LOOK_SECONDS)
