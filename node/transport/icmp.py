"""Closed ports, as the system reports them: a host has answered one of our packets with "port unreachable".

Linux queues such answers on the sending socket (`IP_RECVERR`, ip(7)); other systems report nothing. The queue
has the packet's destination, which any host on the way may have forged: it is a hint.
"""

import ipaddress
import socket
import sys

from crypto.contact import Address, make_address

ERRORS_MAX = 64
"""Reports read at once; the rest waits for the next time."""
_IP_RECVERR, _IPV6_RECVERR = 11, 25
_MSG_ERRQUEUE = 0x2000
_ANSWER_BYTES = 256
_ORIGINS_ICMP = (2, 3)
_CODES_PORT = {2: (3, 3), 3: (1, 4)}
"""Type and code of "port unreachable" by origin: ICMP, and ICMPv6."""


def ask_for_errors(own: socket.socket) -> None:
    """Enable the system's queue of hosts' errors about our packets, if it has one."""
    if sys.platform == "linux":
        is_six = own.family == socket.AF_INET6
        own.setsockopt(socket.IPPROTO_IPV6 if is_six else socket.IPPROTO_IP, _recverr(own), 1)


def closed_places(own: socket.socket) -> list[Address]:
    """Take the destinations with a closed port from the socket's queue."""
    found: list[Address] = []
    if sys.platform != "linux":
        return found  # on other systems the flag means something else, and would take a packet
    for _ in range(ERRORS_MAX):
        try:
            _, ancillary, _, target = own.recvmsg(_ANSWER_BYTES, _ANSWER_BYTES, _MSG_ERRQUEUE)
        except OSError:
            break
        for _, kind, data in ancillary:
            # struct sock_extended_err: errno (4 bytes), origin, type, code.
            if kind in (_IP_RECVERR, _IPV6_RECVERR) and len(data) >= 7 and _is_closed_port(data):
                found.append(_address(target))
    return found


def _recverr(own: socket.socket) -> int:
    return _IPV6_RECVERR if own.family == socket.AF_INET6 else _IP_RECVERR


def _is_closed_port(data: bytes) -> bool:
    origin = data[4]
    return origin in _ORIGINS_ICMP and (data[5], data[6]) == _CODES_PORT[origin]


def _address(target: tuple[str, int]) -> Address:
    host = target[0]
    if ":" in host:
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        host = str(mapped) if mapped is not None else host
    return make_address(host, target[1])
