"""Greets peers on connections that this node has made: states a connection's purpose and awaits the answer.

`router.greet` has the messages. If a greeting fails, its connection ends; if it is refused, the connection
stays and can be used again.
"""

import socket
from typing import Protocol

import trio

from crypto.identity import short_peer
from crypto.noise import HandshakeResult
from node.errors import StreamClosed, Unreachable
from node.transport.address_book import AddressBook
from node.transport.dialer import Reached
from node.transport.handshake import Credentials, SecuredTransport
from node.transport.multiplexed import MultiplexedPath, channel_session
from node.transport.router import Hello, greet
from node.transport.tcp import Connection


class GreetingHost(Protocol):
    """The table of connections: `node.transport.connections.Connections`."""

    def make(
        self, transport: trio.SocketStream, session: HandshakeResult, path: MultiplexedPath | None = None
    ) -> Connection:
        """Keep a new connection in the table of all connections until it ends."""

    def keep(self, connection: Connection) -> None:
        """Keep a free connection for another conversation with its peer."""

    def note_way(self, connection: Connection, transport: trio.SocketStream) -> None:
        """Note at which of its own addresses this machine was reached."""


class Greeter:
    """The greeter of one node."""

    def __init__(self, host: GreetingHost, credentials: Credentials, book: AddressBook) -> None:
        self._host = host
        self._credentials = credentials
        self._book = book

    async def meet(
        self, found: Reached, hello: Hello, message_bytes_max: int, ahead: bytes = b""
    ) -> tuple[Connection, str]:
        """Greet a peer that was reached. Raises Unreachable."""
        if isinstance(found, SecuredTransport):
            return await self.introduce(found, hello, message_bytes_max, ahead=ahead)
        return await self._introduce_channel(found, hello, message_bytes_max)

    async def introduce(
        self,
        dialled: SecuredTransport,
        hello: Hello,
        message_bytes_max: int,
        *,
        is_punched: bool = False,
        ahead: bytes = b"",
    ) -> tuple[Connection, str]:
        """State a connection's purpose after the handshake. Raises Unreachable."""
        address, transport, session = dialled.address, dialled.transport, dialled.session
        connection = self._host.make(transport, session)
        connection.is_punched = is_punched
        # with no source it has hung up, and the greeting fails
        if connection.source is not None and not is_punched:
            self._book.prove(session.peer, connection.source)
            self._host.note_way(connection, transport)
        try:
            return connection, await self.greet(connection, hello, message_bytes_max, ahead)
        except trio.TooSlowError:
            raise Unreachable("timeout", f"{address.short} shook hands, then fell silent") from None
        except StreamClosed:
            raise Unreachable("refused", f"{address.short} hung up after the handshake") from None

    async def greet_channel(
        self, path: MultiplexedPath, hello: Hello, message_bytes_max: int
    ) -> tuple[Connection, str]:
        """Greet a peer on a new channel of a path. Raises StreamClosed, TooSlowError, Unreachable."""
        connection = self.make_channel(path, path.open())
        return connection, await self.greet(connection, hello, message_bytes_max)

    async def _introduce_channel(
        self, path: MultiplexedPath, hello: Hello, message_bytes_max: int
    ) -> tuple[Connection, str]:
        try:
            return await self.greet_channel(path, hello, message_bytes_max)
        except (StreamClosed, trio.TooSlowError):
            who = short_peer(path.peer)
            raise Unreachable("timeout", f"{who} does not answer on the existing path") from None

    def make_channel(self, path: MultiplexedPath, channel: socket.socket) -> Connection:
        """Wrap a channel of a path as a connection."""
        transport = trio.SocketStream(trio.socket.from_stdlib_socket(channel))
        return self._host.make(transport, channel_session(path.peer), path)

    async def greet(
        self, connection: Connection, hello: Hello, message_bytes_max: int, ahead: bytes = b""
    ) -> str:
        """Greet on a connection; return the protocol that the peer chose. Raises StreamClosed, TooSlowError,
        Unreachable."""
        understood = False
        try:
            with trio.fail_after(self._credentials.handshake_seconds):
                me = self._credentials.identity.peer
                protocol = await greet(connection, hello, me, message_bytes_max, ahead)
            understood = True
        except Unreachable:
            understood = True
            self._host.keep(connection)
            raise
        finally:
            if not understood:
                connection.end("the greeting was cut short")
        return protocol
