"""Closed ports, as the system reports them when a host answers one of our packets with "port unreachable".

Linux queues such answers on the sending socket (`IP_RECVERR`, ip(7)); other systems report nothing. The queue
has the packet's destination. Any host on the way may have forged the answer, so it is only a hint.
"""

import ipaddress
import socket
import sys

from crypto.contact import Address, make_address

ERRORS_MAX = 64
"""Maximum number of reports read in one call; the rest waits for the next call."""
_IP_RECVERR, _IPV6_RECVERR = 11, 25
_MSG_ERRQUEUE = 0x2000
_ANSWER_BYTES = 256
_ORIGINS_ICMP = (2, 3)
_CODES_PORT = {2: (3, 3), 3: (1, 4)}
"""Type and code of "port unreachable", keyed by origin: ICMP and ICMPv6."""


def ask_for_errors(own: socket.socket) -> None:
    """Enable the system's queue of errors that hosts report about our packets, if the system has one."""
    if sys.platform == "linux":
        is_six = own.family == socket.AF_INET6
        own.setsockopt(socket.IPPROTO_IPV6 if is_six else socket.IPPROTO_IP, _recverr(own), 1)


def closed_places(own: socket.socket) -> list[Address]:
    """Take from the socket's queue the destinations with a closed port."""
    found: list[Address] = []
    if sys.platform != "linux":
        return found  # on other systems the flag has a different meaning and would take a packet
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
