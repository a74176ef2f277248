"""The history of a plan, for newcomers: the first plan, and every change since.

The requester signs the first plan. The changes follow in segments. Each segment is signed by a peer that is
on the roster at the segment's beginning: a member vouches for the changes since it joined, and its segment
follows the history with which it was admitted. So a peer that was never admitted cannot invent a history.
Members are trusted, because votes are not signed (`partition.plan.paxos`).

Pure. Replaying a history takes up to 0.2 s, so it must not run in the event loop.
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
"""Maximum number of changes of one run. Typical changes have some hundred bytes, and hourly changes fit for
six weeks. After that, a run continues with the members that it has."""
ROSTERS_MAX = 2**19
"""Maximum number of peers on all rosters of a history in total. They are replayed in 0.2 s, and suffice for
all changes of 500 peers."""
SEGMENTS_MAX = 64
"""Maximum number of segments: newcomers in succession, each admitted by the previous one."""
HISTORY_BYTES_MAX = 448 * 1024
"""Maximum size of a history, so that it fits into one message together with the plan that it leads to."""


class History(msgspec.Struct, frozen=True, array_like=True):
    """The history of a plan. `base` is the first plan, signed by its requester; each of `segments` is a
    signed `Segment`."""

    base: Fact
    segments: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=SEGMENTS_MAX)] = ()

    @property
    def size_bytes(self) -> int:
        """The size of the signed bodies, which is nearly the whole size."""
        return len(self.base.body) + sum(len(fact.body) for fact in self.segments)


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Changes that followed the plan with this hash, one after the other."""

    parent: Hash
    links: Annotated[tuple[Link, ...], msgspec.Meta(max_length=CHANGES_MAX)]


def first_history(signer: Signer, plan: Plan) -> History:
    """Return the history that consists of a run's first plan, signed by its requester."""
    return History(signer.sign(FIRST_PLAN_PURPOSE, encode_plan(plan)))


def extend(signer: Signer, history: History, parent: bytes, links: Sequence[bytes]) -> History:
    """Return the history extended by the links that followed the plan `parent`, with which the history ends.
    Raises RemoteProtocolError if it becomes too long."""
    fact = signer.sign(SEGMENT_PURPOSE, encode(Segment(parent, tuple(links))))
    longer = History(history.base, (*history.segments, fact))
    check_length(longer)
    return longer


def first_plan(history: History) -> Plan:
    """Return the first plan of a history. Raises RemoteProtocolError if it is invalid."""
    if len(history.base.body) > PLAN_BYTES_MAX:
        raise RemoteProtocolError(f"a first plan has {len(history.base.body)} bytes")
    return decode_plan(history.base.body)


def check_length(history: History) -> None:
    """Check the length of a history. Raises RemoteProtocolError if it is too long."""
    if history.size_bytes > HISTORY_BYTES_MAX or len(history.segments) > SEGMENTS_MAX:
        raise RemoteProtocolError(
            f"a history has {history.size_bytes} bytes in {len(history.segments)} "
            f"segments, at most {HISTORY_BYTES_MAX} in {SEGMENTS_MAX} are allowed"
        )


def replay(signer: Signer, requester: PeerId, history: History) -> tuple[Plan, PeerId]:
    """Return the plan that a history leads to, and the author of the last part. Raises RemoteProtocolError if
    the history is invalid."""
    check_length(history)
    author = signer.check(FIRST_PLAN_PURPOSE, history.base)
    plan = first_plan(history)
    if author != requester or plan.height:
        raise RemoteProtocolError("a first plan is not signed by the requester, or is not the first")
    peers = 0
    for fact in history.segments:
        author = signer.check(SEGMENT_PURPOSE, fact)
        segment: Segment = decode(fact.body, Segment, bytes_max=HISTORY_BYTES_MAX)
        if segment.parent != plan_hash(plan) or author not in plan.roster:
            raise RemoteProtocolError(
                "a segment of a history does not follow the plan before it, or its author was not a member"
            )
        if plan.height + len(segment.links) > CHANGES_MAX:
            raise RemoteProtocolError(f"a history has more than {CHANGES_MAX} changes")
        for link in segment.links:
            plan, _ = follow(plan, link)
            peers += len(plan.roster)
            if peers > ROSTERS_MAX:
                raise RemoteProtocolError(f"a history has more than {ROSTERS_MAX} peers on its rosters")
    return plan, author
