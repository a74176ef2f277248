"""For each peer, the newest stamps accepted from it, so that no older one is accepted again. The memory is
bounded, and outlives the peer's sessions.

An attacker that makes us forget a peer can replay that peer's initiation. So a source with many ids evicts
only its own entries. All peers without a proven address count as one source, because they may forge any
address.
"""

from collections.abc import Callable
from dataclasses import dataclass

from crypto.crowds import Crowd
from crypto.identity import PeerId

_UNPROVEN = b""


@dataclass(slots=True)
class PeerMemory:
    """The memory of one peer: the highest stamps of its initiations, and of the requests that came with
    them."""

    stamp: int = 0
    request: int = 0


class Memories:
    """Memories by peer, about `memories_max` of them. `is_needed(peer)` says whether the session table has an
    entry for the peer; the memory of such a peer is never dropped."""

    def __init__(self, is_needed: Callable[[PeerId], bool], memories_max: int) -> None:
        self._is_needed = is_needed
        self._memories_max = memories_max
        self._memories: dict[PeerId, PeerMemory] = {}
        self._crowd: Crowd[PeerId] = Crowd()

    def __len__(self) -> int:
        return len(self._memories)

    def __contains__(self, peer: object) -> bool:
        return peer in self._memories

    def stamp_of(self, peer: PeerId) -> int:
        """Return the highest accepted stamp of a peer's initiations; 0 if none is remembered."""
        memory = self._memories.get(peer)
        return 0 if memory is None else memory.stamp

    def open(self, peer: PeerId) -> PeerMemory:
        """Return the memory of a peer; create it if there is none."""
        memory = self._memories.get(peer)
        if memory is None:
            while len(self._memories) >= self._memories_max and self._drop_one():
                pass
            memory = self._memories[peer] = PeerMemory()
            self._crowd.add(peer, _UNPROVEN)
        return memory

    def prove(self, peer: PeerId, source: bytes) -> None:
        """Record that the peer has proved to be at an address of `source`."""
        if peer in self._memories:
            self._crowd.add(peer, source)

    def close(self, peer: PeerId) -> None:
        """Record that the peer's state is gone; an empty memory is then removed too."""
        if self._memories.get(peer) == PeerMemory():
            self._drop(peer)

    def _drop_one(self) -> bool:
        for members in (self._crowd.greedier(_UNPROVEN), self._crowd.equals(_UNPROVEN)):
            for peer in members:
                if not self._is_needed(peer):
                    self._drop(peer)
                    return True
        return False

    def _drop(self, peer: PeerId) -> None:
        del self._memories[peer]
        self._crowd.remove(peer)
