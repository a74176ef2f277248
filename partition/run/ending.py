"""Agreement of a run's members on its end in local mode: a sans-IO core, one for each run.

There is no plan to decide on. One member evaluates: the member with a state whose id is nearest to the hash
of the run. If it dies, or is silent for a while, the next one evaluates. Once the series has converged or the
steps are done, the evaluator keeps the model and proposes a conclusion, which names that model by its hash.
Members that have a state have a vote (`partition.run.poll`); the others follow.

1. A member prefers the conclusion that most voters hold, or a better one (`rank`) that nearly as many hold.
   It fetches the result and tries it (its shell does: no result is trusted), then tells all that it holds
   the conclusion, or refuses it.
2. A voter that has held a conclusion for `STABLE_SECONDS` commits to it, once and for good, when a quorum
   holds it. After `PATIENCE_SECONDS` a majority of those that answer suffices, unless more members than may
   lie hold another. A conclusion that can reach no majority any more is given up, by its author too.
3. A run is settled for a member by as many commitments. The member waits up to `PATIENCE_SECONDS` for the
   others to hold the result too. A settled member never changes its mind, and tells the members of the run.
4. A conclusion is accepted without a trial, even if it was refused, once a quorum has committed to it, or
   the requester or more members than may lie call it settled.
5. A conclusion is void if all its holders are gone before another member has its result, or if no holder
   hands the result over; a member that falsely claimed to hold it introduces no more conclusions. A failure
   is no conclusion for a member that can continue by itself (`can_go_on`).

Consequences: Members that see one another settle one result, whatever they refuse, since two quorums share a
member that commits once. No member chooses a result alone, except the requester on an even vote, since the
run is its own. A member that refuses everything or is silent costs `PATIENCE_SECONDS`. Without a majority for
`STALEMATE_SECONDS` after the last step, or after a commitment, a member settles what it holds alone, so that
every run ends.

There can be two results where two members refuse each other's and neither is the requester; where a liar, one
of at least three, tells different members different things about acceptable results; and on two sides of a
partition. A member cannot tell unreachable members from dead ones, and a side that waited for a majority
would train for nothing if the others are dead. So each side keeps its own result, and all learn of the
difference within `LINGER_SECONDS` of seeing each other (`Differs`). A restarted member forgets its
commitment. Not here: what a model is, and fetching it.
"""

from collections.abc import Collection
from math import inf
from typing import assert_never

import msgspec

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.run.conclusions import (
    Conclusion,
    ConclusionRefused,
    Differs,
    EvaluationHeard,
    Event,
    ModelEvaluated,
    Preferred,
    Said,
    Sends,
    Settled,
    Told,
    Voided,
    rank,
    says_held,
)
from partition.run.local_settings import LocalSettings
from partition.run.own_vote import OwnVote
from partition.run.poll import PATIENCE_SECONDS, OwnChoice, Poll
from partition.run.shared_series import SharedSeries
from partition.run.sight import MembersInSight
from partition.run.turns import Turns

SAY_SECONDS = 0.5
"""Interval between two messages of a conclusion to members that have not answered with it."""
SAY_OVER_SECONDS = 20.0
"""The same interval once the conclusion has been settled for `PATIENCE_SECONDS`."""
LINGER_SECONDS = 600.0
"""How long a finished run answers members that were away."""
REFUSED_MAX = 64
"""Refused conclusions that a member remembers."""
STRIKES_MAX = 8
"""Refused results of one member, after which only its opinion of others' conclusions counts."""
LURES_MAX = 2
"""How often one member may make another leave a held result for one of its own."""


