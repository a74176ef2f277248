"""What this node does about the router before it: a port is mapped, and peers are reached through it.

It puts the drivers of `node.transport.nat` together; each is described there.
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
    """`run` until cancelled; `maps` says whether the router is asked for a port. `live` are the members."""

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
