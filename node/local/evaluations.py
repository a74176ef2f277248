"""The evaluations of a member that trains in local mode, and its part in the run's result.

Not here: whose turn it is (`partition.run.local.evaluating`), and how members agree (`partition.run.ending`).
"""

from collections.abc import Awaitable, Callable, Sequence
from math import inf, isfinite

from crypto.identity import PeerId
from node.checkpoints.weights import weights_name
from node.errors import StageDiverged
from node.local.context import LocalRunsService
from node.local.crew import Crew
from node.local.held_stage import AveragedStage
from node.local.results import LocalResults
from node.local.telling import Teller
from node.local.trainer import LocalTrainer
from node.local.verdict import HeldOutLosses, fault_of
from node.protocols.manifest import Run
from partition.model.graph import Graph
from partition.run.conclusions import Conclusion, ModelEvaluated, Sends
from partition.run.ending import Ending
from partition.run.local.evaluating import EvaluationSchedule
from partition.run.local_settings import LocalSettings


class Evaluations:
    """The evaluations of one member."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        ending: Ending,
        crew: Crew,
        results: LocalResults,
        teller: Teller,
        *,
        tell: Callable[[Ending, Callable[[float], Sends]], None],
        recover: Callable[[str], Awaitable[None]],
    ) -> None:
        """`tell` lets a call act on the core of the end. `recover` is called where a loss is no number."""
        assert run.manifest.local is not None, "the run is in local mode"
        self._settings: LocalSettings = run.manifest.local
        self.schedule = EvaluationSchedule(self._settings, ending)
        self.first_loss = inf
        """The held-out loss of the values that all began with."""
        self._service = service
        self._run = run
        self._ending = ending
        self._crew = crew
        self._results = results
        self._teller = teller
        self._tell = tell
        self._recover = recover
        self._stages = max(1, run.manifest.stages)

    @property
    def _training(self) -> Sequence[PeerId]:
        return self._crew.training

    async def look(self, graph: Graph, held: AveragedStage) -> None:
        """Evaluate if it is this member's turn, and propose a result where the run is over."""
        trainer, rounds = held.trainer, held.rounds
        now, is_at_end = self._service.seams.clock.monotonic(), held.is_at_end
        is_mine = self.schedule.look(
            now,
            trainer.step,
            rounds.schedule,
            self._training,
            axes=rounds.axes,
            is_at_end=is_at_end,
            is_idle=trainer.is_waiting,
        )
        if not is_mine or not await self._evaluate(trainer):
            return
        reason = self.schedule.concludes(
            trainer.step, rounds.schedule, self._training, axes=rounds.axes, is_at_end=is_at_end
        )
        if reason is not None:
            await self._conclude(graph, trainer, reason)

    async def _evaluate(self, trainer: LocalTrainer) -> bool:
        """Evaluate, and tell all; return whether the loss is a number."""
        try:
            loss, samples, metrics = await trainer.evaluate()
        except StageDiverged:
            loss, samples, metrics = inf, 0, ()
        if not isfinite(loss):
            await self._recover("the held-out loss is not finite")
            return False
        step, ending = trainer.step, self._ending
        self.schedule.evaluated(step)
        self._tell(ending, lambda _: ending.evaluate(step, samples, loss, metrics))
        self._teller.evaluated(samples, loss, metrics)
        return True

    def heard(self, step: int, heard: ModelEvaluated) -> None:
        """Note another member's evaluation, when this one is at `step`."""
        self.schedule.evaluated(step)
        if len(heard.metrics) == len(self._run.manifest.metrics):
            self._teller.evaluated(heard.samples, heard.loss, heard.metrics)

    async def _conclude(self, graph: Graph, trainer: LocalTrainer, reason: str) -> None:
        """Keep the model and propose it as the result."""
        column = self._crew.column
        exported = [await trainer.export(), *(await column.exports() if column else [])]
        async with self._results.lock:
            digest = await self._results.keep(graph, exported)
            if digest is not None:
                self.propose("done", reason, trainer.step, digest)

    def propose(self, outcome: str, reason: str, step: int, weights: str = "") -> None:
        """Propose to end the run so."""
        me, run, ending = self._service.signer.peer, self._run.id, self._ending
        is_done = outcome == "done"
        conclusion = Conclusion(run, "done" if is_done else "failed", reason, step, weights, me)
        self.schedule.is_waiting = True
        self._tell(ending, lambda now: ending.propose(now, conclusion))

    async def judge(self, held: AveragedStage) -> None:
        """Hold the result that another proposed, once the run may be over and it is as good as it should be;
        pass it over where it is not. Until then training goes on."""
        ending, conclusion, trainer = self._ending, self._ending.best, held.trainer
        if conclusion is None or ending.holds or not ending.is_here:
            return
        if trainer.is_waiting:  # without its stages this member can neither go on nor try a result
            self._tell(ending, lambda now: ending.hold(now, conclusion))
            return
        is_at_end = held.is_at_end
        if not self.schedule.may_judge(trainer.step, is_at_end=is_at_end):
            return
        async with self._results.lock:
            if conclusion != ending.best:
                return
            name, storage = weights_name(self._run.text), self._service.seams.storage
            own = result = await trainer.held_out_loss()
            if self._stages == 1:  # else no member has all of the model to try it with
                result = await trainer.evaluate_result(name, storage)
        losses = HeldOutLosses(self.first_loss, own, result)
        best, improvement = ending.series.progress.best, self._settings.improvement
        is_own = self._settings.is_federated
        fault = fault_of(losses, best, improvement, is_at_end=is_at_end, is_own=is_own)
        self.schedule.is_waiting = not fault
        if fault:
            self._teller.running(f"a result that a member proposed is passed over: {fault}")
            self._tell(ending, lambda now: ending.give_up(now, conclusion))
        else:
            self._tell(ending, lambda now: ending.hold(now, conclusion))
