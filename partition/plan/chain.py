"""The links of a run's chain of plans that a member knows, and the state that it keeps across restarts.

A link is an encoded change that leads from one plan to the next. Pure: `partition.plan.paxos` decides the
next link. Only the newest links are kept; earlier ones are replaced by the plan that they led to.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from partition.plan.change import CHANGE_BYTES_MAX, Change, decode_change, encode_change, successor
from partition.plan.paxos_messages import LINKS_BYTES_MAX, LINKS_MAX, Link, Vote
from partition.plan.plan import (
    HASH_BYTES,
    HEIGHT_MAX,
    NO_HASH,
    PLAN_BYTES_MAX,
    Hash,
    Height,
    Plan,
    check_plan,
    plan_hash,
)

FORKS_MAX = 16
"""Maximum number of forks in which a member votes on the successor of one plan. If the reachable members
change more often, the member waits for the majority."""
PAST_MAX = 64
"""Maximum number of plans for which a vote is remembered. At older plans, the member counts as having
voted."""
DURABLE_BYTES_MAX = PLAN_BYTES_MAX + LINKS_BYTES_MAX + (1 + FORKS_MAX) * (CHANGE_BYTES_MAX + 256) + 2**14


class Chain:
    """A sequence of plans that begins with `plans[0]`; `links[i]` leads from `plans[i]` to `plans[i + 1]`.

    Raises RemoteProtocolError if they do not follow one another.
    """

    def __init__(self, base: Plan, links: Sequence[bytes] = ()) -> None:
        check_plan(base)
        self.plans = [base]
        self.hashes = [plan_hash(base)]
        self.links: list[bytes] = []
        self._peers: frozenset[bytes] = frozenset(base.roster)
        for link in links:
            plan, _ = follow(self.head, link)
            self.append(plan, link)

    @property
    def head(self) -> Plan:
        """The newest plan."""
        return self.plans[-1]

    @property
    def head_hash(self) -> bytes:
        """The hash of the newest plan."""
        return self.hashes[-1]

    def knows(self, peer: bytes) -> bool:
        """Return whether `peer` is or was on the roster of a kept plan."""
        return peer in self._peers

    def peers(self) -> tuple[bytes, ...]:
        """Return all peers that are or were on the roster of a kept plan, sorted."""
        return tuple(sorted(self._peers))

    def place(self, plan: bytes) -> int | None:
        """Return the index of the plan with this hash; None if the plan is not kept."""
        return self.hashes.index(plan) if plan in self.hashes else None

    def append(self, plan: Plan, link: bytes) -> None:
        """Append a plan with its `link`; drop the oldest plans if there are too many."""
        self.plans.append(plan)
        self.hashes.append(plan_hash(plan))
        self.links.append(link)
        while len(self.links) > LINKS_MAX or sum(map(len, self.links)) > LINKS_BYTES_MAX:
            del self.plans[0], self.hashes[0], self.links[0]
        self._peers = frozenset().union(*(plan.roster for plan in self.plans))


def follow(plan: Plan, link: bytes) -> tuple[Plan, Change]:
    """Return the plan after `plan`, and the change that `link` encodes. Raises RemoteProtocolError if the
    link is invalid.

    Each change has only one valid encoding, so comparing bytes compares changes. The name of a fork must
    follow from its remaining members, and all other members must be lost.
    """
    change = decode_change(link)
    if encode_change(change) != link:
        raise RemoteProtocolError("a change is not in its canonical form")
    new = successor(plan, change)
    if change.fork != NO_HASH and change.fork != fork_name(plan, staying(plan, new)):
        raise RemoteProtocolError("a fork's name does not follow from the members that continue")
    return new, change


def staying(plan: Plan, new: Plan) -> tuple[bytes, ...]:
    """Return the members of the roster of `plan` that are also on the roster of `new`, sorted."""
    return tuple(sorted(set(plan.roster) & set(new.roster)))


def fork_name(plan: Plan, members: Sequence[bytes]) -> bytes:
    """Return the name of the instance in which these members of the roster (sorted) alone decide the
    successor of `plan`."""
    return blake3(plan_hash(plan) + b"".join(members)).digest()


def forked(plan: Plan, change: Change, members: Sequence[bytes]) -> Change:
    """Return the same change as a fork by `members` alone: exactly all other members are lost.

    A lost member that joins again still returns without its state.
    """
    inside = set(members)
    outside = tuple(peer for peer in plan.roster if peer not in inside)
    joined = tuple(row for row in change.joined if row.peer not in outside)
    empty = {row.peer for row in joined} & set(change.lost)
    return replace(
        change,
        lost=tuple(sorted({*outside, *empty})),
        joined=joined,
        admitted=tuple(peer for peer in change.admitted if peer not in outside),
        fork=fork_name(plan, members),
    )


class Past(msgspec.Struct, frozen=True, array_like=True):
    """The newest plans at which this member has voted and which it has left, and the maximum height of older
    ones."""

    plans: Annotated[tuple[tuple[Height, Hash], ...], msgspec.Meta(max_length=PAST_MAX)] = ()
    height: Annotated[int, msgspec.Meta(ge=-1, lt=HEIGHT_MAX)] = -1

    def with_plan(self, plan: Plan) -> "Past":
        """Return this record with one more plan."""
        plans = (*self.plans, (plan.height, plan_hash(plan)))
        dropped = (height for height, _ in plans[:-PAST_MAX])
        return Past(plans[-PAST_MAX:], max(self.height, *dropped, -1))

    def may_hold(self, plan: Plan) -> bool:
        """Return whether this member may have voted on the successor of `plan`."""
        return plan.height <= self.height or (plan.height, plan_hash(plan)) in self.plans


class Voted(msgspec.Struct, frozen=True, array_like=True):
    """A vote, and the instance that it belongs to. `fork` is NO_HASH if that is not a fork."""

    fork: Hash
    vote: Vote


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """The state that a member must not forget: its links, and its votes on the successor of the newest
    plan."""

    base: Plan
    links: Annotated[tuple[Link, ...], msgspec.Meta(max_length=LINKS_MAX)]
    votes: Annotated[tuple[Voted, ...], msgspec.Meta(max_length=1 + FORKS_MAX)]
    abstains: bool
    past: Past


def pack(kept: Kept) -> bytes:
    """Return the bytes to store, preceded by their BLAKE3 hash."""
    body = encode(kept)
    return blake3(body).digest() + body


def base_plan(data: bytes) -> Plan:
    """Return the oldest plan in stored bytes. Raises RemoteProtocolError."""
    return unpack(data).base


def unpack(data: bytes) -> Kept:
    """Return the state that `pack` stored. Raises RemoteProtocolError if the bytes have changed."""
    body = data[HASH_BYTES:]
    if blake3(body).digest() != data[:HASH_BYTES]:
        raise RemoteProtocolError("a stored chain of plans is damaged")
    kept: Kept = decode(body, Kept, bytes_max=DURABLE_BYTES_MAX)
    return kept
