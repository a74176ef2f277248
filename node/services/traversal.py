"""What this node does about the router before it: a port is mapped, and peers are reached through it.

It puts the drivers of `node.transport.nat` together; each is described there.
"""

from collections.abc import Callable

import trio

from node.containment import keep_running
from node.seams import Clock
from node.transport.portmap_driver import PortMappingDriver
from node.transport.network import RealNetwork


class Traversal:
    """`run` until cancelled; `maps` says whether the router is asked for a port."""

    def __init__(
        self, network: RealNetwork, clock: Clock, entropy: Callable[[int], bytes], *, maps: bool
    ) -> None:
        self._mapping = PortMappingDriver(network, clock, entropy) if maps else None

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            if self._mapping is not None:
                nursery.start_soon(keep_running, "port mapping", self._mapping.run)
