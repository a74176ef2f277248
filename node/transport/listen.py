"""Sockets to listen on, TCP and UDP on one port number each, and the addresses others should dial."""

import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import trio

from crypto.contact import ADDRESSES_MAX, PORT_MAX, Address, make_address
from node.errors import UsageError
from node.transport.sockets import socket_name, source_of_name

PORT_ATTEMPTS = 11
"""The wanted port and the ten behind it: enough for several nodes on one machine."""
BACKLOG = 1_024
"""Connections that the kernel holds until we take them: a burst from strangers must not push out who comes
next, whose own kernel tries again only after a second. (Linux takes the least of this and `somaxconn`.)"""

Place = tuple[str, int]
"""Where to listen: an IP literal or a name of this machine, and a port, 0 for any."""


@dataclass(frozen=True)
class Bound:
    """Both sockets of one place; another port than the wanted one where others held that."""

    tcp: socket.socket
    udp: socket.socket
    host: str
    port: int

    def close(self) -> None:
        self.tcp.close()
        self.udp.close()


async def bind_all(places: Sequence[Place], *, may_move: bool = True) -> tuple[Bound, ...]:
    """Listen on every place, as `bind` does; on all or on none. Unless they `may_move`, at these ports alone.

    `[::]` takes IPv4 too, unless an IPv4 address is among the places: then each family has its own.
    """
    found = [await _look_up(host, port) for host, port in places]
    both_families = all(family == socket.AF_INET6 for family, _ in found)
    bound: list[Bound] = []
    try:
        for (family, literal), (host, port) in zip(found, places, strict=True):
            attempts = PORT_ATTEMPTS if may_move or port == 0 else 1
            bound.append(
                _bind(family, literal, port, host=host, both_families=both_families, attempts=attempts)
            )
    except UsageError:
        for each in bound:
            each.close()
        raise
    return tuple(bound)


async def bind(host: str, port: int) -> Bound:
    """Listen on `host`, at `port` or one of the next ten that is free.

    Raises:
        UsageError: no such address here, or all the ports are taken.
    """
    return (await bind_all([(host, port)]))[0]


async def _look_up(host: str, port: int) -> tuple[int, str]:
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        raise UsageError(f"cannot listen on {host}: no such address", "--listen 0.0.0.0:PORT") from None
    return int(found[0][0]), source_of_name(found[0][4])[0]


def _bind(family: int, literal: str, port: int, *, host: str, both_families: bool, attempts: int) -> Bound:
    if "%" not in literal and make_address(literal, port).is_link_local:
        raise UsageError(f"cannot listen on {host}: of which link?", f"--listen '[{host}%eth0]:PORT'")
    wanted = [0] * attempts if port == 0 else range(port, min(port + attempts, PORT_MAX + 1))
    taken = []
    for number in wanted:
        try:
            tcp, udp = _bind_pair(family, literal, number, both_families=both_families)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UsageError(f"cannot listen on {host}:{number}: {error.strerror}") from None
            taken.append(number)
            continue
        return Bound(tcp, udp, literal, tcp.getsockname()[1])
    if attempts == 1:
        raise UsageError(
            f"cannot listen on {host}:{port}: the port is taken", f"--listen {host}:0 for any free"
        )
    raise UsageError(f"cannot listen: ports {taken[0]} to {taken[-1]} are taken", "--listen HOST:PORT")


def _bind_pair(
    family: int, host: str, port: int, *, both_families: bool
) -> tuple[socket.socket, socket.socket]:
    opened: list[socket.socket] = []
    try:
        tcp = socket.socket(family, socket.SOCK_STREAM)
        opened.append(tcp)
        udp = socket.socket(family, socket.SOCK_DGRAM)
        opened.append(udp)
        # A port whose last connections are still dying out may be taken again at once.
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for each in (tcp, udp):
            each.setblocking(False)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both_families)
        tcp.bind(socket_name(host, port))
        udp.bind(socket_name(host, tcp.getsockname()[1]))
        tcp.listen(BACKLOG)
    except OSError:
        for each in opened:
            each.close()
        raise
    return tcp, udp


def dialable(places: Sequence[Place], announce: Sequence[Address] = ()) -> tuple[Address, ...]:
    """Return where others reach what listens at `places` (IP literals): as announced, or each place, or for
    one that is every interface, the addresses of this machine.

    IPv4 comes first; loopback only where there is nothing else. Link-local addresses mean nothing
    to another machine and are left out, so there may be none: see `Multicast.addresses`.
    """
    if announce:
        return tuple(announce)[:ADDRESSES_MAX]
    found: dict[Address, None] = {}
    for host, port in places:
        for each in _hosts(host, alone=len(places) == 1):
            found[make_address(each, port)] = None
    usable = [address for address in found if not ipaddress.ip_address(address.host).is_loopback]
    usable = usable or list(found)
    usable.sort(key=lambda address: address.kind)
    return tuple(usable[:ADDRESSES_MAX])


def _hosts(host: str, *, alone: bool) -> list[str]:
    """The addresses that one place stands for; `alone`, the IPv6 one stands for both families."""
    listening = ipaddress.ip_address(host)
    if not listening.is_unspecified:
        return [] if make_address(host, 0).is_link_local else [host]
    families = [socket.AF_INET] if listening.version == 4 else [socket.AF_INET6]
    if listening.version == 6 and alone:
        families.insert(0, socket.AF_INET)
    found = [
        ipaddress.ip_address(entry.address.partition("%")[0])
        for _, entries in sorted(psutil.net_if_addrs().items())
        for family in families
        for entry in entries
        if entry.family == family
    ]
    loopback = "::1" if listening.version == 6 and not alone else "127.0.0.1"
    return [str(each) for each in found if not each.is_link_local] or [loopback]
