"""Copies of a participant's state that it offers to others: which copy is current, and how long each is kept.

A copy is current while this peer is at the copy's step. With local steps, where states differ a little
anyway, it stays current for some time longer. With a target batch, a peer that takes a copy of an earlier
step would be behind immediately, and have to ask again.
"""

from dataclasses import dataclass

from node.averaging.snapshot import Snapshot

COPIES_MAX = 2
"""Number of copies kept. There are two, so that a copy being fetched survives the next one."""
SNAPSHOT_SECONDS = 10.0
"""With local steps, how long after it was made a copy may be offered, even if its step has ended."""
KEPT_SECONDS = 60.0
"""A copy of a past step is dropped after this many seconds without a fetch, because it takes as much memory
as the state."""


@dataclass
class _Copy:
    snapshot: Snapshot
    made_at: float
    good_seconds: float
    used_at: float


class OfferedStates:
    """The offered copies of one run."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def add(self, now: float, snapshot: Snapshot, good_seconds: float) -> None:
        """Set the current state. It may be offered for `good_seconds`, even after this peer's next step."""
        self._copies = [*self._copies, _Copy(snapshot, now, good_seconds, now)][-COPIES_MAX:]

    def current(self, now: float, step: int, own_step: int) -> Snapshot | None:
        """Return the newest copy at `step` or later that a peer at `own_step` may offer; None if there is
        none."""
        for copy in reversed(self._copies):
            reached = copy.snapshot.table.step
            is_good = reached >= own_step or now - copy.made_at < copy.good_seconds
            if reached >= step and is_good:
                copy.used_at = now
                return copy.snapshot
        return None

    def with_digest(self, now: float, digest: bytes) -> Snapshot | None:
        """Return the copy with this digest; None if it is no longer kept."""
        for copy in self._copies:
            if copy.snapshot.table.digest == digest:
                copy.used_at = now
                return copy.snapshot
        return None

    def moved(self, now: float, own_step: int) -> None:
        """Drop copies of steps before `own_step` that no peer fetches."""
        self._copies = [
            copy
            for copy in self._copies
            if copy.snapshot.table.step >= own_step or now - copy.used_at < KEPT_SECONDS
        ]
