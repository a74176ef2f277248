"""Agreement of a run's members on the next plan: Paxos at each height of the chain, as a sans-IO core.

Paper: Lamport 2001, "Paxos Made Simple"; its "chosen" is `decided` here. There is one instance per height. It
is identified by the parent plan, and the parent's `committee` votes; a majority decides. No leader stays
longer than one plan.

A member must keep its promises across restarts: whenever `unsaved` is set, `durable` must be stored before a
call's messages are sent and its events are handled.

A run may name its requester as tie-breaker. Then exactly half of an even committee is also a quorum if it
includes the tie-breaker. So in a committee of two, the requester can continue alone, while the other member
waits. Any two quorums still intersect, so a height never has two plans. A member that can reach no quorum
waits. If the run allows forks, the members that can still reach each other may, after a delay, decide without
the others, in a separate instance identified by the hash of their member list. After the network has healed,
both sides learn of each other: one branch continues, and members of the other branch get a ForkFound and
return as newcomers.

Members are trusted: a Decided is accepted from any present or past member of the roster if its changes are
valid. A lie is noticed only if two different changes were decided for one plan (ChainBroken).

This file joins the roles: `paxos_proposer` proposes, `paxos_acceptor` votes, `learner` follows decisions of
others, and `quorum` counts live members. Not here: the choice of the change (the wish), and the disk.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.chain import Chain, Kept, follow, pack, unpack
from partition.plan.change import Change
from partition.plan.learner import ChainBroken, ForkBehind, ForkFound, Learner, LeftBehind, Taken
from partition.plan.paxos_acceptor import PaxosAcceptor
from partition.plan.paxos_messages import (
    Accept,
    AgreementMessage,
    ChainHead,
    Decided,
    Prepare,
    Sends,
    other_branch_wins,
)
from partition.plan.paxos_proposer import PaxosProposer
from partition.plan.plan import NO_HASH, Plan
from partition.plan.proposal import check_same_chain, names_of
from partition.plan.quorum import ForkOpened, Instance, QuorumFound, QuorumLost, Reach

__all__ = [
    "ChainBroken",
    "Event",
    "ForkBehind",
    "ForkFound",
    "ForkOpened",
    "LeftBehind",
    "PaxosChain",
    "PlanDecided",
    "QuorumFound",
    "QuorumLost",
]


@dataclass(frozen=True)
class PlanDecided:
    """`plan` is now the newest plan; applying `change` to its parent produced it. `links` is the number of
    plans that were appended together, including this one."""

    plan: Plan
    change: Change
    links: int


Event = (
    PlanDecided | QuorumLost | QuorumFound | ForkOpened | ForkFound | ForkBehind | LeftBehind | ChainBroken
)


class PaxosChain:
    """One member's part in the chain of one run.

    `genesis` is the first plan that this member knows: the requester's first plan or, for a newcomer, the
    plan that admitted it. `durable` is the state stored by an earlier process of this member. If it is not
    empty, it takes precedence over `genesis`. If this member may have voted on the successor of `genesis`
    before it lost its stored state, it must `abstain` until the next plan. All members of a run must name the
    same `tie_breaker`.

    Raises:
        RemoteProtocolError: `durable` is damaged.
        ValueError: `durable` belongs to another run, or to a branch that does not contain `genesis`.
    """

    def __init__(
        self,
        me: PeerId,
        genesis: Plan,
        rng: Random,
        *,
        durable: bytes = b"",
        may_fork: bool = False,
        tie_breaker: PeerId | None = None,
        abstain: bool = False,
    ) -> None:
        self.me = me
        self.unsaved = not durable
        self.events: list[Event] = []
        kept = unpack(durable) if durable else None
        chain = Chain(genesis) if kept is None else Chain(kept.base, kept.links)
        if kept is not None:
            check_same_chain(chain, genesis)
        self._may_fork = may_fork
        self._acceptor = PaxosAcceptor(abstains=abstain, kept=kept)
        self._learner = Learner(me, chain, may_fork=may_fork)
        self._reach = Reach(me, chain.head, may_fork=may_fork, tie_breaker=tie_breaker)
        self._proposer = PaxosProposer(me, rng, self._acceptor, self._reach)
        self._proposer.begin(chain)

    @property
    def head(self) -> Plan:
        """The newest plan known to be decided."""
        return self._learner.chain.head

    @property
    def head_hash(self) -> bytes:
        """The hash of the head."""
        return self._learner.chain.head_hash

    @property
    def base(self) -> Plan:
        """The oldest plan of `chain`."""
        return self._learner.chain.plans[0]

    @property
    def chain(self) -> tuple[bytes, ...]:
        """The encoded changes from `base` to `head`, at most LINKS_MAX. Older changes are already part of
        `base`."""
        return tuple(self._learner.chain.links)

    @property
    def acquainted(self) -> tuple[PeerId, ...]:
        """All other peers on the roster of any plan that is still stored, including lost ones: after a fork
        they must learn of us."""
        return tuple(PeerId(peer) for peer in self._learner.chain.peers() if peer != self.me)

    @property
    def durable(self) -> bytes:
        """The state that must be stored whenever `unsaved` is set."""
        mine = self._acceptor
        return pack(Kept(self.base, self.chain, mine.votes, mine.abstains, mine.past))

    @property
    def deadline(self) -> float:
        """The time of the next `wake`, in monotonic seconds; inf if none is due."""
        return min(self._proposer.deadline, self._reach.deadline)

    def knows(self, peer: PeerId) -> bool:
        """Return whether `peer` is another member, present or past, on the roster of a stored plan."""
        return peer != self.me and self._learner.chain.knows(peer)

    # Calls of this node

    def wish(self, now: float, change: Change | None, *, parent: bytes | None = None) -> Sends:
        """Set the change that this member is to propose (None to propose nothing). It stays in force until
        the next call, or until a new plan is decided.

        `parent` is the hash of the plan for which the change was made. Nothing is proposed if the head is no
        longer that plan, or if the change does not yield a valid plan. Only committee members propose; on any
        other member this call has no effect.
        """
        self._proposer.wish(now, change if parent in (None, self.head_hash) else None)
        return self.wake(now)

    def reach(self, now: float, live: Collection[PeerId]) -> Sends:
        """Set the peers that SWIM believes alive. Until the first call, all count as alive."""
        if self._reach.see(now, live):
            self._proposer.hurry(now)
        return self.wake(now)

    def say(self, head: ChainHead) -> None:
        """Set this member's progress, as reported by the caller. Two branches are compared by their
        progress."""
        self._learner.said = head

    def gives_way(self, head: ChainHead) -> bool:
        """Return whether the branch with this head wins over ours, which is represented by the head last
        passed to `say`."""
        return other_branch_wins(self._learner.head(asks=False), head)

    def rejoin(self, now: float, base: Plan, links: Sequence[bytes] = ()) -> Sends:
        """Replace our chain by `base` and `links` of another member, after ForkFound or LeftBehind.

        The member remembers where it has voted: if it may already have voted on the successor of the new
        head, it abstains until the next plan. Raises RemoteProtocolError, without any change of state, if the
        chain is invalid or belongs to another run.
        """
        if base.run != self.head.run:
            raise RemoteProtocolError("the chain belongs to another run")
        learner = Learner(self.me, Chain(base, links), may_fork=self._may_fork)
        self._acceptor.leave(self.head)
        self._learner = learner
        self._acceptor.return_to(self.head)
        self.unsaved = True
        self._reach.follow(now, self.head)
        self._proposer.begin(learner.chain)
        return self.wake(now)

    def tell(self, peer: PeerId) -> Sends:
        """Exchange heads with `peer`: either side sends the links that the other lacks."""
        return [(peer, self._learner.head(asks=True))]

    def wake(self, now: float) -> Sends:
        """Do the work that is due. Nothing is due before `deadline`."""
        self._reach.wake(now, self._acceptor.voted)
        sends = self._proposer.wake(now) + self._decide(now)
        self._gather()
        return sends

    # Input

    def receive(self, now: float, sender: PeerId, message: AgreementMessage) -> Sends:
        """Handle a peer's message about the chain. Raises RemoteProtocolError, without any change of state,
        if the message is refused."""
        if message.run != self.head.run:
            raise RemoteProtocolError("a message is about another run's plans")
        if not self.knows(sender):
            raise RemoteProtocolError("a message about plans is from a peer that is on no roster")
        try:
            return self._sort(now, sender, message)
        finally:
            self._gather()

    def _sort(self, now: float, sender: PeerId, message: AgreementMessage) -> Sends:
        if isinstance(message, ChainHead):
            return self._learner.hear(now, sender, message)
        if isinstance(message, Decided):
            rows, sends = self._learner.learn(sender, message)
            if rows:
                self._advance(now, rows)
            return sends
        if message.parent != self.head_hash:
            return self._answer_elsewhere(sender, message)
        instance = self._reach.named(message.fork)
        if instance is None:
            return []
        if sender not in instance.committee or self.me not in instance.committee:
            raise RemoteProtocolError("a vote has a sender or receiver outside the committee")
        if isinstance(message, Prepare | Accept):
            return self._vote_on(now, sender, instance, message)
        return self._proposer.count_vote(now, sender, message) + self._decide(now)

    def _answer_elsewhere(self, sender: PeerId, message: AgreementMessage) -> Sends:
        # The message is about a plan that is not our head. A vote for such a plan is just late and is
        # ignored. But a Prepare or Accept for it means that the sender or this member is behind.
        if not isinstance(message, Prepare | Accept):
            return []
        place = self._learner.chain.place(message.parent)
        if place is None:
            return self.tell(sender)
        return [(sender, self._learner.links_after(place))]

    def _vote_on(self, now: float, sender: PeerId, instance: Instance, message: Prepare | Accept) -> Sends:
        ballot = message.ballot
        if ballot.peer != sender:
            raise RemoteProtocolError("a ballot belongs to another peer")
        promised = self._acceptor.vote(instance).promised
        self._proposer.check_round(ballot, promised)
        answer = self._acceptor.answer(self.head, instance, message, names_of(self._learner.chain, instance))
        if answer is None:
            return []
        if promised is None or ballot > promised:
            self._proposer.give_way(now, instance, ballot)
        return [(sender, answer)]

    # Decisions

    @property
    def is_forking(self) -> bool:
        """Whether a fork is open: the reachable members may decide on the successor of the newest plan
        without the others."""
        return self._reach.fork is not None

    def could_decide(self, living: Collection[PeerId]) -> bool:
        """Return whether a fork is open, or the live members of the newest plan's committee can decide its
        successor."""
        return self._reach.fork is not None or self._reach.decides(self._reach.normal, living)

    def _decide(self, now: float) -> Sends:
        """Apply the value that a quorum has accepted, if any, and send it to every member concerned."""
        value = self._proposer.chosen
        if value is None:
            return []
        plan, change = follow(self.head, value)
        told = Decided(run=plan.run, parent=self.head_hash, fork=change.fork, links=(value,))
        # Members that leave the roster are told too, but members that a fork leaves behind are not.
        old = self.head.roster if change.fork == NO_HASH else ()
        self._advance(now, [Taken(plan, change, value)])
        return [(PeerId(peer), told) for peer in sorted({*old, *plan.roster} - {self.me})]

    def _advance(self, now: float, rows: list[Taken]) -> None:
        self._acceptor.leave(self.head)
        self._learner.append(rows)
        self.unsaved = True
        self.events.append(PlanDecided(self.head, rows[-1].change, len(rows)))
        self._reach.follow(now, self.head)
        self._proposer.begin(self._learner.chain)

    def _gather(self) -> None:
        """Collect the output of the parts."""
        for events in (self._learner.events, self._reach.events):
            self.events += events
            events.clear()
        self.unsaved = self.unsaved or self._acceptor.unsaved
        self._acceptor.unsaved = False
