"""Why a run pauses, in words for a person."""

from crypto.identity import short_peer
from partition.plan.quorum import QuorumLost


def votes_missing(event: QuorumLost) -> str:
    """Say how many votes are missing, and which machines would end the pause."""
    names = ", ".join(map(short_peer, event.missing))
    lacking = event.needed - event.live
    text = f"{event.live} of {event.needed} votes needed are there"
    if len(event.missing) == lacking:
        return f"{text}; it goes on when {names} {'is' if lacking == 1 else 'are'} back"
    return f"{text}; it goes on when {lacking} of {names} {'is' if lacking == 1 else 'are'} back"
