"""Whether a member leaves its branch of the run for another, after a network split has healed.

Only the committer of a branch knows how far it is, so it alone abandons the branch, and its members follow
it. A member whose committer is gone, or that has missed more than anybody can tell it, leaves by itself.
"""

from collections.abc import Collection
from enum import Enum, auto

from crypto.identity import PeerId
from partition.plan.paxos import ForkFound, LeftBehind, PaxosChain
from partition.plan.plan import NO_HASH, Plan
from partition.run.progress import Progress


class Verdict(Enum):
    """What a member does about another branch. To ABANDON is to leave, and to tell all members to."""

    STAY = auto()
    LEAVE = auto()
    ABANDON = auto()


class Branches:
    """One member's judgement. `committed` is how many steps this node's own committer has committed, None
    where it does not commit, or does not know yet because its replicas are not synced."""

    def __init__(self, me: PeerId, chain: PaxosChain, progress: Progress, *, may_fork: bool) -> None:
        self._me = me
        self._chain = chain
        self._progress = progress
        self._may_fork = may_fork
        self._forked_at: int | None = None

    def decided(self, plan: Plan) -> None:
        """Note a plan that is in force now: nothing was committed since the others of a fork were lost."""
        if plan.fork != NO_HASH and self._forked_at is None:
            self._forked_at = self._progress.furthest

    def judge(
        self,
        event: ForkFound | LeftBehind,
        plan: Plan | None,
        *,
        live: Collection[PeerId],
        committed: int | None,
        hosts: bool,
    ) -> Verdict:
        """Judge the branch that another member is on; `plan` is the one in force here."""
        if isinstance(event, LeftBehind) and not (
            self._may_fork and plan is not None and plan.committer == self._me
        ):
            return Verdict.LEAVE
        if plan is None:
            return Verdict.STAY
        if plan.committer != self._me:
            return Verdict.STAY if plan.committer in live else Verdict.LEAVE
        if committed is None:
            return Verdict.STAY  # the others will announce their branch again
        self._progress.note(committed)
        self._progress.claim(self._chain, hosts=hosts)
        return Verdict.ABANDON if self._chain.gives_way(event.head) else Verdict.STAY

    @property
    def farewell(self) -> str:
        """Why this branch is left and what that costs, for a person."""
        reason = "another branch of the run goes on"
        if self._forked_at is None:
            return reason
        lost = self._progress.step - self._forked_at
        return f"{reason}: {lost} steps that were committed here are discarded"
