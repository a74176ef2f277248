"""The UDP sockets of one node: which one a datagram leaves by, and what comes in by any of them.

Bare datagrams and addresses. Not here: who sent them and what they say (`udp`).
"""

import ipaddress
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import trio

from crypto.contact import Address, make_address

FAULT_PAUSE_SECONDS = 0.05
"""A socket that reports an error is asked again after this; a lasting error must not spin."""
ROUTES_MAX = 4_096
"""Others whose datagrams came by one of several sockets: the latest, to be answered by the same one."""

_Target = tuple[str, int]
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


class UdpSockets:
    """Owns the sockets. A datagram leaves by the socket by which the receiver's own came; by one of its
    family whose address is most like the receiver's where none came."""

    def __init__(self, bound: Sequence[socket.socket], counters: Counter[str]) -> None:
        for each in bound:
            each.setblocking(False)
        # The bare sockets send at once or not at all; the wrapped ones wait to receive.
        self._bare = tuple(bound)
        self._wrapped = tuple(trio.socket.from_stdlib_socket(each) for each in bound)
        self._counters = counters
        self._own = tuple(ipaddress.ip_address(each.getsockname()[0]) for each in bound)
        families = [each.family for each in bound]
        # An IPv6 socket for all addresses takes IPv4 as well, unless that has sockets of its own.
        self._mapped = tuple(own.is_unspecified and socket.AF_INET not in families for own in self._own)
        self._is_one_a_family = len(set(families)) == len(families)
        self._routes: OrderedDict[Address, int] = OrderedDict()

    def close(self) -> None:
        for each in self._wrapped:
            each.close()

    def takes(self, address: Address) -> bool:
        """Whether a datagram can be sent there: no name to be looked up, and a family that we have."""
        return self._pick(address) is not None

    def send(self, data: bytes, address: Address) -> None:
        """Send at once; what the kernel does not take is a lost datagram like any other."""
        picked = self._pick(address)
        if picked is None:
            self._counters["datagrams_not_sent"] += 1
            return
        bare, target = picked
        try:
            bare.sendto(data, target)
            self._counters["datagrams_sent"] += 1
        except OSError:
            # A full buffer or no route.
            self._counters["datagrams_not_sent"] += 1

    async def receive_forever(self, bytes_max: int, arrived: Callable[[bytes, Address], None]) -> None:
        """Until cancelled; longer ones arrive with `bytes_max` + 1 bytes, so that they show as too long."""
        async with trio.open_nursery() as nursery:
            for index in range(len(self._wrapped)):
                nursery.start_soon(self._receive, index, bytes_max, arrived)

    async def _receive(self, index: int, bytes_max: int, arrived: Callable[[bytes, Address], None]) -> None:
        while True:
            try:
                data, source = await self._wrapped[index].recvfrom(bytes_max + 1)
            except OSError:
                self._counters["datagrams_faulty_socket"] += 1
                await trio.sleep(FAULT_PAUSE_SECONDS)
                continue
            address = address_of(source)
            if not self._is_one_a_family:
                self._note(address, index)
            arrived(data, address)

    def _note(self, source: Address, index: int) -> None:
        self._routes[source] = index
        self._routes.move_to_end(source)
        if len(self._routes) > ROUTES_MAX:
            self._routes.popitem(last=False)

    def _pick(self, address: Address) -> tuple[socket.socket, _Target] | None:
        fitting = [
            (index, target)
            for index, bare in enumerate(self._bare)
            if (target := _target(bare.family, address, mapped=self._mapped[index])) is not None
        ]
        if not fitting:
            return None
        if len(fitting) > 1:
            came_by, there = self._routes.get(address), ipaddress.ip_address(address.host)
            fitting.sort(key=lambda each: (each[0] == came_by, _likeness(self._own[each[0]], there)))
        index, target = fitting[-1]
        return self._bare[index], target


def _target(family: int, address: Address, *, mapped: bool) -> _Target | None:
    """The socket's name of an address; None for a name to be looked up or the other family."""
    if address.kind == "ip4" and family == socket.AF_INET:
        return address.host, address.port
    if address.kind == "ip4" and mapped:
        return f"::ffff:{address.host}", address.port
    if address.kind == "ip6" and family == socket.AF_INET6:
        return address.host, address.port
    return None


def _likeness(own: _Ip, other: _Ip) -> int:
    """How many leading bits are the same: 0 for a socket of all addresses, less where there is no way."""
    if own.is_unspecified:
        return 0
    if own.is_loopback != other.is_loopback:
        return -1
    return own.max_prefixlen - (int(own) ^ int(other)).bit_length()


def address_of(source: tuple[str, int]) -> Address:
    """A socket name as an Address; IPv4 seen through an IPv6 socket is IPv4 again."""
    host, port = source[0], source[1]
    if ":" in host:
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        host = str(mapped) if mapped is not None else host
    return make_address(host, port)
