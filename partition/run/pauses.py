"""Why a run pauses, in words for a person."""

from collections.abc import Collection

from crypto.identity import PeerId, short_peer
from partition.plan.quorum import QuorumLost


def votes_missing(event: QuorumLost) -> str:
    """Say how many votes are missing, and which machines would end the pause."""
    names = ", ".join(map(short_peer, event.missing))
    lacking = event.needed - event.live
    text = f"{event.live} of {event.needed} votes needed are there"
    if len(event.missing) == lacking:
        return f"{text}; it goes on when {names} {'is' if lacking == 1 else 'are'} back"
    return f"{text}; it goes on when {lacking} of {names} {'is' if lacking == 1 else 'are'} back"


def stage_missing(reason: str, lost: Collection[PeerId]) -> str:
    """Say that a stage has nobody for `reason`, and which machines would end the pause."""
    names = " or ".join(map(short_peer, lost))
    return f"{reason}; it goes on when {names} is back" if lost else reason
