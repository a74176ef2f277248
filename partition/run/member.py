"""One member's part in a run, from the first plan that it hears of to the end of the run: a sans-IO core.

It follows the chain of plans, proposes the next plan, renews the run or watches its committer, reports
members that the next plan must drop, leaves its branch for a longer one, and keeps the run's state by the
table of `partition.run.states`. It owns its chain: once a driver has stored the promises of `PromisesMade`,
it calls `stored`. After every call the driver sends `sends`, puts `asks`, acts on `events`, and empties all
three.

Not here: steps (`partition.steps`), and the work of a role: `Roles` reports on it.
"""

from collections.abc import Collection
from typing import assert_never

from crypto.identity import PeerId, short_peer
from partition.plan import paxos
from partition.plan.change import Change, successor
from partition.plan.merging import slowest_pace
from partition.plan.paxos import PaxosChain
from partition.plan.paxos_messages import AgreementMessage
from partition.plan.plan import NO_HASH, Plan, plan_hash
from partition.run import keepalive, proposals
from partition.run.asks import Asks, Declined, Done, Reply
from partition.run.between_steps import BetweenSteps
from partition.run.branches import Verdict
from partition.run.checkpoint_rounds import CheckpointRounds
from partition.run.events import (
    Event,
    MessageRefused,
    PlanEntered,
    PlanFollowed,
    PromisesMade,
    RolesGiven,
    RunLeft,
    RunOver,
    StageAbandoned,
)
from partition.run.failures import Failures
from partition.run.hosting import Hosting
from partition.run.messages import (
    REASON_LENGTH_MAX,
    Absent,
    Checkpointed,
    GivenUp,
    Leaving,
    Recut,
    RunMessage,
    check_sender,
)
from partition.run.parts import MemberLife, Parts
from partition.run.pauses import votes_missing
from partition.run.progress import RunProgress
from partition.run.proposals import Surroundings
from partition.run.roles import Roles
from partition.run.settings import RunSettings
from partition.run.standing import RunStanding
from partition.run.states import State
from partition.run.way_back import WayBack, WaysBack

INF = float("inf")


