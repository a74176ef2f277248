"""The head of a column in a run in local mode, on this node. It drives `partition.run.local.head_course`."""

from collections.abc import Callable

from node.averaging.door import TicketGate
from node.local.column import ColumnStage
from node.local.context import LocalRunsService
from node.local.courses import follow
from node.local.crew import Crew
from node.local.evaluations import Evaluations
from node.local.further import FurtherStages
from node.local.held_stage import AveragedStage, Deed
from node.local.merging import Regrouping
from node.local.telling import Teller
from node.local.trial import Trial
from node.protocols.manifest import Run
from partition.model.graph import Graph
from partition.run.local.column import WorkHere
from partition.run.local.courses import AttachTo
from partition.run.local.head_course import BeginSteps, DropStep, HeadCourse, MakeStep, TryFirstValues
from partition.run.local.member_ending import EvaluateModel, MakeResult, MemberEnding, TryResult
from partition.run.local.regrouping import DropFurther
from partition.run.local.start_barrier import StartBarrier, TellStart

HeadDeed = TryFirstValues | BeginSteps | MakeStep | TellStart
ColumnDeed = DropStep | WorkHere | AttachTo | DropFurther
EndingDeed = EvaluateModel | MakeResult | TryResult


class ColumnHead:
    """One head of a column. `train` drives it until it fails."""

    further: FurtherStages | None = None
    """The stages that the head holds in addition to the first, in a run of several stages."""
    regrouping: Regrouping | None = None

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        crew: Crew,
        door: TicketGate,
        held: AveragedStage,
        graph: Graph,
        *,
        finish: MemberEnding,
        evaluations: Evaluations,
        teller: Teller,
        barrier: StartBarrier,
        begun: Callable[[], object],
    ) -> None:
        """`begun` is called before the initial parameters are evaluated, which may take minutes."""
        self._service = service
        self._now = service.seams.clock.monotonic
        self._run = run
        self._crew = crew
        self._door = door
        self._held = held
        self._graph = graph
        self._finish = finish
        self._evaluations = evaluations
        self._teller = teller
        self._begun = begun
        self._stages = max(1, run.manifest.stages)
        self.course = HeadCourse(
            held, crew, finish, barrier, stages=self._stages, live=lambda: service.live()
        )  # fmt: skip
        held.taken_over = self._taken_over

    async def train(self) -> None:
        """Train without end. Raises StageFailed."""
        await follow(self.course.train(), self._do)

    @property
    def _column(self) -> ColumnStage:
        assert self._crew.column is not None, "a head of several stages has a column"
        return self._crew.column

    async def _do(self, deed: HeadDeed | ColumnDeed | EndingDeed | Deed) -> object:
        match deed:
            case TryFirstValues():
                await self._try_first_values()
            case BeginSteps():
                if self._stages > 1:
                    self._service.readiness.stand_by()
            case MakeStep():
                return await self._make_step()
            case TellStart(news=news):
                self._teller.running(news)
            case DropStep() | WorkHere() | AttachTo() | DropFurther():
                return await self._do_in_column(deed)
            case EvaluateModel() | MakeResult() | TryResult():
                return await self._evaluations.do(deed, self._graph, self._held)
            case _:
                return await self._held.do(deed)
        return None

    async def _do_in_column(self, deed: ColumnDeed) -> object:
        column, held = self._column, self._held
        match deed:
            case DropStep():
                if deed.is_news:
                    self._teller.running(f"this column waits for a stage: {deed.reason}")
                await column.let_go()
                await held.trainer.drop_step()
            case WorkHere(stage=stage):
                await column.work_here(stage, held.step)
            case AttachTo(stage=stage, peer=peer):
                chain = self._door.admission.chain
                return not await column.attach(stage, peer, held.step, chain, self._door.check)
            case DropFurther(stage=stage):
                if self.further is not None:
                    self.further.release(stage)
        return None

    async def _try_first_values(self) -> None:
        self._begun()
        trainer = self._held.trainer
        first = self._evaluations.first_loss = await trainer.held_out_loss()
        if self._stages == 1:  # a single stage of several has no loss by which to judge a state
            assert self._run.manifest.local is not None, "the run is in local mode"
            is_apart = self._run.manifest.local.is_federated
            self._held.trial = await Trial.open(trainer, first, is_apart=is_apart)

    async def _make_step(self) -> bool:
        """Make and announce a step; return whether it was not finite."""
        begun, trainer = self._now(), self._held.trainer
        stepped = await trainer.train_step()
        if self.regrouping is not None:
            self.regrouping.stepped(self._now() - begun)
        replicas = 1 + len(self._crew.training)
        self._teller.stepped(trainer.step, stepped, self._now() - begun, replicas)
        return bool(stepped.diverged)

    async def _taken_over(self) -> None:
        """Handle that parameters of other members were taken over."""
        self._finish.diverged = 0
        if self._crew.column is not None:  # holders learn the new step when they are attached again
            await self._crew.column.let_go()
