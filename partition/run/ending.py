"""Agreement of a run's members on its end in local mode: a sans-IO core, one for each run.

In local mode there is no plan to decide on. One member evaluates: the member with a state whose id is nearest
to the hash of the run. If it dies, or is silent for a while, the next nearest member evaluates. Once the
series of evaluations has converged, or the steps are done, the evaluator keeps the model and proposes a
*conclusion*, which identifies that model by its hash. Members that have a state have a vote
(`partition.run.poll`); the other members follow.

1. A member prefers the conclusion that most voters hold, or a better one (`rank`) that nearly as many hold.
   The member's driver fetches the result and tries it, because no result is trusted. The member then
   announces to all that it holds the conclusion, or that it refuses the conclusion.
2. A voter that has held a conclusion for `STABLE_SECONDS` commits to it, once and for good, when a quorum
   holds it. After `PATIENCE_SECONDS`, a majority of the voters that answer suffices, unless more members than
   may lie hold a different one. A conclusion that can no longer reach a majority is given up, even by its
   author.
3. A run is settled for a member once enough voters have committed to the conclusion: a quorum, or a majority
   as in rule 2. Before that, the member waits up to `PATIENCE_SECONDS` for the others to hold the result too.
   A settled member never changes its mind, and tells the members of the run.
4. A conclusion is accepted without a trial, even if it was refused, once a quorum has committed to it, or
   once the requester, or more members than may lie, report that it is settled.
5. A conclusion is void if all its holders are gone before another member has its result, or if no holder
   hands the result over. A member that falsely claimed to hold it cannot introduce any more conclusions. A
   conclusion that the run failed is ignored by a member that can continue by itself (`can_go_on`).

Consequences: Members that see one another settle on one result, whichever results they refuse, because any
two quorums share a member, and a member commits only once. No member chooses a result alone, except the
requester if the votes are even, because the run is the requester's. A member that refuses everything or is
silent costs `PATIENCE_SECONDS`. If there is no majority for `STALEMATE_SECONDS` after the last step or after
a commitment, a member settles alone on the conclusion that it holds, so every run ends.

There can be two results in three cases: if two members refuse each other's result and neither is the
requester; if one of at least three members lies and reports acceptable results differently to different
members; and if the network is partitioned. A member cannot tell unreachable members from dead ones, and a
side that waited for a majority would train for nothing if the others are dead. So each side keeps its own
result, and all members learn of the difference (`Differs`) when they see each other again within
`LINGER_SECONDS`. A restarted member forgets its commitment. Not here: what a model is, and fetching it.
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
"""Seconds between two messages about the conclusion to members that have not answered with the same
conclusion."""
SAY_OVER_SECONDS = 20.0
"""The same interval, once the run has been settled for `PATIENCE_SECONDS`."""
LINGER_SECONDS = 600.0
"""How long a finished run still answers members that were away."""
REFUSED_MAX = 64
"""Maximum number of refused conclusions that a member remembers."""
STRIKES_MAX = 8
"""Number of refused results after which a member can introduce no more conclusions. Its votes on other
members' conclusions still count."""
LURES_MAX = 2
"""How often one member may make another give up a held result for a conclusion that no other member holds."""


