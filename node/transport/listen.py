"""Sockets to listen on, TCP and UDP on one port number, and the addresses others should dial."""

import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import trio

from crypto.contact import ADDRESSES_MAX, PORT_MAX, Address, make_address
from node.errors import UsageError

PORT_ATTEMPTS = 11
"""The wanted port and the ten behind it: enough for several nodes on one machine."""
BACKLOG = 128


@dataclass(frozen=True)
class Bound:
    """Both sockets of one node, and the ports that others held."""

    tcp: socket.socket
    udp: socket.socket
    host: str
    port: int
    taken: tuple[int, ...]


async def bind(host: str, port: int) -> Bound:
    """Listen on `host` (an IP literal or a name of this machine), `port` or one of the next ten; 0 is any.

    Raises:
        UsageError: no such address here, or all the ports are taken.
    """
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        raise UsageError(f"cannot listen on {host}: no such address", "--listen 0.0.0.0:PORT") from None
    family, literal = found[0][0], str(found[0][4][0])
    wanted = [0] * PORT_ATTEMPTS if port == 0 else range(port, min(port + PORT_ATTEMPTS, PORT_MAX + 1))
    taken = []
    for number in wanted:
        try:
            tcp, udp = _bind_pair(family, literal, number)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UsageError(f"cannot listen on {host}:{number}: {error.strerror}") from None
            taken.append(number)
            continue
        return Bound(tcp, udp, literal, tcp.getsockname()[1], tuple(taken))
    raise UsageError(f"cannot listen: ports {taken[0]} to {taken[-1]} are taken", "--listen HOST:PORT")


def _bind_pair(family: int, host: str, port: int) -> tuple[socket.socket, socket.socket]:
    tcp = socket.socket(family, socket.SOCK_STREAM)
    udp = socket.socket(family, socket.SOCK_DGRAM)
    try:
        # A port whose last connections are still dying out may be taken again at once.
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for each in (tcp, udp):
            each.setblocking(False)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        tcp.bind((host, port))
        udp.bind((host, tcp.getsockname()[1]))
        tcp.listen(BACKLOG)
    except OSError:
        tcp.close()
        udp.close()
        raise
    return tcp, udp


def dialable(host: str, port: int, announce: Sequence[Address] = ()) -> tuple[Address, ...]:
    """Where others reach a listener: as announced, or its host, or every interface of the machine.

    IPv4 comes first; loopback only where there is nothing else. Link-local addresses mean nothing
    to another machine and are left out.
    """
    if announce:
        return tuple(announce)[:ADDRESSES_MAX]
    listening = ipaddress.ip_address(host)
    if not listening.is_unspecified:
        return (make_address(host, port),)
    families = [socket.AF_INET] if listening.version == 4 else [socket.AF_INET, socket.AF_INET6]
    found = [
        ipaddress.ip_address(entry.address.partition("%")[0])
        for _, entries in sorted(psutil.net_if_addrs().items())
        for family in families
        for entry in entries
        if entry.family == family
    ]
    usable = [each for each in found if not each.is_loopback and not each.is_link_local]
    usable.sort(key=lambda each: each.version)
    usable = usable or [each for each in found if each.is_loopback] or [ipaddress.ip_address("127.0.0.1")]
    return tuple(make_address(str(each), port) for each in usable[:ADDRESSES_MAX])
