"""Discovery on the local network. It drives the beacons over their seam and reports the peers it finds to the
node."""

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import NoReturn

import trio

from crypto.contact import Address
from crypto.identity import PeerId
from crypto.swarm import Swarm
from node.seams import Clock, LocalNetwork
from node.transport.beacon import Beacons, BeaconSeal
from node.waker import Waker


class Neighbours:
    """The discovery service. `heard` is called with a peer and its claimed addresses; `counters` counts
    everything else."""

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
        self._waker = Waker(clock, lambda: self._core.deadline)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send and receive beacons until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._waker.run, self._core, self._send)
            await self._listen()

    async def _listen(self) -> NoReturn:
        while True:
            arrived = await self._local.take(inf)
            now = self._clock.monotonic()
            for source, data in arrived:
                self._core.receive(now, source, data)
            self._waker.stir()
            events, self._core.events = self._core.events, []
            for event in events:
                self._heard(event.peer, event.addresses)

    def _send(self, packets: Sequence[bytes]) -> None:
        for packet in packets:
            self._local.send(packet)
