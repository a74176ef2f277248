"""One member's own vote on the end of its run in local mode: when it may commit, may settle, or must give up.

The vote depends on the votes of the others (`partition.run.poll`). Not here: the preferred conclusion, and
the messages (`partition.run.ending`).
"""

from collections.abc import Collection
from math import inf

from crypto.identity import PeerId
from partition.run.conclusions import Conclusion, says_committed, says_held
from partition.run.poll import LOOK_SECONDS, OwnChoice, Poll

STABLE_SECONDS = 3.0
"""How long a member holds a conclusion before it commits, so that it can learn of a better one."""
STALEMATE_SECONDS = 300.0
"""How long there must be no majority, after the last step, before each member settles alone on the conclusion
that it holds. It is longer than most turns take, so that every member has had its turn to evaluate."""


class OwnVote:
    """The vote of the member `me`. `preferred` is its choice, `committed` its final commitment. `ended_at` is
    the time when the last step was done, inf if steps are left."""

    def __init__(self, me: PeerId, poll: Poll) -> None:
        self.preferred: OwnChoice | None = None
        self.committed: Conclusion | None = None
        self.ended_at = inf
        self._me = me
        self._poll = poll
        self._committed_at = inf

    @property
    def best(self) -> Conclusion | None:
        """The conclusion that this member prefers."""
        return None if self.preferred is None else self.preferred.conclusion

    @property
    def holds(self) -> bool:
        """Whether this member has the result of the preferred conclusion, and accepts it."""
        return self.preferred is not None and self.preferred.held_at < inf

    @property
    def alone_from(self) -> float:
        """The time from which this member may settle alone, if its patience is over."""
        if self._me in self._poll.voters:
            return min(self.ended_at, self._committed_at) + STALEMATE_SECONDS
        return (inf if self.preferred is None else self.preferred.held_at) + STALEMATE_SECONDS

    def commit(self, now: float) -> bool:
        """Commit to the preferred conclusion, which this member must hold, once enough others hold it. Return
        whether this call committed."""
        preferred = self.preferred
        if self.committed is not None or preferred is None or self._me not in self._poll.voters:
            return False
        if not self._may_commit(now, preferred):
            return False
        self.committed, self._committed_at = preferred.conclusion, now
        return True

    def _may_commit(self, now: float, preferred: OwnChoice) -> bool:
        holding = self._poll.backing(preferred.conclusion, says_held) | {self._me}
        if self._poll.voters == {self._me} or self._is_stalemate(now, preferred):
            return True
        return now - preferred.held_at >= STABLE_SECONDS and self._poll.carries(now, preferred, holding)

    def may_settle(self, now: float, awaited: Collection[PeerId]) -> bool:
        """Return whether the run may end here with the preferred conclusion, which this member must hold.
        `awaited` are the members whose messages count."""
        preferred = self.preferred
        assert preferred is not None
        if self._is_stalemate(now, preferred):
            return True
        said = [self._poll.said.get(peer) for peer in awaited]
        agree = all(each is not None and says_held(each[0], preferred.conclusion) for each in said)
        if not agree and now < preferred.patient_until:
            return False
        own = {self._me} if self.committed == preferred.conclusion else set()
        backing = self._poll.backing(preferred.conclusion, says_committed) | own
        return not self._poll.voters or self._poll.carries(now, preferred, backing)

    def is_hopeless(self, now: float) -> bool:
        """Return whether the preferred conclusion can no longer reach a majority, or has taken too long to
        reach one."""
        preferred = self.preferred
        if preferred is None or self.committed is not None or (self.holds and now >= self.alone_from):
            return False
        if not self._poll.electorate.is_majority(self._poll.voters - preferred.refusing, self._poll.voters):
            return bool(self._poll.voters)
        is_voter, late = self._me in self._poll.voters, preferred.patient_until + LOOK_SECONDS
        return is_voter and now >= late and not self._may_commit(now, preferred)

    def _is_stalemate(self, now: float, preferred: OwnChoice) -> bool:
        """Return whether a member may settle alone on the conclusion that it holds."""
        return now >= max(self.alone_from, preferred.patient_until)
