"""Since when each peer is a member, as this node has seen it itself: the age that counts for slots."""

from collections.abc import Collection

from crypto.identity import PeerId
from node.placement.turns import SENIOR_SECONDS


class Seniority:
    """One node's view; bounded by its member list. Times are monotonic seconds."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._since: dict[PeerId, float] = {}

    def look(self, now: float, live: Collection[PeerId]) -> None:
        """Update the live members; a peer that was away begins anew."""
        self._since = {peer: self._since.get(peer, now) for peer in live if peer != self._me}

    def seconds(self, now: float, peer: PeerId) -> float:
        """Return for how long a peer has been a member."""
        return now - self._since.get(peer, now)

    def has_any(self, now: float) -> bool:
        """Return whether any member is a senior."""
        return any(now - since >= SENIOR_SECONDS for since in self._since.values())
