"""Copies of a participant's state that it hands out: which one is current, and how long each is kept.

A copy is current while this peer is at its step. With local steps, where states differ a little anyway, it
stays so for a while longer. With a target batch, a peer that takes a copy of an earlier step is behind at
once, and has to ask again.
"""

from dataclasses import dataclass

from node.averaging.snapshot import Snapshot

COPIES_MAX = 2
"""The number of copies: a second one, so that a copy being fetched survives the next."""
SNAPSHOT_SECONDS = 10.0
"""With local steps, how long a copy may be handed out after its step is over."""
KEPT_SECONDS = 60.0
"""A copy of a past step is dropped after this time without a fetch: it takes as much memory as the state."""


@dataclass
class _Copy:
    snapshot: Snapshot
    made_at: float
    good_seconds: float
    used_at: float


class OfferedStates:
    """The copies of one run."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def add(self, now: float, snapshot: Snapshot, good_seconds: float) -> None:
        """Set the current state. It may be handed out for this long after this peer's next step."""
        self._copies = [*self._copies, _Copy(snapshot, now, good_seconds, now)][-COPIES_MAX:]

    def current(self, now: float, step: int, own_step: int) -> Snapshot | None:
        """Return the newest copy at `step` or later that a peer at `own_step` may hand out."""
        for copy in reversed(self._copies):
            reached = copy.snapshot.table.step
            is_good = reached >= own_step or now - copy.made_at < copy.good_seconds
            if reached >= step and is_good:
                copy.used_at = now
                return copy.snapshot
        return None

    def with_digest(self, now: float, digest: bytes) -> Snapshot | None:
        """Return the copy with this digest, if it is still kept."""
        for copy in self._copies:
            if copy.snapshot.table.digest == digest:
                copy.used_at = now
                return copy.snapshot
        return None

    def moved(self, now: float, own_step: int) -> None:
        """Note this peer's step: forget copies of earlier steps that no peer fetches."""
        self._copies = [
            copy
            for copy in self._copies
            if copy.snapshot.table.step >= own_step or now - copy.used_at < KEPT_SECONDS
        ]
