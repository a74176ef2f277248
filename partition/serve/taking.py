"""Decides whether a node takes a stage that it is asked for, and which members are asked for a missing one.

A node without a stage of the service takes one from anybody, if its owner's rules allow it. One that has a
stage already takes a further one at the word of the publisher, or of a member, who is believed only where
this node has itself heard of nobody else who holds it: its slots are not the asker's.
"""

from collections.abc import Sequence

from crypto.identity import PeerId
from partition.serve.messages import ServiceRow
from partition.serve.upkeep import STAGES_PER_PEER_MAX, Recruit, ServiceUpkeep


def is_member(here: Sequence[ServiceUpkeep], asker: PeerId) -> bool:
    """Return whether a peer is a member of the service by what the stages `here` have heard."""
    return any(each.has(asker) for each in here)


def further_refusal(
    here: Sequence[ServiceUpkeep],
    stage: int,
    asker: PeerId,
    *,
    is_owner: bool,
    stages_max: int = STAGES_PER_PEER_MAX,
) -> str | None:
    """Return why a node that holds the stages `here` takes no further one; None where it may. `is_owner`:
    the publisher asks, or the node itself."""
    if not (is_owner or is_member(here, asker)):
        return "another stage of this service is here"
    if not is_owner and not here[0].lacks(stage, asker):
        return "another member holds the stage"
    if len(here) >= stages_max:
        return f"{len(here)} stages of this service are here"
    return None


def stopgaps(wanted: Recruit, me: PeerId) -> list[PeerId]:
    """Return the members that are asked to take a missing stage beside their own, this one first; none where
    somebody has it."""
    if not wanted.is_empty:
        return []
    return [
        peer for peer in (me, *(each for each in wanted.members if each != me)) if peer not in wanted.failed
    ]


def has_other(roster: Sequence[Sequence[PeerId]], stage: int, me: PeerId) -> bool:
    """Return whether another member answers for a stage: the one that leaves need not wait for any."""
    return bool(roster) and any(peer != me for peer in roster[stage])


def others(rows: Sequence[ServiceRow], me: PeerId) -> list[PeerId]:
    """Return the other members, in their order."""
    return [PeerId(row.peer) for row in rows if row.peer != me]
