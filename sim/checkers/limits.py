"""The invariant of limits: nothing that an unknown peer can make grow exceeds its limit."""

from crypto.identity import PeerId
from sim.checkers.checker import Checker
from sim.observers import World

_PEERS_PER_SAMPLE = 16


class WithinLimits(Checker):
    """Check queues, tables and memory of every peer: of a few peers in turn at each sample, and of all at the
    end."""

    name = "limits"

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def sample(self, world: World) -> None:
        peers = world.peers
        for _ in range(min(_PEERS_PER_SAMPLE, len(peers))):
            self._check(world, peers[self._next % len(peers)])
            self._next += 1

    def end(self, world: World) -> None:
        for peer in world.peers:
            self._check(world, peer)

    def _check(self, world: World, peer: PeerId) -> None:
        if not world.is_up(peer):
            return
        for what, (size, limit) in world.sizes(peer).items():
            if size > limit:
                raise self.broken(f"{world.name(peer)} has a size of {size} for {what}; the limit is {limit}")
