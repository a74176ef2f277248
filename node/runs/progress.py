"""What this member knows to be committed in a run, and how others hear of it.

How far the run is, and which step is shown once, is for `partition.run.progress`. Not here: committing
(`node.pipeline.committer`), and what follows from how far a run is.
"""

from dataclasses import dataclass

from node.events import RunChanged, RunEvaluated, RunResumed, StepCommitted
from node.placement.deadline import DeadlineWatch
from node.protocols.manifest import Run
from node.protocols.notices import Notice, RunEvent, event_of, news_of
from node.runs.best import BestState
from node.runs.context import Service
from node.runs.steering import Steering
from partition.plan.plan import Plan, plan_hash
from partition.run.member import Member
from partition.run.stall import StallClock


@dataclass
class Shown:
    """The newest that was shown of each kind."""

    committed: StepCommitted | None = None
    evaluated: RunEvaluated | None = None


class ProgressReports:
    """One member's, beside its core."""

    def __init__(
        self, service: Service, run: Run, core: Member, stall: StallClock, best: BestState, steering: Steering
    ) -> None:
        self.shown = Shown()
        self._steering = steering
        self._deadline = DeadlineWatch()
        self._service = service
        self._run = run
        self._core = core
        self._stall = stall
        self._best = best

    def show(self, event: RunEvent) -> None:
        """Publish it here; a step that was shown before is not shown again."""
        if isinstance(event, StepCommitted):
            if not self._core.show_step(event.step):
                return
            self.shown.committed = event
            self._watch_deadline(event)
        elif isinstance(event, RunEvaluated):
            self.shown.evaluated = event
            self._best.heard(event)
        if isinstance(event, StepCommitted | RunResumed):
            self._stall.moved(self._service.seams.clock.monotonic())
        self._service.publish(event)

    def _watch_deadline(self, event: StepCommitted) -> None:
        """Warn the requester, on its own node, where the run will not be done in time."""
        left = self._steering.seconds_left
        if left is None or self._run.requester != self._service.signer.peer or self._core.state != "running":
            return
        now = self._service.seams.clock.monotonic()
        said = self._deadline.moved(now, event.step, self._steering.steps, left)
        if said is not None:
            reason = said or "its deadline can be met again"
            at = self._service.seams.clock.wall()
            self._service.publish(RunChanged(at=at, run=self._run.text, state="running", reason=reason))

    def tell(self, plan: Plan, event: RunEvent) -> None:
        """As the committer: publish it here and have all others do so."""
        self.show(event)
        notice = Notice(plan_hash(plan), news_of(event))
        for peer in self._core.others():
            self._service.send(peer, notice)

    def hear(self, message: Notice) -> None:
        """The committer says so."""
        # By our own clock: another's may be wrong, and this one's screens sort by it.
        self.show(event_of(message.news, at=self._service.seams.clock.wall(), run=self._run.text))
