"""The reachable members, and which of them may decide: a quorum of the newest plan's committee, or a fork of
the reachable members.

This is the part of `partition.plan.paxos` that holds no votes and sends nothing. SWIM reports which members
are alive; this file only counts them.
"""

from collections.abc import Collection
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.chain import FORKS_MAX, fork_name
from partition.plan.plan import NO_HASH, Plan, committee

QUORUM_SECONDS = 15.0
"""How long a quorum must be missing before that is reported. Shorter gaps heal by themselves."""
FORK_SECONDS = 60.0
"""How long a quorum must be missing before the members that see each other may go on alone."""

INF = float("inf")


@dataclass(frozen=True)
class QuorumLost:
    """For QUORUM_SECONDS, only `live` members of the committee were reachable, and `needed` must agree;
    `missing` are the unreachable ones."""

    height: int
    live: int
    needed: int
    missing: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class QuorumFound:
    """A quorum is reachable again, after a QuorumLost."""

    height: int


@dataclass(frozen=True)
class ForkOpened:
    """`members` may now decide alone. A change that is proposed then also drops all other members."""

    fork: bytes
    members: tuple[bytes, ...]


ReachEvent = QuorumLost | QuorumFound | ForkOpened


@dataclass(frozen=True)
class Instance:
    """One decision and its voters. `fork` is NO_HASH for a decision by the committee; otherwise it is the
    name of a fork by `members`, which have a committee of their own."""

    fork: bytes
    committee: tuple[PeerId, ...]
    members: tuple[bytes, ...] = ()


def majority(committee: Collection[PeerId]) -> int:
    """Return the size of a majority of a committee. Any two majorities have a member in common."""
    return len(committee) // 2 + 1


def decides(committee: Collection[PeerId], votes: Collection[PeerId], tie_breaker: PeerId | None) -> bool:
    """Return whether `votes` decide: a majority of the committee, or exactly half of it including the
    `tie_breaker`.

    Any two such sets have a member in common, so Paxos stays safe (weighted voting; Gifford 1979): two halves
    share the tie-breaker, and a majority shares a member with every half.
    """
    count = sum(peer in votes for peer in committee)
    is_tie = 2 * count == len(committee)
    return count >= majority(committee) or (is_tie and tie_breaker in votes and tie_breaker in committee)


def indispensable(plan: Plan, tie_breaker: PeerId | None) -> tuple[PeerId, ...]:
    """Return each voter without which the others could not decide the successor of `plan`."""
    seats = committee(plan)
    return tuple(
        peer for peer in seats if not decides(seats, [other for other in seats if other != peer], tie_breaker)
    )


class Reach:
    """The live members of the roster, as last reported, and what follows from them. Until the first report,
    all count as live."""

    def __init__(self, me: PeerId, plan: Plan, *, may_fork: bool, tie_breaker: PeerId | None = None) -> None:
        self.events: list[ReachEvent] = []
        self._me = me
        self._may_fork = may_fork
        self._tie_breaker = tie_breaker
        self._live: tuple[PeerId, ...] | None = None
        self._is_lost_told = False
        self._begin(plan)

    def _begin(self, plan: Plan) -> None:
        self._plan = plan
        self.normal = Instance(NO_HASH, committee(plan))
        self.fork: Instance | None = None
        self._members: tuple[bytes, ...] = ()
        self._lost_since: float | None = None
        self._quorum_at = self._fork_at = INF

    @property
    def instance(self) -> Instance:
        """The instance in which a new proposal would be made."""
        return self.fork or self.normal

    @property
    def deadline(self) -> float:
        """The time of the next `wake`."""
        return min(self._quorum_at, self._fork_at)

    def named(self, fork: bytes) -> Instance | None:
        """Return the instance with this name. None for a fork that is not open here, because it has other
        members than we can reach."""
        return next((each for each in (self.normal, self.fork) if each and each.fork == fork), None)

    def decides(self, instance: Instance, votes: Collection[PeerId]) -> bool:
        """Return whether `votes` decide in an instance. A fork has no tie-breaker."""
        return decides(instance.committee, votes, self._tie_breaker if instance.fork == NO_HASH else None)

    def lives(self, peer: PeerId) -> bool:
        """Return whether `peer` is believed to be alive."""
        return self._live is None or peer in self._live

    def follow(self, now: float, plan: Plan) -> None:
        """Follow a new plan, which is now the newest."""
        self._begin(plan)
        self._count(now)

    def see(self, now: float, live: Collection[PeerId]) -> bool:
        """Set the live peers; return whether they have changed."""
        seen = tuple(sorted({*live, self._me}))
        if seen == self._live:
            return False
        self._live = seen
        self._count(now)
        return True

    def wake(self, now: float, voted: Collection[bytes]) -> None:
        """Report conditions that have lasted long enough. `voted` are the instances in which we hold a
        vote."""
        if now >= self._quorum_at:
            self._quorum_at = INF
            self._is_lost_told = True
            seats = self.normal.committee
            missing = tuple(peer for peer in seats if not self.lives(peer))
            live = len(seats) - len(missing)
            self.events.append(QuorumLost(self._plan.height, live, majority(seats), missing))
        if now >= self._fork_at:
            self._fork_at = INF
            name = fork_name(self._plan, self._members)
            if name in voted or sum(fork != NO_HASH for fork in voted) < FORKS_MAX:
                self.fork = Instance(name, committee(self._plan, self._members), self._members)
                self.events.append(ForkOpened(name, self._members))

    def _count(self, now: float) -> None:
        seats = self.normal.committee
        in_reach = [peer for peer in seats if self.lives(peer)]
        if decides(seats, in_reach, self._tie_breaker) or self._me not in self._plan.roster:
            if self._is_lost_told:
                self.events.append(QuorumFound(self._plan.height))
            self._is_lost_told = False
            self._begin(self._plan)
            return
        if self._lost_since is None:
            self._lost_since = now
            self._quorum_at = INF if self._is_lost_told else now + QUORUM_SECONDS
        members = tuple(peer for peer in self._plan.roster if self.lives(PeerId(peer)))
        if self._may_fork and members != self._members:
            # A fork by the previously reachable members is cancelled, because its name depends on the list of
            # members.
            self.fork, self._members = None, members
            self._fork_at = max(self._lost_since + FORK_SECONDS, now + QUORUM_SECONDS)
