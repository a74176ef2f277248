"""One peer's part in one run of a world of cores: the chain of plans, and the roles its head gives to it.

What `node.runs.member`, `chain`, `committer`, `feeder` and `ending` are in a node under trio, around the same
cores, here in virtual time on one heap. An entry is one turn: a core is called, its promises are kept, what
it says is sent, its events are acted on; then whatever has come due since. So nobody dies in the middle of
one. A peer that restarts begins with a new `Member` and its old `Disk`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.runs.ending import END_SECONDS_MAX
from node.runs.placement import LEASE_SECONDS_MAX, START_SECONDS_MAX
from node.runs.pulse import (
    COMMITTER_SILENCE_SECONDS_MAX,
    PAUSE_SECONDS_MAX,
    RENEW_SECONDS,
    RENEW_SECONDS_MAX,
    SILENCE_SECONDS_MAX,
)
from node.runs.succession import REFILL_SECONDS, Hopeless
from partition.plan import agreement as agreed
from partition.plan.chain import base_plan
from partition.plan.change import Change
from partition.plan.plan import NOTHING, Plan, committee, plan_hash
from partition.plan.votes import AgreementMessage, Head
from partition.steps import committer as steps
from partition.steps.feeder import Feeder, FeedReady
from partition.steps.frames import OpenedFrame
from partition.steps.messages import CommitterMessage, Failed, Open, ReplicaMessage, StepCommit, Synced
from sim.happenings import PlanAdopted, RunEnded, StepCommitted
from sim.network.instants import instant
from sim.worlds.ending import collect, tell_all
from sim.worlds.hosted import FRAME_BYTES, Draft, Hosted
from sim.worlds.hosting import Hosting
from sim.worlds.keeping import FETCH_SECONDS_MAX, Keeping
from sim.worlds.said import (
    DONE,
    MESSAGE_BYTES,
    STATE_BYTES,
    Absent,
    Checkpointed,
    Declined,
    Disk,
    End,
    ExportStage,
    FetchCopy,
    FetchState,
    KeepCopy,
    Noted,
    Prepare,
    Question,
    Release,
    Renew,
    Saved,
    Start,
)
from sim.worlds.setting import Setting
from sim.worlds.streams import Answer
from sim.worlds.succeeding import Succeeding
from sim.worlds.summing import State, input_of, labels_of

EVALUATIONS = 4
"""Held-out micro-batches at the end of a run."""
EARLY_MAX = 64
"""What a committer says of a plan that has not come into force here yet."""
INF = float("inf")


class Member:
    """One run at one peer, in one of the peer's lives. `plan` is None while it is not in the run."""

    def __init__(
        self,
        setting: Setting,
        me: PeerId,
        disk: Disk,
        rng: Random,
        *,
        has_forgotten: bool,
        hosts: Callable[[PeerId], bool],
    ) -> None:
        """`has_forgotten`: an earlier life was in the run, and its disk is gone. `hosts` says who has no room
        for a stage."""
        self.plan: Plan | None = None
        self.outcome = ""
        self.step = 0
        self.is_paused = False
        self._setting = setting
        self._me = me
        self._disk = disk
        self._rng = rng
        self._has_forgotten = has_forgotten
        self._hosts = hosts
        self._is_alive = True
        self._chain: agreed.Agreement | None = None
        self._calls: deque[Callable[[agreed.Agreement, float], Any]] = deque()
        self._succeeding: Succeeding | None = None
        self._committer: steps.Committer | None = None
        self._commit: StepCommit | None = None
        self._synced: set[PeerId] = set()
        self._feeder: Feeder | None = None
        self._early: deque[tuple[PeerId, Any]] = deque(maxlen=EARLY_MAX)
        self._keeping = Keeping(
            setting, me, disk, live=self._living, ask=self.ask, send=self.send, later=self.later
        )
        self._hosting = Hosting(me, self._make_hosted, self.later)
        self._is_finishing = False
        self._is_stuck = False
        self._thinks = False
        self._heard_at = 0.0
        self._think_at = self._beat_at = INF
        self._armed_at = INF

    # Turns

    def turn(self, action: Callable[[], None]) -> None:
        """Do something as this peer, now or when it stands still no more; then all that follows from it."""
        ground = self._setting.ground
        if not self._is_alive:
            return
        thaws = ground.thaws(self._me)
        if thaws > ground.now:
            ground.at(thaws, lambda: self.turn(action))
            return
        action()
        self._settle()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """The same after a while, should this life last so long."""
        ground = self._setting.ground
        ground.at(instant(ground.now + seconds), lambda: self.turn(action))

    def stop(self) -> None:
        """It is dead."""
        self._is_alive = False

    def _settle(self) -> None:
        while self._calls or self._thinks:
            if self._calls:
                self._call(self._calls.popleft())
            else:
                self._think()
        if self._committer is not None:
            self._follow_committer(self._committer)
        due = min(
            self._think_at,
            self._beat_at,
            self._chain.deadline if self._chain is not None else INF,
            self._committer.deadline if self._committer is not None else INF,
        )
        if due < self._armed_at:
            self._armed_at = due
            ground = self._setting.ground
            ground.at(max(instant(due), ground.now), lambda: self._ring(due))

    def _ring(self, due: float) -> None:
        if self._armed_at == due:  # else an earlier deadline took this one's place
            self._armed_at = INF
            self.turn(self._wake)

    def _wake(self) -> None:
        now = self._setting.ground.now
        if self._chain is not None and self._chain.deadline <= now:
            self._calls.append(lambda core, now: core.wake(now))
        if self._committer is not None and self._committer.deadline <= now:
            self._send_all(self._committer.wake(now))
        if self._think_at <= now:
            self._thinks = True
        if self._beat_at <= now:
            self._beat_at = now + RENEW_SECONDS
            self._beat()

    def send(self, peer: PeerId, message: Any) -> None:
        """Say something on the stream to `peer`."""
        size = FRAME_BYTES if isinstance(message, OpenedFrame) else MESSAGE_BYTES
        self._setting.streams.send(self._me, peer, message, size)

    def _send_all(self, sends: Sequence[tuple[PeerId, Any]]) -> None:
        for peer, message in sends:
            if isinstance(message, StepCommit):
                self._commit = message
            self.send(peer, message)

    def ask(self, peer: PeerId, question: Question, seconds: float, done: Answer) -> None:
        """Put a question; `done` hears the answer, or None."""
        size = STATE_BYTES if isinstance(question, FetchState | FetchCopy) else MESSAGE_BYTES

        def put(answer: Answer) -> None:
            self._setting.put(self._me, peer, question, answer)

        self._setting.streams.ask(
            self._me, peer, size, seconds, put, lambda reply: self.turn(lambda: done(reply))
        )

    # Plans

    def begin(self, plan: Plan) -> None:
        """The first plan that this member hears of is in force: keep the chain from here on."""
        self._disk.chain = b""
        self._enter(plan, b"")
        assert self._chain is not None
        self._adopt(self._chain.head)

    def restart(self) -> None:
        """With a disk that knows the chain. Whatever was held or fed is gone: all others must know."""
        try:
            self._enter(base_plan(self._disk.chain), self._disk.chain)
        except RemoteProtocolError as error:
            raise AssertionError(f"a disk is damaged: {error}") from error
        assert self._chain is not None
        plan = self.plan = self._chain.head
        self.is_paused = True
        others = [peer for peer in plan.members if peer != self._me]
        self._catch_up(others)
        if plan.stage_of(self._me) is not None or self._me in plan.trainers:
            self._miss_all(self._me, "it was restarted", others)

    def _enter(self, plan: Plan, durable: bytes) -> None:
        setting, now = self._setting, self._setting.ground.now
        self._chain = setting.cores.agreement(
            self._me,
            plan,
            self._rng,
            durable=durable,
            may_fork=setting.training.on_lost_quorum == "fork",
            abstain=self._has_forgotten,
        )
        self._succeeding = Succeeding(
            setting,
            self._me,
            self._chain,
            wanted=tuple([setting.training.replicas] * len(plan.stages)),
            restorable=lambda: self._keeping.restorable,
            hosts=self._hosts,
            ask=self.ask,
            changed=self._think_soon,
            hopeless=self._on_hopeless,
        )
        self._calls.append(lambda core, now: [])  # keeps what is unsaved
        self._heard_at, self._beat_at = now, now + RENEW_SECONDS
        self.members_changed()

    def _call(self, call: Callable[[agreed.Agreement, float], Any]) -> None:
        """What the chain's shell does: call, keep, send, act."""
        core = self._chain
        if core is None:
            return
        try:
            sends = call(core, self._setting.ground.now)
        except RemoteProtocolError:
            self._setting.counters["refused"] += 1
            sends = []
        if core.unsaved:
            core.unsaved = False
            self._disk.chain = core.durable
        self._send_all(sends)
        events, core.events[:] = list(core.events), []
        for event in events:
            if self._chain is core:
                self._on_chain_event(event)

    def _on_chain_event(self, event: Any) -> None:
        match event:
            case agreed.PlanDecided():
                self._adopt(event.plan, event.change)
            case agreed.QuorumLost():
                self.is_paused = True
            case agreed.QuorumFound():
                self.is_paused = False
            case agreed.ForkOpened():
                self._think_soon()
            case agreed.ForkFound() | agreed.LeftBehind():
                self._fall_back()
            case agreed.ChainBroken():
                self.end("failed", f"plan {event.height} was another elsewhere")

    def _adopt(self, plan: Plan, change: Change | None = None) -> None:
        """A plan has come into force: take the roles it gives to this peer, and only these."""
        assert self._succeeding is not None
        before, self.plan = self.plan, plan
        name = plan_hash(plan)
        if self._is_finishing:
            return  # some have heard the end already: now it is said in this plan's name
        self._heard_at = self._setting.ground.now
        self._committer = self._feeder = self._commit = None
        if before is not None:
            self._succeeding.decided()
        if self._me not in plan.roster:
            self._fall_back()
            return
        self._setting.publish(self._me, PlanAdopted(self._setting.run, plan.height, name, plan.parent))
        self.is_paused = self._is_stuck = False
        self._hosting.adopt(plan)
        if self._me in plan.trainers:
            self._feeder = Feeder(self._me, plan)
            if plan.committer == self._me:
                self._commit_steps(plan)
        self.step = plan.step if plan.restored != NOTHING else self.step
        if change is not None:
            self._start_newcomers(plan, change)
        early, self._early = self._early, deque(maxlen=EARLY_MAX)
        for sender, message in early:
            self._setting.ground.at(
                self._setting.ground.now,
                lambda row=(sender, message): self.receive(*row),  # type: ignore[misc]
            )

    def _start_newcomers(self, plan: Plan, change: Change) -> None:
        """The committer tells them that their plan is in force; where it is one of them, all others do."""
        newcomers = [PeerId(peer) for peer in (*(row.peer for row in change.joined), *change.admitted)]
        if self._me != plan.committer and plan.committer not in newcomers:
            return
        for peer in newcomers:

            def started(reply: Any, peer: PeerId = peer) -> None:
                if reply is not DONE and self.plan == plan:
                    self._miss(peer, "it did not start")

            if peer != self._me:
                self.ask(peer, Start(plan), LEASE_SECONDS_MAX, started)

    def _miss(self, peer: PeerId, reason: str) -> None:
        """This member's own view: a committer tells the others, everybody else only wishes."""
        if self.plan is not None and self.plan.committer == self._me:
            self.absent(peer, reason)
        elif self._succeeding is not None:
            self._succeeding.miss(peer, reason)

    def absent(self, peer: PeerId, reason: str) -> None:
        """The next plan must do without this peer. Everybody with a vote is told."""
        if self._succeeding is not None and self.plan is not None and peer not in self._succeeding.absent:
            self._miss_all(peer, reason, self._others(self.plan))

    def _miss_all(self, peer: PeerId, reason: str, others: Sequence[PeerId]) -> None:
        assert self._succeeding is not None
        assert self.plan is not None
        self._succeeding.miss(peer, reason)
        for other in others:
            self.send(other, Absent(plan_hash(self.plan), peer, reason))

    def _think_soon(self) -> None:
        self._thinks = True

    def _think(self) -> None:
        self._thinks = False
        if self._succeeding is None or self._chain is None:
            return
        self._think_at = self._setting.ground.now + REFILL_SECONDS
        change, parent = self._succeeding.wish(), self._chain.head_hash
        self._calls.append(lambda core, now: core.wish(now, change, parent=parent))

    def _on_hopeless(self, found: Hopeless | None, is_final: bool) -> None:
        if self._succeeding is None or self.plan is None:
            return
        if found is None:
            self._is_stuck = False
        elif not self._is_stuck:
            self._is_stuck = self.is_paused = True
        elif is_final and self._succeeding.is_proposer() and self._succeeding.has_majority():
            self._finish("failed", found.reason)

    def _fall_back(self) -> None:
        """The run goes on elsewhere: forget what is here, and wait to be asked again."""
        self._forget()
        self.plan = None
        self._has_forgotten = False

    def _forget(self) -> None:
        self._hosting.close()
        self._chain = self._succeeding = None
        self._committer = self._feeder = self._commit = None
        self._calls.clear()
        self._thinks = False
        self._think_at = self._beat_at = INF
        self._disk.forget_chain()

    # Committing

    def _commit_steps(self, plan: Plan) -> None:
        setting = self._setting
        self._synced.clear()
        committer = self._committer = setting.cores.committer(
            self._me,
            plan,
            steps=setting.training.steps,
            evaluations=EVALUATIONS,
            metrics=0,
            save_every=setting.training.checkpoint_every,
        )
        if plan.height == 0 and setting.training.checkpoint_every:
            self._send_all(committer.save(setting.ground.now))
        self._catch_up([peer for peer in plan.members if peer != self._me])
        self._send_all(committer.start(setting.ground.now))
        self.later(START_SECONDS_MAX, lambda: self._give_up(committer))

    def _give_up(self, committer: steps.Committer) -> None:
        """The next plan does without replicas that have not opened their stage in time."""
        if self._committer is not committer or committer.phase != "syncing":
            return
        for stage in committer.plan.stages:
            for peer in stage.replicas:
                if peer not in self._synced:
                    self.absent(PeerId(peer), "its stage was not open in time")

    def _follow_committer(self, committer: steps.Committer) -> None:
        while committer.events:
            events, committer.events[:] = list(committer.events), []
            for event in events:
                if self._committer is committer:
                    self._on_committer_event(committer, event)

    def _on_committer_event(self, committer: steps.Committer, event: Any) -> None:
        match event:
            case steps.StepApplied():
                self._step_applied(committer.plan, event)
            case steps.ReplicaFailed():
                self.absent(event.peer, event.reason)
            case steps.TrainingEvaluated():
                collect(self._setting, self, committer.plan)
            case steps.TrainingFailed(stage=None):
                self._finish("failed", event.reason)
            case steps.TrainingFailed(stage=int() as stage):
                for peer in committer.plan.stages[stage].replicas:
                    self.absent(PeerId(peer), event.reason)

    def _step_applied(self, plan: Plan, event: steps.StepApplied) -> None:
        setting, commit = self._setting, self._commit
        assert commit is not None
        counted = tuple(
            tuple((PeerId(row.replica), row.microbatches) for row in commit.replicas if row.stage == stage)
            for stage in range(len(plan.stages))
        )
        name = plan_hash(plan)
        setting.publish(
            self._me, StepCommitted(setting.run, name, plan.height, event.step, counted, event.loss)
        )
        setting.check_loss(event.step, event.loss)
        self._note_step(event.step + 1)
        for peer in self._others(plan):
            self.send(peer, Noted(name, event.step + 1))

    def _note_step(self, step: int) -> None:
        """So many steps are committed: by that two branches are judged, so it must never be old."""
        self.step = step
        if self._chain is not None:
            plan = self._chain.head
            self._chain.say(
                Head(
                    run=plan.run,
                    parent=self._chain.head_hash,
                    fork=plan.fork,
                    height=plan.height,
                    step=step,
                    samples=step * self._setting.training.microbatches,
                    hosts=self.hosts,
                )
            )

    # The end

    def _finish(self, outcome: str, reason: str) -> None:
        """Tell every live member, then end here."""
        if not self._is_finishing and not self.outcome:
            self._is_finishing = True
            tell_all(self, outcome, reason)

    def finished(self, reason: str | None) -> None:
        """The result is collected; or why it cannot be."""
        self._finish("done" if reason is None else "failed", reason or "")

    def end(self, outcome: str, reason: str) -> None:
        """The run is over here."""
        if self.outcome:
            return
        self.outcome = outcome
        self._forget()
        self._setting.publish(self._me, RunEnded(self._setting.run, outcome, reason))

    # What comes in

    def receive(self, sender: PeerId, message: Any) -> None:
        """Something on the stream from `sender`."""
        self.turn(lambda: self._take(sender, message))

    def _take(self, sender: PeerId, message: Any) -> None:
        try:
            if isinstance(message, AgreementMessage):
                self._about_plans(sender, message)
            elif self.plan is None or sender not in self.plan.roster:
                pass
            elif isinstance(message, ReplicaMessage):
                self._to_committer(sender, message)
            elif isinstance(message, Absent | Noted | Saved | Checkpointed):
                self._from_member(self.plan, sender, message)
            else:
                self._to_roles(self.plan, sender, message)
        except RemoteProtocolError:
            self._setting.counters["refused"] += 1

    def _about_plans(self, sender: PeerId, message: AgreementMessage) -> None:
        if self._chain is not None:
            self._calls.append(lambda core, now: core.receive(now, sender, message))
        elif self.outcome == "done" and isinstance(message, Head) and message.asks:
            # Whoever was away when a run ended well still believes in a plan, and asks how it went on.
            self.ask(sender, End(message.plan, "done", ""), END_SECONDS_MAX, lambda reply: None)

    def _to_committer(self, sender: PeerId, message: ReplicaMessage) -> None:
        if self._committer is not None:
            if isinstance(message, Synced):
                self._synced.add(sender)
            self._send_all(self._committer.receive(self._setting.ground.now, sender, message))

    def _from_member(self, plan: Plan, sender: PeerId, message: Any) -> None:
        if message.plan != plan_hash(plan) or self._succeeding is None:
            return
        match message:
            case Absent():
                self._succeeding.miss(message.peer, message.reason)
            case Noted():
                self._heard_at = self._setting.ground.now
                self._note_step(message.step)
            case Saved() if plan.committer == self._me:
                self._keeping.saved(plan, sender, message)
            case Checkpointed():
                self._keeping.learn(message.step, message.name)

    def _to_roles(self, plan: Plan, sender: PeerId, message: Any) -> None:
        now = self._setting.ground.now
        if isinstance(message, CommitterMessage) and message.plan != plan_hash(plan):
            self._early.append((sender, message))
            return
        if isinstance(message, Open) and self._feeder is not None:
            self._feeder.receive(now, sender, message)
            self._feed()
        if self._hosting.hosted is not None:
            self._hosting.hosted.receive(sender, message)

    def _feed(self) -> None:
        feeder, run = self._feeder, self._setting.run
        assert feeder is not None
        events, feeder.events[:] = list(feeder.events), []
        last = len(feeder.plan.stages) - 1
        for event in events:
            if not isinstance(event, FeedReady):
                continue
            number, train = event.microbatch, event.train
            if event.input_to is not None:
                draft = Draft(event.step, number, 0, "input", train, input_of(run, number, train))
                self.send(event.input_to, draft.opened(self._me, feeder.plan_hash, event.attempt))
            if event.labels_to is not None:
                draft = Draft(event.step, number, last, "labels", train, labels_of(run, number, train))
                self.send(event.labels_to, draft.opened(self._me, feeder.plan_hash, event.attempt))

    def reconnected(self, peer: PeerId) -> None:
        """The stream to `peer` is open again."""
        self.turn(lambda: self._on_reconnected(peer))

    def _on_reconnected(self, peer: PeerId) -> None:
        if self._chain is not None and self.plan is not None and peer in self.plan.roster:
            self._send_all(self._chain.tell(peer))
        if self._hosting.hosted is not None:
            self._hosting.hosted.reconnected(peer)
        if self._committer is not None:
            self._send_all(self._committer.reconnected(peer))
        if self._feeder is not None:
            self._feeder.reconnected(peer)
            self._feed()

    def members_changed(self) -> None:
        """Who lives is another question now than before."""
        if self._succeeding is not None:
            living = self._succeeding.living()
            self._calls.append(lambda core, now: core.reach(now, living))
            self._thinks = True

    def suspected(self, peer: PeerId) -> None:
        """A member may be dead."""
        if self._committer is not None:
            self._send_all(self._committer.suspect(self._setting.ground.now, peer))

    # Questions of others

    def answer(self, asker: PeerId, question: Question, answer: Answer) -> None:
        """What one question comes to, now or later."""
        self.turn(lambda: self._answer(asker, question, answer))

    def _answer(self, asker: PeerId, question: Question, answer: Answer) -> None:
        match question:
            case FetchCopy():
                answer(self._keeping.copy(question.step, question.stage))
            case KeepCopy():
                self._keeping.keep(question, answer)
            case _ if self.outcome:
                answer(Declined("the run is over"))
            case Prepare():
                self._on_prepare(asker, question.plan, answer)
            case Release():
                self._hosting.unprepare(question.plan)
                answer(DONE)
            case Start():
                self._on_start(asker, question.plan, answer)
            case _:
                self._answer_of_plan(asker, question, answer)

    def _answer_of_plan(self, asker: PeerId, question: Any, answer: Answer) -> None:
        """What is of use only to whoever follows the same plan."""
        plan, hosted = self.plan, self._hosting.hosted
        if plan is None:
            answer(Declined("no such run here"))
        elif isinstance(question, Renew) and question.plan != plan_hash(plan):
            answer(DONE)  # there is another plan: the chain tells
        elif question.plan != plan_hash(plan):
            answer(Declined("no such plan here"))
        elif isinstance(question, Renew):
            self._heard_at = self._setting.ground.now
            answer(DONE)
        elif isinstance(question, End) and asker not in (plan.committer, *committee(plan)):
            answer(Declined("it has no vote in the run"))
        elif isinstance(question, End):
            self.end(question.outcome, question.reason)
            answer(DONE)
        elif isinstance(question, FetchState):
            state = None if hosted is None else hosted.state(question.step)
            answer(state or Declined("the state is that of another step"))
        elif isinstance(question, ExportStage):
            answer(self.export() or Declined("no stage is open here"))

    def _on_prepare(self, asker: PeerId, plan: Plan, answer: Answer) -> None:
        if self.plan is not None and plan_hash(self.plan) != plan.parent:
            self._catch_up([asker])
            answer(Declined("it does not know yet how the run went on"))
        elif plan.stage_of(self._me) is None:
            answer(DONE)
        elif self._hosts(self._me):
            answer(Declined("busy"))
        else:
            name = plan_hash(plan)
            self._hosting.prepare(plan, lambda is_open: answer(DONE if is_open else Declined("busy")))
            self.later(SILENCE_SECONDS_MAX, lambda: self._expire(name))

    def _expire(self, plan: bytes) -> None:
        """Whoever asked for a stage may have died before its plan was decided."""
        self._hosting.unprepare(plan)

    def _on_start(self, asker: PeerId, plan: Plan, answer: Answer) -> None:
        if self.plan is None:
            self.begin(plan)
            answer(DONE)
            return
        if self.plan.height < plan.height and asker in self.plan.roster:
            self._catch_up([asker])
        is_other = self.plan.height == plan.height and self.plan != plan
        answer(Declined("another plan is in force") if is_other else DONE)

    # The pulse

    def _beat(self) -> None:
        plan, chain, now = self.plan, self._chain, self._setting.ground.now
        if plan is None or chain is None:
            return
        if self._hosting.is_opening:
            self._heard_at = now
        self.members_changed()
        self._note_step(max(self.step, self._committer.step if self._committer is not None else 0))
        alive = self._setting.alive(self._me)
        self._catch_up([peer for peer in chain.acquainted if alive.get(peer, False)])
        if plan.committer == self._me:
            self._heard_at = now
            for peer in self._others(plan):
                self._renew(plan, peer)
            return
        silence = now - self._heard_at
        if silence >= (PAUSE_SECONDS_MAX if self.is_paused else SILENCE_SECONDS_MAX):
            self.end("failed", f"nothing was heard of the run for {silence:.0f} s")
        elif silence >= COMMITTER_SILENCE_SECONDS_MAX:
            self._miss(plan.committer, f"it said nothing for {silence:.0f} s")

    def _renew(self, plan: Plan, peer: PeerId) -> None:
        def renewed(reply: Any) -> None:
            if isinstance(reply, Declined) and self.plan == plan:
                self._miss(peer, "it has forgotten the run")

        self.ask(peer, Renew(plan_hash(plan)), RENEW_SECONDS_MAX, renewed)

    # Bookkeeping

    @property
    def hosts(self) -> bool:
        """Whether a stage is open here, or on its way."""
        return self._hosting.is_opening or self._hosting.hosted is not None

    @property
    def standing(self) -> str:
        """Where this member is, in words: what it commits, or what it holds."""
        if self.plan is None:
            return self.outcome or "not in it"
        if self._committer is not None:
            return f"plan {self.plan.height}: {self._committer.phase} step {self._committer.step}"
        waits = "waits" if self.is_paused else "follows"
        hosted = self._hosting.hosted
        held = "" if hosted is None else f", holds stage {hosted.stage.index} after step {hosted.stage.state.step}"
        return f"plan {self.plan.height}: {waits}{held}"

    def _make_hosted(self, plan: Plan, step: int | None) -> Hosted:
        return Hosted(
            self._setting,
            self._me,
            plan,
            step=step,
            later=self.later,
            send=self.send,
            save=self._keeping.save,
            fetch=self._fetch_state,
            restore=self._keeping.restore,
        )

    def _fetch_state(
        self, sources: Sequence[PeerId], plan: bytes, step: int, then: Callable[[State | None], None]
    ) -> None:
        """From the first source that hands it over."""
        left = list(sources)

        def next_one(state: Any) -> None:
            if isinstance(state, State):
                then(state)
            elif left:
                self.ask(left.pop(0), FetchState(plan, step), FETCH_SECONDS_MAX, next_one)
            else:
                then(None)

        next_one(None)

    def export(self) -> State | None:
        """The state of the stage that is held here."""
        return None if self._hosting.hosted is None else self._hosting.hosted.stage.state

    def _catch_up(self, peers: Sequence[PeerId]) -> None:
        """Ask what of the chain is missing here."""
        if self._chain is not None:
            for peer in peers:
                self._send_all(self._chain.tell(peer))

    def _others(self, plan: Plan) -> list[PeerId]:
        """The live members of a plan but for this peer."""
        alive = self._setting.alive(self._me)
        return [peer for peer in plan.members if peer != self._me and alive.get(peer, False)]

    def others(self) -> list[PeerId]:
        """The same of the plan in force."""
        return [] if self.plan is None else self._others(self.plan)

    def _living(self) -> list[PeerId]:
        """Who could hand something over; whoever was in the run has what it kept of it."""
        alive = self._setting.alive(self._me)
        known = () if self._chain is None else self._chain.acquainted
        return [peer for peer in known if alive.get(peer, False)]
