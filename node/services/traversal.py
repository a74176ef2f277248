"""Gets through this node's router: maps a port, and reaches peers by hole punching.

It starts the drivers for both, `node.transport.portmap_driver` and `node.transport.puncher`.
"""

from collections import Counter
from collections.abc import Callable, Collection
from random import Random

import trio

from crypto.identity import PeerId
from node.containment import keep_running
from node.seams import Clock
from node.transport.network import RealNetwork
from node.transport.portmap_driver import PortMappingDriver
from node.transport.puncher import Puncher


class Traversal:
    """The traversal of one node, active while `run` runs. With `maps`, it asks the router for a port. `live`
    returns the live members."""

    def __init__(
        self,
        network: RealNetwork,
        clock: Clock,
        entropy: Callable[[int], bytes],
        rng: Random,
        live: Callable[[], Collection[PeerId]],
        *,
        maps: bool,
        counters: Counter[str],
    ) -> None:
        self._mapping = PortMappingDriver(network, clock, entropy) if maps else None
        self._puncher = Puncher(network, clock, rng, live, counters)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            if self._mapping is not None:
                nursery.start_soon(keep_running, "port mapping", self._mapping.run)
            nursery.start_soon(keep_running, "punching", self._puncher.run)
