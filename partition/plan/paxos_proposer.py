"""The proposer of `partition.plan.paxos`: lets its member's change be decided at one height.

The nearest living member of the committee proposes at once, and the others only in turn after it, so that
they rarely duel. An outbid proposer waits ever longer between attempts; a question without a majority of
answers is repeated at growing intervals.
"""

from random import Random
from typing import assert_never

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.chain import Chain
from partition.plan.change import Change
from partition.plan.paxos_acceptor import PaxosAcceptor
from partition.plan.paxos_messages import (
    ROUNDS_AHEAD_MAX,
    Accepted,
    Ballot,
    PreemptedBallot,
    Promised,
    Sends,
)
from partition.plan.proposal import Proposal, check_value, names_of, value_of
from partition.plan.quorum import Instance, Reach

PROPOSE_SECONDS = 1.0
"""The time that each member of the committee gives its predecessors: two round trips and a disk write, with
margin."""
JITTER = 0.25
"""The random share added to each wait, so that synchronized clocks diverge."""
RESEND_SECONDS = 1.0
"""The time without a majority before a question is repeated; doubled each time."""
RESEND_SECONDS_MAX = 16.0
BACKOFF_SECONDS = 0.5
"""The mean first wait of an outbid proposer; doubled each time."""
BACKOFF_SECONDS_MAX = 16.0

INF = float("inf")


class PaxosProposer:
    """One member's attempts, one at a time, at the height after the head of `chain`.

    Its own promise and acceptance go through `acceptor`, whose state must be stored before a call's messages
    are sent. `chosen` is the value that a quorum accepted: it is final, and `begin` follows.
    """

    def __init__(self, me: PeerId, rng: Random, acceptor: PaxosAcceptor, reach: Reach) -> None:
        self._me = me
        self._rng = rng
        self._acceptor = acceptor
        self._reach = reach

    def begin(self, chain: Chain) -> None:
        """Begin a new height without a proposal."""
        self._chain = chain
        self._instance = self._reach.instance
        self._wish: Change | None = None
        self._proposal: Proposal | None = None
        self.chosen: bytes | None = None
        self._round = 0
        self._outbids = 0
        self._propose_at = self._resend_at = INF
        self._resend_seconds = RESEND_SECONDS

    @property
    def deadline(self) -> float:
        """The time of the next `wake`."""
        return min(self._propose_at, self._resend_at)

    def wish(self, now: float, change: Change | None) -> None:
        """Set the change to decide; None, or one that no plan follows from, for none."""
        if value_of(self._chain.head, self._reach.normal, change) is None:
            change = None
        self._wish = change
        if change is None:
            self._propose_at = INF
            if self._proposal is not None and self._proposal.value is None:
                self._abandon()
        elif self._propose_at == INF:
            self._line_up(now)

    def hurry(self, now: float) -> None:
        """Ask again soon, since other members are in reach."""
        self._resend_seconds = RESEND_SECONDS
        self._resend_at = min(self._resend_at, now + RESEND_SECONDS if self._proposal else INF)
        self._line_up(now)

    def give_way(self, now: float, instance: Instance, ballot: Ballot) -> None:
        """Give way to a higher ballot: an attempt of ours below it has little hope, and a new one only
        disturbs."""
        mine = self._proposal
        if mine is not None and mine.instance == instance and mine.ballot < ballot:
            self._abandon()
        if self._proposal is None and self._wish is not None:
            later = now + self._jittered(PROPOSE_SECONDS) + self._turn()
            self._propose_at = later if self._propose_at == INF else max(self._propose_at, later)

    def check_round(self, ballot: Ballot, known: Ballot | None) -> None:
        """Raise RemoteProtocolError if a ballot is far above all known ones."""
        if ballot.round > max(self._round, known.round if known else 0) + ROUNDS_AHEAD_MAX:
            raise RemoteProtocolError("a ballot of an absurd round")

    def wake(self, now: float) -> Sends:
        """Do what is due, in the instance of the members in reach."""
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
        return sends

    def count_vote(self, now: float, sender: PeerId, message: Promised | PreemptedBallot | Accepted) -> Sends:
        """Count an answer to our question; ignore answers to earlier ones."""
        if message.ballot.peer != self._me:
            raise RemoteProtocolError("an answer to the ballot of another peer")
        mine = self._proposal
        if mine is None or message.ballot != mine.ballot or message.fork != mine.instance.fork:
            return []
        match message:
            case Promised():
                if (value := mine.promised_value(message)) is not None:
                    check_value(self._chain.head, mine.instance, value)
                mine.promise(sender, message)
            case Accepted():
                mine.accept(sender)
            case PreemptedBallot():
                if message.promised <= mine.ballot:
                    raise RemoteProtocolError("outbid by a lower ballot")
                self.check_round(message.promised, mine.ballot)
                self._round = max(self._round, message.promised.round)
                self._back_off(now)
                return []
            case _:
                assert_never(message)
        return self._count(now, mine)

    def _line_up(self, now: float) -> None:
        if self._proposal is None and self._wish is not None:
            self._propose_at = min(self._propose_at, now + self._turn())

    def _propose(self, now: float) -> Sends:
        """Begin an attempt. Its first promise is our own, so no ballot is used twice in any life."""
        self._propose_at = INF
        instance = self._instance
        if self._wish is None or self._acceptor.abstains or self._me not in instance.committee:
            return []
        if value_of(self._chain.head, instance, self._wish) is None:
            return []  # as a fork it would leave a stage without a replica
        vote = self._acceptor.vote(instance)
        self._round = max(self._round, vote.promised.round if vote.promised else 0) + 1
        ballot = Ballot(self._round, self._me)
        self._acceptor.cast(instance, vote.promise(ballot))
        self._proposal = Proposal(instance, ballot, vote, [self._me])
        return self._ask(now, self._proposal) + self._count(now, self._proposal)

    def _count(self, now: float, mine: Proposal) -> Sends:
        """Advance our attempt as far as the answers allow."""
        sends: Sends = []
        if mine.value is None and self._reach.decides(mine.instance, mine.promised):
            mine.value = mine.best.value or value_of(self._chain.head, mine.instance, self._wish)
            if mine.value is None:
                self._abandon()
                return []
            vote = self._acceptor.vote(mine.instance)
            self._acceptor.cast(mine.instance, vote.accept(mine.ballot, mine.value))
            mine.accepted.append(self._me)
            sends = self._ask(now, mine)
        if mine.value is not None and self._reach.decides(mine.instance, mine.accepted):
            self.chosen = mine.value
            return []
        return sends

    def _ask(self, now: float, mine: Proposal) -> Sends:
        """Send the question of the next phase, which is repeated after a while."""
        self._resend_seconds = RESEND_SECONDS
        self._resend_at = now + self._jittered(RESEND_SECONDS)
        return mine.questions(names_of(self._chain, mine.instance))

    def _resend(self, now: float) -> Sends:
        mine = self._proposal
        assert mine is not None
        self._resend_seconds = min(2 * self._resend_seconds, RESEND_SECONDS_MAX)
        self._resend_at = now + self._jittered(self._resend_seconds)
        return mine.questions(names_of(self._chain, mine.instance))

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
        if self._me not in seats:
            return INF
        before = sum(self._reach.lives(peer) for peer in seats[: seats.index(self._me)])
        return self._jittered(before * PROPOSE_SECONDS)

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + JITTER * self._rng.random())
