"""Discovery on the local network: drives the beacons over their seam and reports finds to the node."""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import trio

from crypto.contact import Address
from crypto.identity import PeerId
from crypto.swarm import Swarm
from node.seams import Clock, LocalNetwork
from node.transport.beacon import Beacons, BeaconSeal


class Neighbours:
    """The service. `heard` is told of a peer and where it says it is; `counters` counts all else."""

    def __init__(
        self,
        local: LocalNetwork,
        peer: PeerId,
        swarm: Swarm,
        clock: Clock,
        rng: Random,
        entropy: Callable[[int], bytes],
        *,
        counters: Counter[str],
        heard: Callable[[PeerId, Sequence[Address]], None],
    ) -> None:
        self._local = local
        self._clock = clock
        self._heard = heard
        self._core = Beacons(
            peer,
            BeaconSeal(swarm.secrets, entropy),
            rng,
            counters,
            lambda: self._local.addresses,
            clock.monotonic(),
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Speak and listen until cancelled."""
        task_status.started()
        known = self._local.addresses
        while True:
            arrived = await self._local.take(self._core.deadline)
            now = self._clock.monotonic()
            for source, data in arrived:
                self._core.receive(now, source, data)
            if self._core.deadline <= now:
                # A machine that has changed its network is a newcomer to the new one.
                if self._local.addresses != known:
                    known = self._local.addresses
                    self._core.ask(now)
                for packet in self._core.wake(now):
                    self._local.send(packet)
            events, self._core.events = self._core.events, []
            for event in events:
                self._heard(event.peer, event.addresses)
