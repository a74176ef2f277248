"""One peer's part in one run of a world of cores: drives a `partition.run.member.Member`.

It does the work of a node under trio, in virtual time on one agenda: it keeps the promises of the chain of
plans and gives the peer its roles under the plan in force. Each call is one turn: it calls a core, sends the
core's messages, acts on its events, and then does what is due. So no peer dies in the middle of a turn. A
restarted peer begins with a new `SimMember` and its old `Disk`.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.chain import base_plan
from partition.plan.change import Change
from partition.plan.plan import Plan, plan_hash
from partition.run import events
from partition.run import member as core
from partition.run.asks import Ask, Declined, Done, HandOverStage, Unanswered
from partition.run.dispatch import Dispatch
from partition.run.proposals import Surroundings
from partition.run.way_back import WayBack
from sim.events import BranchLeft, PlanAdopted, RunEnded
from sim.network.instants import instant
from sim.worlds.answering import answer
from sim.worlds.ending import SimResult
from sim.worlds.hosting import SimStageHost
from sim.worlds.integer_stage import IntegerState
from sim.worlds.keeping import SimCheckpointKeeper
from sim.worlds.receiving import receive, reconnected
from sim.worlds.run_context import Setting
from sim.worlds.run_messages import Disk, Noted, Question, Saved, checkpoint_name
from sim.worlds.sim_stage import Hosted
from sim.worlds.streams import Answer
from sim.worlds.trainer import Trainer
from sim.worlds.turns import LifeTurns

INF = float("inf")
RATE = 1_000
"""The rate of a peer at normal speed. The cores treat rates as FLOP/s, and only compare them."""


class SimMember(LifeTurns):
    """One run at one peer, from a start of the peer to its next stop. `plan` is None while the peer is not in
    the run."""

    def __init__(
        self,
        setting: Setting,
        me: PeerId,
        disk: Disk,
        rng: Random,
        *,
        has_forgotten: bool,
        is_busy: Callable[[PeerId], bool],
    ) -> None:
        """`has_forgotten`: the peer was in the run before a restart, and its disk is gone. `is_busy` returns
        whether a peer lacks room for a stage."""
        super().__init__(setting, me)
        self.outcome = ""
        self.trainer: Trainer | None = None
        self._disk = disk
        self._rng = rng
        self._has_forgotten = has_forgotten
        self._is_busy = is_busy
        self._dispatch: Dispatch[SimMember, Any] = Dispatch()
        self.keeping = SimCheckpointKeeper(
            setting, me, disk, live=self._living, ask=self.ask, later=self.later
        )
        self.hosting = SimStageHost(lambda: self.core, self._make_hosted, self.later, lambda: self.now)
        self.requester = setting.requester
        self._result = SimResult(setting)
        self._armed_at = INF
        self.core = self._make_core()

    def _make_core(self) -> core.Member:
        setting = self.setting
        return core.Member(
            self.me,
            requester=setting.requester,
            samples_per_step=setting.training.microbatches,
            may_fork=setting.training.on_lost_quorum == "fork",
            around=Surroundings(partial(self._told, True), partial(self._told, False), self._free),
            roles=self,
            save_every=setting.training.checkpoint_every,
            newest=self._disk.newest,
            parts=setting.cores.member,
            settings=setting.settings,
        )

    def _told(self, lives: bool) -> list[PeerId]:
        return [peer for peer, is_alive in self.setting.alive(self.me).items() if is_alive is lives]

    def _free(self) -> list[tuple[PeerId, int]]:
        setting = self.setting
        free = [peer for peer in setting.pool if not self._is_busy(peer)]
        return [(peer, max(1, round(RATE / setting.slowness(peer)))) for peer in free]

    # Questions that the core asks about its roles

    @property
    def committed(self) -> int | None:
        """The number of committed steps, if this peer commits and its replicas are synced; else None."""
        committer = None if self.trainer is None else self.trainer.core
        return None if committer is None or committer.phase == "syncing" else committer.step

    @property
    def best(self) -> WayBack | None:
        """Always None, because this simulation does not track the best state."""
        return None

    def holds(self, checkpoint: WayBack) -> bool:
        """Return whether copies of a checkpoint are here."""
        return self.keeping.holds(checkpoint)

    @property
    def can_tell(self) -> bool:
        """Always True, because newcomers need no history here."""
        return True

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self.core.plan

    # Turns

    def settle(self) -> None:
        """Do everything that follows from an action."""
        is_settled = False
        while not is_settled:
            self._act()
            if self.core.deadline <= self.now:
                self.core.wake(self.now)
            else:
                is_settled = self.trainer is None or not self.trainer.follow()
        due = min(
            self.core.deadline,
            self.trainer.deadline if self.trainer is not None else INF,
        )
        if due < self._armed_at:
            self._armed_at = due
            ground = self.setting.ground
            ground.at(max(instant(due), ground.now), lambda: self._ring(due))

    def _ring(self, due: float) -> None:
        if self._armed_at == due:  # if not, an earlier deadline has replaced this one
            self._armed_at = INF
            self.turn(self._wake)

    def _wake(self) -> None:
        if self.trainer is not None and self.trainer.deadline <= self.now:
            self.trainer.wake()

    # Plans

    def place(self) -> None:
        """Record that this peer requests the run."""
        self.core.place()

    def begin(self, plan: Plan) -> None:
        """Follow the chain, beginning with the first plan in force that this member learns of."""
        self._disk.chain = b""
        self._enter(plan, b"")

    def restart(self) -> None:
        """Restart with a disk that has the chain."""
        try:
            self._enter(base_plan(self._disk.chain), self._disk.chain)
        except RemoteProtocolError as error:
            raise AssertionError(f"a disk is damaged: {error}") from error

    def _enter(self, plan: Plan, durable: bytes) -> None:
        chain = self.setting.cores.agreement(
            self.me,
            plan,
            self._rng,
            durable=durable,
            may_fork=self.setting.training.on_lost_quorum == "fork",
            tie_breaker=self.setting.tie_breaker,
            abstain=self._has_forgotten,
        )
        self.core.begin(self.now, chain, self.setting.first or plan, is_restart=bool(durable))

    def _act(self) -> None:
        """Act on the core's output until there is none."""
        while True:
            member = self.core
            sends, member.sends[:] = list(member.sends), []
            self.send_all(sends)
            for wanted in member.asks.take():
                self._put(member, wanted)
            if not member.events:
                return
            self._on_event(member.events.pop(0))

    def _put(self, member: core.Member, wanted: Ask) -> None:
        request = wanted.request

        def replied(reply: Any) -> None:
            if isinstance(request, HandOverStage) and isinstance(reply, IntegerState):
                self._result.take(request.plan, request.stage, reply)
                reply = Done()
            known = reply if isinstance(reply, Done | Declined) else Unanswered("no answer")
            member.replied(self.now, wanted.number, known)

        self.ask(wanted.peer, request, wanted.seconds, replied)

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.PlanFollowed():
                self._follow(event.plan)
            case events.PlanEntered():
                self._stop_training()
            case events.RolesGiven():
                self._take_roles(event)
            case events.RunLeft():
                if event.is_branch:
                    self.setting.publish(self.me, BranchLeft(self.setting.run))
                self._forget()
                self.core = self._make_core()
                self._has_forgotten = False
            case events.PromisesMade():
                self._disk.chain = self.core.durable
                self.core.stored(self.now)
            case events.MessageRefused():
                self.setting.counters["refused"] += 1
            case events.RunOver():
                self.end(event.outcome, event.detail)
            case _:
                self._on_work(event)

    def _on_work(self, event: events.Event) -> None:
        match event:
            case events.StageAbandoned():
                self.hosting.abandon()
            case events.PauseWanted() | events.SaveWanted() | events.StepsWanted():
                if self.trainer is not None:
                    self.trainer.steer(event)
            case events.SealWanted():
                name = checkpoint_name(self.setting.run, event.step)
                self.core.checkpoints.sealed(self.now, event.step, name)
            case events.ResultWanted():
                self._result.check(event.plan)
                self.core.end.result_kept(self.now, event.plan, "", "")
            case events.NewestChanged():
                self._disk.newest = event.newest
                self.core.checkpoints.stored(event.newest)

    def _follow(self, plan: Plan) -> None:
        self.provider.slots.release_run(self.setting.run)
        for row in self._dispatch.follow(plan_hash(plan), self):
            self.setting.ground.at(self.now, partial(self.receive, *row))

    def _take_roles(self, event: events.RolesGiven) -> None:
        """Host, feed and commit as the plan assigns."""
        plan = event.plan
        adopted = PlanAdopted(self.setting.run, plan.height, plan_hash(plan), plan.parent)
        self.setting.publish(self.me, adopted)
        self.hosting.act(event.stage)
        if self.me in plan.trainers and not event.is_over:
            self.trainer = Trainer(self.setting, self.me, plan, self, self.core.failures)
            self.trainer.begin(self.core.checkpoints.newest)

    def absent(self, peer: PeerId, reason: str) -> None:
        """As the committer: leave this peer out of the next plan."""
        self.core.exclude_for_all(self.now, peer, reason)

    def paused(self, step: int) -> None:
        """As the committer: record that no step is open."""
        self.core.between.paused(self.now, step)

    def recut(self, wanted: Change) -> None:
        """As the committer: move the borders between stages, or add stages."""
        self.core.between.recut(wanted)

    def leave(self) -> None:
        """Hand over this peer's part before it leaves."""
        if self.plan is not None:
            self.core.between.leave(self.now)

    @property
    def is_out(self) -> bool:
        """Whether the peer can leave now without loss."""
        return self.plan is None or self.core.is_over or self.me not in self.plan.roster

    def _stop_training(self) -> None:
        if self.trainer is not None:
            self.trainer.stop()
            self.trainer = None

    def _forget(self) -> None:
        self.core.is_over = True
        self.core.close()
        for wanted in self.core.asks.take():
            self._put(self.core, wanted)
        self._dispatch.forget(self)
        self.hosting.close()
        self._stop_training()
        self._disk.forget_chain()

    # Training

    def committed_steps(self, step: int) -> None:
        """As the committer: record the number of committed steps."""
        self.core.show_step(step - 1)
        if self.plan is not None:
            for peer in self.others():
                self.send(peer, Noted(plan_hash(self.plan), step))

    def trained(self, reason: str | None) -> None:
        """As the committer: record that training is done, or has failed for a `reason`."""
        self.core.end.training_over(self.now, reason)

    # The end

    def end(self, outcome: str, reason: str) -> None:
        """Record that the run has ended for this peer."""
        if self.outcome:
            return
        self.outcome = outcome
        self.core.ended(outcome)
        self._forget()
        self.setting.publish(self.me, RunEnded(self.setting.run, outcome, reason))

    # Input

    def receive(self, sender: PeerId, message: Any) -> None:
        """Handle a message on the stream from `sender`."""
        self.turn(lambda: receive(self, self._dispatch, sender, message))

    def reconnected(self, peer: PeerId) -> None:
        """Handle a reopened stream to `peer`."""
        self.turn(lambda: reconnected(self, peer))

    def members_changed(self) -> None:
        """React to a change in the set of live members."""
        self.core.members_changed(self.now)

    def planner_lost(self, peer: PeerId) -> None:
        """Handle the death or the departure of a member."""
        self.hosting.planner_lost(peer)

    def suspected(self, peer: PeerId) -> None:
        """Handle the suspicion that a member may be dead."""
        if self.trainer is not None:
            self.trainer.suspect(peer)

    def answer(self, asker: PeerId, question: Question, reply: Answer) -> None:
        """Answer a question of another member, now or later."""
        self.turn(lambda: answer(self, asker, question, reply))

    # Bookkeeping

    @property
    def hosts(self) -> bool:
        """Whether a stage is open or being opened here."""
        return self.core.hosting.occupies

    @property
    def is_paused(self) -> bool:
        """Whether the run waits, in a minority or for a stage without a replica."""
        return self.core.state == "paused"

    def _make_hosted(self, plan: Plan, step: int | None) -> Hosted:
        return Hosted(
            self.setting,
            self.me,
            plan,
            step=step,
            later=self.later,
            send=self.send,
            save=self._save,
            fetch=self.keeping.fetch_state,
            restore=self.keeping.restore,
            failed=self.hosting.failed,
        )

    def _save(self, plan: Plan, stage: int, state: IntegerState) -> None:
        """Save a copy of this peer's stage, if this replica is the one that saves."""
        if self.core.checkpoints.saves(plan, stage):
            self.keeping.put_stage(plan, stage, state)
            self.send(plan.committer, Saved(plan_hash(plan), state.step, stage))

    def others(self) -> list[PeerId]:
        """The live members of the plan in force, without this peer."""
        return self.core.others()

    def _living(self) -> list[PeerId]:
        """Return the live peers that may hand over states. Former members still have what they kept."""
        live = self._told(True)
        return [peer for peer in self.core.acquainted if peer in live]
