"""Why a run pauses or goes on more slowly, in words for a person."""

from collections.abc import Collection
from fractions import Fraction

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


def stages_fewer(stages: int, began_with: int, slower: Fraction) -> str:
    """Say that a run goes on with fewer stages, how much slower, and what would help."""
    has = "1 stage has" if stages == 1 else f"{stages} stages have"
    pace = f", each step about {float(slower):.1f} times as long" if slower > 1 else ""
    return f"{has} the layers of {began_with}{pace}; another machine that offers a slot would take some"
