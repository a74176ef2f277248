"""One member's proposals for the next plan, and the requests to newcomers that precede a proposal.

Only the first live member of the committee asks newcomers, so that no two members ask the same peers. Every
member proposes changes that need no newcomer. Newcomers are asked in the order of their peer ids: one that
gets a stage leases a slot, and a witness agrees without a slot. If any of them refuses, the change is given
up. Once all have agreed, they open their stages while the run continues under the present plan, and then the
change is proposed. Not here: the choice of the change (`partition.run.next_change`), and the decision
(`partition.plan.paxos`).
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, short_peer
from partition.plan.change import Change, successor
from partition.plan.merging import merged_stages
from partition.plan.paxos import PaxosChain
from partition.plan.plan import FIRST_VALUES, Plan, committee
from partition.run.asks import Asks, Done, HoldStage, OpenStage, ReleaseStage, Reply, StartRun
from partition.run.decliners import Decliners
from partition.run.messages import REASON_LENGTH_MAX, Absent
from partition.run.next_change import NoViablePlan, PlanInputs, groups_left, next_change, ranked
from partition.run.roles import Roles
from partition.run.settings import RunSettings
from partition.run.way_back import WayBack


@dataclass(frozen=True)
class Surroundings:
    """Other nodes as a member sees them: `live` returns those believed alive, including this member; `gone`
    those known to be dead or to have left; `free` those with a free slot, and their rates."""

    live: Callable[[], Collection[PeerId]]
    gone: Callable[[], Collection[PeerId]]
    free: Callable[[], Collection[tuple[PeerId, int]]]


@dataclass(frozen=True)
class WayFound:
    """A plan can follow, or no change is needed."""


@dataclass(frozen=True)
class NoWayFound:
    """No plan can follow. `is_final`: this has lasted too long. `lost` are the members whose return would
    help."""

    reason: str
    is_final: bool
    lost: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class NewcomerFailed:
    """The peer did not accept `plan`, although the plan is in force and relies on the peer."""

    plan: Plan
    peer: PeerId
    reason: str


@dataclass(frozen=True)
class NewcomerStarted:
    """The peer has accepted `plan`, which is in force."""

    plan: Plan
    peer: PeerId


@dataclass(frozen=True)
class RecutDeclined:
    """The change that the committer wanted is given up, because a peer refused its stage or is gone."""


Event = WayFound | NoWayFound | NewcomerFailed | NewcomerStarted | RecutDeclined


@dataclass(eq=False)
class _Pending:
    """A change that needs newcomers, the plan that it leads to, and the progress of the newcomers. `leases`
    has the peers that must agree and their stages, None for a witness; the run's requester need not agree to
    be a witness. The peers in `holding` have a stage already, so they open no other one beforehand."""

    change: Change
    plan: Plan
    leases: dict[PeerId, int | None]
    to_lease: list[PeerId]
    holding: frozenset[bytes] = frozenset()
    asked: dict[int, PeerId] = field(default_factory=dict)
    leased: list[PeerId] = field(default_factory=list)
    is_opening: bool = False
    is_done: bool = False

    @property
    def newcomers(self) -> list[PeerId]:
        """All newcomers, including those admitted without a stage."""
        rows = (*(row.peer for row in self.change.joined), *self.change.admitted)
        return [PeerId(peer) for peer in rows if peer not in self.holding]


@dataclass(frozen=True)
class _Refusal:
    """A peer that refused is asked again at `until`, `seconds` after its refusal."""

    until: float
    seconds: float


class Proposer:
    """One member's proposals. `deadline` is the time of the next `think`.

    `absent` maps members that the next plan must drop to the reasons; `leaving` members want to go; `recut`
    is the change of borders that the committer wants. `wanted` is the number of replicas that each stage
    began with.
    """

    def __init__(
        self,
        me: PeerId,
        chain: PaxosChain,
        now: float,
        *,
        requester: PeerId,
        wanted: tuple[int, ...],
        around: Surroundings,
        asks: Asks,
        settings: RunSettings,
    ) -> None:
        self.asks = asks
        self.events: list[Event] = []
        self.absent: dict[PeerId, str] = {}
        self.leaving: set[PeerId] = set()
        self.recut: Change | None = None
        self.wanted = wanted
        self.deadline = now
        self._me = me
        self._chain = chain
        self._requester = requester
        self._around = around
        self._settings = settings
        self._began, self._settled_at = now, 0.0
        self._busy: dict[PeerId, _Refusal] = {}
        self._decliners = Decliners()
        # (peer, first layer, last layer) -> until when
        self._refused: dict[tuple[bytes, int, int], float] = {}
        self._no_way_since: float | None = None
        self._pending: _Pending | None = None
        self._starting: dict[int, tuple[Plan, PeerId]] = {}
        self._newcomers: list[bytes] = []  # newcomers that have not confirmed their start
        self._has_brought = False

    # Knowledge

    def changed(self, now: float) -> None:
        """Request a new `think`, because some input may have changed."""
        self.deadline = min(self.deadline, now)

    def exclude(self, now: float, peer: PeerId, reason: str) -> None:
        """Drop this member, which may be alive, from the next plan."""
        self.absent.setdefault(peer, reason)
        self.changed(now)

    def told_absent(self, now: float, sender: PeerId, message: Absent) -> list[Absent]:
        """Note that the next plan must drop these members. Return the answer: a sender that reports itself
        absent, for example after a restart, may not know yet that this member is absent too."""
        is_news = any(peer not in self.absent for peer in message.peers)
        for peer in message.peers:
            self.exclude(now, PeerId(peer), message.reason)
        return self.own_absence() if is_news and sender in message.peers else []

    def own_absence(self) -> list[Absent]:
        """Return the messages to repeat while the next plan must drop this member: members that disagree
        about who is absent expect different proposers, and would wait for each other."""
        reason, plan = self.absent.get(self._me), self._chain.head_hash
        return [] if reason is None else [Absent(plan, (self._me,), reason[:REASON_LENGTH_MAX])]

    def decided(self, now: float) -> None:
        """Note that a plan is in force: members that were absent under the previous plan may have
        returned."""
        roster = set(self._chain.head.roster)
        self.leaving &= roster
        self.recut = None
        self.absent.clear()
        self._settled_at = now
        self.changed(now)

    def reasons(self, lost: Collection[bytes]) -> str:
        """Return the known reasons, to display, why members were lost."""
        known = [(peer, self.absent[PeerId(peer)]) for peer in lost if PeerId(peer) in self.absent]
        return "; ".join(f"{short_peer(PeerId(peer))}: {reason}" for peer, reason in known)

    def living(self, now: float) -> set[PeerId]:
        """Return all present and former members that count as alive.

        For a while after the start, that includes members that this node has not heard of yet, because news
        of a newcomer takes some rounds of gossip.
        """
        alive, gone = self._around.live(), self._around.gone()
        is_new = now < self._began + self._settings.new_member_grace_seconds
        known = {self._me, *self._chain.acquainted}
        return {peer for peer in known if peer in alive or (is_new and peer not in gone)}

    def has_majority(self, now: float) -> bool:
        """Return whether the live members of the committee could decide a plan."""
        return self._chain.could_decide(self.living(now))

    def can_leave(self, peer: PeerId) -> bool:
        """Return whether this member can leave between two steps without loss."""
        plan = self._chain.head
        stage = plan.stage_of(peer)
        return stage is None or any(
            other != peer and other not in self.leaving and other not in self.absent
            for other in plan.stages[stage].replicas
        )

    def handed_over(self) -> Change | None:
        """Return the change by which neighbouring stages take the layers of leaving members; None if another
        replica or an idle machine may take each stage, or if no neighbour can hold more."""
        plan = self._chain.head
        last = [peer for peer in self.leaving if not self.can_leave(peer)]
        busy = {peer for stage in plan.stages for peer in stage.replicas}
        if not last or self.absent or any(peer not in busy for peer, _ in self._around.free()):
            return None
        stages = merged_stages(plan, groups_left(plan, self.leaving), list(self._refused))
        # A member that brings a plan to others must be in the plan, so this member leaves only once it holds
        # nothing.
        return (
            None if stages is None else Change(lost=tuple(sorted(self.leaving - {self._me})), stages=stages)
        )

    def is_proposer(self, now: float) -> bool:
        """Return whether this member is the first live member of the committee, which asks newcomers."""
        alive, voters = self.living(now), committee(self._chain.head)
        # A member that will be dropped cannot bring the plan to others, so the remaining members come first.
        order = [*(peer for peer in voters if peer not in self.absent), *voters]
        return next((peer for peer in order if peer in alive), None) == self._me

    # Proposals

    def think(self, now: float, roles: Roles, restorable: WayBack | None) -> Change | None:
        """Return the change to propose now, None if there is none. Newcomers are asked before their change is
        returned.

        `restorable` is the checkpoint to return to and its step. A newcomer can join only if this member can
        show how its plan came about.
        """
        self.deadline = _next_look(now, self._settled_at, self._busy.values(), self._settings)
        self._bring_first_plan(now)
        if self.recut is not None and not all(self._may_come(row.peer, now) for row in self.recut.joined):
            self.give_up_recut()  # a newcomer has gone or refused
            self.events.append(RecutDeclined())
        view, pending = self._inputs(now, roles, restorable), self._pending
        if pending is not None and not (self.has_majority(now) and self._still_fits(pending, view)):
            self._drop(pending)
            pending = None
        if pending is not None:
            return pending.change if pending.is_done else None
        found = next_change(view)
        if isinstance(found, NoViablePlan):
            if not self.has_majority(now):
                self._no_way_since = None  # it waits for votes first, and the chain reports whose votes
                return None
            reasons = self.reasons(found.lost)
            reason = f"{found.reason} ({reasons})" if reasons else found.reason
            self._no_way(now, replace(found, reason=reason))
            return None
        self._no_way_since = None
        self.events.append(WayFound())
        if found is None or not (found.joined or found.admitted or found.stages):
            return found
        try:
            plan = successor(view.plan, found)
        except RemoteProtocolError:
            return None
        holding = {peer for stage in view.plan.stages for peer in stage.replicas} - set(found.lost)
        leases: dict[PeerId, int | None] = {
            PeerId(row.peer): row.stage for row in found.joined if row.peer not in holding
        }
        leases |= {PeerId(peer): None for peer in found.admitted if peer != self._requester}
        leases |= _growing(view.plan, plan, holding)  # a holder of more layers may lack room for them
        self._pending = pending = _Pending(found, plan, leases, sorted(leases), frozenset(holding))
        self._ask_next(pending)
        return None

    def replied(self, now: float, number: int, reply: Reply) -> None:
        """Handle the answer to one of `asks`."""
        if number in self._starting:
            plan, peer = self._starting.pop(number)
            if isinstance(reply, Done):
                self._newcomers = [other for other in self._newcomers if other != peer]
                self.events.append(NewcomerStarted(plan, peer))
            else:
                self.events.append(NewcomerFailed(plan, peer, reply.reason))
            return
        pending = self._pending
        if pending is None or number not in pending.asked:
            return
        peer = pending.asked.pop(number)
        if not isinstance(reply, Done):
            if pending.leases.get(peer) is not None and peer not in pending.newcomers:
                self._note_refused(now, pending.plan, peer)
            else:
                self._note_refusal(now, peer)
                self._decliners.note(peer, now)
            # Include a peer that did not answer: it may have leased a slot, and its answer may have been
            # lost.
            self._drop(pending, [*pending.leased, peer])
            if pending.change == self.recut:
                self.recut = None
                self.events.append(RecutDeclined())
        elif not pending.is_opening:
            pending.leased.append(peer)
            self._ask_next(pending)
        else:
            pending.is_done = not pending.asked
        self.changed(now)

    def _bring_first_plan(self, now: float) -> None:
        """Send the first plan to all others, once, if the requester is lost soon after this member began: the
        requester may have died before it told all of them. A member that has begun already ignores it."""
        plan = self._chain.head
        is_young = not plan.height and now < self._began + self._settings.new_member_grace_seconds
        if self._has_brought or not is_young or plan.committer not in self._around.gone():
            return
        self._has_brought = True
        for peer in plan.roster:
            if peer != self._me and peer in self._around.live():
                self.asks.put(PeerId(peer), StartRun(plan), self._settings.lease_seconds_max)

    def _note_refused(self, now: float, plan: Plan, peer: PeerId) -> None:
        """Note that a member cannot hold its stage of `plan`; do not ask it for such a stage for a while."""
        number = plan.stage_of(peer)
        if number is not None:
            stage = plan.stages[number]
            self._refused = {row: until for row, until in self._refused.items() if now < until}
            self._refused[peer, stage.first_layer, stage.last_layer] = now + self._settings.refused_seconds

    def _note_refusal(self, now: float, peer: PeerId) -> None:
        """Ask this peer again after a while, which doubles each time it refuses."""
        last = self._busy.get(peer)
        seconds = self._settings.next_busy_seconds(last.seconds if last else 0.0)
        self._busy[peer] = _Refusal(now + seconds, seconds)

    def start(self, plan: Plan, joined: Collection[bytes], *, is_new_committer: bool) -> None:
        """Start the newcomers, those in `joined`, of a plan in force.

        The committer does so; if the committer is a newcomer itself, every other member does. A new committer
        also starts unconfirmed newcomers of earlier plans, because its predecessor may have been cut off.
        """
        everybody = dict.fromkeys((*joined, *self._newcomers))
        self._newcomers = [peer for peer in everybody if peer in plan.roster]
        if plan.committer == self._me or plan.committer in self._newcomers:
            for peer in self._newcomers if is_new_committer else joined:
                self._start(plan, PeerId(peer))

    def _start(self, plan: Plan, peer: PeerId) -> None:
        if peer != self._me:
            number = self.asks.put(peer, StartRun(plan), self._settings.lease_seconds_max)
            self._starting[number] = plan, peer

    def give_up_recut(self) -> None:
        """Give up a change that adds stages or moves a standby. A change of borders alone stays, because all
        members know it."""
        if self.recut is not None and (self.recut.stages or self.recut.joined):
            if self._pending is not None and self._pending.change == self.recut:
                self._drop(self._pending)
            self.recut = None

    def give_up(self) -> None:
        """Release newcomers that were asked, and propose nothing more."""
        if self._pending is not None:
            self._drop(self._pending)

    def _ask_next(self, pending: _Pending) -> None:
        """Lease slots one by one, then let all newcomers open their stages."""
        if pending.to_lease:
            peer = pending.to_lease.pop(0)
            request = HoldStage(pending.plan, pending.change, pending.leases[peer])
            pending.asked[self.asks.put(peer, request, self._settings.lease_seconds_max)] = peer
            return
        pending.is_opening = True
        for peer in pending.newcomers:
            opening = OpenStage(pending.plan, pending.change)
            pending.asked[self.asks.put(peer, opening, self._settings.prepare_seconds_max)] = peer
        pending.is_done = not pending.asked

    def _drop(self, pending: _Pending, peers: Collection[PeerId] = ()) -> None:
        """Give up a change. Newcomers that were asked release their slots, unless the change was decided."""
        self._pending = None
        if pending.plan == self._chain.head:
            return
        asked = dict.fromkeys([*peers, *pending.leased, *pending.asked.values()])
        for peer in asked:
            if peer in pending.leases:
                self.asks.put(peer, ReleaseStage(pending.plan), self._settings.lease_seconds_max)

    def _still_fits(self, pending: _Pending, view: PlanInputs) -> bool:
        """Return whether a pending change still follows the newest plan and drops the right members, and its
        newcomers are alive."""
        live = self._around.live()
        gone = set(view.plan.roster) & view.absent
        return (
            pending.plan.parent == self._chain.head_hash
            and gone <= set(pending.change.lost) <= gone | view.leaving
            and all(peer in live and not self._wants_out(peer) for peer in pending.newcomers)
        )

    def _no_way(self, now: float, found: NoViablePlan) -> None:
        """Report that no plan can follow, once this has lasted a while: a missing member may return soon."""
        if self._no_way_since is None:
            self._no_way_since = now
        seconds = now - self._no_way_since
        if seconds >= self._settings.refill_seconds:
            self.events.append(NoWayFound(found.reason, seconds >= found.waits_seconds, found.lost))

    def _inputs(self, now: float, roles: Roles, restorable: WayBack | None) -> PlanInputs:
        plan, alive = self._chain.head, self.living(now)
        absent = frozenset(
            PeerId(peer) for peer in plan.roster if peer not in alive or PeerId(peer) in self.absent
        )
        is_needed = restorable is not None and restorable[0] != FIRST_VALUES
        is_needed &= any(absent.issuperset(map(PeerId, stage.replicas)) for stage in plan.stages)
        # Without a quorum no plan can be decided, and a peer that agreed to one would be unavailable to other
        # runs.
        asks = self.is_proposer(now) and roles.can_tell and self.has_majority(now)
        return PlanInputs(
            plan=plan,
            absent=absent,
            leaving=frozenset(self.leaving - absent),
            candidates=self._candidates(plan, now) if asks else (),
            wanted=self.wanted,
            restorable=restorable,
            can_restore=not is_needed or _can_restore(self._around.live(), self._chain, roles, restorable),
            newcomers=(self._requester,) if asks and self._may_come(self._requester, now) else (),
            may_refill=asks and now >= self._settled_at + self._settings.refill_seconds,
            asks=asks,
            recut=self.recut,
            refused=[row for row, until in self._refused.items() if now < until],
            settings=self._settings,
        )

    def _candidates(self, plan: Plan, now: float) -> tuple[tuple[PeerId, int], ...]:
        free = [row for row in self._around.free() if self._may_come(row[0], now)]
        # The proposer must be in the plan that it brings to others, even if it lost its own stage.
        first = {self._me} & set(self.absent)
        last, roster = self._decliners.now(now), set(plan.roster)
        return ranked(free, first=first, trainers=plan.trainers, roster=roster, last=last)

    def _wants_out(self, peer: PeerId) -> bool:
        """Return whether a peer is about to leave. A member that the next plan drops has given up its stage,
        so it may be asked again once it offers a slot."""
        return peer in self.leaving and peer not in self.absent

    def _may_come(self, peer: bytes, now: float) -> bool:
        peer = PeerId(peer)
        is_here = peer in self._around.live() and not self._wants_out(peer)
        refusal = self._busy.get(peer)
        return is_here and (refusal is None or refusal.until <= now)


def _can_restore(
    live: Collection[PeerId], chain: PaxosChain, roles: Roles, restorable: WayBack | None
) -> bool:
    """Return whether a copy of a checkpoint is here, or may be at another live member, present or former."""
    if any(peer in live for peer in chain.acquainted):
        return True
    return restorable is not None and roles.holds(restorable)


def _next_look(now: float, settled_at: float, refusals: Iterable[_Refusal], settings: RunSettings) -> float:
    """Return when to think again if nothing changes: when the next wait ends, such as the wait before a peer
    that refused is asked again."""
    waits = [settled_at + settings.refill_seconds, *(refusal.until for refusal in refusals)]
    return min([now + settings.refill_seconds, *(until for until in waits if until > now)])


def _growing(before: Plan, after: Plan, holding: Collection[bytes]) -> dict[PeerId, int]:
    """Return the holders whose layers change from the plan `before` to `after`, with their stages."""
    spans = {
        peer: (stage.first_layer, stage.last_layer) for stage in before.stages for peer in stage.replicas
    }
    return {
        PeerId(peer): number
        for number, stage in enumerate(after.stages)
        for peer in stage.replicas
        if peer in holding and spans[peer] != (stage.first_layer, stage.last_layer)
    }
