"""The history of a plan, for newcomers: the first plan, and every change since.

The requester signs the first plan. The changes follow in segments, each signed by a peer on the roster at the
segment's beginning: a member vouches for the changes since it came, and the history that admitted it precedes
them. So a peer that was never admitted cannot invent a history. Members are trusted, since votes are not
signed (`partition.plan.paxos`).

Pure. Replaying takes up to 0.2 s, so it is not for the event loop.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from partition.plan.chain import follow
from partition.plan.paxos_messages import Link
from partition.plan.plan import PLAN_BYTES_MAX, Hash, Plan, decode_plan, encode_plan, plan_hash

FIRST_PLAN_PURPOSE = "first-plan"
SEGMENT_PURPOSE = "plan-history"
CHANGES_MAX = 1_024
"""Changes of one run: usual ones have some hundred bytes, and hourly changes fit six weeks. A longer run
continues with the members it has."""
ROSTERS_MAX = 2**19
"""Peers on all rosters of a history in total, replayed in 0.2 s: all changes of 500 peers."""
SEGMENTS_MAX = 64
"""Newcomers in a chain, each admitted by the one before."""
HISTORY_BYTES_MAX = 448 * 1024
"""Size limit of a history, so that it fits into one message with the plan that it leads to."""


class History(msgspec.Struct, frozen=True, array_like=True):
    """`base` is the first plan as its requester signed it, each of `segments` an encoded `Segment`."""

    base: Fact
    segments: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=SEGMENTS_MAX)] = ()

    @property
    def size_bytes(self) -> int:
        """Return the size of the signed parts, which is nearly all."""
        return len(self.base.body) + sum(len(fact.body) for fact in self.segments)


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Changes that followed the plan of this hash, one after the other."""

    parent: Hash
    links: Annotated[tuple[Link, ...], msgspec.Meta(max_length=CHANGES_MAX)]


def first_history(signer: Signer, plan: Plan) -> History:
    """Return the history of a run's first plan, by its requester."""
    return History(signer.sign(FIRST_PLAN_PURPOSE, encode_plan(plan)))


def extend(signer: Signer, history: History, parent: bytes, links: Sequence[bytes]) -> History:
    """Return the history extended by the links that followed the plan `parent`, its end. RemoteProtocolError
    if it gets too long."""
    fact = signer.sign(SEGMENT_PURPOSE, encode(Segment(parent, tuple(links))))
    longer = History(history.base, (*history.segments, fact))
    check_length(longer)
    return longer


def first_plan(history: History) -> Plan:
    """Return the first plan of a history; RemoteProtocolError if it is invalid."""
    if len(history.base.body) > PLAN_BYTES_MAX:
        raise RemoteProtocolError(f"a first plan of {len(history.base.body)} bytes")
    return decode_plan(history.base.body)


def check_length(history: History) -> None:
    """Check the length of a history; else raise RemoteProtocolError."""
    if history.size_bytes > HISTORY_BYTES_MAX or len(history.segments) > SEGMENTS_MAX:
        raise RemoteProtocolError(
            f"a history of {history.size_bytes} bytes in {len(history.segments)} segments, at most "
            f"{HISTORY_BYTES_MAX} in {SEGMENTS_MAX}"
        )


def replay(signer: Signer, requester: PeerId, history: History) -> tuple[Plan, PeerId]:
    """Return the plan that a history leads to, and its author; else raise RemoteProtocolError."""
    check_length(history)
    author = signer.check(FIRST_PLAN_PURPOSE, history.base)
    plan = first_plan(history)
    if author != requester or plan.height:
        raise RemoteProtocolError("a first plan that is not its requester's, or not the first")
    peers = 0
    for fact in history.segments:
        author = signer.check(SEGMENT_PURPOSE, fact)
        segment: Segment = decode(fact.body, Segment, bytes_max=HISTORY_BYTES_MAX)
        if segment.parent != plan_hash(plan) or author not in plan.roster:
            raise RemoteProtocolError("a history told by somebody who was not there")
        if plan.height + len(segment.links) > CHANGES_MAX:
            raise RemoteProtocolError(f"a history of more than {CHANGES_MAX} changes")
        for link in segment.links:
            plan, _ = follow(plan, link)
            peers += len(plan.roster)
            if peers > ROSTERS_MAX:
                raise RemoteProtocolError(f"a history of more than {ROSTERS_MAX} peers on its rosters")
    return plan, author