class Ending:
    """One run, as one member sees it."""

    def __init__(
        self,
        me: PeerId,
        run: bytes,
        settings: LocalSettings,
        steps: int = 2**53 - 1,
        requester: PeerId | None = None,
    ) -> None:
        """`steps` are those of the run, an upper bound for all members."""
        self.run = run
        self.is_settled = False
        self.is_decided = False
        """Whether the preferred conclusion is accepted without a trial."""
        self.can_go_on = False
        """Whether this member trains and its parameters are finite."""
        self.turns = Turns(me, run)
        self.series = SharedSeries(run, settings, steps, self.turns)
        self.events: list[Event] = []
        self.forget_at = inf
        self._me = me
        self._steps = steps
        self._others = MembersInSight()
        self._poll = Poll(me, requester)
        self._vote = OwnVote(me, self._poll)
        self._refused: dict[Conclusion, None] = {}
        self._strikes: dict[PeerId, int] = {}
        self._say_at = inf

    @property
    def best(self) -> Conclusion | None:
        """The conclusion that is preferred here."""
        return self._vote.best

    @property
    def holds(self) -> bool:
        """Whether this member has the result of that conclusion, and accepts it."""
        return self._vote.holds

    @property
    def is_here(self) -> bool:
        """Whether the result of that conclusion was fetched, though it is not held yet."""
        return self._vote.preferred is not None and self._vote.preferred.is_here

    @property
    def deadline(self) -> float:
        if self._vote.preferred is None or (self.is_settled and not self._untold):
            return inf
        return inf if self._say_at >= self.forget_at else self._say_at

    # Input from the shell

    def set_due(self, now: float, waited_seconds: float) -> Sends:
        """Set how long an evaluation has been due here; negative if none is."""
        self.turns.set_due(now, waited_seconds)
        return []

    def set_end(self, now: float, waited_seconds: float) -> Sends:
        """Set how long the steps have been done; negative if they are not."""
        self._vote.ended_at = inf if waited_seconds < 0 else now - waited_seconds
        if waited_seconds < 0:
            self.turns.passed = 0
        return []

    def set_peers(
        self,
        now: float,
        peers: Collection[PeerId],
        trainers: Collection[PeerId] | None = None,
        voters: Collection[PeerId] | None = None,
    ) -> Sends:
        """Set the other members. `trainers` are the members with a state, including this one if it has one;
        they vote. None: this member tries no result, and accepts any evaluator; then the `voters` are given,
        or all vote."""
        found = frozenset(peers) - {self._me}
        if trainers is not None:
            self.turns.trainers = voters = frozenset(trainers)
        forgotten = self._others.see(now, found)
        # A member that has settled and left keeps its vote; an unreachable one keeps it for a while.
        kept = self._poll.voters.intersection({*self._others.unseen, *self._poll.claims})
        self._poll.voters = kept | frozenset({*found, self._me} if voters is None else voters)
        for peer in forgotten:
            self._poll.forget(peer)
            self._strikes.pop(peer, None)
        self._void()
        return self._advance(now)

    def know(self, peer: PeerId) -> None:
        """Accept this member's messages about the end, though it is not in sight: the run may be over for
        it."""
        self._others.know(peer)

    def evaluate(self, step: int, samples: int, loss: float, metrics: tuple[float, ...]) -> Sends:
        """Add this member's own evaluation to the series, and tell all."""
        message = self.series.add(step, samples, loss, metrics)
        return [(peer, message) for peer in self._others.peers]

    def propose(self, now: float, conclusion: Conclusion) -> Sends:
        """Propose a conclusion as the evaluator, which holds the result."""
        if self._vote.preferred is not None:
            return []
        if now >= self._vote.alone_from:
            self._refused.pop(conclusion, None)
        if conclusion in self._refused:
            self.turns.passed += self._vote.ended_at < inf
            return []
        self._vote.preferred = OwnChoice(conclusion, is_here=True, held_at=now)
        self._say_at = now
        return self.wake(now)

    def hold(self, now: float, conclusion: Conclusion) -> Sends:
        """Record that the result of a preferred conclusion is here, is not needed, or cannot be obtained."""
        if self._vote.preferred is None or conclusion != self.best or self.holds:
            return []
        self._vote.preferred.held_at = self._say_at = now
        return self.wake(now)

    def fetched(self, conclusion: Conclusion) -> Sends:
        """Record that the result of a preferred conclusion is here and will be tried."""
        if self._vote.preferred is not None and conclusion == self.best:
            self._vote.preferred.is_here = True
        return []

    def give_up(self, now: float, conclusion: Conclusion, *, is_missing: bool = False) -> Sends:
        """Give up a preferred conclusion whose result is invalid, or not handed over (`is_missing`). If the
        conclusion is already decided, the run ends here without its result."""
        if conclusion != self.best or self.holds or self.is_settled:
            return []
        if self.is_decided:
            return self._settle(now) if is_missing else []
        holders = [peer for peer, (said, _) in self._poll.said.items() if says_held(said, conclusion)]
        author = PeerId(conclusion.author)
        for peer in holders if is_missing or author not in holders else [author]:
            strikes = STRIKES_MAX if is_missing else 1
            self._strikes[peer] = self._strikes.get(peer, 0) + strikes
        return self._refuse(now)

    # Messages of others

    def receive(self, now: float, sender: PeerId, message: Told) -> Sends:
        """Handle one message. Raises RemoteProtocolError for invalid numbers."""
        match message:
            case ModelEvaluated():
                return self._take_evaluation(now, sender, message)
            case Said():
                return self._take_conclusion(now, sender, message)
            case ConclusionRefused():
                return self._take_refusal(now, sender, message.conclusion)
            case _:
                assert_never(message)

    def wake(self, now: float) -> Sends:
        """Repeat messages that are due, and apply expired time limits."""
        if self._vote.preferred is None or now < self._say_at:
            return self._advance(now)
        own = self.said
        if self.is_settled:
            is_new = now < self.forget_at - LINGER_SECONDS + PATIENCE_SECONDS
            self._say_at = now + (SAY_SECONDS if is_new else SAY_OVER_SECONDS)
            return [(peer, own) for peer in self._untold]
        self._say_at = now + SAY_SECONDS
        return [(peer, own) for peer in self._others.awaited(now)] + self._advance(now)

    def _take_evaluation(self, now: float, sender: PeerId, message: ModelEvaluated) -> Sends:
        self.series.check(message)
        if self.is_settled:
            return [(sender, self.said)]
        if sender in self._others.peers and self.series.take(now, sender, message):
            self.events.append(EvaluationHeard(self.run, message))
        return []

    def _take_conclusion(self, now: float, sender: PeerId, message: Said) -> Sends:
        new = message.conclusion
        if new.run != self.run or (new.outcome == "done") != bool(new.weights):
            raise RemoteProtocolError("a conclusion of another run, or without its result")
        if new.step > self._steps:
            raise RemoteProtocolError("a conclusion at a step that the run does not have")
        if sender not in self._others.known:  # a peer that is not known as a member yet repeats it
            return [(sender, self.said)] if self.is_settled and not message.is_settled else []
        if message.is_settled and not message.holds:
            message = msgspec.structs.replace(message, is_settled=False)
        if message.is_settled and self._poll.claims.get(sender, new) != new:
            return []  # it has changed its preference
        if self.is_settled:
            return self._hear_of_another(sender, message)
        if new.outcome == "failed" and self.can_go_on:
            return []
        if message.is_settled:
            self._poll.claims[sender] = new
        self._poll.said[sender] = (message, now)
        if self._vote.preferred is not None and new != self.best:
            self._vote.preferred.refusing.discard(sender)  # it states its opinion of each conclusion
        self._decide(now)
        self._choose(now)
        is_refused = new in self._refused and new != self.best and not message.is_settled
        return [(sender, ConclusionRefused(self.run, new))] * is_refused + self._advance(now)

    def _take_refusal(self, now: float, sender: PeerId, conclusion: Conclusion) -> Sends:
        if sender not in self._others.known or self.is_settled:
            return []
        self._poll.retract(sender, conclusion)
        if self._vote.preferred is not None and conclusion == self.best:
            self._vote.preferred.refusing.add(sender)
        return self._advance(now)

    def _hear_of_another(self, sender: PeerId, message: Said) -> Sends:
        """Answer a message after the end, and notice another conclusion."""
        if not message.is_settled:
            return [(sender, self.said)]
        if sender not in self._poll.claims:
            self._poll.claims[sender] = message.conclusion
            self._compare(sender)
        return []

    def _compare(self, peer: PeerId) -> None:
        other, best = self._poll.claims[peer], self.best
        if best is not None and (other.outcome, other.weights) != (best.outcome, best.weights):
            self.events.append(Differs(self.run, best, other, peer))

    # The preferred conclusion

    def _choose(self, now: float) -> None:
        """Prefer the conclusion that most voters hold, or a better one that hardly fewer do."""
        if self.is_decided or self._vote.committed is not None:
            return
        candidates = {
            conclusion: holders
            for conclusion, holders in self._poll.supported(now).items()
            if conclusion not in self._refused
            and (conclusion == self.best or any(self._strikes.get(p, 0) < STRIKES_MAX for p in holders))
        }
        if self.best is not None:
            candidates.setdefault(self.best, set()).update({self._me} if self.holds else ())
        # A liar tells each member something else, so as few members as may lie cannot outweigh the rank.
        votes = {conclusion: len(holders & self._poll.voters) for conclusion, holders in candidates.items()}
        enough = max(votes.values(), default=0) - self._poll.electorate.liars_max
        chosen = min((each for each in candidates if votes[each] >= enough), key=rank, default=None)
        if chosen is None or chosen == self.best:
            return
        if self.holds and len(candidates[chosen]) == 1:  # one member must not make the others change forever
            (peer,) = candidates[chosen]
            self._strikes[peer] = self._strikes.get(peer, 0) + STRIKES_MAX // LURES_MAX
        self._prefer(now, chosen)

    def _prefer(self, now: float, conclusion: Conclusion) -> None:
        self._vote.preferred = OwnChoice(conclusion)
        self._say_at = now + SAY_SECONDS
        self.events.append(Preferred(self.run, conclusion))

    @property
    def holders(self) -> tuple[PeerId, ...]:
        """The members that have the result of the preferred conclusion: in sight, recently out of sight, or
        gone because the run is over for them."""
        if self.best is None:
            return ()
        said = (peer for peer, (said, _) in self._poll.said.items() if says_held(said, self.best))
        found = dict.fromkeys((PeerId(self.best.author), *said))
        return tuple(
            peer
            for peer in found
            if peer in self._others.peers or peer in self._others.unseen or peer in self._poll.claims
        )

    def _void(self) -> None:
        """Give up a conclusion whose result went with its author."""
        if self.best is None or self.holds or self.is_here or self.is_settled or self.holders:
            return
        if not self.is_decided:
            self._drop()

    def _drop(self) -> None:
        self._vote.preferred = None
        self._say_at = inf
        self.events.append(Voided(self.run))

    def _refuse(self, now: float) -> Sends:
        """Refuse the preferred conclusion for good, and continue without it."""
        assert self.best is not None, "there is a conclusion"
        refused = ConclusionRefused(self.run, self.best)
        self._refused[self.best] = None
        for old in list(self._refused)[:-REFUSED_MAX]:
            del self._refused[old]
        if self.best.author == self._me:
            self.turns.passed += self._vote.ended_at < inf
        self._drop()
        return [(peer, refused) for peer in self._others.awaited(now)]

    # Votes

    def _advance(self, now: float) -> Sends:
        """Commit, settle, or give up, as messages and elapsed time require."""
        self._poll.voters -= self._others.gone(now).difference(self._poll.claims)
        self._decide(now)
        preferred = self._vote.preferred
        if preferred is None or self.is_settled:
            return []
        if self.is_decided:
            return self._settle(now) if self.holds else []
        if self._vote.is_hopeless(now):
            return self._refuse(now)
        if not self.holds:
            return []
        has_committed, awaited = self._vote.commit(now), self._others.awaited(now)
        if self._vote.may_settle(now, awaited):
            return self._settle(now)
        own = self.said
        return [(peer, own) for peer in awaited if has_committed]

    def _decide(self, now: float) -> None:
        """Accept a conclusion that others have settled, or a quorum has committed to, even if it was refused
        here."""
        if self.is_settled or self.is_decided:
            return
        if (decided := self._poll.decided()) is None:
            return
        self.is_decided = True
        if self._vote.preferred is None or decided != self.best:
            self._prefer(now, decided)
        elif self.is_here and not self.holds:
            self._vote.preferred.held_at = now

    def _settle(self, now: float) -> Sends:
        best = self.best
        assert best is not None, "there is a conclusion"
        self.is_settled = True
        self._vote.committed = best
        self._say_at = now + SAY_SECONDS
        self.forget_at = now + LINGER_SECONDS
        self.events.append(Settled(self.run, best))
        for peer in self._poll.claims:
            self._compare(peer)
        own = self.said
        return [(peer, own) for peer in self._untold]

    @property
    def _untold(self) -> list[PeerId]:
        """Return the members that have not yet said that the run ended with this conclusion."""
        return [peer for peer in self._others.known if self._poll.claims.get(peer) != self.best]

    @property
    def said(self) -> Said:
        """Return this member's message about the end. Requires a preferred conclusion."""
        assert self.best is not None, "there is a conclusion"
        return Said(self.run, self.best, self.holds, self.is_settled, self._vote.committed == self.best)
