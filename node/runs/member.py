"""This node's membership in one run: the shell around a `partition.run.member.Member`.

It drives the core and the chain of plans, and takes this node's roles in the plan in force: it holds a stage,
feeds, commits, or only follows. The core decides how the run proceeds.
"""

from collections.abc import Sequence
from functools import partial

import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from node.placement.leases import Offer, rounded
from node.protocols.manifest import Run
from node.runs.asking import AskShell
from node.runs.chain import ChainShell, RunEntry
from node.runs.checkpointing import CheckpointKeeper, read_newest
from node.runs.context import RunService
from node.runs.departure import Departure
from node.runs.duties import Duties
from node.runs.member_end import MemberEnd
from node.runs.member_messages import MemberMessages
from node.runs.stage import StageHosting
from node.waker import Waker
from partition.plan.change import Change
from partition.plan.history import first_plan
from partition.plan.plan import Plan, plan_hash
from partition.run import events
from partition.run import member as core
from partition.run.asks import Declined, Done, Reply
from partition.run.messages import REASON_LENGTH_MAX
from partition.run.proposals import Surroundings
from partition.run.states import State
from partition.run.way_back import WayBack
from partition.steps.messages import Failed


class RunMember:
    """One run on this node, from its manifest to its end."""

    def __init__(self, service: RunService, run: Run) -> None:
        self.run = run
        self._service = service
        self._clock = service.seams.clock
        self._start_task = partial(service.start_task, of=run)
        self._me = service.signer.peer
        manifest = run.manifest
        self.core: core.Member = service.seams.core(
            service.seams.part(core.Member),
            self._me,
            requester=run.requester,
            samples_per_step=manifest.microbatches * manifest.microbatch,
            may_fork=manifest.on_lost_quorum == "fork",
            around=Surroundings(service.live, service.gone, self._free),
            roles=self,
            save_every=manifest.save_every,
            newest=read_newest(service.seams, run.text),
            settings=service.settings,
        )
        self._chain: ChainShell | None = None
        self._asking: AskShell | None = None
        self.keeping = CheckpointKeeper(
            service, run, self.core.checkpoints, self._living, lambda: self.duties.committer, act=self.act
        )
        self.hosting = StageHosting(
            service,
            run,
            self.core.hosting,
            holders=self.holders,
            failed=self.fail_stage,
            abandoned=self._abandoned,
            save=self.keeping.save,
            restore=self.keeping.restore,
        )
        self.duties = Duties(service, run, self)
        self.steering, self._reports = self.duties.steering, self.duties.reports
        self._life = trio.CancelScope()
        self.stopped_by: Fact | None = None
        self.is_over_for_all = False
        self.shown = self._reports.shown
        self.export, self.read_state = self.hosting.export, self.hosting.read_state
        self.unprepare = self.hosting.unprepare
        self.planner_lost = self.hosting.planner_lost
        self.close_stage = self.hosting.end
        self._departure = Departure(self, service, self._start_task, self._life.cancel)
        self.leave, self.drop = self._departure.leave, self._departure.drop
        self._waker = Waker(service.seams.clock, lambda: self.core.deadline)
        self._end = MemberEnd(self, service, self._waker, self._gone)
        self.end, self.fail = self._end.end, self._end.fail
        messages = MemberMessages(self, service)
        self.receive, self.take_frame = messages.receive, messages.take_frame
        self.revise, self.reconnected = messages.revise, messages.reconnected
        self.member_suspected = messages.member_suspected
        self._has_begun = trio.Event()
        self._is_acting, self._has_life, self.is_driven = False, False, True

    # What the core asks about this node's roles

    @property
    def hosts(self) -> bool:
        """Whether a stage of this run is open on this node, or being opened."""
        return self.core.hosting.occupies

    @property
    def committed(self) -> int | None:
        """The number of steps committed here, if this node commits and its replicas are synced."""
        return self.duties.committed

    @property
    def best(self) -> WayBack | None:
        """The checkpoint of the state with the best validation, if the run keeps it."""
        return self.duties.best.checkpoint

    def holds(self, checkpoint: WayBack) -> bool:
        """Return whether this node has a complete checkpoint."""
        return self.keeping.holds(checkpoint)

    @property
    def can_tell(self) -> bool:
        """Whether this node can send a newcomer the history of the next plan."""
        return self._chain is not None and self._chain.can_tell

    def _free(self) -> list[tuple[PeerId, int]]:
        return [(row.peer, rounded(row.flops_per_second)) for row in self.offers() if row.has_slot]

    def offers(self) -> list[Offer]:
        return self._service.places.choose(self.run, self._service.offers())

    # State

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self.core.plan

    @property
    def plan_hash(self) -> bytes | None:
        """The hash of the plan in force."""
        return None if self.plan is None else plan_hash(self.plan)

    @property
    def state(self) -> State:
        """The run's state, as in the table of states."""
        return self.core.state

    @property
    def is_witness(self) -> bool:
        """Whether this node is in another peer's run without a stage."""
        is_others = self.run.requester != self._me
        return is_others and self.plan is not None and self.plan.stage_of(self._me) is None

    @property
    def acquainted(self) -> set[PeerId]:
        """All peers known to be, or to have been, members."""
        return set(self.core.acquainted)

    @property
    def _now(self) -> float:
        return self._clock.monotonic()

    def holders(self) -> list[PeerId]:
        """Return the peers that may provide data and model: the requester, then the other members."""
        members = () if self.plan is None else self.plan.members
        others = [peer for peer in members if peer not in (self._me, self.run.requester)]
        return [self.run.requester, *others]

    def _living(self) -> list[PeerId]:
        """Return the live peers that may provide data or checkpoints, including former members, which keep
        their copies."""
        live = self._service.live()
        return [peer for peer in self.core.acquainted if peer in live]

    # Driving the core

    async def prepare(self, plan: Plan, planner: PeerId) -> str | None:
        """Open the stage of a plan that is not in force yet, as `planner` asks. Return None once the stage is
        open, else the reason why it is not."""
        self._drive()
        try:
            return await self.hosting.prepare(plan, planner)
        finally:
            self._waker.stir()

    def place(self) -> None:
        """Search for providers, as the requester."""
        self.core.place()
        self.act()

    def begin(self, plan: Plan, entered: RunEntry, durable: bytes = b"") -> None:
        """Enter the run with the first known plan, and follow its chain. `durable` is the stored chain state
        after a restart."""
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
        self._asking = AskShell(
            self._service, self.run, chain, lambda: self.steering.fact, self._end.collected
        )
        first = first_plan(entered.history)
        self.core.begin(self._now, chain.core, first, is_restart=bool(durable))
        self._drive()
        self._has_begun.set()
        self.act()
        if durable:
            self._service.publish_plan(self.run, chain.head)

    def _drive(self) -> None:
        """Start waking the core, because it has a stage to open or a plan to follow."""
        if not self._has_life:
            self._has_life = True
            self._start_task(self._live)

    async def _live(self) -> None:
        try:
            with self._life:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._waker.run, self.core, self._woken)
                    await self._has_begun.wait()
                    assert self._chain is not None
                    await self._chain.run()
        finally:
            self.is_driven = False
        self.core.close()
        self.act()

    def _woken(self, _: None) -> None:
        self.act()

    def _stored(self) -> None:
        self.core.stored(self._now)
        self.act()

    def _replied(self, now: float, number: int, reply: Reply) -> None:
        self.core.replied(now, number, reply)
        self.act()

    def act(self) -> None:
        """Carry out the core's requests, and the requests that result from them."""
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
            case events.RunLeft():
                self.duties.stop()
                self.duties.committer = None
                self._start_task(self._end.forget)
            case events.PromisesMade() if chain is not None:
                chain.store()
            case events.MessageRefused():
                service.refuse(event.peer, RemoteProtocolError(event.reason))
            case events.RunOver():
                self._start_task(self.end, event.outcome, event.detail, event.weights)
            case _:
                self._on_work(event)

    def _on_work(self, event: events.Event) -> None:
        match event:
            case events.StageAbandoned():
                self._start_task(self.hosting.abandon)
            case events.PauseWanted() | events.SaveWanted() | events.StepsWanted():
                self.steering.steer(event, self.duties.committer)
            case events.NewestChanged():
                self.duties.best.learned(event.newest)
                self.keeping.on_event(event)
            case events.ResultWanted():
                self._start_task(self._end.keep_result, event.plan)
            case events.SealWanted() | events.CheckpointWhole() | events.CheckpointEnded():
                self.keeping.on_event(event)

    # Roles

    def _end_roles(self, event: events.PlanEntered) -> None:
        """End this node's roles of the previous plan, because a new plan is in force."""
        self.duties.end()
        self._departure.look()
        self._service.publish_plan(self.run, event.plan)

    def _take_roles(self, event: events.RolesGiven) -> None:
        """Host, feed and commit according to the plan."""
        self.duties.stall.entered(self._now, None if event.change is None else event.change.lost)
        self.hosting.act(event.stage)
        self.duties.begin(event)

    def fail_stage(self, reason: str) -> None:
        """Report that this node cannot hold its stage, so that the next plan excludes it."""
        plan = self.plan
        if plan is not None and not self.core.is_over:
            message = Failed(plan=plan_hash(plan), reason=reason[:REASON_LENGTH_MAX])
            self._service.send(plan.committer, message)

    def absent(self, peer: PeerId, reason: str) -> None:
        """Exclude a peer from the next plan. The committer may exclude any peer, other members only
        themselves."""
        self.core.exclude_for_all(self._now, peer, reason)
        self.act()

    def recut(self, plan: Plan, wanted: Change) -> None:
        """As the committer of `plan`, propose different stage borders or more stages."""
        if plan == self.plan:
            self.core.between.recut(wanted)
            self.act()

    def bring_back(self, checkpoint: bytes, step: int) -> None:
        self.core.between.bring_back(self._now, checkpoint, step)
        self.act()

    async def save(self) -> int:
        """Have a checkpoint made after the current step; return that step. Raises RunFailed if this node is
        not the committer."""
        return self.duties.save()

    # The end

    def _gone(self) -> None:
        self._departure.look()
        self._life.cancel()

    def _abandoned(self) -> None:
        """Close the stage that was opened for a plan that was not decided."""
        if self.plan is None and not self.core.is_over:
            self.core.is_over = True
            self._service.released(self)
            self._life.cancel()

    # Requests from other peers

    def renewed(self, sender: PeerId, plan: bytes) -> Done | Declined:
        """Answer whether this node is still in the run."""
        return self.core.on_renew(self._now, sender, plan)

    def is_behind(self, sender: PeerId, plan: Plan) -> bool:
        """Return whether `plan` follows a plan that this node does not know. In that case, ask `sender` for
        it."""
        is_behind = self.core.is_behind(sender, plan)
        self.act()
        return is_behind

    def on_start(self, sender: PeerId, plan: Plan) -> Done | Declined | None:
        """Answer a claim that a plan is in force; None means that this node may enter the run with it."""
        answer = self.core.on_start(sender, plan)
        self.act()
        return answer

    def catch_up(self, peers: Sequence[PeerId]) -> None:
        """Ask peers for missing parts of the chain."""
        self.core.catch_up(peers)
        self.act()

    def members_changed(self) -> None:
        """React to a change in the set of live members."""
        self.core.members_changed(self._now)
        self.act()
