"""The evaluations of a member that trains in local mode, and its part in making the run's result.

Not here: when a member evaluates, proposes a result, and tests one (`partition.run.local.member_ending`).
"""

from math import inf, isfinite

from node.checkpoints.weights import weights_name
from node.errors import StageDiverged
from node.local.context import LocalRunsService
from node.local.crew import Crew
from node.local.held_stage import AveragedStage
from node.local.results import LocalResults
from node.local.telling import Teller
from node.local.verdict import HeldOutLosses, fault_of
from node.protocols.manifest import Run
from partition.model.graph import Graph
from partition.run.conclusions import Conclusion, ModelEvaluated
from partition.run.local.member_ending import (
    EvaluateModel,
    MakeResult,
    MemberEnding,
    ModelLoss,
    TryResult,
)
from partition.run.local_settings import LocalSettings


class Evaluations:
    """The evaluations of one member."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        finish: MemberEnding,
        crew: Crew,
        results: LocalResults,
        teller: Teller,
    ) -> None:
        assert run.manifest.local is not None, "the run is in local mode"
        self._settings: LocalSettings = run.manifest.local
        self.first_loss = inf
        """The held-out loss of the initial parameters."""
        self._service = service
        self._run = run
        self._ending = crew.ending
        self._finish = finish
        self._crew = crew
        self._results = results
        self._teller = teller
        self._stages = max(1, run.manifest.stages)

    async def do(
        self, deed: EvaluateModel | MakeResult | TryResult, graph: Graph, held: AveragedStage
    ) -> object:
        """Carry out a deed about the end of the run. Raises StageFailed, ColumnBroken."""
        match deed:
            case EvaluateModel():
                return await self._evaluate(held)
            case MakeResult():
                return await self._make_result(graph, held)
            case TryResult(conclusion=conclusion):
                return await self._try(conclusion, held)

    async def _evaluate(self, held: AveragedStage) -> ModelLoss:
        try:
            loss, samples, metrics = await held.trainer.evaluate()
        except StageDiverged:
            return ModelLoss(inf, 0)
        if isfinite(loss):
            self._teller.evaluated(samples, loss, metrics)
        return ModelLoss(loss, samples, metrics)

    def heard(self, step: int, heard: ModelEvaluated) -> None:
        """Record another member's evaluation while this member is at `step`."""
        self._finish.schedule.evaluated(step)
        if len(heard.metrics) == len(self._run.manifest.metrics):
            self._teller.evaluated(heard.samples, heard.loss, heard.metrics)

    async def _make_result(self, graph: Graph, held: AveragedStage) -> str | None:
        """Store the model as a result; return its hash, or None if a different conclusion came meanwhile."""
        column = self._crew.column
        exported = [await held.trainer.export(), *(await column.exports() if column else [])]
        async with self._results.lock:
            return await self._results.keep(graph, exported)

    async def _try(self, conclusion: Conclusion, held: AveragedStage) -> str | None:
        """Return what is wrong with a fetched result, or "" if nothing is. Return None if a different
        conclusion came meanwhile."""
        is_at_end, trainer = held.is_at_end, held.trainer
        async with self._results.lock:
            if conclusion != self._ending.best:
                return None
            name, storage = weights_name(self._run.text), self._service.seams.storage
            own = result = await trainer.held_out_loss()
            if self._stages == 1:  # in a column no member can evaluate the whole model alone
                result = await trainer.evaluate_result(name, storage)
        losses = HeldOutLosses(self.first_loss, own, result)
        best, improvement = self._ending.series.progress.best, self._settings.improvement
        is_own = self._settings.is_federated
        fault = fault_of(losses, best, improvement, is_at_end=is_at_end, is_own=is_own)
        if fault:
            self._teller.running(f"a result that a member proposed is rejected: {fault}")
        return fault
