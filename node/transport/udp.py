"""Datagrams over a node's UDP sockets: what is authentic goes to the inboxes, all else to the counters."""

from collections import Counter
from collections.abc import Callable, Sequence

from crypto.contact import Address
from crypto.datagrams import DATAGRAM_BYTES_MAX, Datagram, DatagramRefused, Opener, Seal
from crypto.identity import PeerId
from node.transport.sockets import UdpSockets


class Datagrams:
    """Seals and opens. `arrived(datagram, source)` is called for each authentic datagram."""

    def __init__(
        self,
        sockets: UdpSockets,
        seal: Seal,
        opener: Opener,
        counters: Counter[str],
        arrived: Callable[[Datagram, Address], None],
    ) -> None:
        self._sockets = sockets
        self._seal = seal
        self._opener = opener
        self._counters = counters
        self._arrived = arrived

    def send(self, peer: PeerId, protocol: str, payload: bytes, addresses: Sequence[Address]) -> bool:
        """Send one datagram to each address, of which the peer opens one; False if none can be used.

        It is sealed once, so the copies are one and the same to the receiver's replay window.
        """
        targets = [address for address in addresses if self._sockets.takes(address)]
        if not targets:
            return False
        data = self._seal.seal(peer, protocol, payload)
        for target in targets:
            self._sockets.send(data, target)
        return True

    async def receive_forever(self) -> None:
        """Until cancelled."""
        await self._sockets.receive_forever(DATAGRAM_BYTES_MAX, self._take)

    def _take(self, data: bytes, source: Address) -> None:
        try:
            datagram = self._opener.open(data)
        except DatagramRefused as refusal:
            self._counters[f"datagrams_refused_{refusal.reason}"] += 1
            return
        self._counters["datagrams_received"] += 1
        self._arrived(datagram, source)
