"""The choice between branches of a run, after a network split has healed.

Only the committer of a branch knows its progress, so only the committer decides to abandon the branch, and
its members follow. A member leaves the branch by itself if its committer is gone or on a different branch, or
if it has missed more plans than any peer can still send. A branch is not followed if it claims more steps
than its machines can have made.
"""

from collections.abc import Collection
from enum import Enum, auto

from crypto.identity import PeerId, short_peer
from partition.plan.paxos import ForkBehind, ForkFound, LeftBehind, PaxosChain
from partition.plan.plan import NO_HASH, Plan
from partition.run.branch_pace import BranchPace
from partition.run.progress import RunProgress
from partition.run.settings import RunSettings

TOLD_MAX = 64
"""Maximum number of members of other branches that are remembered. A roster holds as many."""


class Verdict(Enum):
    """A member's decision about another branch. LEAVE: leave this branch; ABANDON: leave, and make all
    members leave; REFUSE: stay, because the other branch's claim cannot be true."""

    STAY = auto()
    LEAVE = auto()
    ABANDON = auto()
    REFUSE = auto()


class Branches:
    """One member's judgement of branches."""

    def __init__(
        self, me: PeerId, chain: PaxosChain, progress: RunProgress, settings: RunSettings, *, may_fork: bool
    ) -> None:
        self._me = me
        self._chain = chain
        self._progress = progress
        self._may_fork = may_fork
        self._settings = settings
        self._forked_at: int | None = None
        self._parted: tuple[bytes, ...] = ()
        self._returned: set[bytes] = set()
        self._pace = BranchPace()
        self._refused: list[PeerId] = []
        self._behind: dict[PeerId, tuple[float, ForkBehind]] = {}

    def decided(self, now: float, plan: Plan, lost: Collection[bytes] = ()) -> None:
        """Note the plan in force. For a fork, `lost` are the members that it could not reach; nothing was
        committed in between."""
        if plan.fork != NO_HASH and self._forked_at is None:
            self._forked_at = self._progress.furthest
        parted = {*self._parted, *lost} if plan.fork != NO_HASH else set(self._parted)
        self._returned |= parted & set(plan.roster)
        self._parted = tuple(sorted(parted - set(plan.roster)))
        self._pace.entered(now, plan, self._progress.step)

    def look(self, now: float, plan: Plan, live: Collection[PeerId]) -> str:
        """Note the progress of the run and the reachable members. The committer's call returns a message to
        display if other branches gave way to this one, otherwise an empty text."""
        if not self._may_fork:
            return ""
        self._pace.look(now, plan, self._progress.step, live)
        return self._given_way(now, plan, live) if plan.committer == self._me else ""

    @property
    def kept_step(self) -> int | None:
        """The step after which this branch began; None if it is not a fork."""
        return self._forked_at

    @property
    def said(self) -> str:
        """The message to display about this branch; empty if it is not a fork."""
        if self._forked_at is None or not self._parted:
            return ""
        names = ", ".join(short_peer(PeerId(peer)) for peer in self._parted)
        return (
            f"alone since step {self._forked_at}, without {names}. Once they are back, "
            "the branch with more samples is kept"
        )

    def judge(
        self,
        now: float,
        event: ForkFound | LeftBehind,
        plan: Plan | None,
        *,
        live: Collection[PeerId],
        committed: int | None,
        hosts: bool,
    ) -> Verdict:
        """Judge another member's branch. `plan` is the plan in force here. `committed` is the number of steps
        that this node has committed; None if it does not commit, or if its replicas are not synced yet."""
        self._behind.pop(event.peer, None)  # that branch has progressed
        if isinstance(event, LeftBehind) and not (
            self._may_fork and plan is not None and plan.committer == self._me
        ):
            return Verdict.LEAVE
        if plan is None:
            return Verdict.STAY
        if plan.committer != self._me:
            is_left_out = event.peer == plan.committer  # the committer went on without this member
            return Verdict.STAY if plan.committer in live and not is_left_out else Verdict.LEAVE
        if committed is None:
            return Verdict.STAY  # the other branch will be announced again
        self._progress.note(committed)
        self._progress.claim(self._chain, hosts=hosts)
        if not self._chain.gives_way(event.head):
            return Verdict.STAY
        branch = event.branch if isinstance(event, ForkFound) else None
        possible = self._pace.possible(now, branch, plan)
        is_possible = possible is None or self._progress.steps_of(event.head) <= possible
        return Verdict.ABANDON if is_possible else Verdict.REFUSE

    def refusal(self, now: float, event: ForkFound | LeftBehind, plan: Plan) -> str:
        """Return a message to display why a claim is not believed; empty if it was displayed before."""
        if event.peer in self._refused:
            return ""
        self._refused = [*self._refused, event.peer][-TOLD_MAX:]
        branch = event.branch if isinstance(event, ForkFound) else None
        possible = self._pace.possible(now, branch, plan)
        return (
            f"{short_peer(event.peer)} claims a branch of "
            f"{self._progress.steps_of(event.head)} steps, but its machines can have "
            f"made at most {possible}. The claim is ignored, and both branches continue"
        )

    def outlives(self, now: float, event: ForkBehind) -> None:
        """Note a branch that is shorter than this one. It will either give way or overtake this branch
        first."""
        if len(self._behind) < TOLD_MAX or event.peer in self._behind:
            self._behind[event.peer] = now, event

    def _given_way(self, now: float, plan: Plan, live: Collection[PeerId]) -> str:
        """Return a message about a shorter branch that gave way; empty if none did. A branch gave way if the
        member that claimed it is in the plan, or is alive and no longer claims a branch."""
        for peer, (heard, event) in list(self._behind.items()):
            is_silent = peer in live and now - heard >= self._settings.left_seconds
            since = self._pace.since(event.branch)
            if peer not in plan.roster and not is_silent:
                continue
            del self._behind[peer]
            self._returned.discard(peer)
            if since is not None:
                theirs = max(0, event.head.step - since.step)
                ours = max(0, self._progress.furthest - since.step)
                return (
                    f"the branch of {short_peer(peer)} gave way: about {theirs} of its "
                    f"steps are discarded. The {ours} steps of this branch since the split "
                    "are kept"
                )
        unheard, self._returned = self._returned, set()
        if not unheard or self._forked_at is None:
            return ""
        names = ", ".join(short_peer(PeerId(peer)) for peer in sorted(unheard))
        ours = max(0, self._progress.furthest - self._forked_at)
        return f"back together with {names}: the {ours} steps of this branch since the split are kept"

    def farewell(self, event: ForkFound | LeftBehind | None = None) -> str:
        """Return a message that tells why this branch is left, and how many steps that costs."""
        reason = "another branch of the run goes on"
        if self._forked_at is not None:
            lost = self._progress.step - self._forked_at
            reason = f"{reason}: {lost} steps that were committed here are discarded"
        return reason if event is None else f"{reason}. The kept branch has {event.head.step} steps in all"
