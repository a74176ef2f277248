"""The UDP sockets of one node. It chooses the socket for each packet, and receives on all of them.

It handles bare packets and their source addresses; `udp` handles senders and contents.
"""

import ipaddress
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import trio

from crypto.contact import Address, make_address
from node.transport.icmp import ask_for_errors, closed_places

FAULT_PAUSE_SECONDS = 0.05
"""How long to pause after a socket error, so that a lasting error does not cause a busy loop."""
BATCH_MAX = 64
"""Maximum number of packets read before other tasks run: some milliseconds at most, if all are refused."""
REFUSED_PAUSE_SECONDS = 0.002
REFUSED_PAUSE_SECONDS_MAX = 0.02
"""Maximum pause after batches without an authentic packet; the pause grows with each such batch in a row. A
turn of the event loop costs ten times as much as refusing a packet, so a flood from unknown senders gets few
turns. A peer's packet waits no longer than this, and the kernel has room for more."""
BUFFER_BYTES = 2**20
"""Receive buffer requested from the kernel, so that a burst from unknown senders does not push out other
packets."""
ROUTES_MAX = 4_096
"""Maximum number of sources, the latest, for which the socket is remembered if there are several, so that
answers leave by the same socket."""
SOURCES_MAX = 4_096
"""Maximum number of sources whose parsed address is cached. Parsing costs more than all other work for a
packet."""

Source = tuple[str, int]
"""A socket address as the socket itself states it, which is cheap to use when most packets may be refused. A
link-local address has its zone after a `%`; the system keeps the zone separately, as a number."""
Route = tuple[int, Source]
"""The index of one of this node's sockets, and the address to send to from it."""
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

SEND_TRIES = 3
"""How often a packet is sent if the system reports an earlier packet's error instead of sending."""


class UdpSockets:
    """Owns the sockets. A packet leaves by the socket on which the receiver's packets came. If none came, it
    leaves by the socket of the same family whose address is most similar to the receiver's."""

    def __init__(
        self,
        bound: Sequence[socket.socket],
        counters: Counter[str],
        closed: Callable[[Address], None] | None = None,
    ) -> None:
        """`closed` is called with an address if a host reports a closed port there and the system passes that
        on."""
        for each in bound:
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            if closed is not None:
                ask_for_errors(each)
        self._closed = closed
        self._sockets = tuple(bound)
        self._counters = counters
        self._own = tuple(ipaddress.ip_address(each.getsockname()[0]) for each in bound)
        families = [each.family for each in bound]
        # An IPv6 socket for all addresses takes IPv4 as well, unless IPv4 has sockets of its own.
        self._mapped = tuple(own.is_unspecified and socket.AF_INET not in families for own in self._own)
        self._is_one_a_family = len(set(families)) == len(families)
        self._came_by: OrderedDict[Address, int] = OrderedDict()
        self._families = tuple(families)
        self._fitting = lru_cache(maxsize=ROUTES_MAX)(self._find_fitting)

    def close(self) -> None:
        for each in self._sockets:
            trio.lowlevel.notify_closing(each)
            each.close()

    def send(self, packet: bytes, route: Route) -> None:
        """Send without waiting. A packet that the kernel refuses is lost like any other."""
        index, target = route
        for _ in range(SEND_TRIES):
            try:
                self._sockets[index].sendto(packet, target if "%" not in target[0] else socket_name(*target))
                self._counters["packets_sent"] += 1
                return
            except ConnectionRefusedError:
                # This is the error of an earlier packet, perhaps to another peer. The present packet has not
                # been sent.
                self._read_errors(self._sockets[index])
            except OSError:
                break  # a full buffer or no route
        self._counters["packets_not_sent"] += 1

    def _read_errors(self, own: socket.socket) -> None:
        """Read which of this node's packets reached a closed port."""
        for address in closed_places(own):
            self._counters["ports_found_closed"] += 1
            if self._closed is not None:
                self._closed(address)

    def route(self, address: Address) -> Route | None:
        """Return the route to an address; None for a name that must be looked up, or a family that this node
        does not have."""
        fitting = self._fitting(address)
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        came_by, there = self._came_by.get(address), ipaddress.ip_address(address.host)
        return max(
            reversed(fitting), key=lambda each: (each[0] == came_by, _likeness(self._own[each[0]], there))
        )

    def _find_fitting(self, address: Address) -> tuple[Route, ...]:
        """Return the sockets that reach an address. Cached, because the result is constant and needed for
        each packet."""
        return tuple(
            (index, target)
            for index, family in enumerate(self._families)
            if (target := _target(family, address, mapped=self._mapped[index])) is not None
        )

    def note(self, address: Address, route: Route) -> None:
        """Note that an authentic packet came from `address` by this route."""
        if self._is_one_a_family:
            return
        self._came_by[address] = route[0]
        self._came_by.move_to_end(address)
        if len(self._came_by) > ROUTES_MAX:
            self._came_by.popitem(last=False)

    async def receive_forever(
        self, bytes_max: int, arrived: Callable[[bytes, Route], bool], all_read: Callable[[], None]
    ) -> None:
        """Receive until cancelled. A packet longer than `bytes_max` arrives with `bytes_max` + 1 bytes, which
        shows that it is too long. `arrived` returns whether a packet was authentic; `all_read` is called
        after each batch."""
        async with trio.open_nursery() as nursery:
            for index in range(len(self._sockets)):
                nursery.start_soon(self._receive, index, bytes_max, arrived, all_read)

    async def _receive(
        self,
        index: int,
        bytes_max: int,
        arrived: Callable[[bytes, Route], bool],
        all_read: Callable[[], None],
    ) -> None:
        own = self._sockets[index]
        await trio.lowlevel.wait_readable(own)
        refused_in_a_row = 0
        while True:
            read, authentic, pause_seconds = 0, 0, 0.0
            try:
                while read < BATCH_MAX:
                    packet, source = own.recvfrom(bytes_max + 1)
                    read += 1
                    authentic += arrived(packet, (index, source_of_name(source)))
            except BlockingIOError:
                refused_in_a_row = refused_in_a_row + 1 if read and not authentic else 0
                pause_seconds = min(REFUSED_PAUSE_SECONDS * refused_in_a_row, REFUSED_PAUSE_SECONDS_MAX)
            except ConnectionRefusedError:
                self._read_errors(own)
                pause_seconds = REFUSED_PAUSE_SECONDS
            except OSError:
                self._counters["datagrams_faulty_socket"] += 1
                pause_seconds = FAULT_PAUSE_SECONDS
            all_read()
            if pause_seconds:
                await trio.sleep(pause_seconds)
            else:
                await trio.lowlevel.wait_readable(own)