class Ending:
    """The end of one run, as one member sees it."""

    def __init__(
        self,
        me: PeerId,
        run: bytes,
        settings: LocalSettings,
        steps: int = 2**53 - 1,
        requester: PeerId | None = None,
    ) -> None:
        """`steps` is the run's number of steps, an upper bound for all members."""
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
        """The conclusion that this member prefers."""
        return self._vote.best

    @property
    def holds(self) -> bool:
        """Whether this member has the result of the preferred conclusion, and accepts it."""
        return self._vote.holds

    @property
    def is_here(self) -> bool:
        """Whether the result of the preferred conclusion was fetched; it may not be held yet."""
        return self._vote.preferred is not None and self._vote.preferred.is_here

    @property
    def deadline(self) -> float:
        if self._vote.preferred is None or (self.is_settled and not self._untold):
            return inf
        return inf if self._say_at >= self.forget_at else self._say_at

    # Input from the driver

    def set_due(self, now: float, waited_seconds: float) -> Sends:
        """Set how long an evaluation has been due here; negative if none is."""
        self.turns.set_due(now, waited_seconds)
        return []

    def set_end(self, now: float, waited_seconds: float) -> Sends:
        """Set how long ago the last step was done; negative if steps are left."""
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
        they vote. If `trainers` is None, this member tries no result and accepts any evaluator, and the
        `voters` vote, or all members if `voters` is None."""
        found = frozenset(peers) - {self._me}
        if trainers is not None:
            self.turns.trainers = voters = frozenset(trainers)
        forgotten = self._others.see(now, found)
        # A member that has settled and left keeps its vote; an unreachable member keeps its vote for a while.
        kept = self._poll.voters.intersection({*self._others.unseen, *self._poll.claims})
        self._poll.voters = kept | frozenset({*found, self._me} if voters is None else voters)
        for peer in forgotten:
            self._poll.forget(peer)
            self._strikes.pop(peer, None)
        self._void()
        return self._advance(now)

    def know(self, peer: PeerId) -> None:
        """Accept messages of `peer` about the end of the run although it is not in sight. It may have
        finished the run already."""
        self._others.know(peer)

    def evaluate(self, step: int, samples: int, loss: float, metrics: tuple[float, ...]) -> Sends:
        """Add this member's own evaluation to the series, and announce it to all."""
        message = self.series.add(step, samples, loss, metrics)
        return [(peer, message) for peer in self._others.peers]

    def propose(self, now: float, conclusion: Conclusion) -> Sends:
        """Propose a conclusion as the evaluator, which holds its result."""
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
        """Record that this member now accepts the preferred conclusion, because its result is here or is not
        needed."""
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
        """Give up the preferred conclusion, because its result is invalid or was not handed over
        (`is_missing`). If the conclusion is already decided and its result is missing, the run ends here
        without it."""
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
        """Handle one message. Raises RemoteProtocolError for invalid values."""
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
        """Repeat messages that are due, and act on time limits that have passed."""
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
            raise RemoteProtocolError("a conclusion belongs to another run, or lacks its result")
        if new.step > self._steps:
            raise RemoteProtocolError("a conclusion names a step beyond the run's last one")
        if sender not in self._others.known:  # the peer will repeat it once it is known as a member
            return [(sender, self.said)] if self.is_settled and not message.is_settled else []
        if message.is_settled and not message.holds:
            message = msgspec.structs.replace(message, is_settled=False)
        if message.is_settled and self._poll.claims.get(sender, new) != new:
            return []  # a member that has settled must not change its conclusion
        if self.is_settled:
            return self._hear_of_another(sender, message)
        if new.outcome == "failed" and self.can_go_on:
            return []
        if message.is_settled:
            self._poll.claims[sender] = new
        self._poll.said[sender] = (message, now)
        if self._vote.preferred is not None and new != self.best:
            self._vote.preferred.refusing.discard(sender)  # each of its messages replaces its opinion
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
        """Answer a message after the end, and note whether the sender settled on a different conclusion."""
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
        """Prefer the conclusion that most voters hold, or a better one that nearly as many hold."""
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
        # A liar can tell each member something different, so a lead of at most as many votes as there may be
        # liars is ignored: among conclusions that close, the better `rank` wins.
        votes = {conclusion: len(holders & self._poll.voters) for conclusion, holders in candidates.items()}
        enough = max(votes.values(), default=0) - self._poll.electorate.liars_max
        chosen = min((each for each in candidates if votes[each] >= enough), key=rank, default=None)
        if chosen is None or chosen == self.best:
            return
        # bounds how often one member alone can make the others change
        if self.holds and len(candidates[chosen]) == 1:
            (peer,) = candidates[chosen]
            self._strikes[peer] = self._strikes.get(peer, 0) + STRIKES_MAX // LURES_MAX
        self._prefer(now, chosen)

    def _prefer(self, now: float, conclusion: Conclusion) -> None:
        self._vote.preferred = OwnChoice(conclusion)
        self._say_at = now + SAY_SECONDS
        self.events.append(Preferred(self.run, conclusion))

    @property
    def holders(self) -> tuple[PeerId, ...]:
        """The members that have the result of the preferred conclusion. They are in sight, or recently out of
        sight, or gone because the run is over for them."""
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
        """Give up the preferred conclusion if no holder of its result is left."""
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
        assert self.best is not None, "no conclusion is preferred"
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
        """Commit, settle or give up, as the messages and the elapsed time require."""
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
        """Accept a conclusion that others have settled on, or that a quorum has committed to, even if it was
        refused here."""
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
        assert best is not None, "no conclusion is preferred"
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
        """The members that have not yet reported that the run ended with this conclusion."""
        return [peer for peer in self._others.known if self._poll.claims.get(peer) != self.best]

    @property
    def said(self) -> Said:
        """This member's message about the end. Requires a preferred conclusion."""
        assert self.best is not None, "no conclusion is preferred"
        return Said(self.run, self.best, self.holds, self.is_settled, self._vote.committed == self.best)
