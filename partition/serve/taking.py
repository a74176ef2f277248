"""The decision whether a node takes a requested stage, and which members are asked for a missing one.

A node that has no stage of the service takes one for any asker, if its owner's rules allow it. A node that
has a stage takes a further one only for the publisher, or for a member if the node itself knows of no other
holder. So members cannot claim its slots.
"""

from collections.abc import Sequence

from crypto.identity import PeerId
from partition.serve.messages import ServiceRow
from partition.serve.upkeep import STAGES_PER_PEER_MAX, Recruit, ServiceUpkeep


def is_member(here: Sequence[ServiceUpkeep], asker: PeerId) -> bool:
    """Return whether the stages `here` know a peer as a member of the service."""
    return any(each.has(asker) for each in here)


def further_refusal(
    here: Sequence[ServiceUpkeep],
    stage: int,
    asker: PeerId,
    *,
    is_owner: bool,
    stages_max: int = STAGES_PER_PEER_MAX,
) -> str | None:
    """Return why a node that holds the stages `here` does not take a further one; None if it may. `is_owner`:
    the publisher or the node itself asks."""
    if not (is_owner or is_member(here, asker)):
        return "another stage of this service is here"
    if not is_owner and not here[0].lacks(stage, asker):
        return "another member holds the stage"
    if len(here) >= stages_max:
        return f"{len(here)} stages of this service are here"
    return None


def stopgaps(wanted: Recruit, me: PeerId) -> list[PeerId]:
    """Return the members to ask to hold a missing stage in addition to their own, this member first; none if
    the stage has a holder."""
    if not wanted.is_empty:
        return []
    return [
        peer for peer in (me, *(each for each in wanted.members if each != me)) if peer not in wanted.failed
    ]


def has_other(roster: Sequence[Sequence[PeerId]], stage: int, me: PeerId) -> bool:
    """Return whether another member answers for a stage, so that a leaving member need not wait."""
    return bool(roster) and any(peer != me for peer in roster[stage])


def others(rows: Sequence[ServiceRow], me: PeerId) -> list[PeerId]:
    """Return the other members, in order."""
    return [PeerId(row.peer) for row in rows if row.peer != me]
