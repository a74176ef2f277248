"""Finds the fastest of several networks to a peer, by measuring when the two meet and now and then later.

Two machines may share more than one network: a cable and Wi-Fi, one for storage, a VPN. In that case the
network that answers first is not necessarily the best for a model's state. For each such peer the link over
each network is measured, with the method of `links`, and streams use the fastest from then on. Most machines
are on one network, and there this does nothing.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

import trio

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.containment import contain
from node.errors import StreamClosed, Unreachable
from node.seams import Clock, Network
from node.services.links import MeasurementRefused, measure_link

PATHS_MAX = 3
"""Maximum number of networks shared with one peer that are measured. Two machines seldom share more."""
LOOK_SECONDS = 1.0
"""Seconds between checks for new members."""
AGAIN_SECONDS = 600.0
"""Seconds between comparisons of the networks to one peer. Cables get plugged in, and Wi-Fi quality
changes."""
RETRY_SECONDS = 20.0
"""How long to wait after a comparison that failed because the peer computes or others measure it."""
SINGLE_SECONDS = 30.0
"""Seconds between checks of a peer on only one network, because its other addresses may become known
later."""


class PathComparison:
    """The comparisons of one node. `run` must be running."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        *,
        refuse: Callable[[PeerId, RemoteProtocolError], None],
        counters: Counter[str],
        measure: Callable[[Network, Clock, PeerId, Address], Awaitable[tuple[float, float]]] = measure_link,
    ) -> None:
        """`measure` returns the bytes a second in each direction for one address."""
        self._measure = measure
        self._network = network
        self._clock = clock
        self._refuse = refuse
        self._counters = counters
        self._due: dict[PeerId, float] = {}

    async def run(self, live: Callable[[], Iterable[PeerId]]) -> None:
        """Compare the networks to each of the `live` peers that has several, one peer after the other, until
        cancelled."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            now = self._clock.monotonic()
            present = [peer for peer in live() if peer != self._network.peer]
            self._due = {peer: self._due.get(peer, now) for peer in present}
            for peer in present:
                if self._due[peer] <= now:
                    paths = self._network.paths(peer)[:PATHS_MAX]
                    self._due[peer] = now + SINGLE_SECONDS
                    if len(paths) > 1:
                        self._due[peer] = now + RETRY_SECONDS
                        with contain("comparing the paths to a peer"):
                            await self._compare(peer, paths)

    async def _compare(self, peer: PeerId, paths: Iterable[Address]) -> None:
        """Measure each address and prefer the fastest. Ignore addresses that do not answer."""
        rates: dict[Address, float] = {}
        for address in paths:
            try:
                rates[address] = min(await self._measure(self._network, self._clock, peer, address))
            except (Unreachable, StreamClosed):
                continue
            except MeasurementRefused:
                return
            except RemoteProtocolError as error:
                self._refuse(peer, error)
                return
        if rates:
            self._network.prefer(peer, max(rates, key=rates.__getitem__))
            self._due[peer] = self._clock.monotonic() + AGAIN_SECONDS
            self._counters["paths_compared"] += 1
