"""A trainer of a run in a world of cores under one plan: it feeds samples and, if it is the first trainer,
commits.

It drives a `partition.steps.feeder.Feeder`, and a `partition.steps.committer.Committer` whose events
`partition.run.verdicts` judges. Each plan has its own trainer.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from crypto.identity import PeerId
from partition.plan.plan import Plan, plan_hash
from partition.run.events import PauseWanted, SaveWanted, StepsWanted
from partition.run.failures import Failures
from partition.run.verdicts import PeersLost, TrainingOver, Verdicts
from partition.steps import committer as core
from partition.steps.feeder import Feeder, FeedReady
from partition.steps.messages import Open, StepCommit
from partition.steps.routes import attempts
from sim.events import StepCommitted
from sim.worlds.integer_stage import input_of, labels_of
from sim.worlds.run_context import Setting
from sim.worlds.sim_stage import SimFrameDraft

EVALUATIONS = 4
"""Number of held-out micro-batches evaluated at the end of a run."""
INF = float("inf")


class Shell(Protocol):
    """The member that trains, as the trainer uses it."""

    def send(self, peer: PeerId, message: Any) -> None: ...
    def later(self, seconds: float, action: Callable[[], None]) -> None: ...
    def absent(self, peer: PeerId, reason: str) -> None:
        """Leave this peer out of the next plan."""

    def committed_steps(self, step: int) -> None:
        """Record that `step` steps are committed."""

    def paused(self, step: int) -> None:
        """Record that no step is open."""

    def trained(self, reason: str | None) -> None:
        """Record that the last step is committed and evaluated, or the `reason` why that will never
        happen."""


class Trainer:
    """One trainer under one plan."""

    def __init__(self, setting: Setting, me: PeerId, plan: Plan, shell: Shell, failures: Failures) -> None:
        self.core: core.Committer | None = None
        self.is_over = False
        self._setting = setting
        self._me = me
        self._plan = plan
        self._shell = shell
        self._verdicts = Verdicts(plan, failures)
        self._feeder = Feeder(me, plan)
        self._commit: StepCommit | None = None

    def begin(self, newest: tuple[bytes, int] | None) -> None:
        """Start to commit, if this is the committing trainer. `newest` is the newest checkpoint."""
        setting, training = self._setting, self._setting.training
        if self._plan.committer != self._me:
            return
        self.core = setting.cores.committer(
            self._me,
            self._plan,
            steps=training.steps,
            evaluations=EVALUATIONS,
            metrics=0,
            save_every=training.checkpoint_every,
            saved=0 if newest is None else newest[1],
        )
        assert self.core is not None
        if newest is None and training.checkpoint_every:
            self._send_all(self.core.save(setting.ground.now))
        self._send_all(self.core.start(setting.ground.now))
        self._shell.later(setting.settings.start_seconds_max, self._give_up)

    def stop(self) -> None:
        """Stop, because a new plan is in force or the run is over."""
        self.is_over = True
        self.core = None

    def _give_up(self) -> None:
        """Leave replicas out of the next plan that have not opened their stage in time."""
        if self.core is not None:
            self._lost(self._verdicts.late(self.core.phase, self._setting.settings.start_seconds_max))

    def _lost(self, lost: PeersLost) -> None:
        for peer in lost.peers:
            self._shell.absent(peer, lost.reason)

    # Input

    @property
    def deadline(self) -> float:
        """The time of the next `wake`."""
        return INF if self.core is None else self.core.deadline

    def wake(self) -> None:
        """Do what is due."""
        if self.core is not None:
            self._send_all(self.core.wake(self._setting.ground.now))

    def opened(self, sender: PeerId, message: Open) -> None:
        """Feed the steps that the committer has opened. Raises RemoteProtocolError."""
        self._feeder.receive(self._setting.ground.now, sender, message)
        self._feed()

    def receive(self, sender: PeerId, message: Any) -> None:
        """Handle a replica's message to the committer. Raises RemoteProtocolError."""
        if self.core is not None:
            self._verdicts.heard(sender, message)
            self._send_all(self.core.receive(self._setting.ground.now, sender, message))

    def steer(self, event: PauseWanted | SaveWanted | StepsWanted) -> None:
        """Carry out the member's decisions between two steps."""
        if self.core is not None:
            core, now = self.core, self._setting.ground.now
            match event:
                case PauseWanted():
                    self._send_all(core.pause(now))
                case SaveWanted():
                    self._send_all(core.save(now))
                case StepsWanted():
                    self._send_all(core.unpause(now))

    def suspect(self, peer: PeerId) -> None:
        """Handle the suspicion that a peer may be dead."""
        if self.core is not None:
            self._send_all(self.core.suspect(self._setting.ground.now, peer))

    def reconnected(self, peer: PeerId) -> None:
        """Handle a reopened stream to `peer`."""
        if self.core is not None:
            self._send_all(self.core.reconnected(peer))
        self._feeder.reconnected(peer)
        self._feed()

    def _send_all(self, sends: Sequence[tuple[PeerId, Any]]) -> None:
        for peer, message in sends:
            if isinstance(message, StepCommit):
                self._commit = message
            self._shell.send(peer, message)

    def _feed(self) -> None:
        feeder, run = self._feeder, self._setting.run
        events, feeder.events[:] = list(feeder.events), []
        last = len(self._plan.stages) - 1
        for event in events:
            if not isinstance(event, FeedReady):
                continue
            number, train = event.microbatch, event.train
            if event.input_to is not None:
                draft = SimFrameDraft(event.step, number, 0, "input", train, input_of(run, number, train))
                self._shell.send(event.input_to, draft.opened(self._me, feeder.plan_hash, event.attempt))
            if event.labels_to is not None:
                draft = SimFrameDraft(
                    event.step, number, last, "labels", train, labels_of(run, number, train)
                )
                self._shell.send(event.labels_to, draft.opened(self._me, feeder.plan_hash, event.attempt))

    # Events of the committer

    def follow(self) -> bool:
        """Act on the committer's events; return whether there were any."""
        had_any = False
        while self.core is not None and self.core.events:
            had_any = True
            events, self.core.events[:] = list(self.core.events), []
            for event in events:
                if not self.is_over:
                    self._on_event(event)
        return had_any

    def _on_event(self, event: Any) -> None:
        match event:
            case core.StepApplied():
                self._step_applied(event)
            case core.StepsPaused():
                self._shell.paused(event.step)
        match self._verdicts.judge(event):
            case PeersLost() as lost:
                self._lost(lost)
            case TrainingOver(reason):
                self._shell.trained(reason)

    def _step_applied(self, event: core.StepApplied) -> None:
        setting, plan, commit = self._setting, self._plan, self._commit
        setting.check_loss(event.step, event.loss)
        self._shell.committed_steps(event.step + 1)
        if commit is None or event.attempt not in attempts(plan):
            return  # committed under the previous plan, and only reported again
        counted = tuple(
            tuple((PeerId(row.replica), row.microbatches) for row in commit.replicas if row.stage == stage)
            for stage in range(len(plan.stages))
        )
        name = plan_hash(plan)
        setting.publish(
            self._me, StepCommitted(setting.run, name, plan.height, event.step, counted, event.loss)
        )