class Member:
    """One run at one node. `plan` is the plan in force, None before the first.

    `is_dropped`: this node takes no more roles. `is_over`: the member sends and does nothing more for the
    run.

    Long because it is one state machine: everything that a member proposes, follows, leaves and ends depends
    on one plan.
    """

    def __init__(
        self,
        me: PeerId,
        *,
        requester: PeerId,
        samples_per_step: int,
        may_fork: bool,
        around: Surroundings,
        roles: Roles,
        save_every: int = 0,
        newest: WayBack | None = None,
        parts: Parts | None = None,
        settings: RunSettings | None = None,
    ) -> None:
        """`save_every` is the minimum number of steps between two checkpoints, 0 for none; `newest` is the
        newest checkpoint that was stored before a restart."""
        self.plan: Plan | None = None
        self.is_dropped = self.is_over = False
        self.progress = RunProgress(samples_per_step)
        self.failures = Failures()
        self.asks = Asks()
        self._settings = settings or RunSettings()
        self.hosting = Hosting(me, self._settings)
        self.sends: list[tuple[PeerId, RunMessage | AgreementMessage]] = []
        self.events: list[Event] = []
        self._standing = RunStanding(self.events)
        self._me = me
        self._requester = requester
        self._may_fork = may_fork
        self._around = around
        self._roles = roles
        self.checkpoints = CheckpointRounds(
            me,
            plan=lambda: self.plan,
            ways_back=WaysBack(save_every),
            best=lambda: roles.best,
            asks=self.asks,
            events=self.events,
            live=self._living,
            tell=self._tell_some,
            learned=self._checkpointed,
            newest=newest,
        )
        self._parts = parts or Parts()
        self._life: MemberLife | None = None
        self.end = self._parts.end(
            me,
            plan=self._open_plan,
            standing=self._standing,
            asks=self.asks,
            events=self.events,
            live=around.live,
            newest=lambda: self.checkpoints.newest,
            settings=self._settings,
        )

    @property
    def state(self) -> State:
        """The run's state for this member."""
        return self._standing.state

    @property
    def commits(self) -> bool:
        """Whether the plan in force makes this node its committer."""
        return self.plan is not None and self.plan.committer == self._me

    def _open_plan(self) -> Plan | None:
        """Return the plan in force; None if the run is over here."""
        return None if self.is_over else self.plan

    @property
    def deadline(self) -> float:
        """The time of the next `wake`, in monotonic seconds; inf if none is due."""
        if self._life is None:
            return self.hosting.deadline
        if self.is_over:
            return self._life.chain.deadline  # its vote still counts
        life = self._life
        parts = self.end, self.hosting, life.chain, life.proposer, life.keepalive, life.between.recutting
        return min(part.deadline for part in parts)

    @property
    def acquainted(self) -> tuple[PeerId, ...]:
        """All other present and former members known here."""
        return () if self._life is None else self._life.chain.core.acquainted

    def _living(self) -> list[PeerId]:
        """Return all live present and former members. Former members keep their copies."""
        live = self._around.live()
        return [peer for peer in self.acquainted if peer in live]

    def others(self) -> list[PeerId]:
        """Return the live members of the plan in force, without this one."""
        live, plan = self._around.live(), self.plan
        return [peer for peer in plan.members if peer != self._me and peer in live] if plan else []

    def _tell(self, message: RunMessage) -> None:
        self.sends += [(peer, message) for peer in self.others()]

    def _tell_some(self, peers: Collection[PeerId], message: RunMessage) -> None:
        self.sends += [(peer, message) for peer in peers if not self.is_over]

    # The beginning

    def place(self) -> None:
        """Note that this node has asked for the run, and that providers are being sought."""
        self._standing.change("leases wanted", "")

    def begin(self, now: float, chain: PaxosChain, first: Plan, *, is_restart: bool = False) -> None:
        """Follow the chain from now on. `first` is the first plan of the run, even if this node joined later:
        each stage should have as many replicas as under that plan.

        A restarted member knows the chain but has lost its stage. It tells all others, including those that
        restarted too, and takes no role until a new plan gives it one.
        """
        make = self._parts
        proposer = make.proposer(
            self._me,
            chain,
            now,
            requester=self._requester,
            wanted=tuple(len(stage.computing) for stage in first.stages),
            around=self._around,
            asks=self.asks,
            settings=self._settings,
        )
        self._life = MemberLife(
            chain=make.chain(chain),
            branches=make.branches(self._me, chain, self.progress, self._settings, may_fork=self._may_fork),
            proposer=proposer,
            between=BetweenSteps(
                self._me,
                proposer,
                make.draining(proposer),
                self._roles,
                plan=lambda: None if self.end.is_told else self._open_plan(),
                events=self.events,
                restorable=lambda: self.checkpoints.restorable,
                tell=self._tell,
                exclude=self.exclude_for_all,
            ),
            keepalive=make.keepalive(self._me, now, self.asks, self._settings),
            first_pace=slowest_pace(first),
        )
        if is_restart:
            self._restart(now, chain.head)
        else:
            self._adopt(now, self._life, chain.head, None)
        self.members_changed(now)

    def _restart(self, now: float, plan: Plan) -> None:
        self.plan = plan
        self.checkpoints.entered(now, plan)
        self.events.append(PlanFollowed(plan))
        self._standing.change("node restarted", "this node was restarted")
        others = [peer for peer in plan.members if peer != self._me]
        self.catch_up(others)
        if plan.stage_of(self._me) is not None or self._me in plan.trainers:
            self.exclude_for_all(now, self._me, "it was restarted", others)
        if self._me not in plan.roster:
            self._leave("the run goes on without this node", is_branch=False)

    # Plans

    def on_chain(self, now: float, event: paxos.Event) -> None:
        """Act on an event of the chain. The chain's promises are already stored."""
        life = self._life
        if life is None or self.is_over:
            return
        match event:
            case paxos.PlanDecided():
                life.branches.decided(now, event.plan, event.change.lost)
                self._adopt(now, life, event.plan, event.change)
            case paxos.QuorumLost():
                self._standing.change("quorum lost", votes_missing(event), event.missing)
            case paxos.QuorumFound():
                self._in_force(life, "a majority is there again")
            case paxos.ForkOpened():
                life.proposer.changed(now)
            case paxos.ForkFound() | paxos.LeftBehind():
                self._on_fork(now, life, event)
            case paxos.ForkBehind():
                life.branches.outlives(now, event)
            case paxos.ChainBroken():
                said = f"{short_peer(event.peer)} reports a different plan {event.height}"
                self.events.append(RunOver("failed", f"{said}, so it has lost its disk"))
            case _:
                assert_never(event)

    def _adopt(self, now: float, life: MemberLife, plan: Plan, change: Change | None) -> None:
        """Adopt a plan in force."""
        before, self.plan = self.plan, plan
        life.between.recutting.end()
        self.events.append(PlanFollowed(plan))
        self.end.entered(now)
        if self.end.is_told:
            return  # some know of the end: announce it under this plan
        life.keepalive.heard(now)
        self.checkpoints.entered(now, plan)
        reason = life.proposer.reasons(change.lost if change is not None else ())
        if before is not None:
            life.proposer.decided(now)
        self.events.append(PlanEntered(plan, before is None))
        if self.is_dropped:
            return
        if self._me not in plan.roster:
            self._leave("the run goes on without this node", is_branch=False)
            return
        self._in_force(life, reason)
        lost_steps, over = 0, None
        if plan.restored != NO_HASH and not plan.is_final:
            lost_steps = self.progress.restored(plan.step)
            over = self.failures.went_back(plan.step, self.progress.furthest, reason)
        over = over if self.commits else None
        is_over = over is not None
        self.events.append(RolesGiven(plan, change, self.hosting.adopt(plan), lost_steps, is_over))
        if over is None and self.commits:
            self.catch_up([peer for peer in plan.members if peer != self._me])
            life.between.look_for_leavers()
        if over is not None:
            self.end.fail(now, over)
        else:
            joined = () if change is None else (*(row.peer for row in change.joined), *change.admitted)
            life.proposer.start(
                plan, joined, is_new_committer=before is None or before.committer != plan.committer
            )

    def _in_force(self, life: MemberLife, reason: str) -> None:
        """Note that the run continues, with all its initial replicas or with fewer."""
        plan = self.plan
        if plan is None or self._me not in plan.roster:
            return
        usual = life.proposer.wanted
        self._standing.in_force(plan, usual, life.first_pace, branch=life.branches.said, reason=reason)

    def catch_up(self, peers: Collection[PeerId]) -> None:
        """Exchange plans with peers, so that they send the plans that are missing here."""
        if self._life is not None:
            for peer in peers:
                self.sends += self._life.chain.core.tell(peer)

    # Branches

    def _on_fork(self, now: float, life: MemberLife, event: paxos.ForkFound | paxos.LeftBehind) -> None:
        if self.end.is_told:
            return
        roles, live = self._roles, life.keepalive.speaking(now, self.plan, self._around.live())
        verdict = life.branches.judge(
            now, event, self.plan, live=live, committed=roles.committed, hosts=self.hosting.occupies
        )
        if verdict is Verdict.REFUSE and self.plan is not None:
            self._standing.note(life.branches.refusal(now, event, self.plan))
            return
        if verdict is Verdict.ABANDON and self.plan is not None:
            name = plan_hash(self.plan)
            self.sends += [(peer, GivenUp(name)) for peer in self.others()]
        if verdict is not Verdict.STAY:
            self._leave(life.branches.farewell(event), is_branch=True)

    def _leave(self, reason: str, *, is_branch: bool) -> None:
        """Leave the run, which continues elsewhere; nothing more is committed here."""
        self.is_over = True
        kept = self._life.branches.kept_step if is_branch and self._life is not None else None
        if kept is not None:
            # the run must not return to a state that only the abandoned branch has
            self.checkpoints.forget_after(kept)
        self._standing.leave(reason)
        self.events.append(RunLeft(is_branch))

    # Members that the next plan must drop

    def exclude(self, now: float, peer: PeerId, reason: str) -> None:
        """Exclude a peer from the next plan, as this member sees it. The committer tells all others; any
        other member only proposes it."""
        if self.commits:
            self.exclude_for_all(now, peer, reason)
        elif self._life is not None:
            self._life.proposer.exclude(now, peer, reason)

    def exclude_for_all(
        self, now: float, peer: PeerId, reason: str, others: Collection[PeerId] | None = None
    ) -> None:
        """As the committer, or about this node itself: drop this peer from the next plan, and tell every live
        member."""
        life, plan = self._life, self.plan
        if life is None or plan is None or self.is_over or peer in life.proposer.absent:
            return
        life.proposer.exclude(now, peer, reason)
        message = Absent(plan_hash(plan), (peer,), reason[:REASON_LENGTH_MAX])
        self.sends += [(other, message) for other in (self.others() if others is None else others)]

    # Between two steps

    @property
    def between(self) -> BetweenSteps:
        """The changes that wait until no step is open. Requires a plan."""
        assert self._life is not None, "there is no plan"
        return self._life.between

    def _checkpointed(self, now: float) -> None:
        if self._life is not None:
            self._life.between.checkpointed(now)

    # Steps

    def note_step(self, step: int) -> None:
        """Note and claim that `step` steps are committed."""
        self.progress.note(step)
        self._claim()

    def show_step(self, step: int) -> bool:
        """Note that the step of this number was committed; return True the first time, so that it is
        displayed once."""
        is_new = self.progress.show(step)
        if is_new:
            self._claim()
        return is_new

    def _claim(self) -> None:
        if self._life is not None:
            self.progress.claim(self._life.chain.core, hosts=self.hosting.occupies)

    # The end

    def cannot_train(self, now: float, reason: str) -> None:
        """Ask for a plan in which this node does not feed samples, because it cannot."""
        plan = self.plan
        if plan is None or self.is_over:
            return
        if not self.commits:
            self.sends.append((PeerId(plan.committer), Leaving(plan_hash(plan), at_once=True)))
        elif plan.height == 0 or len(plan.roster) == 1:
            self.end.finish(now, "failed", reason)
        else:
            self.exclude_for_all(now, self._me, reason)

    def ended(self, outcome: str) -> None:
        """Note that the run is over here."""
        self._standing.end(outcome)

    # Requests of others

    def on_renew(self, now: float, sender: PeerId, plan: bytes) -> Done | Declined:
        """Answer whether this node is still in the run; `plan` is a hash."""
        if self.plan is None or self.is_over:
            return Declined("no such run here")
        if plan == plan_hash(self.plan):
            if sender != self.plan.committer:
                return Declined("no such plan here")
            self.heard(now)
        return Done()  # if a different plan is in force, the chain reports it

    def on_start(self, sender: PeerId, plan: Plan) -> Done | Declined | None:
        """Answer a `sender` that announces a plan in force. None: this node has no plan yet, and may begin
        with this one."""
        mine = self.plan
        if mine is None:
            return None
        # If this plan is newer, the chain decides and reports it.
        if mine.height < plan.height and sender in mine.roster:
            self.catch_up([sender])
        is_other = mine.height == plan.height and mine != plan
        return Declined("another plan is in force") if is_other else Done()

    def is_behind(self, sender: PeerId, plan: Plan) -> bool:
        """Return whether this node lacks the parent of `plan`; if so, ask `sender` for it."""
        if self.plan is None or plan_hash(self.plan) == plan.parent:
            return False
        self.catch_up([sender])
        return True

    # Input

    def receive(self, now: float, sender: PeerId, message: RunMessage | AgreementMessage) -> None:
        """Handle a message about the chain, or about the run under the plan in force. Raises
        RemoteProtocolError."""
        life, plan = self._life, self.plan
        if isinstance(message, AgreementMessage):
            if life is not None:
                life.chain.receive(sender, message)
            return
        if life is None or plan is None or self.is_over:
            return
        check_sender(plan, sender, message)
        match message:
            case Absent():
                answers = life.proposer.told_absent(now, sender, message)
                self.sends += [(sender, answer) for answer in answers]
            case GivenUp():
                self._leave(life.branches.farewell(), is_branch=True)
            case Recut():
                successor(plan, message.change)  # raises if the change cannot follow
                life.between.heard(now, message.change)
            case Checkpointed():
                self.checkpoints.told(now, message)
            case Leaving(at_once=True):
                self.exclude_for_all(now, sender, "it has nothing to feed the run with")
            case Leaving():
                life.between.note_leaving(now, sender)
            case _:
                assert_never(message)

    def heard(self, now: float) -> None:
        """Note that the run is alive."""
        if self._life is not None:
            self._life.keepalive.heard(now)

    def members_changed(self, now: float) -> None:
        """Act on a change of the live members."""
        if self._life is not None:
            if self.plan is not None:
                self._standing.note(self._life.branches.look(now, self.plan, self._around.live()))
            self._life.chain.reach(tuple(sorted(self._life.proposer.living(now))))
            self._life.proposer.changed(now)
            self.end.changed(now)

    def replied(self, now: float, number: int, reply: Reply) -> None:
        """Handle the answer to one of `asks`."""
        self.checkpoints.replied(now, number, reply)
        if self._life is not None:
            self._life.proposer.replied(now, number, reply)
            self._life.keepalive.replied(now, number, reply)
            if not self.is_over:
                self.end.replied(now, number, reply)
            self._follow(now, self._life)

    def wake(self, now: float) -> None:
        """Do the work that is due. Nothing is due before `deadline`."""
        life = self._life
        if now >= self.hosting.deadline and self.hosting.wake(now) is not None:
            self.events.append(StageAbandoned())
        if life is None:
            return
        if now >= life.chain.deadline:  # at most one, as the chain may always have another due
            plan = self.plan
            life.chain.wake(now)
            self._follow_chain(now, life)
            if self.plan is not plan or self._life is not life:
                return  # the driver must first take the roles of the new plan
        if self.is_over:
            return
        if now >= self.end.deadline:
            self.end.wake(now)
        if now >= life.keepalive.deadline:
            self._beat(now, life)
        if now >= life.between.recutting.deadline:
            life.between.give_up()
        if now >= life.proposer.deadline:
            way_back = self.checkpoints.find_way_back(self.progress.furthest)
            change = life.proposer.think(now, self._roles, way_back)
            life.chain.wish(change, life.chain.core.head_hash)
        self._follow(now, life)

    @property
    def durable(self) -> bytes:
        """The promises to store after `PromisesMade`."""
        return b"" if self._life is None else self._life.chain.core.durable

    def stored(self, now: float) -> None:
        """Note that the promises of the chain are stored."""
        if self._life is not None:
            self._life.chain.stored()
            self._follow_chain(now, self._life)

    def _follow_chain(self, now: float, life: MemberLife) -> None:
        """Send the chain's messages and act on its events, once its promises are stored."""
        if life.chain.is_storing:
            self.events.append(PromisesMade())
        sends, events = life.chain.take()
        self.sends += sends
        self.events += [MessageRefused(*row) for row in life.chain.refused]
        life.chain.refused.clear()
        for event in events:
            self.on_chain(now, event)

    def close(self) -> None:
        """Release newcomers that were asked to join, and leave the agreement."""
        if self._life is not None:
            self._life.proposer.give_up()
            self._life.chain.close()

    def _beat(self, now: float, life: MemberLife) -> None:
        self.members_changed(now)
        self.note_step(max(self.progress.step, self._roles.committed or 0))
        live = self._around.live()
        self.catch_up([peer for peer in life.chain.core.acquainted if peer in live])
        self.sends += [(peer, absence) for absence in life.proposer.own_absence() for peer in self.others()]
        life.keepalive.wake(
            now,
            self.plan,
            others=self.others(),
            is_paused=self.state == "paused",
            is_opening=self.hosting.is_opening,
        )
        self.checkpoints.tell(self.others())

    def _follow(self, now: float, life: MemberLife) -> None:
        """Act on the events of the parts."""
        told = [*life.proposer.events, *life.keepalive.events]
        life.proposer.events.clear()
        life.keepalive.events.clear()
        for event in told:
            if not self.is_over:
                self._on_part(now, life, event)

    def _on_part(self, now: float, life: MemberLife, event: proposals.Event | keepalive.Event) -> None:
        match event:
            case proposals.NewcomerStarted():
                self.checkpoints.tell([event.peer] if self.plan == event.plan else [])
            case keepalive.MemberSilent() | proposals.NewcomerFailed():
                if self.plan == event.plan:
                    self.exclude(now, event.peer, event.reason)
            case keepalive.RunSilent():
                self.events.append(RunOver("failed", event.reason))
            case proposals.RecutDeclined():
                life.between.give_up()
            case proposals.WayFound():
                if self._standing.is_stuck:
                    self._in_force(life, "every stage has a replica again")
            case proposals.NoWayFound():
                self._on_no_way(now, life, event)
            case _:
                assert_never(event)

    def _on_no_way(self, now: float, life: MemberLife, event: proposals.NoWayFound) -> None:
        """Wait while no plan can follow. If that lasts too long, the proposer ends the run."""
        if not self._standing.is_stuck:
            self._standing.stick(event.reason, event.lost, is_alone=life.chain.core.is_forking)
        elif life.chain.core.is_forking:
            return  # a waiting minority does not decide the end, as the others may be ahead
        elif event.is_final and life.proposer.is_proposer(now) and life.proposer.has_majority(now):
            self.end.finish(now, "failed", event.reason)