def _target(family: int, address: Address, *, mapped: bool) -> Source | None:
    """Return the socket's form of an address; None for a name that must be looked up, or the other family."""
    if address.kind == "ip4" and family == socket.AF_INET:
        return address.host, address.port
    if address.kind == "ip4" and mapped:
        return f"::ffff:{address.host}", address.port
    if address.kind == "ip6" and family == socket.AF_INET6:
        return address.host, address.port
    return None


def socket_name(host: str, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
    """Return the system's form of an IP address and port. Raises OSError if the interface does not exist."""
    host, _, zone = host.partition("%")
    if not zone:
        return host, port
    return host, port, 0, int(zone) if zone.isdecimal() else socket.if_nametoindex(zone)


def source_of_name(name: "tuple[Any, ...]") -> Source:
    """Return the address with its zone, and the port, from the system's form."""
    return name[:2] if len(name) < 4 or not name[3] else _zoned(name[0], name[1], name[3])


@lru_cache(maxsize=SOURCES_MAX)
def _zoned(host: str, port: int, index: int) -> Source:
    try:
        zone = socket.if_indextoname(index)
    except OSError:
        zone = str(index)  # the interface has gone in the meantime
    return f"{host.partition('%')[0]}%{zone}", port


def _likeness(own: _Ip, other: _Ip) -> int:
    """Return the number of equal leading bits: 0 for a socket of all addresses, and less if there is no
    route."""
    if own.is_unspecified:
        return 0
    if own.is_loopback != other.is_loopback:
        return -1
    return own.max_prefixlen - (int(own) ^ int(other)).bit_length()


@lru_cache(maxsize=SOURCES_MAX)
def address_of(source: "tuple[Any, ...]") -> Address:
    """Convert a socket's form to an Address. IPv4-mapped IPv6 becomes IPv4."""
    host, port = source_of_name(source)
    if ":" in host:
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        host = str(mapped) if mapped is not None else host
    return make_address(host, port)
