"""Records since when each peer has been a member, as seen by this node itself; this age counts for slots."""

from collections.abc import Collection

from crypto.identity import PeerId
from node.placement.turns import SENIOR_SECONDS


class Seniority:
    """One node's view of the ages, bounded by its member list. Times are monotonic seconds."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._since: dict[PeerId, float] = {}

    def look(self, now: float, live: Collection[PeerId]) -> None:
        """Update the live members; a peer that was away starts again at zero."""
        self._since = {peer: self._since.get(peer, now) for peer in live if peer != self._me}

    def seconds(self, now: float, peer: PeerId) -> float:
        """Return for how many seconds a peer has been a member."""
        return now - self._since.get(peer, now)

    def has_any(self, now: float) -> bool:
        """Return whether any member has been listed for SENIOR_SECONDS."""
        return any(now - since >= SENIOR_SECONDS for since in self._since.values())
