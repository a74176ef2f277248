"""Learning the chain of plans from other members: the links that this member lacks, and other branches.

This is the part of `partition.plan.paxos` that needs no vote. Other members are trusted as long as their
messages are valid.

Of two members, one may be behind, or they may be on different branches. A ChainHead that asks is answered
with the links that its sender lacks. If the sender's plan is unknown here, the answer has all our links and
our own ChainHead. An answer is not answered again.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.chain import Chain, follow
from partition.plan.change import Change
from partition.plan.paxos_messages import ChainHead, Decided, Sends, other_branch_wins
from partition.plan.plan import NO_HASH, Plan, plan_hash

BEHIND_SECONDS = 30.0
"""How long this member waits for missing links before it counts as left behind. One late member may know too
little to help, but another will help within this time."""
STRAYED_MAX = 64
"""Maximum number of plans of other branches that are remembered."""


@dataclass(frozen=True)
class Branch:
    """Another branch, as its links show it: the last plan that it has in common with ours, and the members of
    its newest plan."""

    split: Plan
    members: tuple[bytes, ...]


@dataclass(frozen=True)
class ForkFound:
    """`peer` is on another branch of the chain, which wins if the claims in its head can be trusted. `branch`
    is None if its links are too old to compare with ours."""

    peer: PeerId
    head: ChainHead
    branch: Branch | None = None


@dataclass(frozen=True)
class ForkBehind:
    """`peer` is on another branch of the chain, and ours wins."""

    peer: PeerId
    head: ChainHead
    branch: Branch | None = None


@dataclass(frozen=True)
class LeftBehind:
    """`peer` is ahead, and no member could send the missing links for BEHIND_SECONDS, so this member has
    missed too much."""

    peer: PeerId
    head: ChainHead


@dataclass(frozen=True)
class ChainBroken:
    """`peer` reports a change at `height` that differs from the one we know: it lies, or a disk was lost."""

    peer: PeerId
    height: int


LearnerEvent = ForkFound | ForkBehind | LeftBehind | ChainBroken


@dataclass(frozen=True)
class Taken:
    """A link that follows our head, and the plan and change that it stands for."""

    plan: Plan
    change: Change
    link: bytes


class Learner:
    """The chain as this member knows it, and the peers that are known to be on other branches."""

    def __init__(self, me: PeerId, chain: Chain, *, may_fork: bool) -> None:
        self.events: list[LearnerEvent] = []
        self.chain = chain
        self.said = ChainHead(run=chain.head.run, parent=chain.head_hash, height=chain.head.height)
        self._me = me
        self._may_fork = may_fork
        # The latest ChainHead of each peer whose plan is unknown here.
        self._heads: dict[PeerId, ChainHead] = {}
        self._strayed: dict[bytes, Branch] = {}
        self._behind_since: float | None = None

    def append(self, rows: list[Taken]) -> None:
        """Append links to our chain."""
        for row in rows:
            self.chain.append(row.plan, row.link)
        self._behind_since = None
        self._heads = {peer: head for peer, head in self._heads.items() if self.chain.knows(peer)}

    def head(self, *, asks: bool) -> ChainHead:
        """Return our own ChainHead."""
        plan = self.chain.head
        return replace(
            self.said,
            run=plan.run,
            parent=self.chain.head_hash,
            fork=plan.fork,
            height=plan.height,
            asks=asks,
        )

    def links_after(self, place: int) -> Decided:
        """Return all links that followed our plan at `place`."""
        return Decided(
            run=self.chain.head.run,
            parent=self.chain.hashes[place],
            links=tuple(self.chain.links[place:]),
            whole=place == 0,
        )

    def learn(self, sender: PeerId, message: Decided) -> tuple[list[Taken], Sends]:
        """Return the links that follow our head, which are not appended yet, and the messages to send.

        All links are checked before any of them counts. A fork without us is another branch, even if it
        begins at our head.
        """
        place = self.chain.place(message.parent)
        if place is None:
            # We lack earlier links, or the parent was never ours. A peer that sent all its links cannot tell
            # us which.
            return [], [] if message.whole else [(sender, self.head(asks=True))]
        plan = self.chain.plans[place]
        split = plan
        taken: list[Taken] = []
        strayed: dict[bytes, Branch] = {}
        for link in message.links:
            ours = self.chain.links[place] if place < len(self.chain.links) else None
            if link == ours and not strayed:
                place += 1
                split = plan = self.chain.plans[place]
                continue
            before = plan
            plan, change = follow(before, link)
            if change.fork != NO_HASH and not self._may_fork:
                raise RemoteProtocolError("a change is a fork, but the run does not allow forks")
            if ours is not None and not strayed and follow(before, ours)[1].fork == change.fork:
                self.events.append(ChainBroken(sender, plan.height))
                raise RemoteProtocolError(f"two different changes were decided for height {plan.height}")
            is_without_us = change.fork != NO_HASH and self._me not in plan.roster
            if strayed or ours is not None or is_without_us:
                strayed[plan_hash(plan)] = Branch(split, plan.roster)
            else:
                taken.append(Taken(plan, change, link))
                split = plan
        if strayed:
            known = {name: each for name, each in self._strayed.items() if name not in strayed}
            self._strayed = dict([*known.items(), *strayed.items()][-STRAYED_MAX:])
            self._judge(sender)
        return taken, []

    def hear(self, now: float, sender: PeerId, head: ChainHead) -> Sends:
        """Handle a member's ChainHead; return the messages to send."""
        ours = self.chain.head
        place = self.chain.place(head.plan)
        if place is not None:
            if self.chain.plans[place].height != head.height:
                raise RemoteProtocolError("a head states a wrong height of its plan")
            self._heads.pop(sender, None)
            return [] if head.plan == self.chain.head_hash else [(sender, self.links_after(place))]
        self._heads[sender] = head
        is_strayed = self._judge(sender)
        if not is_strayed and head.height > ours.height:
            if head.asks:
                # the sender knows our plan, or answers with all its links
                return [(sender, self.head(asks=True))]
            self._fall_behind(now, sender, head)
        return [(sender, self.links_after(0)), (sender, self.head(asks=False))] if head.asks else []

    def _fall_behind(self, now: float, sender: PeerId, head: ChainHead) -> None:
        # If forks are allowed, a branch with more plans is not necessarily better.
        if self._may_fork and not other_branch_wins(self.head(asks=False), head):
            return
        if self._behind_since is None:
            self._behind_since = now
        elif now >= self._behind_since + BEHIND_SECONDS:
            self.events.append(LeftBehind(sender, head))

    def _judge(self, sender: PeerId) -> bool:
        """Return whether the latest ChainHead of `sender` is on another branch. Append an event if its links
        prove that, or if ours do not reach back far enough to compare."""
        head = self._heads.get(sender)
        if head is None:
            return False
        base = self.chain.plans[0].height
        branch = self._strayed.get(head.plan)
        is_passed = base <= head.height <= self.chain.head.height
        if branch is None and not is_passed:
            return False
        if branch is not None or base:
            wins = other_branch_wins(self.head(asks=False), head)
            self.events.append((ForkFound if wins else ForkBehind)(sender, head, branch))
        return True
