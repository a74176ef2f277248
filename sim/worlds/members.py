"""One peer's part in one run of a world of cores: the chain of plans, and the roles its head gives to it.

What `node.runs.member`, `chain`, `committer`, `feeder` and `ending` are in a node under trio, around the same
cores, here in virtual time on one agenda. An entry is one turn: a core is called, its promises are kept, what
it says is sent, its events are acted on; then whatever has come due since. So nobody dies in the middle of
one. A peer that restarts begins with a new `Member` and its old `Disk`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.runs.ending import END_SECONDS_MAX
from node.runs.placement import LEASE_SECONDS_MAX
from node.runs.pulse import (
    RENEW_SECONDS,
)
from node.runs.succession import REFILL_SECONDS, Hopeless
from partition.plan import agreement as agreed
from partition.plan.chain import base_plan
from partition.plan.change import Change
from partition.plan.plan import NOTHING, Plan, plan_hash
from partition.plan.votes import AgreementMessage, Head
from partition.run import states
from partition.run.branches import Branches, Verdict
from partition.run.failures import Failures
from partition.run.messages import REASON_LENGTH_MAX, Absent, Checkpointed, GivenUp, check_sender
from partition.run.progress import Progress
from partition.run.states import CAUSE_OF, Cause, after, cause_of
from partition.steps.messages import CommitterMessage, Open, ReplicaMessage
from sim.happenings import BranchLeft, PlanAdopted, RunEnded
from sim.network.instants import instant
from sim.worlds.answering import answer
from sim.worlds.ending import collect, tell_all
from sim.worlds.hosted import Hosted
from sim.worlds.hosting import Hosting
from sim.worlds.keeping import Keeping, fetch_from
from sim.worlds.pulsing import Pulse
from sim.worlds.said import (
    DONE,
    Declined,
    Disk,
    End,
    FetchState,
    Noted,
    Question,
    Saved,
    Start,
)
from sim.worlds.setting import Setting
from sim.worlds.streams import Answer
from sim.worlds.succeeding import Succeeding, nothing
from sim.worlds.summing import State
from sim.worlds.trainer import Trainer
from sim.worlds.turns import Turns

EARLY_MAX = 64
"""What a committer says of a plan that has not come into force here yet."""
INF = float("inf")


class Member(Turns):
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
        super().__init__(setting, me)
        self.plan: Plan | None = None
        self.outcome = ""
        self._disk = disk
        self._rng = rng
        self._has_forgotten = has_forgotten
        self._hosts = hosts
        self._chain: agreed.Agreement | None = None
        self._begin_anew()
        self._branches: Branches | None = None
        self._calls: deque[Callable[[agreed.Agreement, float], Any]] = deque()
        self._succeeding: Succeeding | None = None
        self.trainer: Trainer | None = None
        self._early: deque[tuple[PeerId, Any]] = deque(maxlen=EARLY_MAX)
        self.keeping = Keeping(
            setting, me, disk, live=self._living, ask=self.ask, send=self.send, later=self.later
        )
        self.hosting = Hosting(me, self._make_hosted, self.later)
        self._is_finishing = False
        self._is_stuck = False
        self._thinks = False
        self._pulse = Pulse(setting, self)
        self._think_at = self._beat_at = INF
        self._armed_at = INF

    def _begin_anew(self) -> None:
        self._state: states.State = "submitted"
        self.progress = Progress(self._setting.training.microbatches)
        self._failures = Failures()

    # Turns

    def settle(self) -> None:
        while self._calls or self._thinks:
            if self._calls:
                self._call(self._calls.popleft())
            else:
                self._think()
        if self.trainer is not None:
            self.trainer.follow()
        due = min(
            self._think_at,
            self._beat_at,
            self._chain.deadline if self._chain is not None else INF,
            self.trainer.deadline if self.trainer is not None else INF,
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
        if self.trainer is not None and self.trainer.deadline <= now:
            self.trainer.wake()
        if self._think_at <= now:
            self._thinks = True
        if self._beat_at <= now:
            self._beat_at = now + RENEW_SECONDS
            self._beat()

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
        self._change("node restarted")
        others = [peer for peer in plan.members if peer != self.me]
        self.catch_up(others)
        if plan.stage_of(self.me) is not None or self.me in plan.trainers:
            self._miss_all(self.me, "it was restarted", others)

    def _enter(self, plan: Plan, durable: bytes) -> None:
        setting, now = self._setting, self._setting.ground.now
        self._chain = setting.cores.agreement(
            self.me,
            plan,
            self._rng,
            durable=durable,
            may_fork=setting.training.on_lost_quorum == "fork",
            abstain=self._has_forgotten,
        )
        self._branches = setting.cores.branches(
            self.me, self._chain, self.progress, may_fork=setting.training.on_lost_quorum == "fork"
        )
        self._succeeding = Succeeding(
            setting,
            self.me,
            self._chain,
            wanted=tuple(len(stage.replicas) for stage in plan.stages),
            restorable=lambda: self.keeping.restorable,
            hosts=self._hosts,
            ask=self.ask,
            changed=self._think_soon,
            hopeless=self._on_hopeless,
        )
        self._calls.append(lambda core, now: core.wake(now))  # keeps what is unsaved
        self._pulse.heard()
        self._beat_at = now + RENEW_SECONDS
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
        self.send_all(sends)
        events, core.events[:] = list(core.events), []
        for event in events:
            if self._chain is core:
                self._on_chain_event(event)

    def _on_chain_event(self, event: Any) -> None:
        match event:
            case agreed.PlanDecided():
                if self._branches is not None:
                    self._branches.decided(event.plan)
                self._adopt(event.plan, event.change)
            case agreed.QuorumLost():
                self._change("quorum lost")
            case agreed.QuorumFound():
                self._in_force()
            case agreed.ForkOpened():
                self._think_soon()
            case agreed.ForkFound() | agreed.LeftBehind():
                self._on_fork(event)
            case agreed.ChainBroken():
                self.end("failed", f"plan {event.height} was another elsewhere")

    def _adopt(self, plan: Plan, change: Change | None = None) -> None:
        """A plan has come into force: take the roles it gives to this peer, and only these."""
        assert self._succeeding is not None
        before, self.plan = self.plan, plan
        name = plan_hash(plan)
        if self._is_finishing:
            return  # some have heard the end already: now it is said in this plan's name
        self._pulse.heard()
        self._stop_training()
        if before is not None:
            self._succeeding.decided()
        if self.me not in plan.roster:
            self._fall_back()
            return
        self._setting.publish(self.me, PlanAdopted(self._setting.run, plan.height, name, plan.parent))
        self._in_force()
        self.hosting.adopt(plan)
        if plan.restored != NOTHING:
            self.progress.restored(plan.step)
            reason = self._succeeding.why(change.lost if change is not None else ())
            over = self._failures.went_back(plan.step, self.progress.furthest, reason)
            if over is not None and plan.committer == self.me:
                self._finish("failed", over)
                return
        if self.me in plan.trainers:
            self.trainer = Trainer(self._setting, self.me, plan, self, self._failures)
            if plan.committer == self.me:
                self.catch_up([peer for peer in plan.members if peer != self.me])
            self.trainer.begin(self.keeping.restorable)
        if change is not None:
            self._start_newcomers(plan, change)
        early, self._early = self._early, deque(maxlen=EARLY_MAX)
        for row in early:
            self._setting.ground.at(self._setting.ground.now, partial(self.receive, *row))

    def _start_newcomers(self, plan: Plan, change: Change) -> None:
        """The committer tells them that their plan is in force; where it is one of them, all others do."""
        newcomers = [PeerId(peer) for peer in (*(row.peer for row in change.joined), *change.admitted)]
        if self.me != plan.committer and plan.committer not in newcomers:
            return
        for peer in newcomers:

            def started(reply: Any, peer: PeerId = peer) -> None:
                if reply is not DONE and self.plan == plan:
                    self.miss(peer, "it did not start")

            if peer != self.me:
                self.ask(peer, Start(plan), LEASE_SECONDS_MAX, started)

    def miss(self, peer: PeerId, reason: str) -> None:
        """This member's own view: a committer tells the others, everybody else only wishes."""
        if self.plan is not None and self.plan.committer == self.me:
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
            self.send(other, Absent(plan_hash(self.plan), (peer,), reason[:REASON_LENGTH_MAX]))

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
            if self._is_stuck:
                self._in_force()
        elif not self._is_stuck:
            self._is_stuck = True
            self._change("stage lost")
        elif is_final and self._succeeding.is_proposer() and self._succeeding.has_majority():
            self._finish("failed", found.reason)

    def _in_force(self) -> None:
        """The run goes on, with all the replicas it began with or with fewer."""
        if self.plan is None or self._succeeding is None or self.me not in self.plan.roster:
            return
        self._is_stuck = False
        self._change(cause_of(self.plan, self._succeeding.wanted))

    def _change(self, cause: Cause) -> None:
        self._state = after(self._state, cause)

    def _on_fork(self, event: agreed.ForkFound | agreed.LeftBehind) -> None:
        """Another branch is further, by what was known here."""
        plan, core = self.plan, None if self.trainer is None else self.trainer.core
        if self._branches is None or plan is None or self._is_finishing:
            return
        is_synced = core is not None and core.phase != "syncing"
        verdict = self._branches.judge(
            event,
            plan,
            live=[peer for peer, lives in self._setting.alive(self.me).items() if lives],
            committed=core.step if core is not None and is_synced else None,
            hosts=self.hosts,
        )
        if verdict is Verdict.ABANDON:
            for peer in self.others():
                self.send(peer, GivenUp(plan_hash(plan)))
        if verdict is not Verdict.STAY:
            self._leave_branch()

    def _leave_branch(self) -> None:
        self._setting.publish(self.me, BranchLeft(self._setting.run))
        self._fall_back()

    def _fall_back(self) -> None:
        """The run goes on elsewhere: forget what is here, and wait to be asked again."""
        self._change("quorum lost")
        self._forget()
        self._begin_anew()
        self.plan = None
        self._has_forgotten = False

    def _stop_training(self) -> None:
        if self.trainer is not None:
            self.trainer.stop()
            self.trainer = None

    def _forget(self) -> None:
        self.hosting.close()
        self._chain = self._succeeding = self._branches = None
        self._stop_training()
        self._calls.clear()
        self._thinks = False
        self._think_at = self._beat_at = INF
        self._disk.forget_chain()

    # Training

    def committed(self, step: int) -> None:
        """As the committer: so many steps are."""
        self._note_step(step)
        if self.plan is not None:
            for peer in self._others(self.plan):
                self.send(peer, Noted(plan_hash(self.plan), step))

    def trained(self, reason: str | None) -> None:
        """As the committer: all is done, or will never be."""
        self._change("training over")
        if reason is not None:
            self.finished(reason)
        elif self.plan is not None:
            collect(self._setting, self, self.plan)

    def _note_step(self, step: int) -> None:
        """Take it that `step` steps are committed, and claim so."""
        self.progress.note(step)
        if self._chain is not None:
            self.progress.claim(self._chain, hosts=self.hosts)

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
        self._change(CAUSE_OF[outcome])
        self._forget()
        self._setting.publish(self.me, RunEnded(self._setting.run, outcome, reason))

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
                if self.trainer is not None:
                    self.trainer.receive(sender, message)
            elif isinstance(message, Absent | Noted | Saved | Checkpointed | GivenUp):
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
            self.ask(sender, End(message.plan, "done", ""), END_SECONDS_MAX, nothing)

    def _from_member(self, plan: Plan, sender: PeerId, message: Any) -> None:
        if message.plan != plan_hash(plan) or self._succeeding is None:
            return
        if not isinstance(message, Saved):
            check_sender(plan, sender, message)
        match message:
            case Absent():
                for peer in message.peers:
                    self._succeeding.miss(PeerId(peer), message.reason)
            case Noted():
                self.heard()
                if self.progress.show(message.step - 1) and self._chain is not None:
                    self.progress.claim(self._chain, hosts=self.hosts)
            case GivenUp():
                self._leave_branch()
            case Saved() if plan.committer == self.me:
                self.keeping.saved(plan, sender, message)
            case Checkpointed():
                self.keeping.learn(message.step, message.checkpoint)

    def _to_roles(self, plan: Plan, sender: PeerId, message: Any) -> None:
        if isinstance(message, CommitterMessage) and message.plan != plan_hash(plan):
            self._early.append((sender, message))
            return
        if isinstance(message, Open) and self.trainer is not None:
            self.trainer.opened(sender, message)
        if self.hosting.hosted is not None:
            self.hosting.hosted.receive(sender, message)

    def reconnected(self, peer: PeerId) -> None:
        """The stream to `peer` is open again."""
        self.turn(lambda: self._on_reconnected(peer))

    def _on_reconnected(self, peer: PeerId) -> None:
        if self._chain is not None and self.plan is not None and peer in self.plan.roster:
            self.send_all(self._chain.tell(peer))
        if self.hosting.hosted is not None:
            self.hosting.hosted.reconnected(peer)
        if self.trainer is not None:
            self.trainer.reconnected(peer)

    def members_changed(self) -> None:
        """Who lives is another question now than before."""
        if self._succeeding is not None:
            living = self._succeeding.living()
            self._calls.append(lambda core, now: core.reach(now, living))
            self._thinks = True

    def suspected(self, peer: PeerId) -> None:
        """A member may be dead."""
        if self.trainer is not None:
            self.trainer.suspect(peer)

    def answer(self, asker: PeerId, question: Question, reply: Answer) -> None:
        """What a question of another comes to, now or later."""
        self.turn(lambda: answer(self, asker, question, reply))

    def started(self, asker: PeerId, plan: Plan, reply: Answer) -> None:
        """`plan` is in force, says `asker`."""
        if self.plan is None:
            self.begin(plan)
            reply(DONE)
            return
        # What comes after is decided by the chain, and heard from it.
        if self.plan.height < plan.height and asker in self.plan.roster:
            self.catch_up([asker])
        is_other = self.plan.height == plan.height and self.plan != plan
        reply(Declined("another plan is in force") if is_other else DONE)

    def heard(self) -> None:
        """Somebody says that the run goes on."""
        self._pulse.heard()

    def _beat(self) -> None:
        if self.plan is None or self._chain is None:
            return
        self.members_changed()
        committer = None if self.trainer is None else self.trainer.core
        self._note_step(max(self.progress.step, 0 if committer is None else committer.step))
        self.catch_up(self._living())
        self._pulse.beat(self.plan)

    # Bookkeeping

    @property
    def hosts(self) -> bool:
        """Whether a stage is open here, or on its way."""
        return self.hosting.is_opening or self.hosting.hosted is not None

    @property
    def is_paused(self) -> bool:
        """Whether a minority, or a stage without a replica, waits."""
        return self._state == "paused"

    @property
    def is_busy(self) -> bool:
        """Whether there is no room for a stage here."""
        return self._hosts(self.me)

    def _make_hosted(self, plan: Plan, step: int | None) -> Hosted:
        return Hosted(
            self._setting,
            self.me,
            plan,
            step=step,
            later=self.later,
            send=self.send,
            save=self.keeping.save,
            fetch=self._fetch_state,
            restore=self.keeping.restore,
        )

    def _fetch_state(
        self, sources: Sequence[PeerId], plan: bytes, step: int, then: Callable[[State | None], None]
    ) -> None:
        fetch_from(self.ask, sources, FetchState(plan, step), then)

    def catch_up(self, peers: Sequence[PeerId]) -> None:
        """Ask what of the chain is missing here."""
        if self._chain is not None:
            for peer in peers:
                self.send_all(self._chain.tell(peer))

    def _others(self, plan: Plan) -> list[PeerId]:
        """The live members of a plan but for this peer."""
        alive = self._setting.alive(self.me)
        return [peer for peer in plan.members if peer != self.me and alive.get(peer, False)]

    def others(self) -> list[PeerId]:
        """The same of the plan in force."""
        return [] if self.plan is None else self._others(self.plan)

    def _living(self) -> list[PeerId]:
        """Who could hand something over; whoever was in the run has what it kept of it."""
        alive = self._setting.alive(self.me)
        known = () if self._chain is None else self._chain.acquainted
        return [peer for peer in known if alive.get(peer, False)]
