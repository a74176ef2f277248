"""This node's membership in one run: the chain of plans as it is known here, and the roles the head gives to
this node.

A member may hold a stage, feed, commit, or only follow. A plan comes into force here when the chain says
that it was decided; roles change then and only then. What should come next is for `node.runs.succession`.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId, short_peer
from node.errors import PeerloomError, RunFailed, Unreachable
from node.events import RunChanged
from node.runs import requests as wire
from node.runs.chain import ChainShell, Entered
from node.runs.committer import CommitterShell
from node.runs.departures import Departures
from node.runs.ending import collect_result, end_for_all, fetch_result, with_checkpoint
from node.runs.hosting import Hosting
from node.runs.keeping import Keeping
from node.runs.manifest import Run
from node.runs.pulse import Pulse
from node.runs.service import Service
from node.runs.succession import Hopeless, Succession, make_succession
from node.runs.telling import Telling
from node.runs.training import Training
from partition.plan import agreement
from partition.plan.change import Change, heirs
from partition.plan.plan import NOTHING, Plan, plan_hash
from partition.plan.votes import AgreementMessage
from partition.run.branches import Branches, Verdict
from partition.run.failures import Failures
from partition.run.messages import REASON_LENGTH_MAX, Absent, Checkpointed, GivenUp, Leaving, check_sender
from partition.run.states import CAUSE_OF, OVER, Cause, State, after, cause_of
from partition.steps.messages import Failed, Open, ReplicaMessage

HEIRS = 2
"""So many of those who would train next fetch the data beforehand."""
DROP_SECONDS_MAX = 10.0
"""How long a member that has dropped a run still votes on the plan without it."""
LEAVE_SECONDS_MAX = 8.0
"""How long a member that wants to leave waits for a plan without it: a person waits for it to go. Where that
is too short for another to take up its stage, the others go on as after its death."""


class RunMember:
    """One run on this node, from its manifest to its end."""

    def __init__(self, service: Service, run: Run) -> None:
        self.run = run
        self.plan: Plan | None = None
        self.state: State = "submitted"
        self._service = service
        self._start_task = partial(service.start_task, of=run)
        self._me = service.signer.peer
        self._may_fork = run.manifest.on_lost_quorum == "fork"
        self._chain: ChainShell | None = None
        self._branches: Branches | None = None
        self._succession: Succession | None = None
        self._departures: Departures | None = None
        self._keeping = Keeping(service, run, self._living)
        self._hosting = Hosting(
            service,
            run,
            holders=self._holders,
            failed=self._fail_stage,
            abandoned=self._abandoned,
            save=self._keeping.save,
            restore=self._keeping.restore,
        )
        self._committer: CommitterShell | None = None
        self._training: Training | None = None
        self._life = trio.CancelScope()
        self._pulse = Pulse(
            service,
            run.id,
            plan=lambda: self.plan,
            others=self._others,
            waits=lambda: self.state == "paused",
            beat=self._on_beat,
            absent=self._miss,
            give_up=lambda reason: self.end("failed", reason, ""),
        )
        self._stalled_since = service.seams.clock.monotonic()
        self._is_ended = False
        self._is_finishing = False
        self._is_dropped = False
        self.stopped_by: Fact | None = None
        self.is_over_for_all = False
        self._is_stuck = False
        self._failures = Failures()
        self._telling = Telling(service, run, others=self._others, hosts=lambda: self.hosts)
        self.shown = self._telling.shown
        self.heard = self._pulse.heard
        self.export, self.read_state = self._hosting.export, self._hosting.read_state
        self.prepare, self.unprepare = self._hosting.prepare, self._hosting.unprepare
        self.keep, self.close_stage = self._hosting.keep, self._hosting.end
        self._decided = trio.Event()

    @property
    def hosts(self) -> bool:
        """Whether a stage of this run is open here, or being opened."""
        return self._hosting.is_opening or self._hosting.replica is not None

    @property
    def plan_hash(self) -> bytes | None:
        """Of the plan in force."""
        return None if self.plan is None else plan_hash(self.plan)

    def place(self) -> None:
        """This node asks for the run, and looks for providers."""
        self._change("leases wanted", "")

    def begin(self, plan: Plan, entered: Entered, durable: bytes = b"") -> None:
        """The first plan that this member hears of is in force: keep the chain from here on.

        One that was restarted knows the chain (`durable`) and has lost its stage: it takes up nothing until
        a new plan gives it something.
        """
        service = self._service
        chain = self._chain = ChainShell(
            service,
            self.run,
            plan,
            entered=entered,
            durable=durable,
            may_fork=self._may_fork,
            on_event=self._on_chain_event,
        )
        self._telling.begin(chain)
        self._branches = Branches(self._me, chain.core, self._telling.progress, may_fork=self._may_fork)
        self._succession = make_succession(
            service,
            self.run,
            chain,
            hopeless=self._on_hopeless,
            wanted=tuple(len(stage.replicas) for stage in plan.stages),
            restorable=lambda: self._keeping.restorable,
        )
        self._departures = Departures(self._succession, committer=lambda: self._committer, absent=self.absent)
        self._start_task(self._live)
        if durable:
            self._wake_up(chain.head)
        else:
            self._adopt(chain.head)

    def _wake_up(self, plan: Plan) -> None:
        """After a restart: whatever this node held or fed is gone. All others must know, also those who
        were restarted themselves; and the run may have gone on."""
        self.plan = plan
        self._change("node restarted", "this node was restarted")
        self._service.follow(plan_hash(plan), self)
        self._service.publish_plan(self.run, plan)
        others = [peer for peer in plan.members if peer != self._me]
        self.catch_up(others)
        if plan.stage_of(self._me) is not None or self._me in plan.trainers:
            self.absent(self._me, "it was restarted", others)

    def catch_up(self, peers: Sequence[PeerId]) -> None:
        """Ask what of the chain is missing here."""
        if self._chain is not None:
            for peer in peers:
                self._chain.tell(peer)

    async def _live(self) -> None:
        assert self._chain is not None
        assert self._succession is not None
        with self._life:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._chain.run)
                nursery.start_soon(self._succession.think)
                nursery.start_soon(self._pulse.run)
                self.members_changed()
                await trio.sleep_forever()
        await self._succession.give_up()

    def _abandoned(self) -> None:
        """The plan that this node's stage was opened for did not come about."""
        if self.plan is None and not self._is_ended:
            self._is_ended = True
            self._service.released(self)

    def _on_chain_event(self, event: Any) -> None:
        match event:
            case agreement.PlanDecided():
                assert self._branches is not None
                self._branches.decided(event.plan)
                if not self._is_ended:
                    self._adopt(event.plan, event.change)
            case agreement.QuorumLost():
                self._change("quorum lost", f"{event.live} of {event.needed} votes needed are there")
            case agreement.QuorumFound():
                self._in_force("a majority is there again")
            case agreement.ForkOpened():
                if self._succession is not None:
                    self._succession.changed()
            case agreement.ForkFound() | agreement.LeftBehind():
                self._on_fork(event)
            case agreement.ChainBroken():
                said = f"{short_peer(event.peer)} says that plan {event.height} was another"
                reason = f"{said}: its disk is lost"
                self._start_task(partial(self.end, "failed", reason, ""))

    def _adopt(self, plan: Plan, change: Change | None = None) -> None:
        """A plan has come into force: take the roles it gives to this node, and only these."""
        before, self.plan = self.plan, plan
        service = self._service
        service.follow(plan_hash(plan), self)
        if self._is_finishing:
            return  # some have heard the end already: now it is said in this plan's name
        self._pulse.heard()
        if before is None or self._committer is None or self._committer.core.phase != "syncing":
            self._stalled_since = service.seams.clock.monotonic()
        past, self._committer = self._committer, None
        self._stop_training()
        assert self._succession is not None
        reason = self._succession.why(change.lost if change is not None else ())
        if before is not None:
            self._succession.decided()
        self._decided.set()
        self._decided = trio.Event()
        service.publish_plan(self.run, plan)
        if self._is_dropped:
            return
        if self._me not in plan.roster:
            self._fall_back("the run goes on without this node")
            return
        self._in_force(reason)
        self._hosting.adopt(plan)
        self._take_roles(plan, change, past, reason)

    def _take_roles(
        self, plan: Plan, change: Change | None, past: CommitterShell | None, reason: str
    ) -> None:
        """Feed and commit as the plan says; `past` is this node's committer under the plan before."""
        if past is not None and plan.committer == self._me:
            for event in past.dropped(plan):
                self._telling.tell(plan, event)
        lost_steps = self._telling.progress.restored(plan.step) if plan.restored != NOTHING else 0
        if plan.restored != NOTHING:
            over = self._failures.went_back(plan.step, self._telling.progress.furthest, reason)
            if over is not None and plan.committer == self._me:
                self._fail(over)
                return
        if self._me in plan.trainers:
            self._train(plan, lost_steps)
        elif self._me in heirs(plan.roster, plan.stages)[:HEIRS]:
            self._start_task(self._keep_data)
        joined = () if change is None else (*(row.peer for row in change.joined), *change.admitted)
        # The committer has newcomers start; where it is one of them, all others do.
        if joined and (plan.committer == self._me or plan.committer in joined):
            self._start_task(partial(self._start_newcomers, plan, [PeerId(peer) for peer in joined]))

    def _in_force(self, reason: str) -> None:
        """The run goes on, with all the replicas it began with or with fewer."""
        assert self.plan is not None
        if self._succession is None or self._me not in self.plan.roster:
            return
        self._is_stuck = False
        cause = cause_of(self.plan, self._succession.wanted)
        usual = (
            f"plan {self.plan.height}" if cause == "plan in force" else "fewer replicas than it began with"
        )
        self._change(cause, reason or usual)

    def _fail_stage(self, reason: str) -> None:
        """Say that this node cannot hold its stage: the next plan does without it."""
        plan = self.plan
        if plan is not None and not self._is_ended:
            message = Failed(plan=plan_hash(plan), reason=reason[:REASON_LENGTH_MAX])
            self._service.send(plan.committer, message)

    def _holders(self) -> list[PeerId]:
        """Who may hand over what the run is made of: the requester first, then every other member."""
        members = () if self.plan is None else self.plan.members
        others = [peer for peer in members if peer not in (self._me, self.run.requester)]
        return [self.run.requester, *others]

    def _living(self) -> list[PeerId]:
        """Who could hand something over; whoever was in the run has what it kept of it."""
        live = self._service.live()
        return [peer for peer in self._chain.core.acquainted if peer in live] if self._chain else []

    async def _finish_training(self, plan: Plan, reason: str | None, digest: str = "") -> None:
        """As the committer: the last step is committed, or training failed for `reason`."""
        self._change("training over", "the last step is committed" if reason is None else reason)
        if reason is None:
            digest, reason = await collect_result(self._service, self.run, plan, self._hosting.replica)
        if reason is None:
            self._finish("done", "", digest)
        else:
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        """End the run for all, and say what is left of it."""
        self._finish("failed", with_checkpoint(reason, self.run, self._keeping.restorable), "")

    async def _keep_data(self) -> None:
        """Have the run's data here before it is needed: whoever has it now may be gone then."""
        with suppress(Unreachable, PeerloomError):
            await self._service.load_data(self.run, self._holders())

    async def _cannot_train(self, plan: Plan, reason: str) -> None:
        """This node has a part in the feeding and cannot play it: the next plan must do without it."""
        if plan.committer == self._me and (plan.height == 0 or len(plan.roster) == 1):
            self._finish("failed", reason, "")
        elif plan.committer == self._me:
            self.absent(self._me, reason)
        else:
            self._service.send(plan.committer, Leaving(plan_hash(plan), at_once=True))

    def _train(self, plan: Plan, lost_steps: int) -> None:
        if plan.committer == self._me:
            assert self._departures is not None
            service, saved = self._service, self._keeping.restorable
            self._committer = CommitterShell(
                service,
                self.run,
                plan,
                partial(self._telling.tell, plan),
                absent=self.absent,
                paused=self._departures.paused,
                stalled_since=self._stalled_since,
                saved=saved[1] if saved is not None else 0,
                failures=self._failures,
                lost_steps=lost_steps,
            )
            if self._keeping.restorable is None and self.run.manifest.save_every:
                self._committer.save()  # else whatever is lost before the first checkpoint ends the run
            self.catch_up([peer for peer in plan.members if peer != self._me])
            self._departures.hand_over()
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

    def _stop_training(self) -> None:
        if self._training is not None:
            self._training.stop()
            self._training = None

    async def _start_newcomers(self, plan: Plan, peers: Sequence[PeerId]) -> None:
        assert self._succession is not None
        failures = await self._succession.start(plan, peers)
        for peer, reason in failures.items():
            if self.plan == plan:
                self._miss(peer, reason)

    def absent(self, peer: PeerId, reason: str, others: Sequence[PeerId] | None = None) -> None:
        """As the committer, or of this node: the next plan must do without this peer. Everybody with a vote
        is told."""
        if self._succession is None or self.plan is None or peer in self._succession.absent:
            return
        self._succession.miss(peer, reason)
        message = Absent(plan_hash(self.plan), (peer,), reason[:REASON_LENGTH_MAX])
        for other in self._others(self.plan) if others is None else others:
            self._service.send(other, message)

    def _on_hopeless(self, found: Hopeless | None, is_final: bool) -> None:
        """No plan can follow: the run waits, and if that lasts whoever would propose one says so."""
        succession = self._succession
        if succession is None or self.plan is None or self._is_ended:
            return
        if found is None:
            if self._is_stuck:
                self._in_force("every stage has a replica again")
        elif not self._is_stuck:
            self._is_stuck = True
            self._change("stage lost", found.reason)
        elif is_final and succession.is_proposer() and succession.has_majority():
            self._finish("failed", found.reason, "")

    def _miss(self, peer: PeerId, reason: str) -> None:
        """This member's own view: a committer tells the others, whoever misses the committer only wishes."""
        if self.plan is not None and self.plan.committer == self._me:
            self.absent(peer, reason)
        elif self._succession is not None:
            self._succession.miss(peer, reason)

    def _on_beat(self) -> None:
        if self._hosting.is_opening:
            self._pulse.heard()
        self.members_changed()
        assert self._chain is not None
        committed = 0 if self._committer is None else self._committer.core.step
        self._telling.note(max(self._telling.progress.step, committed))
        live = self._service.live()
        self.catch_up([peer for peer in self._chain.core.acquainted if peer in live])

    def _on_fork(self, event: agreement.ForkFound | agreement.LeftBehind) -> None:
        """Another branch is further, by what was known here."""
        plan, core = self.plan, None if self._committer is None else self._committer.core
        if self._branches is None or self._is_ended or self._is_finishing:
            return
        is_synced = core is not None and core.phase != "syncing"
        committed, live = core.step if core is not None and is_synced else None, self._service.live()
        verdict = self._branches.judge(event, plan, live=live, committed=committed, hosts=self.hosts)
        if verdict is Verdict.STAY:
            return
        if verdict is Verdict.ABANDON and plan is not None:
            for peer in self._others(plan):
                self._service.send(peer, GivenUp(plan_hash(plan)))
        self._leave_branch()

    def _leave_branch(self) -> None:
        assert self._branches is not None
        self._fall_back(self._branches.farewell)

    def _fall_back(self, reason: str) -> None:
        """The run goes on elsewhere: from now on nothing is committed here, what is here is forgotten, and
        this node waits to be asked again."""
        if self._is_ended:
            return
        self._is_ended = True
        self._change("quorum lost", reason)
        self._stop_training()
        self._committer = None
        self._start_task(self._let_go)

    async def _let_go(self) -> None:
        await self._hosting.end()
        self._service.forgotten(self)
        self._decided.set()
        self._life.cancel()

    def _finish(self, outcome: str, detail: str, weights: str) -> None:
        """Tell every live member, then end here; whatever plan comes into force from now on."""
        if not self._is_finishing and not self._is_ended:
            self._is_finishing = True
            told = partial(end_for_all, self._service, lambda: self.plan, self.end)
            self._start_task(told, outcome, detail, weights)

    def _others(self, plan: Plan) -> list[PeerId]:
        """The live members of a plan but for this node."""
        live = self._service.live()
        return [peer for peer in plan.members if peer != self._me and peer in live]

    async def end(self, outcome: str, detail: str, weights: str, *, source: PeerId | None = None) -> None:
        """The run is over here: fetch the result from `source`, close the stage, say so."""
        if self._is_ended:
            return
        self._is_ended = True
        self.is_over_for_all = self._is_finishing or source is not None or self.stopped_by is not None
        if outcome == "done" and source is not None:
            detail = await fetch_result(self._service, self.run, source, weights)
        await self._hosting.end()
        if self.state not in OVER:
            self.state = after(self.state, CAUSE_OF[outcome])
        await self._service.ended(self, outcome, detail, weights)
        self._decided.set()
        self._life.cancel()
        self._stop_training()

    async def fail(self, reason: str) -> None:
        """End after an unexpected failure; where another node commits, the run goes on without this one."""
        if not (self._is_ended or self._is_finishing):
            if self.plan is not None and self.plan.committer == self._me:
                self._finish("failed", reason, "")
                return
            self.absent(self._me, reason)
        self._is_ended = False  # an end that failed half way is gone through again
        await self.end("failed", reason, "")

    @property
    def acquainted(self) -> set[PeerId]:
        """Everybody that this node knows to be, or to have been, a member."""
        return set() if self._chain is None else set(self._chain.core.acquainted)

    async def drop(self, reason: str) -> None:
        """Close the stage at once; the vote stays for a moment, so that the others find a plan without it."""
        if self._is_ended or self._is_dropped:
            return
        self._is_dropped = True
        self._stop_training()
        self._committer = None
        await self._hosting.end()
        self.absent(self._me, "it dropped the run")
        self._start_task(self._go, reason)

    async def _go(self, reason: str) -> None:
        await self._until_out(DROP_SECONDS_MAX)
        self._is_ended = True
        self.state = after(self.state, "asked to stop")
        await self._service.ended(self, "stopped", reason, "")
        self._life.cancel()

    async def _until_out(self, seconds: float) -> bool:
        """Wait for a plan without this node; whether it came."""
        with trio.move_on_after(seconds):
            while not self._is_ended and self.plan is not None and self._me in self.plan.roster:
                await self._decided.wait()
            return True
        return False

    async def leave(self) -> bool:
        """Hand this node's part over before it goes; bounded. Whether that came about."""
        plan = self.plan
        if plan is None or self._is_ended or self._departures is None:
            return True
        message = Leaving(plan_hash(plan))
        for peer in self._others(plan):
            self._service.send(peer, message)
        self._departures.note(self._me)
        return await self._until_out(LEAVE_SECONDS_MAX)

    async def save(self) -> int:
        """Have a checkpoint made after this step; the step. Raises RunFailed: this node does not commit."""
        if self._committer is None:
            raise RunFailed(f"run {self.run.text[:8]} is committed by another node: ask there")
        self._committer.save()
        return self._committer.core.step + 1

    # What comes in

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        """A pipeline message of the plan in force, or about the chain. Raises RemoteProtocolError."""
        if isinstance(message, AgreementMessage):
            if self._chain is not None:
                self._chain.receive(sender, message)
        elif isinstance(message, ReplicaMessage):
            if self._committer is not None:
                self._committer.receive(now, sender, message)
        elif isinstance(message, wire.Notice | Absent | Checkpointed | GivenUp | Leaving):
            self._about_the_run(sender, message)
        elif isinstance(message, wire.Saved):
            self._on_saved(sender, message)
        else:
            self._to_roles(now, sender, message)

    def _about_the_run(
        self, sender: PeerId, message: wire.Notice | Absent | Checkpointed | GivenUp | Leaving
    ) -> None:
        if self._succession is None or self._departures is None or self.plan is None:
            return
        check_sender(self.plan, sender, message)
        match message:
            case wire.Notice():
                self._telling.hear(message)
                self._pulse.heard()
            case Absent():
                for peer in message.peers:
                    self._succession.miss(PeerId(peer), message.reason)
            case GivenUp():
                self._leave_branch()
            case Checkpointed():
                self._start_task(partial(self._keeping.learn, message.step, message.checkpoint))
            case Leaving(at_once=True):
                self.absent(sender, "it has nothing to feed the run with")
            case Leaving():
                self._departures.note(sender)

    def _on_saved(self, sender: PeerId, message: wire.Saved) -> None:
        if self.plan is None or self.plan.committer != self._me:
            raise RemoteProtocolError("a saved stage for a peer that is not the run's committer")
        self._keeping.saved(self.plan, sender, message)

    def _to_roles(self, now: float, sender: PeerId, message: Any) -> None:
        if isinstance(message, Open) and self._training is not None:
            self._training.open(sender, message)
        if self._hosting.replica is not None:
            self._hosting.replica.receive(now, sender, message)

    def reconnected(self, peer: PeerId) -> None:
        """A link to `peer` was opened anew."""
        if self._chain is not None and self.plan is not None and peer in self.plan.roster:
            self._chain.tell(peer)
        if self._hosting.replica is not None:
            self._hosting.replica.reconnected(peer)
        if self._training is not None:
            self._training.reconnected(peer)

    def members_changed(self) -> None:
        """Who lives is another question now than before."""
        if self._chain is not None and self._succession is not None:
            self._chain.reach(self._succession.living())
            self._succession.changed()

    def member_suspected(self, peer: PeerId) -> None:
        """A member may be dead."""
        if self._committer is not None and self.plan is not None and self.plan.stage_of(peer) is not None:
            self._committer.suspect(peer)

    def _change(self, cause: Cause, reason: str) -> None:
        state = after(self.state, cause)
        if state != self.state:
            self.state = state
            at = self._service.seams.clock.wall()
            self._service.publish(RunChanged(at=at, run=self.run.text, state=state, reason=reason))
