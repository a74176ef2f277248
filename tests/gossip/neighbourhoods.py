"""A swarm in which each peer lists only its neighbourhood. A search for neighbours immediately returns the
nearest running peers; a real DHT would take a moment.
"""

from collections import Counter

from dht.keys import distance, node_key, node_number
from gossip.member import NeighbourhoodLookupWanted, Status
from gossip.messages import ScopedSync
from gossip.settings import SwimSettings
from gossip.swim import Sends
from tests.gossip.swarm import Swarm, peer_of

NEAREST = 8
SMALL = SwimSettings(scope_members_min=8, scope_members_max=24, sync_interval_seconds=10.0)
"""These limits make neighbourhoods so small that a few hundred peers form many of them."""


class Neighbourhoods(Swarm):
    """`messages` counts the messages that each peer sent; `depths` lists the successive depths of each
    peer."""

    place = staticmethod(node_number)

    def __init__(self, count: int, settings: SwimSettings = SMALL, seed: int = 1, loss: float = 0.0) -> None:
        self.messages: Counter[int] = Counter()
        self.depths: dict[int, list[int]] = {}
        self.told: Counter[int] = Counter()
        super().__init__(0, settings, seed, loss)
        for number in range(count):
            self.start(number, join=self.rng.choice(sorted(self.cores)) if self.cores else None)
            self.run(0.1)

    def send(self, number: int, sends: Sends) -> None:
        core = self.cores[number]
        wanted = [event.key for event in core.events if isinstance(event, NeighbourhoodLookupWanted)]
        depths = self.depths.setdefault(number, [])
        if not core.scope.joining and depths[-1:] != [core.scope.depth]:
            depths.append(core.scope.depth)
        self.messages[number] += len(sends)
        self.told[number] += sum(
            len(message.facts) for _, message in sends if isinstance(message, ScopedSync)
        )
        super().send(number, sends)
        for key in wanted:
            self.send(number, core.join(self.now, [peer_of(near) for near in self.nearest(key, number)]))

    def nearest(self, key: bytes, without: int) -> list[int]:
        """Return the running peers nearest to `key`."""
        others = (number for number in self.cores if number != without)
        return sorted(others, key=lambda number: distance(node_key(peer_of(number)), key))[:NEAREST]

    def missing(self, number: int) -> set[int]:
        """Return the running peers in the scope of `number` that this peer does not list."""
        return self.around(number) - self.listed(number)

    def listed(self, number: int) -> set[int]:
        statuses = self.cores[number].statuses.items()
        return {self.numbers[peer] for peer, status in statuses if status is Status.ALIVE}

    def around(self, number: int) -> set[int]:
        """Return the running peers in the scope of `number`."""
        scope = self.cores[number].scope
        return {other for other in self.cores if scope.holds(peer_of(other))}

    def settle(self, at_most: float) -> None:
        """Run until every peer's list is right."""
        begun = self.now
        while not self.right():
            assert self.now - begun < at_most, {number: self.missing(number) for number in self.cores}
            self.run(2)

    def right(self) -> bool:
        """Return whether every peer lists exactly the running peers in its scope."""
        return all(self.listed(number) == self.around(number) for number in self.cores)
