"""The acceptor of `partition.plan.paxos`: one member's votes on the successor of the newest plan.

A vote is never revoked, neither by a restart nor by a change of branch. Votes on the successor of the newest
plan are stored. For earlier plans, only the fact that this member may have voted is kept. If the member
returns to such a plan, it abstains until the next plan is decided.
"""

from collections.abc import Collection

from partition.plan.chain import Kept, Past, Voted
from partition.plan.paxos_messages import Accept, Accepted, PreemptedBallot, Prepare, Promised, Vote
from partition.plan.plan import Plan
from partition.plan.proposal import check_value
from partition.plan.quorum import Instance


class PaxosAcceptor:
    """The votes of one member, by instance. `unsaved`: the votes have changed since `unsaved` was last
    cleared."""

    def __init__(self, *, abstains: bool, kept: Kept | None) -> None:
        self.abstains = abstains if kept is None else kept.abstains
        self.past = Past() if kept is None else kept.past
        self.unsaved = False
        self._votes: dict[bytes, Vote] = {} if kept is None else {row.fork: row.vote for row in kept.votes}

    @property
    def voted(self) -> Collection[bytes]:
        """The instances in which this member holds a vote."""
        return self._votes.keys()

    @property
    def votes(self) -> tuple[Voted, ...]:
        """The votes to be stored."""
        return tuple(Voted(fork, vote) for fork, vote in self._votes.items())

    def vote(self, instance: Instance) -> Vote:
        """Return the vote in an instance, empty if there is none."""
        return self._votes.get(instance.fork, Vote())

    def cast(self, instance: Instance, vote: Vote) -> None:
        """Vote in an instance."""
        if vote != self._votes.get(instance.fork):
            self._votes[instance.fork] = vote
            self.unsaved = True

    def answer(
        self, plan: Plan, instance: Instance, message: Prepare | Accept, names: dict[str, bytes]
    ) -> Promised | PreemptedBallot | Accepted | None:
        """Answer a Prepare or Accept about the successor of `plan`; return None if this member abstains.
        Raises RemoteProtocolError if the value is not a valid change, or if a different value was proposed
        with this ballot."""
        if self.abstains:
            return None
        ballot, vote = message.ballot, self.vote(instance)
        if vote.promised is not None and vote.forbids(ballot):
            return PreemptedBallot(**names, ballot=ballot, promised=vote.promised)
        answer: Promised | Accepted
        if isinstance(message, Prepare):
            answer = Promised(**names, ballot=ballot, accepted=vote.accepted, value=vote.value)
            after = vote.promise(ballot)
        else:
            check_value(plan, instance, message.value)
            answer = Accepted(**names, ballot=ballot)
            after = vote.accept(ballot, message.value)
        self.cast(instance, after)
        return answer

    def leave(self, plan: Plan) -> None:
        """Drop the votes on the successor of `plan`, and remember that there may have been some."""
        # Votes after a plan that has a successor are useless, unless this member returns to the plan.
        if self._votes or self.abstains:
            self.past = self.past.with_plan(plan)
        self._votes.clear()
        self.abstains = False

    def return_to(self, plan: Plan) -> None:
        """Abstain on the successor of `plan` if this member may have voted on it before."""
        self.abstains = self.past.may_hold(plan)
