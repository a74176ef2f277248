"""Peers met before: where to begin the next time, kept on the disk."""

from collections.abc import Callable, Sequence

import trio

from crypto.contact import Address
from node.config import Join
from node.seams import Seams
from node.storage.known_peers import read_remembered, write_remembered

REMEMBER_SECONDS = 60.0


class RememberedPeers:
    """The service. `live_addresses` says where each live member is now."""

    def __init__(
        self, seams: Seams, join: Join, live_addresses: Callable[[], Sequence[tuple[Address, ...]]]
    ) -> None:
        self._seams = seams
        self._join = join
        self._live_addresses = live_addresses

    def addresses_to_try(self) -> list[Address]:
        """Return the seeds, and one address of each peer that was met before."""
        remembered = read_remembered(self._seams.storage) if self._join.remember else []
        first = [address for peer in remembered for address in peer[:1]]
        return list(dict.fromkeys([*self._join.seeds, *first]))

    async def run(self) -> None:
        """Save now and then, until cancelled."""
        while True:
            await trio.sleep(REMEMBER_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Keep who is alive now."""
        live = self._live_addresses()
        if live and self._join.remember:
            # A disk may take its time to make a write durable.
            await self._seams.executor.run(lambda: write_remembered(self._seams.storage, live))
