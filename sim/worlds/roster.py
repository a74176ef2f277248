"""The peers of a world, by number: their ids, names, addresses, keys and metadata.

It is the same in both kinds of worlds. Nothing here changes while a world plays, and nothing is stored that
can be computed.
"""

from collections.abc import Callable

from crypto.contact import Address
from crypto.facts import IdentitySigner, Signer
from crypto.identity import PeerId
from gossip.member import Profile
from node.protocols.runs import RUNS_WORD
from node.services.capacity import Capacity
from node.services.metadata import encode_metadata
from node.services.standing import look_at
from sim.network.addresses import outer_address
from sim.scenario import Scenario
from sim.seeds import HashSigner, seeded_identity, seeded_peer

SWARM = "sim"
"""The name of the swarm, which is part of all signatures."""


def capacity(region: str) -> Capacity:
    """Return what every peer offers: one core of a small machine."""
    return Capacity("cpu", 1, 8 << 30, 16 << 30, 5e9, region)


class WorldRoster:
    """The `scenario.nodes` peers. `region_of` returns the region of a number."""

    def __init__(self, scenario: Scenario, seed: int, region_of: Callable[[int], str]) -> None:
        self._seed = seed
        self._real = scenario.signatures == "ed25519"
        self._region_of = region_of
        numbers = range(scenario.nodes)
        if self._real:
            self.peers = tuple(seeded_identity(seed, number).peer for number in numbers)
        else:
            self.peers = tuple(seeded_peer(seed, number) for number in numbers)
        self.numbers = {peer: number for number, peer in enumerate(self.peers)}
        self._metadata: dict[str, bytes] = {}

    def name(self, peer: PeerId) -> str:
        return f"n{self.numbers[peer]}"

    def address(self, number: int) -> Address:
        """Return the address at which others see this peer, the same after each restart."""
        return outer_address(number, self.peers[number])

    def signer(self, number: int) -> Signer:
        if self._real:
            return IdentitySigner(seeded_identity(self._seed, number), SWARM)
        return HashSigner(self.peers[number], SWARM, self._seed)

    def profile(self, number: int) -> Profile:
        return Profile(f"n{number}", (self.address(number),), self.metadata(number))

    def metadata(self, number: int) -> bytes:
        """Return the metadata with a peer's capacity, as a node's membership service sends it. Peers of a
        region share one object."""
        region = self._region_of(number)
        if region not in self._metadata:
            self._metadata[region] = _metadata(capacity(region))
        return self._metadata[region]


def _metadata(offered: Capacity) -> bytes:
    """Return the metadata that a whole node with this capacity sends when it joins."""
    words = {RUNS_WORD: True, "stages": True, "fenced": True, "calibrated": False}
    standing = look_at(None, offered, words, 1, (), is_measured=False)
    return encode_metadata(offered, accepts_runs=True, standing=standing)
