"""This node's membership in one run: the shell around a `partition.run.member.Member`.

It drives the core and the chain of plans, and takes this node's roles in the plan in force: to hold a stage,
feed, commit, or only follow. The core has the rules of a run's life.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from node.errors import RunFailed
from node.pipeline.committer import CommitterShell
from node.placement.leases import Offer, rounded
from node.protocols import runs as wire
from node.protocols.manifest import Run
from node.protocols.notices import Notice
from node.runs.asking import AskShell
from node.runs.best import BestState
from node.runs.chain import ChainShell, Entered
from node.runs.checkpointing import Keeping
from node.runs.completion import collect_result, fetch_result, with_checkpoint
from node.runs.context import Service
from node.runs.progress import ProgressReports
from node.runs.rebalancing import Rebalancing
from node.runs.stage import Hosting
from node.runs.standbys import Standbys
from node.runs.steering import Steering
from node.runs.trainer import Training, keep_data
from node.waker import Waker
from partition.plan.change import Change, standby_trainers
from partition.plan.history import first_plan
from partition.plan.plan import Plan, plan_hash
from partition.run import events
from partition.run import member as core
from partition.run.asks import Declined, Done, Reply
from partition.run.dispatch import Role, role_of
from partition.run.messages import REASON_LENGTH_MAX, Leaving, check_sender
from partition.run.proposals import Surroundings
from partition.run.stall import StallClock
from partition.run.states import State
from partition.steps.messages import Failed, Open

STANDBY_TRAINERS = 2
"""The number of next-in-line trainers that fetch the data beforehand."""


class RunMember:
    """One run on this node, from its manifest to its end.

    Long because it is the driver of one core: each of its events and roles is one short method here.
    """

    def __init__(self, service: Service, run: Run) -> None:
        self.run = run
        self._service = service
        self._clock = service.seams.clock
        self._start_task = partial(service.start_task, of=run)
        self._me = service.signer.peer
        manifest = run.manifest
        self.core: core.Member = service.seams.core(
            core.Member,
            self._me,
            requester=run.requester,
            samples_per_step=manifest.microbatches * manifest.microbatch,
            may_fork=manifest.on_lost_quorum == "fork",
            around=Surroundings(service.live, service.gone, self._free),
            roles=self,
            save_every=manifest.save_every,
            settings=service.settings,
        )
        self._chain: ChainShell | None = None
        self._asking: AskShell | None = None
        self._keeping = Keeping(
            service, run, self._living, lambda: self._committer, learned=self._checkpointed
        )
        self.hosting = Hosting(
            service,
            run,
            holders=self._holders,
            failed=self.fail_stage,
            abandoned=self._abandoned,
            save=self._keeping.save,
            restore=self._keeping.restore,
        )
        best_from = self._bring_back, self._keeping.note_best
        self._best = BestState(service, run, lambda: self._committer, *best_from)
        self._rebalancing = Rebalancing(service, run, self._recut, self._offers)
        self._standbys = Standbys(service, run, self._recut, self._offers, self.absent)
        self.steering = Steering(service, run, self._paused)
        self._committer: CommitterShell | None = None
        self._past: CommitterShell | None = None
        self._training: Training | None = None
        self._life, self._stall = trio.CancelScope(), StallClock(self._now)
        self.stopped_by: Fact | None = None
        self.is_over_for_all = False
        self._reports = ProgressReports(service, run, self.core, self._stall, self._best, self.steering)
        self.shown = self._reports.shown
        self.export, self.read_state = self.hosting.export, self.hosting.read_state
        self.prepare, self.unprepare = self.hosting.prepare, self.hosting.unprepare
        self.planner_lost = self.hosting.planner_lost
        self.keep, self.close_stage = self.hosting.keep, self.hosting.end
        self._decided = trio.Event()
        self._waker = Waker(service.seams.clock, lambda: self.core.deadline)
        self._is_acting, self._is_driven = False, True

    # What the core asks of its roles

    @property
    def hosts(self) -> bool:
        """Return whether a stage of this run is open here, or being opened."""
        return self.hosting.core.occupies

    @property
    def is_opening(self) -> bool:
        """Return whether a stage is being opened."""
        return self.hosting.core.is_opening

    @property
    def committed(self) -> int | None:
        """Return the number of steps committed here, if this node commits and its replicas are synced."""
        committer = self._committer
        return None if committer is None or committer.core.phase == "syncing" else committer.core.step

    @property
    def restorable(self) -> tuple[bytes, int] | None:
        """Return the newest complete checkpoint and its step; under a final plan, the result's."""
        is_final = self.plan is not None and self.plan.is_final
        return self._best.checkpoint if is_final else self._keeping.restorable

    @property
    def can_restore(self) -> bool:
        """Return whether a copy of that is here, or may be at another live member, present or former."""
        return self._keeping.can_restore

    @property
    def can_tell(self) -> bool:
        """Return whether a newcomer can be told how the next plan came about."""
        return self._chain is not None and self._chain.can_tell

    def _free(self) -> list[tuple[PeerId, int]]:
        return [(row.peer, rounded(row.flops_per_second)) for row in self._offers() if row.has_slot]

    def _offers(self) -> list[Offer]:
        return self._service.places.choose(self.run, self._service.offers())

    # What is known

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self.core.plan

    @property
    def plan_hash(self) -> bytes | None:
        """Return the hash of the plan in force."""
        return None if self.plan is None else plan_hash(self.plan)

    @property
    def state(self) -> State:
        """Return the run's state, as in the table of states."""
        return self.core.state

    @property
    def is_witness(self) -> bool:
        """Return whether this node is in another's run without a stage."""
        is_others = self.run.requester != self._me
        return is_others and self.plan is not None and self.plan.stage_of(self._me) is None

    @property
    def acquainted(self) -> set[PeerId]:
        """Return all peers known to be, or to have been, members."""
        return set(self.core.acquainted)

    @property
    def _now(self) -> float:
        return self._clock.monotonic()

    def _holders(self) -> list[PeerId]:
        """Return the peers that may hand over data and model: the requester, then other members."""
        members = () if self.plan is None else self.plan.members
        others = [peer for peer in members if peer not in (self._me, self.run.requester)]
        return [self.run.requester, *others]

    def _living(self) -> list[PeerId]:
        """Return live peers that could hand something over; former members keep their copies."""
        live = self._service.live()
        return [peer for peer in self.core.acquainted if peer in live]

    # Driving the core

    def place(self) -> None:
        """Look for providers, as the requester."""
        self.core.place()
        self._act()

    def begin(self, plan: Plan, entered: Entered, durable: bytes = b"") -> None:
        """Enter the run by the first known plan, and follow its chain, `durable` after a restart."""
        chain = self._chain = ChainShell(
            self._service,
            self.run,
            plan,
            entered=entered,
            durable=durable,
            may_fork=self.run.manifest.on_lost_quorum == "fork",
            tie_breaker=self.run.tie_breaker,
            stored=self._stored,
        )
        self._asking = AskShell(self._service, self.run, chain, lambda: self.steering.fact)
        first = first_plan(entered.history)
        self.core.begin(self._now, chain.core, first, is_restart=bool(durable))
        self._start_task(self._live)
        self._act()
        if durable:
            self._service.publish_plan(self.run, chain.head)

    async def _live(self) -> None:
        assert self._chain is not None
        try:
            with self._life:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._chain.run)
                    nursery.start_soon(self._waker.run, self.core, self._woken)
                    await trio.sleep_forever()
        finally:
            self._is_driven = False
        self.core.close()
        self._act()

    def _woken(self, _: None) -> None:
        self._act()

    def _stored(self) -> None:
        self.core.stored(self._now)
        self._act()

    def _replied(self, now: float, number: int, reply: Reply) -> None:
        self.core.replied(now, number, reply)
        self._act()

    def _act(self) -> None:
        """Carry out the core's requests, and those that follow from them."""
        if self._is_acting:
            return
        self._is_acting, member = True, self.core
        try:
            while True:
                sends, member.sends[:] = list(member.sends), []
                for peer, message in sends:
                    self._service.send(peer, message)
                if self._asking is not None:
                    self._asking.put(member.asks, self._replied)
                if not member.events:
                    break
                self._on_event(member.events.pop(0))
        finally:
            self._is_acting = False
            self._waker.stir()

    def _on_event(self, event: events.Event) -> None:
        service, chain = self._service, self._chain
        match event:
            case events.StateChanged():
                self.steering.changed(event)
            case events.PlanFollowed():
                service.follow(plan_hash(event.plan), self)
            case events.PlanEntered():
                self._end_roles(event)
            case events.RolesGiven():
                self._take_roles(event)
            case events.Left():
                self._keeping.left_branch(event.kept_step)
                self._stop_training()
                self._committer = None
                self._start_task(self._let_go)
            case events.PromisesMade() if chain is not None:
                chain.store()
            case events.MessageRefused():
                service.refuse(event.peer, RemoteProtocolError(event.reason))
            case events.PauseWanted() | events.SaveWanted() | events.StepsWanted():
                self.steering.steer(event, self._committer)
            case events.CheckpointFound():
                self._keeping.learn(event.step, event.checkpoint)
            case events.RunOver():
                self._start_task(self.end, event.outcome, event.detail, event.weights)

    # Roles

    def _end_roles(self, event: events.PlanEntered) -> None:
        """End this node's roles of the last plan, as another is in force."""
        self._past, self._committer = self._committer, None
        self._stop_training()
        self._decided.set()
        self._decided = trio.Event()
        self._service.publish_plan(self.run, event.plan)

    def _take_roles(self, event: events.RolesGiven) -> None:
        """Host, feed and commit as the plan says."""
        plan = event.plan
        self._stall.entered(self._now, None if event.change is None else event.change.lost)
        self.hosting.adopt(plan)
        self._best.begin(plan)
        self._rebalancing.begin(plan)
        self._standbys.begin(plan)
        past, self._past = self._past, None
        if past is not None and plan.committer == self._me:
            for dropped in past.dropped(plan):
                self._reports.tell(plan, dropped)
        if event.over is not None:
            self._fail(event.over)
        elif self._me in plan.trainers:
            self._train(plan, event.lost_steps)
        elif self._me in standby_trainers(plan.roster, plan.stages)[:STANDBY_TRAINERS]:
            self._start_task(keep_data, self._service, self.run, self._holders())

    def _train(self, plan: Plan, lost_steps: int) -> None:
        if plan.committer == self._me:
            self._commit(plan, lost_steps)
        training = self._training = Training(
            self._service,
            self.run,
            plan,
            self._holders(),
            self._committer,
            cannot=partial(self._cannot_train, plan),
            over=partial(self._finish_training, plan),
        )
        self._start_task(training.run)

    def _commit(self, plan: Plan, lost_steps: int) -> None:
        saved = self._keeping.restorable
        self._committer = CommitterShell(
            self._service,
            self.steering.run,
            plan,
            partial(self._reports.tell, plan),
            absent=self.absent,
            paused=self._paused,
            stalled_since=self._stall.since,
            saved=saved[1] if saved is not None else 0,
            failures=self.core.failures,
            lost_steps=lost_steps,
            stepped=partial(self._stepped, plan),
            best=self._best,
        )
        if saved is None and self.run.manifest.save_every:
            self._committer.save()  # else whatever is lost before the first checkpoint ends the run
        self.core.catch_up([peer for peer in plan.members if peer != self._me])
        self.core.look_for_leavers()
        self.steering.begin(self._committer, plan, self._me)

    def _stepped(self, plan: Plan, step: int, seconds: float, *measured: Mapping[PeerId, int]) -> None:
        self._rebalancing.stepped(plan, step, seconds, *measured)
        self._standbys.stepped(plan, seconds)

    def _stop_training(self) -> None:
        if self._training is not None:
            self._training.stop()
            self._training = None

    async def _finish_training(self, plan: Plan, reason: str | None, digest: str = "") -> None:
        """As the committer: end the training, after the last step or for the `reason` of a failure."""
        self.core.training_over(reason)
        self._act()
        if reason is None:
            run, replica = self.steering.run, self.hosting.replica
            digest, reason = await collect_result(self._service, run, plan, replica)
        if reason is None:
            self._finish("done", self._best.detail, digest)
        else:
            self._fail(reason)

    async def _cannot_train(self, plan: Plan, reason: str) -> None:
        """Ask for a plan without this node's part in the feeding, which it cannot play."""
        if plan.committer == self._me and (plan.height == 0 or len(plan.roster) == 1):
            self._finish("failed", reason, "")
        elif plan.committer == self._me:
            self.absent(self._me, reason)
        else:
            self._service.send(plan.committer, Leaving(plan_hash(plan), at_once=True))

    def fail_stage(self, reason: str) -> None:
        """Report that this node cannot hold its stage: the next plan excludes it."""
        plan = self.plan
        if plan is not None and not self.core.is_over:
            message = Failed(plan=plan_hash(plan), reason=reason[:REASON_LENGTH_MAX])
            self._service.send(plan.committer, message)

    def absent(self, peer: PeerId, reason: str) -> None:
        """Exclude a peer from the next plan, as the committer or of this node itself."""
        self.core.exclude_for_all(self._now, peer, reason)
        self._act()

    def _paused(self, step: int) -> None:
        if self.steering.is_paused and self._committer is not None:
            self._committer.save()
        self.core.paused(self._now, step)
        self._act()

    def _recut(self, plan: Plan, wanted: Change) -> None:
        """As the committer of `plan`: propose other borders, or more stages."""
        if plan == self.plan:
            self.core.recut(wanted)
            self._act()

    def _checkpointed(self) -> None:
        self._best.learned(self._keeping.restorable)
        self.core.checkpointed(self._now)
        self._act()

    def _bring_back(self, checkpoint: bytes, step: int) -> None:
        self.core.bring_back(self._now, checkpoint, step)
        self._act()

    async def save(self) -> int:
        """Have a checkpoint made after this step; return it. Raises RunFailed: not the committer."""
        if self._committer is None:
            raise RunFailed(f"run {self.run.text[:8]} is committed by another node: ask there")
        self._committer.save()
        return self._committer.core.step + 1

    # The end

    def _abandoned(self) -> None:
        """Drop the stage that was opened for a plan that was not decided."""
        if self.plan is None and not self.core.is_over:
            self.core.is_over = True
            self._service.released(self)

    async def _let_go(self) -> None:
        await self.hosting.end()
        self._service.forgotten(self)
        self._decided.set()
        self._life.cancel()

    def _fail(self, reason: str) -> None:
        """End the run for all, with a note on what can be recovered."""
        self._finish("failed", with_checkpoint(reason, self.run, self._keeping.restorable), "")

    def _finish(self, outcome: str, detail: str, weights: str) -> None:
        """Tell every live member, then end here, whichever plan comes into force meanwhile."""
        self.core.finish(self._now, outcome, detail, weights)
        self._act()

    async def end(
        self, outcome: str, detail: str, weights: str, *, source: PeerId | None = None, refusal: str = ""
    ) -> None:
        """End the run here: fetch the result from `source` unless there is a `refusal`, close the stage, and
        announce it. Without a source the result is here already."""
        if self.core.is_over:
            return
        self.core.is_over = True
        self.is_over_for_all = self.core.is_finishing or source is not None or self.stopped_by is not None
        missing = refusal
        if outcome == "done" and source is not None and not missing:
            missing = await fetch_result(self._service, self.run, source, weights)
        await self.hosting.end()
        self.core.ended(outcome)
        is_here = outcome == "done" and not missing
        await self._service.ended(self, outcome, missing or detail, weights, is_here=is_here)
        self._decided.set()
        self._life.cancel()
        self._stop_training()

    async def fail(self, reason: str) -> None:
        """End after an unexpected failure; where another node commits, the run goes on without this one."""
        if not (self.core.is_over or self.core.is_finishing):
            if self.core.commits:
                self._finish("failed", reason, "")
                if not self._is_driven:
                    self._start_task(self._tell_failure, reason)
                return
            self.absent(self._me, reason)
        self.core.is_over = False  # an end that failed half way is gone through again
        await self.end("failed", reason, "")

    async def _tell_failure(self, reason: str) -> None:
        """Tell the others of the end where this member's driver has failed itself; bounded."""
        self.core.close()
        with trio.move_on_after(self._service.settings.end_seconds_max):
            while not self.core.is_over:
                await self._waker.wake_when_due(self.core)
                self._act()
        await self.end("failed", reason, "")

    async def drop(self, reason: str) -> None:
        """Close the stage at once; the vote stays briefly, so that the others can replan."""
        if self.core.is_over or self.core.is_dropped:
            return
        self.core.is_dropped = True
        self._stop_training()
        self._committer = None
        await self.hosting.end()
        self.absent(self._me, "it dropped the run")
        self._start_task(self._go, reason)

    async def _go(self, reason: str) -> None:
        await self._until_out(self._service.settings.drop_seconds_max)
        self.core.is_over = True
        self.core.ended("stopped")
        await self._service.ended(self, "stopped", reason, "", is_here=False)
        self._life.cancel()

    async def _until_out(self, seconds: float) -> bool:
        """Wait for a plan without this node; return whether it came."""
        with trio.move_on_after(seconds):
            while not self.core.is_over and self.plan is not None and self._me in self.plan.roster:
                await self._decided.wait()
            return True
        return False

    async def leave(self) -> bool:
        """Hand this node's part over before it goes; bounded. Return whether that succeeded."""
        if self.plan is None or self.core.is_over:
            return True
        self.core.leave(self._now)
        self._act()
        return await self._until_out(self._service.settings.leave_seconds_max)

    # What comes in

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        """Handle a pipeline message of the plan in force, or one about the chain. Raises
        RemoteProtocolError."""
        self._stall.heard(now, sender)
        if isinstance(message, Notice | wire.Saved | wire.Revised):
            self._on_told(sender, message)
            return
        match role_of(message):
            case Role.MEMBER:
                self.core.receive(now, sender, message)
                self._act()
            case Role.COMMITTER if self._committer is not None:
                self._committer.receive(now, sender, message)
            case Role.STAGE:
                self._to_stage(now, sender, message)

    def revise(self, fact: Fact) -> bool:
        """Handle the requester's revision of the run; return whether it is new. Raises
        RemoteProtocolError."""
        return self.steering.take(fact, self.state, self._committer, self.plan, self._me)

    def _on_told(self, sender: PeerId, message: Notice | wire.Saved | wire.Revised) -> None:
        plan = self.plan
        if plan is None:
            return
        if isinstance(message, wire.Revised):
            self.revise(message.revision)
            return
        if isinstance(message, Notice):
            check_sender(plan, sender, message)
            self._reports.hear(message)
            self.core.heard(self._now)
        elif plan.committer == self._me:
            self._keeping.saved(plan, sender, message)
        else:
            raise RemoteProtocolError("a saved stage for a peer that is not the run's committer")

    def _to_stage(self, now: float, sender: PeerId, message: Any) -> None:
        if isinstance(message, Open) and self._training is not None:
            self._training.open(sender, message)
        if self.hosting.replica is not None:
            self.hosting.replica.receive(now, sender, message)

    def renewed(self, sender: PeerId, plan: bytes) -> Done | Declined:
        """Answer whether this node is still in the run."""
        return self.core.on_renew(self._now, sender, plan)

    def is_behind(self, sender: PeerId, plan: Plan) -> bool:
        """Return whether this node does not know the plan before `plan`; then it asks `sender`."""
        is_behind = self.core.is_behind(sender, plan)
        self._act()
        return is_behind

    def on_start(self, sender: PeerId, plan: Plan) -> Done | Declined | None:
        """Answer a claim that a plan is in force; None: this node may begin with it."""
        answer = self.core.on_start(sender, plan)
        self._act()
        return answer

    def catch_up(self, peers: Sequence[PeerId]) -> None:
        """Ask peers for missing parts of the chain."""
        self.core.catch_up(peers)
        self._act()

    def reconnected(self, peer: PeerId) -> None:
        """Handle a link to `peer` that was opened anew."""
        if self.plan is not None and peer in self.plan.roster:
            self.catch_up([peer])
        if self.hosting.replica is not None:
            self.hosting.replica.reconnected(peer)
        if self._training is not None:
            self._training.reconnected(peer)
        if self.plan is not None and self.plan.committer == self._me:
            self.steering.tell(self.plan, self._me, peer)

    def members_changed(self) -> None:
        """React to a change in the set of live members."""
        self.core.members_changed(self._now)
        self._act()

    def member_suspected(self, peer: PeerId) -> None:
        """Handle the suspicion that a member may be dead."""
        if self._committer is not None and self.plan is not None and self.plan.stage_of(peer) is not None:
            self._committer.suspect(peer)
