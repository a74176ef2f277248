"""Watches this node's addresses and reachability, and passes each change on to the parts concerned.

A machine may change its network, its addresses may turn out to be usable or not, and dial-backs and datagrams
may succeed or fail. `autonat_core` decides which peers to ask and what follows from an answer,
`node.transport.address_policy` which addresses to announce.
"""

from collections.abc import Callable, Collection
from random import Random

import trio

from crypto.contact import Address
from crypto.identity import PeerId
from node.containment import keep_running
from node.events import DatagramsBlocked, Event, ReachabilityFound
from node.seams import Clock, Network
from node.services.autonat import ReachService
from node.services.autonat_core import OTHERS
from node.services.discovery import Discovery
from node.transport.network import RealNetwork, Translation

DATAGRAMS_SECONDS = 2.0
"""Seconds between counts of the peers that datagrams do not reach."""
INTERFACES_SECONDS = 5.0
"""Seconds between reads of this machine's addresses, so that a moved laptop is noticed soon. A read takes
half a millisecond."""


class Whereabouts:
    """The watcher of one node. `live` are the members, including this node. `moved` is called when the
    addresses to announce change, `heard` with each dial-back report, and `judged` when this node becomes
    reachable or unreachable, even through a relay. `is_leaving` returns whether the node has said goodbye,
    after which nothing is announced.
    """

    def __init__(
        self,
        network: Network,
        clock: Clock,
        reach: ReachService,
        discovery: Discovery,
        *,
        publish: Callable[[Event], None],
        live: Callable[[], Collection[PeerId]],
        moved: Callable[[], None],
        heard: Callable[[bool | None, int], None],
        judged: Callable[[bool], None],
        is_leaving: Callable[[], bool],
    ) -> None:
        self._network = network
        self._clock = clock
        self._reach = reach
        self._discovery = discovery
        self._publish = publish
        self._live = live
        self._moved = moved
        self._heard = heard
        self._judged = judged
        self._is_leaving = is_leaving
        self._told = network.addresses
        self._is_unreachable = False
        self._verdict: bool | None = None
        self._asked = 0
        self._translation = Translation()

    async def run(self, rng: Random) -> None:
        """Run until cancelled; `rng` chooses the peers to ask."""
        async with trio.open_nursery() as nursery:
            if isinstance(self._network, RealNetwork):
                nursery.start_soon(keep_running, "interfaces", self._watch_interfaces, self._network)
                nursery.start_soon(keep_running, "datagrams", self._watch_datagrams, self._network)
            nursery.start_soon(keep_running, "reach", self._reach.run, rng, self._live, self._found)

    async def _watch_interfaces(self, network: RealNetwork) -> None:
        """When the machine's network changes, announce the new addresses and ask others again."""
        while True:
            await trio.sleep(INTERFACES_SECONDS)
            if network.look():
                self._reach.move()
                self._heard(None, 0)
                self._tell(None, 0)
            elif network.translation != self._translation:
                self._tell(self._verdict, self._asked)
            else:
                # perhaps only the order has changed, so others' reports are still valid
                self._tell_addresses()

    async def _watch_datagrams(self, network: RealNetwork) -> None:
        """Report the number of members that datagrams do not reach."""
        told: tuple[PeerId, ...] = ()
        while True:
            await trio.sleep(DATAGRAMS_SECONDS)
            live = {peer for peer in self._live() if peer != network.peer}
            found = tuple(sorted(peer for peer in network.without_datagrams if peer in live))
            if found != told:
                told = found
                self._publish(DatagramsBlocked(at=self._clock.wall(), peers=found, of=len(live)))

    def _found(self, verdict: bool | None, asked: int, found: tuple[Address, ...]) -> None:
        for address in found:
            self._network.announce(address)
        self._heard(verdict, asked)
        self._tell(verdict, asked)

    def circuits_changed(self) -> None:
        """Note that others reach this node through other relays than before."""
        self._tell(self._verdict, self._asked)

    def _tell(self, verdict: bool | None, asked: int) -> None:
        self._verdict, self._asked = verdict, asked
        if isinstance(self._network, RealNetwork):
            self._translation = self._network.translation
        if self._is_leaving():
            return
        self._tell_addresses()
        circuits = self._network.circuits if isinstance(self._network, RealNetwork) else ()
        is_unreachable = verdict is False and not circuits
        if is_unreachable != self._is_unreachable:
            self._is_unreachable = is_unreachable
            self._judged(is_unreachable)
        self._discovery.appear(self._network.addresses, client=verdict is False)
        self._publish(
            ReachabilityFound(
                at=self._clock.wall(),
                reachable=verdict,
                asked=asked,
                of=OTHERS,
                addresses=tuple(address.short for address in self._network.addresses),
                relays=tuple(each.relay for each in circuits if each.relay is not None),
                nat="; ".join(filter(None, (self._translation.kind, self._families_text()))),
                mapping=self._translation.mapping,
            )
        )

    def _families_text(self) -> str:
        return self._reach.families.text(self._reach.own_families(), self._clock.monotonic())

    def _tell_addresses(self) -> None:
        if self._network.addresses != self._told and not self._is_leaving():
            self._told = self._network.addresses
            self._moved()
