"""TCP connections from this node's listening port. A router then uses one outer port for all of them, and two
nodes that dial each other simultaneously get one connection (RFC 9293, section 3.5).

Linux lets a connecting socket share the port of a listening one if both set SO_REUSEPORT. The listening
socket sets it only once it has the port exclusively (`listen`), so no other program can listen there.
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
"""Pauses after a punch is refused. The peer's router or kernel may answer before the peer has dialled. That
makes three attempts in all, and no more, because the host did not ask for them."""
_OTHERS_FIRST = (errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.EISCONN)
"""Errors that mean that the peer's connection was accepted meanwhile, so there can be no second one."""


def open_at(family: int, place: Place) -> trio.socket.SocketType:
    """Return a socket bound to one of this node's listening ports. Raises Unreachable."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        keep_from_children(made)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(socket_name(*place))
    except (OSError, AttributeError) as error:  # some systems have no SO_REUSEPORT
        made.close()
        raise Unreachable("unknown", f"cannot dial from port {place[1]}: {error}") from None
    made.setblocking(False)
    return trio.socket.from_stdlib_socket(made)


async def connect_from(
    places: Sequence[Place],
    address: Address,
    retries_seconds: Sequence[float] = (),
    open_socket: Callable[[int, Place], trio.socket.SocketType] = open_at,
) -> trio.SocketStream:
    """Connect to an IP address from one of the `places` where this node listens. If that is refused, try
    again after each of the pauses.

    Raises:
        Unreachable: it was refused, there is no route, or the peer's own connection was accepted
        meanwhile.
    """
    family = socket.AF_INET6 if address.kind == "ip6" else socket.AF_INET
    place = next((each for each in places if (":" in each[0]) == (family == socket.AF_INET6)), None)
    if place is None:
        raise Unreachable(
            "unknown", f"this node has no listening port from which it could reach {address.short}"
        )
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
            why = (
                ("the peer's own connection was accepted first")
                if error.errno in _OTHERS_FIRST
                else error.strerror
            )
            raise Unreachable("timeout", f"{address.short} cannot be reached: {why}") from None
        except BaseException:
            connecting.close()
            raise
        transport = trio.SocketStream(connecting)
        set_options(transport)
        return transport


def leave_nothing(transport: trio.SocketStream) -> None:
    """Close the connection without TIME_WAIT. Otherwise no connection from this port to the same address
    could follow for a minute. Unsent bytes are lost."""
    transport.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def secure(
    transport: trio.SocketStream, credentials: Credentials, there: Address, *, is_first: bool
) -> SecuredTransport:
    """Shake hands with the peer of `there` on an open connection. Raises Unreachable."""
    session = await shake_hands(transport, credentials, there.short, expected=there.peer, is_first=is_first)
    return SecuredTransport(there, transport, session)
