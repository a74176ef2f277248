"""This node's feeding and committing in one run, from plan to plan, and the measurements made meanwhile.

Only for `node.runs.member`, whose core decides which plan is in force, and when to pause or save.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from crypto.identity import PeerId
from node.errors import RunFailed
from node.pipeline.committer import CommitterShell
from node.placement.leases import Offer
from node.protocols.manifest import Run
from node.runs.best import BestState
from node.runs.context import RunService
from node.runs.progress import ProgressReports
from node.runs.rebalancing import Rebalancing
from node.runs.standbys import Standbys
from node.runs.steering import Steering
from node.runs.trainer import TrainingLoop, keep_data
from partition.plan.change import Change, standby_trainers
from partition.plan.plan import Plan
from partition.run import events
from partition.run.member import Member
from partition.run.stall import StallClock

STANDBY_TRAINERS = 2
"""Number of members next in line as trainers that fetch the data beforehand."""


class DutyOwner(Protocol):
    """The part of a `node.runs.member.RunMember` that this file uses."""

    core: Member

    def holders(self) -> list[PeerId]: ...
    def offers(self) -> list[Offer]: ...
    def act(self) -> None: ...
    def absent(self, peer: PeerId, reason: str) -> None: ...
    def recut(self, plan: Plan, wanted: Change) -> None: ...
    def bring_back(self, checkpoint: bytes, step: int) -> None: ...


class Duties:
    """The duties of one member. `committer` commits the plan in force, if that is this node's role."""

    def __init__(self, service: RunService, run: Run, member: DutyOwner) -> None:
        self.committer: CommitterShell | None = None
        self.training: TrainingLoop | None = None
        self._service = service
        self._run = run
        self._member = member
        self._me = service.signer.peer
        self._clock = service.seams.clock
        self._past: CommitterShell | None = None
        self.stall = StallClock(self._clock.monotonic())
        best_from = member.bring_back, self._note_best
        self.best = BestState(service, run, lambda: self.committer, *best_from)
        self._rebalancing = Rebalancing(service, run, member.recut, member.offers)
        self._standbys = Standbys(service, run, member.recut, member.offers, member.absent)
        self.steering = Steering(service, run, self.paused)
        self.reports = ProgressReports(service, run, member.core, self.stall, self.best, self.steering)

    @property
    def committed(self) -> int | None:
        """The number of steps committed here, if this node commits and its replicas are synced."""
        committer = self.committer
        return None if committer is None or committer.core.phase == "syncing" else committer.core.step

    def _note_best(self, step: int | None) -> None:
        self._member.core.checkpoints.best_step = step

    # From plan to plan

    def end(self) -> None:
        """End the work under the previous plan, because a new plan is in force."""
        self._past, self.committer = self.committer, None
        self.stop()

    def stop(self) -> None:
        """Stop training."""
        if self.training is not None:
            self.training.stop()
            self.training = None

    def begin(self, event: events.RolesGiven) -> None:
        """Feed and commit according to the plan."""
        plan = event.plan
        self.best.begin(plan)
        self._rebalancing.begin(plan)
        self._standbys.begin(plan)
        past, self._past = self._past, None
        if past is not None and plan.committer == self._me:
            for dropped in past.dropped(plan):
                self.reports.tell(plan, dropped)
        if event.is_over:
            return
        if self._me in plan.trainers:
            self._train(plan, event.lost_steps)
        elif self._me in standby_trainers(plan.roster, plan.stages)[:STANDBY_TRAINERS]:
            self._start_task(keep_data, self._service, self._run, self._member.holders())

    def _start_task(self, task: Callable[..., object], *arguments: object) -> None:
        self._service.start_task(task, *arguments, of=self._run)

    def _train(self, plan: Plan, lost_steps: int) -> None:
        if plan.committer == self._me:
            self._commit(plan, lost_steps)
        training = self.training = TrainingLoop(
            self._service,
            self._run,
            plan,
            self._member.holders(),
            self.committer,
            cannot=partial(self._cannot_train, plan),
            over=partial(self._over, plan),
        )
        self._start_task(training.run)

    def _commit(self, plan: Plan, lost_steps: int) -> None:
        saved = self._member.core.checkpoints.newest
        self.committer = self._service.seams.part(CommitterShell)(
            self._service,
            self.steering.run,
            plan,
            partial(self.reports.tell, plan),
            absent=self._member.absent,
            paused=self.paused,
            stalled_since=self.stall.since,
            saved=saved[1] if saved is not None else 0,
            failures=self._member.core.failures,
            lost_steps=lost_steps,
            stepped=partial(self._stepped, plan),
            best=self.best,
        )
        if saved is None and self._run.manifest.save_every:
            self.committer.save()  # otherwise a loss before the first checkpoint would end the run
        self.steering.begin(self.committer, plan, self._me)

    def _stepped(self, plan: Plan, step: int, seconds: float, *measured: Mapping[PeerId, int]) -> None:
        self._rebalancing.stepped(plan, step, seconds, *measured)
        self._standbys.stepped(plan, seconds)

    def _over(self, plan: Plan, reason: str | None) -> None:
        """As the committer, end the training: after the last step, or with the `reason` of a failure."""
        if plan == self._member.core.plan:
            self._member.core.end.training_over(self._clock.monotonic(), reason)
            self._member.act()

    def _cannot_train(self, plan: Plan, reason: str) -> None:
        if plan == self._member.core.plan:
            self._member.core.cannot_train(self._clock.monotonic(), reason)
            self._member.act()

    # Between two steps

    def paused(self, step: int) -> None:
        """Handle the pause after `step` steps, in which no step is open."""
        if self.steering.is_paused and self.committer is not None:
            self.committer.save()
        self._member.core.between.paused(self._clock.monotonic(), step)
        self._member.act()

    def save(self) -> int:
        """Have a checkpoint made after the current step; return that step. Raises RunFailed if this node does
        not commit."""
        if self.committer is None:
            raise RunFailed(f"run {self._run.text[:8]} is committed by another node; use the command there")
        self.committer.save()
        return self.committer.core.step + 1
