"""Texts to display that explain why a run pauses or slows down."""

from collections.abc import Collection
from fractions import Fraction

from crypto.identity import PeerId, short_peer
from partition.plan.quorum import QuorumLost

GAIN_PERCENT_MIN = 20
"""Minimum share, in percent, by which another stage must shorten steps. It is twice the threshold for moving
borders, because another stage also takes a machine that other runs could use."""


def votes_missing(event: QuorumLost) -> str:
    """Return a text that states how many votes are missing, and which machines would end the pause."""
    names = ", ".join(map(short_peer, event.missing))
    lacking = event.needed - event.live
    text = f"{event.live} of {event.needed} votes needed are there"
    if len(event.missing) == lacking:
        return f"{text}; it goes on when {names} {'is' if lacking == 1 else 'are'} back"
    return f"{text}; it goes on when {lacking} of {names} {'is' if lacking == 1 else 'are'} back"


def stage_missing(reason: str, lost: Collection[PeerId]) -> str:
    """Return a text that states that a stage has no replica for `reason`, and which machines would end the
    pause."""
    names = " or ".join(map(short_peer, lost))
    return f"{reason}; it goes on when {names} is back" if lost else reason


def stages_fewer(stages: int, began_with: int, slower: Fraction, useless: int = 0) -> str:
    """Return a text that states that a run continues with fewer stages, how much slower it is, and what would
    help. `useless` is the number of free machines that would not make the run enough faster."""
    has = "1 stage has" if stages == 1 else f"{stages} stages have"
    pace = f", each step about {float(slower):.1f} times as long" if slower > 1 else ""
    helps = f"a machine that offers a slot takes some if steps get {GAIN_PERCENT_MIN} % faster"
    if useless:
        free = "the machine that is" if useless == 1 else f"none of the {useless} machines that are"
        would = "would not make steps" if useless == 1 else "would make steps"
        helps = f"{free} free {would} {GAIN_PERCENT_MIN} % faster"
    return f"{has} the layers of {began_with}{pace}; {helps}"
