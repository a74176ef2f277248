"""Datagrams over one UDP socket: what is authentic goes to the inboxes, all else to the counters."""

import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Sequence

import trio

from crypto.contact import Address, make_address
from crypto.datagrams import DATAGRAM_BYTES_MAX, Datagram, DatagramRefused, Opener, Seal
from crypto.identity import PeerId

FAULT_PAUSE_SECONDS = 0.05
"""A socket that reports an error is asked again after this; a lasting error must not spin."""


class Datagrams:
    """Owns the socket. `arrived(datagram, source)` is called for each authentic datagram."""

    def __init__(
        self,
        bound: socket.socket,
        seal: Seal,
        opener: Opener,
        counters: Counter[str],
        arrived: Callable[[Datagram, Address], None],
    ) -> None:
        bound.setblocking(False)
        # The bare socket sends at once or not at all; the wrapped one waits to receive.
        self._bare = bound
        self._socket = trio.socket.from_stdlib_socket(bound)
        self._seal = seal
        self._opener = opener
        self._counters = counters
        self._arrived = arrived

    def close(self) -> None:
        self._socket.close()

    def send(self, peer: PeerId, protocol: str, payload: bytes, addresses: Sequence[Address]) -> bool:
        """Send one datagram to each address, of which the peer opens one; False if none can be used.

        It is sealed once, so the copies are one and the same to the receiver's replay window.
        """
        targets = [target for address in addresses if (target := self._target(address)) is not None]
        if not targets:
            return False
        data = self._seal.seal(peer, protocol, payload)
        for target in targets:
            try:
                self._bare.sendto(data, target)
                self._counters["datagrams_sent"] += 1
            except OSError:
                # A full buffer or no route: a lost datagram like any other.
                self._counters["datagrams_not_sent"] += 1
        return True

    async def receive_forever(self) -> None:
        """Until cancelled."""
        while True:
            try:
                # One byte more than allowed, so that a longer one shows as too long.
                data, source = await self._socket.recvfrom(DATAGRAM_BYTES_MAX + 1)
            except OSError:
                self._counters["datagrams_faulty_socket"] += 1
                await trio.sleep(FAULT_PAUSE_SECONDS)
                continue
            try:
                datagram = self._opener.open(data)
            except DatagramRefused as refusal:
                self._counters[f"datagrams_refused_{refusal.reason}"] += 1
                continue
            self._counters["datagrams_received"] += 1
            self._arrived(datagram, address_of(source))

    def _target(self, address: Address) -> tuple[str, int] | None:
        """The socket's name of an address; None for a name to be looked up or the other family."""
        if address.kind == "ip4":
            host = f"::ffff:{address.host}" if self._bare.family == socket.AF_INET6 else address.host
            return host, address.port
        if address.kind == "ip6" and self._bare.family == socket.AF_INET6:
            return address.host, address.port
        return None


def address_of(source: tuple[str, int]) -> Address:
    """A socket name as an Address; IPv4 seen through an IPv6 socket is IPv4 again."""
    host, port = source[0], source[1]
    if ":" in host:
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        host = str(mapped) if mapped is not None else host
    return make_address(host, port)
