"""The other members of a run in local mode, as one member sees them."""

from crypto.identity import PeerId

GRACE_SECONDS = 12.0
"""How long a member that fell out of sight is still awaited. On a busy machine, a live member can look dead
for a while."""
KNOWN_MAX = 1_024
"""Maximum number of present and former members from which messages about the end of the run are accepted."""


class MembersInSight:
    """The other members, by how recently they were seen: `peers` are in sight now; `unseen` fell out of sight
    recently, at the given time; `known` are present or former members."""

    def __init__(self) -> None:
        self.peers: frozenset[PeerId] = frozenset()
        self.unseen: dict[PeerId, float] = {}
        self.known: dict[PeerId, None] = {}

    def see(self, now: float, found: frozenset[PeerId]) -> list[PeerId]:
        """Note which members are in sight now. Return the members that were removed from `known` to make
        room."""
        self.unseen |= dict.fromkeys(self.peers - found, now)
        self.unseen = {
            peer: at for peer, at in self.unseen.items() if peer not in found and now - at < GRACE_SECONDS
        }
        self.peers = found
        self.known |= dict.fromkeys(found)
        old = [peer for peer in self.known if peer not in found][: max(0, len(self.known) - KNOWN_MAX)]
        for peer in old:
            del self.known[peer]
        return old

    def know(self, peer: PeerId) -> None:
        """Add a member to `known` although it is not in sight. It may have finished the run already."""
        if len(self.known) < KNOWN_MAX:
            self.known[peer] = None

    def gone(self, now: float) -> set[PeerId]:
        """Return the members that fell out of sight too long ago to be awaited."""
        return {peer for peer, at in self.unseen.items() if now - at >= GRACE_SECONDS}

    def awaited(self, now: float) -> list[PeerId]:
        """Return the members whose messages are awaited: members that are in sight now or were recently."""
        return sorted({*self.peers, *self.unseen} - self.gone(now))
