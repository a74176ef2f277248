"""Datagrams over one UDP socket: drives `crypto.sessions`, sends its packets, hands on what is authentic.

What is refused goes to the counters. Which address a peer has is not decided here: see `book`.
"""

import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

import trio

from crypto.contact import Address, make_address
from crypto.identity import PeerId
from crypto.sessions.core import Sessions
from crypto.sessions.packets import DATAGRAM_BYTES_MAX, Datagram, DatagramRefused
from node.seams import Clock

FAULT_PAUSE_SECONDS = 0.05
"""A socket that reports an error is asked again after this; a lasting error must not spin."""
BATCH_MAX = 64
"""Packets read at once, before others get their turn: at most some milliseconds of refusing."""
BUFFER_BYTES = 2**20
"""What the kernel is asked to hold for us, so that a burst from strangers does not push out the rest."""
SOURCES_MAX = 4_096
"""Sources whose address is remembered; reading one costs more than all else of a packet."""


class Datagrams:
    """Owns the socket. `where(peer)` says where to send; `heard(peer, source)` is called for each newest
    authentic packet, whatever was in it; `arrived(datagram)` for each message."""

    def __init__(
        self,
        bound: socket.socket,
        sessions: Sessions,
        clock: Clock,
        counters: Counter[str],
        where: Callable[[PeerId], Sequence[Address]],
        heard: Callable[[PeerId, Address], None],
        arrived: Callable[[Datagram], None],
    ) -> None:
        bound.setblocking(False)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket = bound
        self._sessions = sessions
        self._clock = clock
        self._counters = counters
        self._where = where
        self._heard = heard
        self._arrived = arrived
        self._sleep = trio.CancelScope()

    def close(self) -> None:
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()

    def send(self, peer: PeerId, protocol: str, payload: bytes, addresses: Sequence[Address]) -> bool:
        """Send one message to each address, of which the peer takes one; False if none can be used."""
        targets = self._targets(addresses)
        if not targets:
            return False
        self._counters["datagrams_sent"] += 1
        for packet in self._sessions.send(self._clock.monotonic(), peer, protocol, payload):
            for target in targets:
                self._put(packet, target)
        self._wake_in_time()
        return True

    async def receive_forever(self) -> None:
        """Until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                for _ in range(BATCH_MAX):
                    # One byte more than allowed, so that a longer one shows as too long.
                    self._take(*self._socket.recvfrom(DATAGRAM_BYTES_MAX + 1))
            except BlockingIOError:
                pass  # all is read
            except OSError:
                self._counters["datagrams_faulty_socket"] += 1
                await trio.sleep(FAULT_PAUSE_SECONDS)
            self._wake_in_time()

    async def wake_forever(self) -> None:
        """Send what is due, until cancelled."""
        while True:
            with trio.CancelScope(deadline=self._sessions.deadline) as self._sleep:
                await trio.sleep_forever()
            for peer, packet in self._sessions.wake(self._clock.monotonic()):
                for target in self._targets(self._where(peer)):
                    self._put(packet, target)

    def _take(self, data: bytes, source: tuple[str, int]) -> None:
        try:
            received = self._sessions.receive(self._clock.monotonic(), data, source[:2])
        except DatagramRefused as refusal:
            self._counters[f"datagrams_refused_{refusal.reason}"] += 1
            return
        for answer in received.answers:
            self._put(answer, source)
        if received.newest and received.peer is not None:
            # A copy that came late from an old address must not move the peer back there.
            self._heard(received.peer, address_of(source[:2]))
        if received.datagram is not None:
            self._counters["datagrams_received"] += 1
            self._arrived(received.datagram)

    def _put(self, packet: bytes, target: tuple[str, int]) -> None:
        try:
            self._socket.sendto(packet, target)
            self._counters["packets_sent"] += 1
        except OSError:
            # A full buffer or no route: a lost packet like any other.
            self._counters["packets_not_sent"] += 1

    def _wake_in_time(self) -> None:
        if self._sessions.deadline < self._sleep.deadline:
            self._sleep.deadline = self._sessions.deadline

    def _targets(self, addresses: Sequence[Address]) -> list[tuple[str, int]]:
        return [target for address in addresses if (target := self._target(address)) is not None]

    def _target(self, address: Address) -> tuple[str, int] | None:
        """The socket's name of an address; None for a name to be looked up or the other family."""
        if address.kind == "ip4":
            host = f"::ffff:{address.host}" if self._socket.family == socket.AF_INET6 else address.host
            return host, address.port
        if address.kind == "ip6" and self._socket.family == socket.AF_INET6:
            return address.host, address.port
        return None


@lru_cache(maxsize=SOURCES_MAX)
def address_of(source: tuple[str, int]) -> Address:
    """A socket name as an Address; IPv4 seen through an IPv6 socket is IPv4 again."""
    host, port = source[0], source[1]
    if ":" in host:
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        host = str(mapped) if mapped is not None else host
    return make_address(host, port)
