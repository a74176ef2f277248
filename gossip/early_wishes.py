"""Wishes for a group that peers announced before this peer had its own wish: pure.

They determine which answers a new wish of this peer briefly waits for; `gossip.matchmaking` does the waiting.
"""

from collections.abc import Iterable
from typing import TypeVar

from crypto.identity import PeerId

EARLY_MAX = 1_024
"""Maximum number of peers whose early wish, or missing answer, is remembered: the number of peers that
receive a node's wish."""

V = TypeVar("V")


class EarlyWishes:
    """The latest early wish of each peer, kept for a limited time."""

    def __init__(self, good_seconds: float) -> None:
        self._good_seconds = good_seconds
        self._heard: dict[PeerId, tuple[float, bytes]] = {}
        self._unanswered: dict[PeerId, None] = {}

    def heard(self, now: float, peer: PeerId, key: bytes) -> None:
        """Record that this peer wants a group under this key."""
        _keep(self._heard, peer, (now, key))

    def of(self, now: float, key: bytes) -> list[PeerId]:
        """Return the peers that want a group under this key, except those that did not answer the previous
        time."""
        return [
            peer
            for peer, (at, wanted) in self._heard.items()
            if wanted == key and now - at < self._good_seconds and peer not in self._unanswered
        ]

    def answered(self, peer: PeerId) -> None:
        """Count this peer again, because it answers wishes."""
        self._unanswered.pop(peer, None)

    def unanswered(self, peers: Iterable[PeerId]) -> None:
        """Ignore these peers until they answer a wish."""
        for peer in peers:
            _keep(self._unanswered, peer, None)


def _keep(table: dict[PeerId, V], peer: PeerId, value: V) -> None:
    """Insert an entry at the end; evict the oldest if the table is full."""
    table.pop(peer, None)
    table[peer] = value
    if len(table) > EARLY_MAX:
        del table[next(iter(table))]
