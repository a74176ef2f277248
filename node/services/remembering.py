"""Remembers on disk the peers that this node has met, so that it can start from them next time.

They are saved as soon as a first peer is known, because a power failure may follow, and then ever more
rarely. Peers of earlier runs of the node are kept after those that are live now, as far as there is room.
"""

from collections.abc import Callable, Mapping, Sequence

import trio

from crypto.contact import Address
from crypto.identity import PeerId
from node.config import JoinSettings
from node.seams import Seams
from node.storage.known_peers import REMEMBERED_MAX, read_remembered, write_remembered

SAVE_SECONDS_MIN = 2.0
"""Pause after the first save; a starting swarm is complete soon after it."""
SAVE_SECONDS_MAX = 60.0
"""Longest pause between two saves. The pauses double up to it."""


class RememberedPeers:
    """The remembered peers of one node. `live` returns each other live member with its announced addresses;
    `is_met` is set once there is one."""

    def __init__(
        self,
        seams: Seams,
        join: JoinSettings,
        live: Callable[[], Mapping[PeerId, Sequence[Address]]],
        is_met: trio.Event,
    ) -> None:
        self._seams = seams
        self._join = join
        self._live = live
        self._is_met = is_met
        self._saved: tuple[tuple[Address, ...], ...] = ()
        if join.remember:
            self._saved = read_remembered(seams.storage)

    def addresses_to_try(self) -> list[tuple[Address, ...]]:
        """Return the seeds, each separately, and the addresses of each peer that was met before. This node's
        own addresses are left out, because another machine's bridge may have the same ones."""
        network = self._seams.network
        seeds: list[tuple[Address, ...]] = [(seed,) for seed in self._join.seeds]
        known = [tuple(each for each in peer if not network.is_own(each)) for peer in self._saved]
        return list(dict.fromkeys([*seeds, *filter(None, known)]))

    def is_remembered(self, addresses: Sequence[Address]) -> bool:
        """Return whether these addresses are tried only because their peer was met before."""
        return tuple(addresses) not in {(seed,) for seed in self._join.seeds}

    async def run(self) -> None:
        """Save once a first peer is known, then now and then, until cancelled."""
        await self._is_met.wait()
        pause = SAVE_SECONDS_MIN
        while True:
            await self.save()
            await trio.sleep(pause)
            pause = min(2 * pause, SAVE_SECONDS_MAX)

    async def save(self) -> None:
        """Save the live peers, and after them those known before."""
        live = self._live()
        if not live or not self._join.remember:
            return
        known = self._seams.network.known_addresses
        found = {peer: tuple(each.of(peer) for each in known(peer) or told) for peer, told in live.items()}
        before = [peer for peer in self._saved if peer[0].peer not in found]
        peers = (*filter(None, found.values()), *before)[:REMEMBERED_MAX]
        if peers != self._saved:
            # Use an executor, because a disk may take long to make a write durable.
            await self._seams.executor.run(lambda: write_remembered(self._seams.storage, peers))
            self._saved = peers
