"""The choice among several networks for a peer's streams, by measurements in virtual time.

`tests/lab/test_paths.py` measures two real networks with different speeds.
"""

from collections import Counter
from collections.abc import Callable

import trio

from crypto.contact import Address, make_address
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import Unreachable
from node.seams import Clock, Network
from node.services.links import MeasurementRefused
from node.services.paths import AGAIN_SECONDS, LOOK_SECONDS, RETRY_SECONDS, PathComparison
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.peer_network import SimNetwork
from sim.seams import SimClock, SimNetworkFabric
from sim.seeds import seeded_peer
from tests.stack import simulate

SLOW, FAST, DEAD = (make_address(f"10.0.{number}.2", 9747) for number in range(3))
Rates = dict[Address, tuple[float, float] | Exception]


class SeveralNetworks(SimNetwork):
    """A node that shares several networks with every peer, simulated; it records the networks that were
    preferred."""

    shared: tuple[Address, ...] = (SLOW, FAST)
    preferred: tuple[Address, ...] = ()

    def paths(self, peer: PeerId) -> tuple[Address, ...]:
        return self.shared

    def prefer(self, peer: PeerId, address: Address) -> None:
        self.preferred += (address,)


def compare(
    rates: Rates, seconds: float, change: Callable[[SeveralNetworks], None] = lambda network: None
) -> tuple[tuple[Address, ...], int, int]:
    """Return the networks that were preferred within `seconds`, the number of measurements, and the number of
    refusals."""
    measured, refused = [], []
    network = None

    async def measure(network: Network, clock: Clock, peer: PeerId, address: Address) -> tuple[float, float]:
        measured.append(address)
        found = rates[address]
        if isinstance(found, Exception):
            raise found
        return found

    async def main() -> None:
        nonlocal network
        medium = SimNetworkFabric(SimLinks(NetworkModel(), 1))
        peer, other = seeded_peer(1, 1), seeded_peer(1, 2)
        home = medium.attach(peer)._home
        network = SeveralNetworks(medium, peer, home)
        change(network)
        paths = PathComparison(
            network,
            SimClock(),
            refuse=lambda peer, error: refused.append(error),
            counters=Counter(),
            measure=measure,
        )
        with trio.move_on_after(seconds):
            await paths.run(lambda: [peer, other])

    simulate(main)
    assert network is not None
    return network.preferred, len(measured), len(refused)


def test_the_network_whose_slower_direction_is_fastest_is_preferred() -> None:
    rates: Rates = {SLOW: (9e6, 1e6), FAST: (8e6, 7e6)}
    assert compare(rates, AGAIN_SECONDS - 1) == ((FAST,), 2, 0)
    assert compare(rates, AGAIN_SECONDS + 2 * LOOK_SECONDS) == ((FAST, FAST), 4, 0)


def test_an_unreachable_network_leaves_the_other_one_preferred() -> None:
    rates: Rates = {SLOW: (1e6, 1e6), DEAD: Unreachable("timeout", "no answer")}

    def change(network: SeveralNetworks) -> None:
        network.shared = (DEAD, SLOW)

    assert compare(rates, 10.0, change) == ((SLOW,), 2, 0)


def test_a_peer_that_cannot_be_measured_now_is_measured_later() -> None:
    assert compare({SLOW: MeasurementRefused(5.0)}, 2 * RETRY_SECONDS + 4 * LOOK_SECONDS) == ((), 3, 0)


def test_a_peer_with_a_nonsense_answer_is_refused_without_a_preference() -> None:
    assert compare({SLOW: RemoteProtocolError("nonsense")}, 10.0) == ((), 1, 1)


def test_a_machine_on_one_network_measures_nothing() -> None:
    def change(network: SeveralNetworks) -> None:
        network.shared = ()

    assert compare({}, 10 * AGAIN_SECONDS, change) == ((), 0, 0)
