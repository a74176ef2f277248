"""Wishes for a group that peers announced before this one had its own: pure.

They decide whose answer a wish of this peer waits for a moment; `gossip.matchmaking` does the waiting.
"""

from collections.abc import Iterable
from typing import TypeVar

from crypto.identity import PeerId

EARLY_MAX = 1_024
"""Peers whose early wish, or missing answer, is kept: as many as a node tells of a wish."""

V = TypeVar("V")


class EarlyWishes:
    """The last early wish of each peer, kept for a bounded time."""

    def __init__(self, good_seconds: float) -> None:
        self._good_seconds = good_seconds
        self._heard: dict[PeerId, tuple[float, bytes]] = {}
        self._unanswered: dict[PeerId, None] = {}

    def heard(self, now: float, peer: PeerId, key: bytes) -> None:
        """Keep that this peer wants a group under this key."""
        _keep(self._heard, peer, (now, key))

    def of(self, now: float, key: bytes) -> list[PeerId]:
        """Return the peers that want a group under this key, without those that did not answer last time."""
        return [
            peer
            for peer, (at, wanted) in self._heard.items()
            if wanted == key and now - at < self._good_seconds and peer not in self._unanswered
        ]

    def answered(self, peer: PeerId) -> None:
        """Count this peer again: it answers wishes."""
        self._unanswered.pop(peer, None)

    def unanswered(self, peers: Iterable[PeerId]) -> None:
        """Do not count these until they answer a wish."""
        for peer in peers:
            _keep(self._unanswered, peer, None)


def _keep(table: dict[PeerId, V], peer: PeerId, value: V) -> None:
    """Put an entry last; the oldest makes room."""
    table.pop(peer, None)
    table[peer] = value
    if len(table) > EARLY_MAX:
        del table[next(iter(table))]
