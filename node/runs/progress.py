"""Tracks a run's committed steps at this member, and reports them to the other members.

`partition.run.progress` decides how many steps are committed, and shows each step only once. Not here:
committing (`node.pipeline.committer`), and decisions that depend on the progress.
"""

from dataclasses import dataclass

from node.events import RunChanged, RunEvaluated, RunResumed, StepCommitted
from node.placement.deadline import DeadlineWatch
from node.protocols.manifest import Run
from node.protocols.notices import Notice, RunEvent, event_of, news_of
from node.runs.best import BestState
from node.runs.context import RunService
from node.runs.steering import Steering
from node.settings_events import RunGoalSet
from partition.plan.plan import Plan, plan_hash
from partition.run.member import Member
from partition.run.stall import StallClock


@dataclass
class ShownSteps:
    """The newest step of each kind that was shown."""

    committed: StepCommitted | None = None
    evaluated: RunEvaluated | None = None


class ProgressReports:
    """The progress reports of one member; the rules are in its core."""

    def __init__(
        self,
        service: RunService,
        run: Run,
        core: Member,
        stall: StallClock,
        best: BestState,
        steering: Steering,
    ) -> None:
        self.shown = ShownSteps()
        self._steering = steering
        self._deadline = DeadlineWatch()
        self._goal: tuple[float, int] | None = None
        self._service = service
        self._run = run
        self._core = core
        self._stall = stall
        self._best = best

    def show(self, event: RunEvent) -> None:
        """Publish an event on this node, unless its step was already shown."""
        if isinstance(event, StepCommitted):
            if not self._core.show_step(event.step):
                return
            self.shown.committed = event
            self._watch_deadline(event)
            self._tell_goal(event)
        elif isinstance(event, RunEvaluated):
            self.shown.evaluated = event
            self._best.heard(event)
        if isinstance(event, StepCommitted | RunResumed):
            self._stall.moved(self._service.seams.clock.monotonic())
        self._service.publish(event)

    def _watch_deadline(self, event: StepCommitted) -> None:
        """On the requester's node, warn when the run is going to miss its deadline."""
        left = self._steering.seconds_left
        if left is None or self._run.requester != self._service.signer.peer or self._core.state != "running":
            return
        now = self._service.seams.clock.monotonic()
        said = self._deadline.moved(now, event.step, self._steering.steps, left)
        if said is not None:
            reason = said or "its deadline can be met again"
            at = self._service.seams.clock.wall()
            self._service.publish(RunChanged(at=at, run=self._run.text, state="running", reason=reason))

    def _tell_goal(self, event: StepCommitted) -> None:
        """On the requester's node, publish the run's goal whenever it changes."""
        goal = self._steering.goal
        if goal == self._goal or self._run.requester != self._service.signer.peer:
            return
        self._goal = goal
        rate, seconds = goal or (0.0, 0)
        self._service.publish(
            RunGoalSet(at=event.at, run=self._run.text, samples_per_second=rate, seconds=seconds)
        )

    def tell(self, plan: Plan, event: RunEvent) -> None:
        """As the committer, publish an event on this node and send it to all other members."""
        self.show(event)
        notice = Notice(plan_hash(plan), news_of(event))
        for peer in self._core.others():
            self._service.send(peer, notice)

    def hear(self, message: Notice) -> None:
        """Handle a committer's report."""
        # Use this node's clock: the committer's may be wrong, and our screens sort by this time.
        self.show(event_of(message.news, at=self._service.seams.clock.wall(), run=self._run.text))
