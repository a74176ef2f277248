"""The simulated local network: the peers of one region hear each other's beacons.

Each packet takes the latency of its link; no packet is lost, and none crosses a split. It is off by default,
because local discovery would hide how peers find each other without it.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable

import trio

from crypto.contact import Address
from sim.network.instants import nearest_instant
from sim.wakeup import SimAlarm

PACKETS_MAX = 256
"""Maximum number of packets, as in `node.transport.multicast`; here packets in flight count as well."""


class SimLocal:
    """The `node.seams.LocalNetwork` of one simulated peer. `near()` yields the peers that hear this one, each
    with the seconds that a packet takes. One of the `counters` is the number of packets that did not fit."""

    def __init__(
        self,
        address: Address,
        near: Callable[[], Iterable[tuple["SimLocal", float]]],
        counters: Counter[str],
    ) -> None:
        self._address = address.of(None)
        self._counters = counters
        self._near = near
        self._packets: list[tuple[float, int, str, bytes]] = []
        self._number = 0
        self._alarm = SimAlarm()

    @property
    def addresses(self) -> tuple[Address, ...]:
        return (self._address,)

    def send(self, data: bytes) -> None:
        now = nearest_instant(trio.current_time())
        for other, seconds in self._near():
            other._expect(nearest_instant(now + seconds), self._address.host, data)

    async def take(self, until: float) -> list[tuple[str, bytes]]:
        while True:
            due = self._packets[0][0] if self._packets else until
            await self._alarm.sleep_until(min(due, until))
            now = nearest_instant(trio.current_time())
            if now >= until or (self._packets and self._packets[0][0] <= now):
                break
        taken = []
        while self._packets and self._packets[0][0] <= now:
            _, _, host, data = heapq.heappop(self._packets)
            taken.append((host, data))
        return taken

    def _expect(self, due: float, host: str, data: bytes) -> None:
        if len(self._packets) >= PACKETS_MAX:
            self._counters["beacons_dropped"] += 1
            return
        self._number += 1
        heapq.heappush(self._packets, (due, self._number, host, data))
        self._alarm.no_later_than(due)
