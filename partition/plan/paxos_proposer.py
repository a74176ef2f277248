"""The proposer of `partition.plan.paxos`: it tries to have its member's change decided at one height.

The first live member of the committee proposes immediately, and each other member only in its turn, so that
they rarely compete. A proposer whose ballot was preempted waits longer before each new attempt. A question
that gets no majority of answers is repeated at growing intervals.
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
"""How long each member of the committee waits for each member before it: two round trips and a disk write,
with some margin."""
JITTER = 0.25
"""Maximum share by which each wait is randomly prolonged, so that synchronized clocks diverge."""
RESEND_SECONDS = 1.0
"""How long to wait for a majority of answers before a question is repeated; doubled each time."""
RESEND_SECONDS_MAX = 16.0
BACKOFF_SECONDS = 0.5
"""Mean wait after the first preempted attempt; doubled each time."""
BACKOFF_SECONDS_MAX = 16.0

INF = float("inf")


class PaxosProposer:
    """One member's attempts, one at a time, at the height after the head of `chain`.

    The member's own promise and acceptance go through `acceptor`, whose state must be stored before a call's
    messages are sent. `chosen` is the value that a quorum has accepted. It is final, and the owner calls
    `begin` next.
    """

    def __init__(self, me: PeerId, rng: Random, acceptor: PaxosAcceptor, reach: Reach) -> None:
        self._me = me
        self._rng = rng
        self._acceptor = acceptor
        self._reach = reach

    def begin(self, chain: Chain) -> None:
        """Begin a new height, without a proposal."""
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
        """Set the change to propose. Nothing is proposed if it is None, or if no valid plan follows from
        it."""
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
        """Ask again soon, because the reachable members have changed."""
        self._resend_seconds = RESEND_SECONDS
        self._resend_at = min(self._resend_at, now + RESEND_SECONDS if self._proposal else INF)
        self._line_up(now)

    def give_way(self, now: float, instance: Instance, ballot: Ballot) -> None:
        """Give way to a higher ballot: an attempt of ours with a lower ballot has little chance, and a new
        attempt would only interfere."""
        mine = self._proposal
        if mine is not None and mine.instance == instance and mine.ballot < ballot:
            self._abandon()
        if self._proposal is None and self._wish is not None:
            later = now + self._jittered(PROPOSE_SECONDS) + self._turn()
            self._propose_at = later if self._propose_at == INF else max(self._propose_at, later)

    def check_round(self, ballot: Ballot, known: Ballot | None) -> None:
        """Check a ballot's round. Raises RemoteProtocolError if it is far above all known rounds."""
        if ballot.round > max(self._round, known.round if known else 0) + ROUNDS_AHEAD_MAX:
            raise RemoteProtocolError("a ballot has an absurdly high round")

    def wake(self, now: float) -> Sends:
        """Do the work that is due, in the instance of the reachable members."""
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
        """Count an answer to our question; ignore answers to earlier questions."""
        if message.ballot.peer != self._me:
            raise RemoteProtocolError("an answer is to another peer's ballot")
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
                    raise RemoteProtocolError("a ballot was preempted by a lower one")
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
        """Begin an attempt. Its first promise is our own and is stored, so no ballot is used twice, even
        after a restart."""
        self._propose_at = INF
        instance = self._instance
        if self._wish is None or self._acceptor.abstains or self._me not in instance.committee:
            return []
        if value_of(self._chain.head, instance, self._wish) is None:
            return []  # as a fork, the change would leave a stage without a replica
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
        """Send the question of the next phase, and schedule its repetition."""
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
        """Return the seconds until it is our turn to propose. They depend on the number of live members
        before us."""
        seats = self._instance.committee
        if self._me not in seats:
            return INF
        before = sum(self._reach.lives(peer) for peer in seats[: seats.index(self._me)])
        return self._jittered(before * PROPOSE_SECONDS)

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + JITTER * self._rng.random())
