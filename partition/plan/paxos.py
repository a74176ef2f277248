"""Agreement of a run's members on the next plan: Paxos at each height of the chain, as a sans-IO core.

Paper: Lamport 2001, "Paxos Made Simple"; its "chosen" is `decided` here. One instance per height, named by
the plan that is to be followed, among `committee` of that plan; a majority of it decides. The nearest living
member of the committee proposes at once and the others only in turn after it, so that they rarely duel;
nobody is elected for longer than one plan.

A member must keep its promises over every restart: whenever `unsaved` is set, `durable` must be stored before
anything that a call returned is sent, and before its events are acted on.

Where a run names a tie-breaker, its requester, half of an even committee with it decides as a majority does:
of two members the requester goes on alone and the other waits; every two quorums still meet, so there are
never two plans at one height. A member that has lost sight of a quorum waits. Where the run allows forks, the
members that see each other then decide alone, in an instance of their own that their list names. After
healing both sides hear of each other: the one that survives goes on, and members of the other get a ForkFound
and come back as newcomers.

Members are trusted to tell the truth: a Decided is believed from any present or past member of the roster, as
far as its changes are valid. A lie is noticed only where two different changes were decided for one plan
(ChainBroken).

This file has the proposer and the acceptor, `proposal` one attempt of the former; `learner` follows decisions
of others, `quorum` counts the living. Not here: the change to decide (the wish), and the disk.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import assert_never

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.chain import Chain, Kept, Past, Voted, follow, pack, unpack
from partition.plan.change import Change
from partition.plan.learner import ChainBroken, ForkBehind, ForkFound, Learner, LeftBehind, Taken
from partition.plan.paxos_messages import (
    ROUNDS_AHEAD_MAX,
    Accept,
    Accepted,
    AgreementMessage,
    Ballot,
    ChainHead,
    Decided,
    PreemptedBallot,
    Prepare,
    Promised,
    Sends,
    Vote,
    other_branch_wins,
)
from partition.plan.plan import NO_HASH, Plan
from partition.plan.proposal import Proposal, check_same_chain, value_of
from partition.plan.quorum import ForkOpened, Instance, QuorumFound, QuorumLost, Reach, decides

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

PROPOSE_SECONDS = 1.0
"""The time that each member of the committee gives those before it: two round trips and a disk, with room."""
JITTER = 0.25
"""The random share by which each wait is longer, so that clocks in step do not stay in step."""
RESEND_SECONDS = 1.0
"""The time without a majority after which a question is repeated; doubled each time."""
RESEND_SECONDS_MAX = 16.0
BACKOFF_SECONDS = 0.5
"""The mean first wait of an outbid proposer; doubled each time."""
BACKOFF_SECONDS_MAX = 16.0

INF = float("inf")


@dataclass(frozen=True)
class PlanDecided:
    """`plan` is now the newest. `change` led to it; `links` plans came at once, this one included."""

    plan: Plan
    change: Change
    links: int


Event = (
    PlanDecided | QuorumLost | QuorumFound | ForkOpened | ForkFound | ForkBehind | LeftBehind | ChainBroken
)


class PaxosChain:
    """One member's part in the chain of one run.

    `genesis` is where this member begins: the requester's plan, or for a newcomer the plan that admitted it.
    `durable` is the state stored in an earlier life, which then counts instead. A member that may have voted
    on what follows `genesis`, in a life that it has forgotten, must `abstain`: it votes from the next plan
    on. All members of a run must name the same `tie_breaker`.

    Long because promises, votes and decisions of a height must go into one durable record before any is said.

    Raises:
        RemoteProtocolError: `durable` is damaged.
        ValueError: `durable` is another run's, or of a branch that `genesis` is not on.
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
        self._rng = rng
        self._abstains = abstain
        self._votes: dict[bytes, Vote] = {}
        self._past = Past()
        kept = unpack(durable) if durable else None
        chain = Chain(genesis) if kept is None else Chain(kept.base, kept.links)
        if kept is not None:
            check_same_chain(chain, genesis)
            self._abstains, self._past = kept.abstains, kept.past
            self._votes = {row.fork: row.vote for row in kept.votes}
        self._may_fork = may_fork
        self._tie_breaker = tie_breaker
        self._learner = Learner(me, chain, may_fork=may_fork)
        self._reach = Reach(me, chain.head, may_fork=may_fork, tie_breaker=tie_breaker)
        self._begin()

    def _begin(self) -> None:
        """Begin a new height: nothing is wished for or proposed."""
        self._instance = self._reach.instance
        self._wish: Change | None = None
        self._proposal: Proposal | None = None
        self._round = 0
        self._outbids = 0
        self._propose_at = self._resend_at = INF
        self._resend_seconds = RESEND_SECONDS

    @property
    def head(self) -> Plan:
        """The newest plan that is known to be decided."""
        return self._learner.chain.head

    @property
    def head_hash(self) -> bytes:
        """The hash of the head."""
        return self._learner.chain.head_hash

    @property
    def base(self) -> Plan:
        """The plan that `chain` begins from."""
        return self._learner.chain.plans[0]

    @property
    def chain(self) -> tuple[bytes, ...]:
        """The encoded changes from `base` to `head`, at most LINKS_MAX; older ones are folded into `base`."""
        return tuple(self._learner.chain.links)

    @property
    def acquainted(self) -> tuple[PeerId, ...]:
        """All others on a kept roster, lost ones too: after a fork they must hear of us."""
        return tuple(PeerId(peer) for peer in self._learner.chain.peers() if peer != self.me)

    @property
    def durable(self) -> bytes:
        """The state that must be stored whenever `unsaved` is set."""
        votes = tuple(Voted(fork, vote) for fork, vote in self._votes.items())
        return pack(Kept(self.base, self.chain, votes, self._abstains, self._past))

    @property
    def deadline(self) -> float:
        """When `wake` wants to be called, in monotonic seconds; inf for never."""
        return min(self._propose_at, self._resend_at, self._reach.deadline)

    def knows(self, peer: PeerId) -> bool:
        """Return whether `peer` is another that is, or was, on a kept roster."""
        return peer != self.me and self._learner.chain.knows(peer)

    # Orders of this node

    def wish(self, now: float, change: Change | None, *, parent: bytes | None = None) -> Sends:
        """Set the change that this member wants decided next, until the next call or the next plan; None for
        nothing.

        `parent` is the hash of the plan it was made for: where the head is another by now, or no plan follows
        from it, nothing is wished. It counts only from a member of the committee.
        """
        fits = change is not None and parent in (None, self.head_hash)
        if not fits or value_of(self.head, self._reach.normal, change) is None:
            change = None
        self._wish = change
        if change is None:
            self._propose_at = INF
            if self._proposal is not None and self._proposal.value is None:
                self._abandon()
        elif self._propose_at == INF:
            self._line_up(now)
        return self.wake(now)

    def reach(self, now: float, live: Collection[PeerId]) -> Sends:
        """Set the peers believed to be alive, as SWIM has them; until the first call all are."""
        if self._reach.see(now, live):
            self._resend_seconds = RESEND_SECONDS
            self._resend_at = min(self._resend_at, now + RESEND_SECONDS if self._proposal else INF)
            self._line_up(now)
        return self.wake(now)

    def say(self, head: ChainHead) -> None:
        """Set how far this member is, as its shell reports it: the basis for judging which of two branches
        survives."""
        self._learner.said = head

    def gives_way(self, head: ChainHead) -> bool:
        """Return whether the branch with this head is the one to go on with, by the head last set."""
        return other_branch_wins(self._learner.head(asks=False), head)

    def rejoin(self, now: float, base: Plan, links: Sequence[bytes] = ()) -> Sends:
        """Give up our chain and go on from `base` and `links` of another member, after ForkFound or
        LeftBehind.

        Votes given up are not forgotten: at a plan where it may have voted, it abstains until the next one.
        RemoteProtocolError: they are another run's, or no chain, and nothing has changed.
        """
        if base.run != self.head.run:
            raise RemoteProtocolError("a chain of another run's plans")
        learner = Learner(self.me, Chain(base, links), may_fork=self._may_fork)
        self._note_votes()
        self._learner = learner
        self._abstains = self._past.may_hold(self.head)
        self.unsaved = True
        self._reach.follow(now, self.head)
        self._begin()
        return self.wake(now)

    def tell(self, peer: PeerId) -> Sends:
        """Exchange heads with `peer`: either side sends the links that the other lacks."""
        return [(peer, self._learner.head(asks=True))]

    def wake(self, now: float) -> Sends:
        """Do what is due. Nothing is due before `deadline`."""
        self._reach.wake(now, self._votes)
        if self._reach.instance != self._instance:
            self._instance = self._reach.instance
            self._abandon()
            self._propose_at = INF
            self._line_up(now)
        sends: Sends = []
        if now >= self._propose_at:
            sends += self._propose(now)
        if now >= self._resend_at:
            sends += self._resend(now)
        self._gather()
        return sends

    # Input

    def receive(self, now: float, sender: PeerId, message: AgreementMessage) -> Sends:
        """Take a peer's message about the chain. RemoteProtocolError: refused, and nothing has changed."""
        if message.run != self.head.run:
            raise RemoteProtocolError("a message about another run's plans")
        if not self.knows(sender):
            raise RemoteProtocolError("a message about plans from a peer that is on no roster")
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
            raise RemoteProtocolError("a vote outside of the committee")
        if isinstance(message, Prepare | Accept):
            return self._vote_on(now, sender, instance, message)
        return self._count_vote(now, sender, message)

    def _answer_elsewhere(self, sender: PeerId, message: AgreementMessage) -> Sends:
        # About another plan than our head. Answers may be late; a question shows that one of us is behind.
        if not isinstance(message, Prepare | Accept):
            return []
        place = self._learner.chain.place(message.parent)
        if place is None:
            return self.tell(sender)
        return [(sender, self._learner.links_after(place))]

    def _gather(self) -> None:
        for events in (self._learner.events, self._reach.events):
            self.events += events
            events.clear()

    # Acceptor

    def _vote_on(self, now: float, sender: PeerId, instance: Instance, message: Prepare | Accept) -> Sends:
        ballot, names = message.ballot, self._names(instance)
        if ballot.peer != sender:
            raise RemoteProtocolError("a ballot of another peer")
        vote = self._votes.get(instance.fork, Vote())
        self._check_round(ballot, vote.promised)
        if self._abstains:
            return []
        if vote.promised is not None and vote.forbids(ballot):
            return [(sender, PreemptedBallot(**names, ballot=ballot, promised=vote.promised))]
        answer: Promised | Accepted
        if isinstance(message, Prepare):
            answer = Promised(**names, ballot=ballot, accepted=vote.accepted, value=vote.value)
            after = vote.promise(ballot)
        else:
            self._check_value(instance, message.value)
            answer = Accepted(**names, ballot=ballot)
            after = vote.accept(ballot, message.value)
        self._cast(instance, after)
        if vote.promised is None or ballot > vote.promised:
            self._give_way(now, instance, ballot)
        return [(sender, answer)]

    def _check_round(self, ballot: Ballot, known: Ballot | None) -> None:
        if ballot.round > max(self._round, known.round if known else 0) + ROUNDS_AHEAD_MAX:
            raise RemoteProtocolError("a ballot of an absurd round")

    def _check_value(self, instance: Instance, value: bytes) -> None:
        _, change = follow(self.head, value)
        if change.fork != instance.fork:
            raise RemoteProtocolError("a change of another fork")

    def _cast(self, instance: Instance, vote: Vote) -> None:
        if vote != self._votes.get(instance.fork):
            self._votes[instance.fork] = vote
            self.unsaved = True

    def _give_way(self, now: float, instance: Instance, ballot: Ballot) -> None:
        """Give way to a higher ballot: an attempt of ours below it has little hope, and a new one only
        disturbs."""
        mine = self._proposal
        if mine is not None and mine.instance == instance and mine.ballot < ballot:
            self._abandon()
        if self._proposal is None and self._wish is not None:
            later = now + self._jittered(PROPOSE_SECONDS) + self._turn()
            self._propose_at = later if self._propose_at == INF else max(self._propose_at, later)

    # Proposer

    def _line_up(self, now: float) -> None:
        if self._proposal is None and self._wish is not None:
            self._propose_at = min(self._propose_at, now + self._turn())

    def _propose(self, now: float) -> Sends:
        """Begin an attempt. Its first promise is our own, so no ballot is used twice in any life."""
        self._propose_at = INF
        instance = self._instance
        if self._wish is None or self._abstains or self.me not in instance.committee:
            return []
        if value_of(self.head, instance, self._wish) is None:
            return []  # as a fork it would leave a stage without a replica
        vote = self._votes.get(instance.fork, Vote())
        self._round = max(self._round, vote.promised.round if vote.promised else 0) + 1
        ballot = Ballot(self._round, self.me)
        self._cast(instance, vote.promise(ballot))
        self._proposal = Proposal(instance, ballot, vote, [self.me])
        self._resend_seconds = RESEND_SECONDS
        self._resend_at = now + self._jittered(RESEND_SECONDS)
        return self._proposal.questions(self._names(instance)) + self._count(now, self._proposal)

    def _count_vote(
        self, now: float, sender: PeerId, message: Promised | PreemptedBallot | Accepted
    ) -> Sends:
        """Count an answer to our question; one to an earlier question changes nothing any more."""
        if message.ballot.peer != self.me:
            raise RemoteProtocolError("an answer to the ballot of another peer")
        mine = self._proposal
        if mine is None or message.ballot != mine.ballot or message.fork != mine.instance.fork:
            return []
        match message:
            case Promised():
                if (value := mine.promised_value(message)) is not None:
                    self._check_value(mine.instance, value)
                mine.promise(sender, message)
            case Accepted():
                mine.accept(sender)
            case PreemptedBallot():
                if message.promised <= mine.ballot:
                    raise RemoteProtocolError("outbid by a lower ballot")
                self._check_round(message.promised, mine.ballot)
                self._round = max(self._round, message.promised.round)
                self._back_off(now)
                return []
            case _:
                assert_never(message)
        return self._count(now, mine)

    def _count(self, now: float, mine: Proposal) -> Sends:
        """Go on with our attempt as far as the answers allow."""
        sends: Sends = []
        if mine.value is None and self._is_quorum(mine.instance, mine.promised):
            mine.value = mine.best.value or value_of(self.head, mine.instance, self._wish)
            if mine.value is None:
                self._abandon()
                return []
            self._cast(mine.instance, self._votes[mine.instance.fork].accept(mine.ballot, mine.value))
            mine.accepted.append(self.me)
            self._resend_seconds = RESEND_SECONDS
            self._resend_at = now + self._jittered(RESEND_SECONDS)
            sends = mine.questions(self._names(mine.instance))
        if mine.value is not None and self._is_quorum(mine.instance, mine.accepted):
            return self._decide(now, mine.value)
        return sends

    def _is_quorum(self, instance: Instance, votes: Collection[PeerId]) -> bool:
        return decides(instance.committee, votes, self._tie_breaker if instance.fork == NO_HASH else None)

    @property
    def is_forking(self) -> bool:
        """Whether a fork is open: the members in reach may decide alone what follows the newest plan."""
        return self._reach.fork is not None

    def could_decide(self, living: Collection[PeerId]) -> bool:
        """Return whether the living of the newest plan's committee are enough to decide what follows it, or a
        fork may do so."""
        return self._reach.fork is not None or self._is_quorum(self._reach.normal, living)

    def _decide(self, now: float, value: bytes) -> Sends:
        """Take a value that a majority has accepted, which is final; tell every member concerned."""
        plan, change = follow(self.head, value)
        told = Decided(run=plan.run, parent=self.head_hash, fork=change.fork, links=(value,))
        # Members that leave the roster hear of it too, but not those that a fork goes on without.
        old = self.head.roster if change.fork == NO_HASH else ()
        self._advance(now, [Taken(plan, change, value)])
        return [(PeerId(peer), told) for peer in sorted({*old, *plan.roster} - {self.me})]

    def _advance(self, now: float, rows: list[Taken]) -> None:
        self._note_votes()
        self._learner.append(rows)
        self._abstains = False
        self.unsaved = True
        self.events.append(PlanDecided(self.head, rows[-1].change, len(rows)))
        self._reach.follow(now, self.head)
        self._begin()

    def _note_votes(self) -> None:
        # At a plan that was followed they are of no use any more, unless this member comes back to it.
        if self._votes or self._abstains:
            self._past = self._past.with_plan(self.head)
        self._votes.clear()

    def _resend(self, now: float) -> Sends:
        mine = self._proposal
        assert mine is not None
        self._resend_seconds = min(2 * self._resend_seconds, RESEND_SECONDS_MAX)
        self._resend_at = now + self._jittered(self._resend_seconds)
        return mine.questions(self._names(mine.instance))

    def _back_off(self, now: float) -> None:
        self._abandon()
        self._outbids += 1
        middle = min(BACKOFF_SECONDS * 2 ** min(self._outbids - 1, 16), BACKOFF_SECONDS_MAX)
        if self._wish is not None:
            self._propose_at = now + (0.5 + self._rng.random()) * middle

    def _abandon(self) -> None:
        self._proposal = None
        self._resend_at = INF

    def _turn(self) -> float:
        """Return the seconds until it is our turn to propose, by the number of living members before us."""
        seats = self._instance.committee
        if self.me not in seats:
            return INF
        before = sum(self._reach.lives(peer) for peer in seats[: seats.index(self.me)])
        return self._jittered(before * PROPOSE_SECONDS)

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + JITTER * self._rng.random())

    def _names(self, instance: Instance) -> dict[str, bytes]:
        return {"run": self.head.run, "parent": self.head_hash, "fork": instance.fork}
