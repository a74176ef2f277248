"""Wishes for a group that peers announced before this one had its own: pure.

They decide which answers a wish of this peer briefly awaits; `gossip.matchmaking` does the waiting.
"""

from collections.abc import Iterable
from typing import TypeVar

from crypto.identity import PeerId

EARLY_MAX = 1_024
"""Peers whose early wish, or missing answer, is remembered: as many as receive a wish of a node."""

V = TypeVar("V")


class EarlyWishes:
    """The last early wish of each peer, kept for a bounded time."""

    def __init__(self, good_seconds: float) -> None:
        self._good_seconds = good_seconds
        self._heard: dict[PeerId, tuple[float, bytes]] = {}
        self._unanswered: dict[PeerId, None] = {}

    def heard(self, now: float, peer: PeerId, key: bytes) -> None:
        """Note that this peer wants a group under this key."""
        _keep(self._heard, peer, (now, key))

    def of(self, now: float, key: bytes) -> list[PeerId]:
        """Return the peers that want a group under this key, except those that did not answer last time."""
        return [
            peer
            for peer, (at, wanted) in self._heard.items()
            if wanted == key and now - at < self._good_seconds and peer not in self._unanswered
        ]

    def answered(self, peer: PeerId) -> None:
        """Count this peer again, since it answers wishes."""
        self._unanswered.pop(peer, None)

    def unanswered(self, peers: Iterable[PeerId]) -> None:
        """Do not count these peers until they answer a wish."""
        for peer in peers:
            _keep(self._unanswered, peer, None)


def _keep(table: dict[PeerId, V], peer: PeerId, value: V) -> None:
    """Insert an entry as the last one; the oldest makes room."""
    table.pop(peer, None)
    table[peer] = value
    if len(table) > EARLY_MAX:
        del table[next(iter(table))]
