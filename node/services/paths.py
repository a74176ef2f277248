"""Which of several networks leads to a peer fastest: measured when the two meet, and now and then again.

Two machines may share more than one network: a cable and Wi-Fi, one for storage, a VPN. The first that
answers is then not the one to carry a model's state. For each such peer the link is measured by each network,
as `links` measures any, and streams are opened by the fastest from then on. Most machines are on one network,
where this does nothing.
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
"""Networks shared with one peer that are measured: two machines seldom have more in common."""
LOOK_SECONDS = 1.0
"""From one look for new members to the next."""
AGAIN_SECONDS = 600.0
"""Between two comparisons of the paths to one peer: cables are changed and Wi-Fi gets better or worse."""
RETRY_SECONDS = 20.0
"""After a comparison that did not come about, for the peer computes or others measure it."""
SINGLE_SECONDS = 30.0
"""After this a peer that had one path is looked at again: its other addresses may be heard of later."""


class PathComparison:
    """The service. `run` must be running."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        *,
        refuse: Callable[[PeerId, RemoteProtocolError], None],
        counters: Counter[str],
        measure: Callable[[Network, Clock, PeerId, Address], Awaitable[tuple[float, float]]] = measure_link,
    ) -> None:
        """`measure` finds the bytes a second each way by one address."""
        self._measure = measure
        self._network = network
        self._clock = clock
        self._refuse = refuse
        self._counters = counters
        self._due: dict[PeerId, float] = {}

    async def run(self, live: Callable[[], Iterable[PeerId]]) -> None:
        """Compare the paths to each of `live` that has several, one peer after the other, until cancelled."""
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
        """Measure each and prefer the fastest. One that leads nowhere is left out."""
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
