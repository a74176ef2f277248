"""Converts a node's reports about a run to events of worlds of cores (`sim.events`).

A node's events are meant for display: they have short ids and no hashes of parents. Missing facts are read
from the node's public interface at that moment. The contents of a step's sums are observed at the stages
(`sim.worlds.stages`), independently of peers' reports.
"""

from dataclasses import dataclass, field
from typing import Any

from crypto.identity import PeerId
from node import events
from node.protocols.manifest import Run
from partition.plan.plan import Plan, plan_hash
from partition.stage import StageSpecification
from partition.steps.messages import Reduced, StepCommit
from sim.events import PlanAdopted, RunEnded, SamplesCounted, StepCommitted
from sim.scenario import TrainingScenario
from sim.worlds.node_life import NodeLife


@dataclass
class Trained:
    """The known facts of a run. `weights` is the hash of its result, initially empty."""

    training: TrainingScenario
    run: Run
    accuracy: float | None = None
    outcome: str = ""
    reason: str = ""
    weights: str = ""
    steps: int = 0

    @property
    def standing(self) -> str:
        """Return a text about the run's state."""
        reached = "" if self.accuracy is None else f", accuracy {self.accuracy:.3f}"
        ended = f"{self.outcome} {self.reason}".strip() or "not ended"
        return f"{ended} after {self.steps} steps{reached}"


@dataclass
class RunWords:
    """All runs of a world, and the events reported about them."""

    runs: dict[str, Trained] = field(default_factory=dict)
    _plans: dict[bytes, Plan] = field(default_factory=dict)
    _commits: dict[tuple[bytes, int], StepCommit] = field(default_factory=dict)
    # For each peer and run: the latest summed step, and its plan.
    _summed: dict[tuple[PeerId, bytes], tuple[int, Plan]] = field(default_factory=dict)

    def made(self, training: TrainingScenario, run: Run) -> None:
        """Record a run that a peer requests."""
        self.runs[run.text] = Trained(training, run)

    def sent(self, life: NodeLife, message: object) -> None:
        """Record that a node sends a message of a run."""
        match message:
            case StepCommit():
                self._commits[message.plan, message.step] = message
            case Reduced() if message.plan in self._plans:
                plan = self._plans[message.plan]
                self._summed[life.peer, plan.run] = message.step, plan

    def of_stage(
        self, life: NodeLife, specification: StageSpecification, step: int, microbatches: tuple[int, ...]
    ) -> SamplesCounted | None:
        """Return the event that a stage of this peer applied a step. A new plan may already be in force."""
        for trained in self.runs.values():
            if trained.run.random_key != specification.run:
                continue
            summed, plan = self._summed.get((life.peer, trained.run.id), (None, None))
            if summed != step:
                plan = _plan(life, trained.run)  # never summed, which a checker reports
            stage = None if plan is None else plan.stage_of(life.peer)
            if plan is not None and stage is not None:
                return SamplesCounted(trained.run.id, plan_hash(plan), step, stage, microbatches)
        return None

    def of_node(self, life: NodeLife, event: events.Event) -> Any | None:
        """Return the event for a node's own event; None if it belongs to no run, or was already reported."""
        match event:
            case events.RunPlanned():
                return self._planned(life, self.runs[event.run].run)
            case events.StepCommitted():
                return self._committed(life, self.runs[event.run], event)
            case events.RunEvaluated():
                self.runs[event.run].accuracy = event.accuracy
                return event
            case events.RunEnded():
                return self._ended(self.runs[event.run], event)
            case events.RunResumed() | events.CheckpointKept():
                return event
        return None

    def _planned(self, life: NodeLife, run: Run) -> PlanAdopted | None:
        plan = _plan(life, run)
        if plan is None:
            return None
        name = plan_hash(plan)
        self._plans[name] = plan
        return PlanAdopted(run.id, plan.height, name, plan.parent)

    def _committed(
        self, life: NodeLife, trained: Trained, event: events.StepCommitted
    ) -> StepCommitted | None:
        plan = _plan(life, trained.run)
        # A step of the previous plan may be reported after the new plan is in force.
        while plan is not None and plan.height > event.height:
            plan = self._plans.get(plan.parent)
        if plan is None or plan.committer != life.peer:
            return None  # the node only learnt of the step
        if event.diverged:
            return None  # it counts no samples
        commit = self._commits.pop((plan_hash(plan), event.step))
        counted = tuple(
            tuple((PeerId(row.replica), row.microbatches) for row in commit.replicas if row.stage == stage)
            for stage in range(len(plan.stages))
        )
        trained.steps = max(trained.steps, event.step + 1)
        return StepCommitted(trained.run.id, plan_hash(plan), plan.height, event.step, counted, event.loss)

    def _ended(self, trained: Trained, event: events.RunEnded) -> RunEnded:
        # A member that was away may give up a run that others have finished.
        if trained.outcome != "done":
            trained.outcome, trained.reason = event.outcome, event.detail
            trained.weights = event.weights
        return RunEnded(trained.run.id, event.outcome, event.detail)


def _plan(life: NodeLife, run: Run) -> Plan | None:
    """Return the plan in force at this peer."""
    member = life.node.runs.members.get(run.id)
    return None if member is None else member.plan
