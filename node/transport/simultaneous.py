"""TCP connections from this node's listening port, so that a router uses one outer port for all, and two
nodes that dial each other at once meet in one connection (RFC 9293, section 3.5).

Linux lets a connecting socket share a listening one's port if both set SO_REUSEPORT; the listening one sets
it only once it has the port exclusively (`listen`), so no other program can listen there.
"""

import errno
import socket
import struct
from collections.abc import Callable, Sequence

import trio

from crypto.contact import Address
from node.errors import Unreachable
from node.forks import keep_from_children
from node.transport.address_policy import Place
from node.transport.handshake import Credentials, SecuredTransport, set_options, shake_hands
from node.transport.sockets import socket_name

PUNCH_RETRIES_SECONDS = (0.1, 0.4)
"""The pauses after refusals of a punch: the other side's router or kernel has answered before that side
dialled. That makes three attempts in all, and no more to a host that did not ask."""
_OTHERS_FIRST = (errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.EISCONN)
"""The error when the other side's connection was accepted meanwhile: there can be no second one."""


def open_at(family: int, place: Place) -> trio.socket.SocketType:
    """Return a socket bound to one of this node's listening places. Raises Unreachable."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        keep_from_children(made)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(socket_name(*place))
    except (OSError, AttributeError) as error:  # not every system has SO_REUSEPORT
        made.close()
        raise Unreachable("unknown", f"port {place[1]} cannot be dialled from: {error}") from None
    made.setblocking(False)
    return trio.socket.from_stdlib_socket(made)


async def connect_from(
    places: Sequence[Place],
    address: Address,
    retries_seconds: Sequence[float] = (),
    open_socket: Callable[[int, Place], trio.socket.SocketType] = open_at,
) -> trio.SocketStream:
    """Connect to an IP address from one of the `places` where this node listens; once more after each of the
    pauses where it is refused.

    Raises:
        Unreachable: it is refused, there is no route, or the other side's own connection was accepted
        meanwhile.
    """
    family = socket.AF_INET6 if address.kind == "ip6" else socket.AF_INET
    place = next((each for each in places if (":" in each[0]) == (family == socket.AF_INET6)), None)
    if place is None:
        raise Unreachable("unknown", f"this node does not listen where it could reach {address.short}")
    pauses = iter(retries_seconds)
    while True:
        connecting = open_socket(family, place)
        try:
            await connecting.connect(socket_name(address.host, address.port))
        except ConnectionRefusedError:
            connecting.close()
            pause_seconds = next(pauses, None)
            if pause_seconds is None:
                raise Unreachable("refused", f"{address.short} refuses connections") from None
            await trio.sleep(pause_seconds)
            continue
        except OSError as error:
            connecting.close()
            why = "it has come in already" if error.errno in _OTHERS_FIRST else error.strerror
            raise Unreachable("timeout", f"{address.short} cannot be reached: {why}") from None
        except BaseException:
            connecting.close()
            raise
        transport = trio.SocketStream(connecting)
        set_options(transport)
        return transport


def leave_nothing(transport: trio.SocketStream) -> None:
    """Close the connection without TIME_WAIT: else no connection from this port to the same place could
    follow for a minute. Unsent bytes are lost."""
    transport.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def secure(
    transport: trio.SocketStream, credentials: Credentials, there: Address, *, is_first: bool
) -> SecuredTransport:
    """Shake hands with the peer of `there` on an open connection. Raises Unreachable."""
    session = await shake_hands(transport, credentials, there.short, expected=there.peer, is_first=is_first)
    return SecuredTransport(there, transport, session)
