"""Listening sockets, TCP and UDP on one port number each, and the addresses that others should dial."""

import errno
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from crypto.contact import PORT_MAX, Address, make_address
from node.errors import UsageError
from node.forks import keep_from_children
from node.transport.address_policy import AddressPolicy, Place
from node.transport.interfaces import read_interfaces
from node.transport.sockets import socket_name, source_of_name

PORT_ATTEMPTS = 11
"""Number of ports tried: the wanted port and the ten after it, enough for several nodes on one machine."""
BACKLOG = 1_024
"""Maximum number of connections that the kernel holds until we accept them. A burst from unknown peers must
not push out an honest one, whose kernel tries again only after a second. (Linux uses the smaller of this and
`somaxconn`.)"""

_MTU_DISCOVER, _NEVER_DISCOVER = 10, 0
"""Linux's IP_MTU_DISCOVER and IP_PMTUDISC_DONT, which Python does not name."""
_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
"""The errors of a kernel without IPv6, or with IPv6 turned off."""


@dataclass(frozen=True)
class BoundSockets:
    """The TCP and the UDP socket of one host and port. Their port differs from the `wanted` one if that was
    taken."""

    tcp: socket.socket
    udp: socket.socket
    host: str
    port: int
    wanted: int

    def close(self) -> None:
        self.tcp.close()
        self.udp.close()


async def bind_all(places: Sequence[Place], *, may_move: bool = True) -> tuple[BoundSockets, ...]:
    """Listen on all places (host and port) or on none.

    Unless they `may_move`, only these ports are used. Places that want one port move together, so that a node
    has one port number for both families. `[::]` accepts IPv4 too, unless an IPv4 address is among the
    places; in that case each family has its own socket. If there are other places, `[::]` is left out on a
    machine without IPv6.

    Raises:
        UsageError: an address does not exist here, or all the ports are taken.
    """
    found = [await _look_up(host, port) for host, port in places]
    sockets = [
        _Wanted(family, literal, host, literal == "::" and len(places) > 1)
        for (family, literal), (host, _) in zip(found, places, strict=True)
    ]
    both_families = all(each.family == socket.AF_INET6 for each in sockets)
    by_port: dict[int | tuple[int, int], list[int]] = {}
    for index, (_, port) in enumerate(places):
        # With port 0 each socket takes a port of its own.
        by_port.setdefault(port or (0, index), []).append(index)
    bound: dict[int, BoundSockets] = {}
    try:
        for indices in by_port.values():
            port = places[indices[0]][1]
            attempts = PORT_ATTEMPTS if may_move or port == 0 else 1
            group = [sockets[index] for index in indices]
            made = _bind_group(group, port, both_families=both_families, attempts=attempts)
            bound.update((index, each) for index, each in zip(indices, made, strict=True) if each is not None)
    except UsageError:
        for each in bound.values():
            each.close()
        raise
    return tuple(bound[index] for index in sorted(bound))


async def _look_up(host: str, port: int) -> tuple[int, str]:
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        raise UsageError(f"cannot listen on {host}: no such address", "--listen 0.0.0.0:PORT") from None
    return int(found[0][0]), source_of_name(found[0][4])[0]


@dataclass(frozen=True)
class _Wanted:
    """A place as the system names it; `host` is the user's text. If it `may_lack`, it is left out on a
    machine without its address family."""

    family: int
    literal: str
    host: str
    may_lack: bool


def _bind_group(
    wanted: Sequence[_Wanted], port: int, *, both_families: bool, attempts: int
) -> "list[BoundSockets | None]":
    """Listen on all of these places at one port: `port` or one of the ports after it. The result has None for
    a place whose address family this machine does not have."""
    for each in wanted:
        if "%" not in each.literal and make_address(each.literal, port).is_link_local:
            raise UsageError(
                f"cannot listen on {each.host}: a link-local address needs its interface",
                f"--listen '[{each.host}%eth0]:PORT'",
            )
    numbers = [0] * attempts if port == 0 else range(port, min(port + attempts, PORT_MAX + 1))
    host = wanted[0].host
    for number in numbers:
        made = _bind_at(wanted, number, port, both_families=both_families)
        if made is not None:
            return made
    if attempts == 1:
        raise UsageError(
            f"cannot listen on {host}:{port}: the port is taken", f"use --listen {host}:0 for any free port"
        )
    raise UsageError(f"cannot listen: ports {numbers[0]} to {numbers[-1]} are taken", "--listen HOST:PORT")


def _bind_at(
    wanted: Sequence[_Wanted], number: int, port: int, *, both_families: bool
) -> "list[BoundSockets | None] | None":
    """Bind all of these at port `number` instead of `port`; return None if it is taken at any of them."""
    made: list[BoundSockets | None] = []
    for each in wanted:
        try:
            tcp, udp = _bind_pair(each.family, each.literal, number, both_families=both_families)
        except OSError as error:
            if error.errno in _NO_FAMILY and each.may_lack:
                made.append(None)
                continue
            for other in made:
                if other is not None:
                    other.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UsageError(f"cannot listen on {each.host}:{number}: {error.strerror}") from None
            return None
        made.append(BoundSockets(tcp, udp, each.literal, tcp.getsockname()[1], port))
    return made


def _bind_pair(
    family: int, host: str, port: int, *, both_families: bool
) -> tuple[socket.socket, socket.socket]:
    opened: list[socket.socket] = []
    try:
        tcp = socket.socket(family, socket.SOCK_STREAM)
        opened.append(tcp)
        udp = socket.socket(family, socket.SOCK_DGRAM)
        opened.append(udp)
        keep_from_children(tcp, udp)
        # Allow a port to be taken again immediately while its previous connections are still closing.
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for each in (tcp, udp):
            each.setblocking(False)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both_families)
        _allow_fragments(udp, family)
        tcp.bind(socket_name(host, port))
        udp.bind(socket_name(host, tcp.getsockname()[1]))
        tcp.listen(BACKLOG)
        # Set this only now, when no other program can listen here: see `nat.simultaneous`.
        if hasattr(socket, "SO_REUSEPORT"):
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        for each in opened:
            each.close()
        raise
    return tcp, udp


def _allow_fragments(udp: socket.socket, family: int) -> None:
    """Let routers fragment datagrams for links with a smaller MTU, such as VPNs, because many firewalls drop
    the messages that would report the MTU. Linux only; elsewhere this is the default."""
    if sys.platform == "linux" and family == socket.AF_INET:
        udp.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _NEVER_DISCOVER)


def dialable(places: Sequence[Place], announce: Sequence[Address] = ()) -> tuple[Address, ...]:
    """Return the addresses at which others should dial `places` (IP literals), best first. They are the
    `announce` addresses if given. Otherwise they are the places, and for a place that means every interface,
    the addresses of this machine (`AddressPolicy.own`).

    There may be none on a machine that has only link-local IPv6: see `Multicast.addresses`.
    """
    policy = AddressPolicy()
    policy.look(places, read_interfaces())
    return policy.own(announce)
