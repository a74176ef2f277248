"""The table of a node's TCP connections. It opens connections, reuses them, and ends them in order.

A connection carries one conversation at a time, and can carry the next once both peers have ended the current
one in order. A peer that cannot be dialled is spoken to on a channel of a multiplexed path (`paths`).
`dialer` reaches peers, `greeting` says what a connection is for, and `arrivals` serves the connections that
others open.
"""

import socket
from collections import Counter
from contextlib import suppress

import trio

from crypto.contact import Address
from crypto.identity import PeerId, short_peer
from crypto.noise import HandshakeResult
from node.containment import contain
from node.errors import StreamClosed, Unreachable
from node.seams import MESSAGE_BYTES_USUAL
from node.transport.address_book import AddressBook
from node.transport.arrivals import ServedConnections
from node.transport.buffer_pool import Pool
from node.transport.connection_pool import IdleConnections
from node.transport.dialer import Dialer
from node.transport.greeting import Greeter
from node.transport.handshake import Credentials, SecuredTransport
from node.transport.multiplexed import MultiplexedPath
from node.transport.pace import Paces
from node.transport.paths import Paths
from node.transport.router import Hello, Router
from node.transport.settings import TRANSPORT, TransportSettings
from node.transport.sockets import address_of
from node.transport.streams import SecureStream
from node.transport.tcp import Connection, ReassemblyBudget
from node.transport.vanished import VanishedConnections

OPEN_SECONDS = 20.0
"""How long to try all addresses of a peer."""
GRACE_SECONDS = 0.5
"""How long handlers may take to finish their answers, and streams to end in order, when the node leaves."""


class Connections:
    """The connections of one node. `run` must be running to serve, and to keep connections for another
    conversation."""

    def __init__(
        self,
        credentials: Credentials,
        book: AddressBook,
        router: Router,
        counters: Counter[str],
        paces: Paces | None = None,
        settings: TransportSettings = TRANSPORT,
    ) -> None:
        self._settings = settings
        self._credentials = credentials
        self._book = book
        self._counters = counters
        self._paces = paces or Paces()
        self._assembly = ReassemblyBudget()
        self._pool = Pool()
        self._idle = IdleConnections()
        # Every open connection, with the stream that it carries; a dict for its order.
        self._open: dict[Connection, SecureStream | None] = {}
        self.paths = Paths(self, credentials, counters, settings.paths)
        self._dialer = Dialer(credentials, book, self.paths)
        self._greeter = Greeter(self, credentials, book)
        self.arrivals = ServedConnections(self, credentials, router, self._assembly, counters, settings)
        self._vanished = VanishedConnections(lambda: tuple(self._open), counters, settings.vanished_seconds)
        self._leaving: trio.Event | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[trio.Nursery] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until `leave`, then for a grace period while streams are open. Calls `started` with the nursery
        for connections.

        Cancellation is delayed until then, so that a handler may finish its answer.
        """
        self._leaving = leaving = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.shield = True
                self._nursery = nursery
                watch = await nursery.start(self._watch)
                task_status.started(nursery)
                await leaving.wait()
                watch.cancel()
                nursery.cancel_scope.deadline = trio.current_time() + GRACE_SECONDS
                self._send_away(nursery)
        finally:
            self._nursery = self._leaving = None
            for connection in tuple(self._open):
                connection.end("this node has left")

    def leave(self) -> None:
        """Make `run` end."""
        if self._leaving is not None:
            self._leaving.set()

    @property
    def _work_bits(self) -> int:
        return self._credentials.swarm.work_bits

    @property
    def _is_staying(self) -> bool:
        return self._leaving is not None and not self._leaving.is_set()

    def _send_away(self, nursery: trio.Nursery) -> None:
        self._idle.clear()
        self.arrivals.send_away()
        for stream in tuple(self._open.values()):
            if stream is None:
                continue
            stream.leave()
            if not stream.is_served:
                nursery.start_soon(self._part, stream)
        self._end_idle_paths()

    async def _watch(self, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            task_status.started(scope)
            while True:
                await trio.sleep(self._settings.look_seconds)
                self._idle.expire(trio.current_time())
                self._pool.look()
                self.paths.look(trio.current_time())
                self._vanished.look()

    # --- outgoing ----------------------------------------------------------------------------------

    async def open(
        self,
        peer: PeerId,
        *protocols: str,
        message_bytes_max: int = MESSAGE_BYTES_USUAL,
        at: Address | None = None,
    ) -> SecureStream:
        """Open a stream with the first of the protocols that the peer speaks, at its address `at` if given.
        Raises Unreachable."""
        hello = Hello("stream", protocols, self._work_bits)
        connection, protocol = await self._greet_peer(peer, hello, message_bytes_max, at)
        self._counters["streams_opened"] += 1
        return self._stream(connection, protocol)

    def _stream(self, connection: Connection, protocol: str) -> SecureStream:
        stream = self._open[connection] = SecureStream(connection, protocol, self._closed)
        return stream

    async def send(self, peer: PeerId, protocol: str, message: bytes) -> None:
        """Send one message to the peer's inbox. Raises Unreachable, StreamClosed."""
        connection, _ = await self._greet_peer(peer, Hello("message", (protocol,), self._work_bits))
        await connection.send(message)
        self.keep(connection)

    async def identify(self, address: Address) -> PeerId:
        """Return the peer that answers at an address, always by making a new handshake. Raises
        Unreachable."""
        with trio.move_on_after(OPEN_SECONDS):
            connection, _ = await self._dial(address, Hello("identify", (), self._work_bits))
            self.keep(connection)
            return connection.peer
        raise Unreachable("timeout", f"{address.short} did not answer in {OPEN_SECONDS:g} s")

    async def _greet_peer(
        self, peer: PeerId, hello: Hello, message_bytes_max: int = 0, at: Address | None = None
    ) -> tuple[Connection, str]:
        with trio.move_on_after(OPEN_SECONDS):
            known = at or self._book.preferred(peer)
            if (found := await self._greet_idle(peer, hello, message_bytes_max, at=known)) is not None:
                return found
            if at is None and (path := self.paths.best(peer)) is not None:
                try:
                    return await self._greeter.greet_channel(path, hello, message_bytes_max)
                except (StreamClosed, trio.TooSlowError):
                    self._counters["channels_failed"] += 1
            if at is not None:
                # The peer may only claim this address, so the attempt counts toward the dial limit.
                return await self._greeter.meet(
                    await self._dialer.attempt(peer, at), hello, message_bytes_max
                )
            return await self._greeter.meet(await self._dialer.reach_peer(peer), hello, message_bytes_max)
        raise Unreachable("timeout", f"{short_peer(peer)} did not answer in {OPEN_SECONDS:g} s")

    async def _greet_idle(
        self,
        peer: PeerId,
        hello: Hello,
        message_bytes_max: int,
        *,
        at: Address | None = None,
        is_bare: bool = False,
        ahead: bytes = b"",
    ) -> tuple[Connection, str] | None:
        """Open a stream on an idle connection; return None if there is no open idle connection."""
        connection = self._idle.take(peer, at, is_bare=is_bare)
        if connection is not None:
            try:
                protocol = await self._greeter.greet(connection, hello, message_bytes_max, ahead)
                self._counters["connections_used_again"] += 1
                return connection, protocol
            except (StreamClosed, trio.TooSlowError):
                # The peer has read neither the hello nor the first message, so it is safe to repeat them.
                self._counters["connections_stale"] += 1
                self._idle.drop(peer)
        return None

    async def _dial(
        self, address: Address, hello: Hello, message_bytes_max: int = 0
    ) -> tuple[Connection, str]:
        """Connect to one address, shake hands, and greet."""
        return await self._greeter.meet(await self._dialer.reach(address), hello, message_bytes_max)

    # --- paths -------------------------------------------------------------------------------------

    @property
    def serving(self) -> trio.Nursery | None:
        """The nursery for tasks; this and the next methods are documented in `paths.PathHost`."""
        return self._nursery if self._is_staying else None

    async def open_bare(self, peer: PeerId, protocol: str, at: Address, ahead: bytes) -> SecureStream:
        """Open a stream on a TCP connection of its own, which the caller detaches. The connection is an idle
        one, or a new one to the peer `at` an address. The first message, `ahead`, is sent before the answer
        to the hello. Raises Unreachable."""
        hello = Hello("stream", (protocol,), self._work_bits)
        with trio.move_on_after(OPEN_SECONDS):
            found = await self._greet_idle(peer, hello, MESSAGE_BYTES_USUAL, is_bare=True, ahead=ahead)
            if found is None:
                # The dial counts like one to a claimed address, because the relay's address may come only
                # from a peer behind it.
                found = await self._greeter.meet(
                    await self._dialer.attempt(peer, at), hello, MESSAGE_BYTES_USUAL, ahead
                )
            return self._stream(*found)
        raise Unreachable("timeout", f"{short_peer(peer)} did not answer in {OPEN_SECONDS:g} s")

    async def keep_ready(self, peer: PeerId, at: Address) -> None:
        """Keep an idle connection to a peer for `open_bare`. An existing one is used now, so that neither
        peer closes it as idle. Raises Unreachable."""
        hello = Hello("identify", (), self._work_bits)
        with trio.move_on_after(OPEN_SECONDS):
            found = await self._greet_idle(peer, hello, 0, is_bare=True)
            if found is None:
                found = await self._greeter.meet(await self._dialer.attempt(peer, at), hello, 0)
            self.keep(found[0])

    async def dial_path(self, peer: PeerId, at: Address | None = None) -> Connection:
        """Dial a peer, and agree with it that the connection becomes a path. Raises Unreachable."""
        connection, _ = await self._dial_bare(peer, Hello("path", (), self._work_bits), at)
        return connection

    async def _dial_bare(self, peer: PeerId, hello: Hello, at: Address | None) -> tuple[Connection, str]:
        with trio.move_on_after(OPEN_SECONDS):
            if at is not None:
                return await self._dial(at.of(peer), hello, MESSAGE_BYTES_USUAL)
            found = await self._dialer.reach_peer(peer, is_bare=True)
            return await self._greeter.meet(found, hello, MESSAGE_BYTES_USUAL)
        raise Unreachable("timeout", f"{short_peer(peer)} did not answer in {OPEN_SECONDS:g} s")

    async def open_on(self, secured: SecuredTransport, protocol: str) -> SecureStream:
        """Open a stream on a connection whose handshake is complete. Raises Unreachable."""
        hello = Hello("stream", (protocol,), self._work_bits)
        return self._stream(*await self._greeter.introduce(secured, hello, MESSAGE_BYTES_USUAL))

    async def agree_on_path(self, secured: SecuredTransport) -> Connection:
        """Agree with the peer that a punched connection becomes a path. Raises Unreachable."""
        # A punched connection, because the address where the peer is seen cannot be dialled.
        hello = Hello("path", (), self._work_bits)
        return (await self._greeter.introduce(secured, hello, MESSAGE_BYTES_USUAL, is_punched=True))[0]

    async def serve_punched(self, secured: SecuredTransport) -> None:
        """Serve a connection made by hole punching. The other peer states its purpose."""
        connection = self.make(secured.transport, secured.session)
        connection.is_punched = True
        await self.arrivals.serve_punched(connection)

    def has_better(self, path: MultiplexedPath) -> None:
        """End the idle connections on a path, because there is a better one."""
        self._idle.drop_of(path)

    async def reach_again(self, peer: PeerId) -> None:
        """Make a new path to a peer through any of its relays. Raises Unreachable."""
        await self._dialer.reach_again(peer)

    def doubt(self) -> None:
        """Check soon for other dead connections, because a path was lost."""
        if self._is_staying and self._nursery is not None:
            self._nursery.start_soon(self._vanished.doubt)

    def serve_channel(self, path: MultiplexedPath, channel: socket.socket) -> None:
        """Serve a channel that the peer has opened, like an accepted connection."""
        self.arrivals.serve_channel(path, self._greeter.make_channel(path, channel))

    def note_way(self, connection: Connection, transport: trio.SocketStream) -> None:
        """Note at which of its own addresses this machine was reached, as this connection shows."""
        there = connection.source
        if there is not None:
            with suppress(OSError):
                self._book.policy.reached(address_of(transport.socket.getsockname()).host, there.host)

    def carries(self, connection: Connection, stream: SecureStream | None) -> None:
        """Note the stream that a connection carries; None for none."""
        self._open[connection] = stream

    def make(
        self, transport: trio.SocketStream, session: HandshakeResult, path: MultiplexedPath | None = None
    ) -> Connection:
        """Keep a new connection in the table of all connections until it ends."""
        connection = Connection(
            transport,
            session,
            self._assembly,
            self._pool,
            self._counters,
            self._ended,
            self._paces,
            self._settings,
            path,
            path.place if path is not None else None,
        )
        self._open[connection] = None
        return connection

    def keep(self, connection: Connection) -> None:
        """Keep a free connection for another conversation with its peer."""
        if connection.why is not None:
            return
        self._open[connection] = None
        if self._is_staying and not (connection.path is not None and connection.path.has_better):
            self._idle.put(connection, trio.current_time())
        else:
            connection.end("nobody keeps it")

    def _ended(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._idle.forget(connection)
        self.arrivals.ended(connection)
        if connection.path is not None and not self._is_staying:
            self._end_idle_paths()

    def _end_idle_paths(self) -> None:
        """End idle paths when the node leaves. A path lasts as long as the streams on it."""
        used = {connection.path for connection in self._open}
        for path in self.paths:
            if path not in used:
                path.end("this node is leaving")

    def _closed(self, stream: SecureStream) -> None:
        """Handle the local close of a stream that this node opened."""
        if stream.connection.why is not None:
            return
        if self._is_staying and self._nursery is not None:
            if stream.finish_now():
                self.keep(stream.connection)
            else:
                self._nursery.start_soon(self._part, stream)
        elif self._nursery is None:
            stream.connection.end("this side closed it")

    async def _part(self, stream: SecureStream) -> None:
        with contain("a stream's end") as part:
            if await stream.finish():
                self.keep(stream.connection)
            else:
                stream.connection.end("the other side did not close in time")
        if part.error is not None:
            stream.connection.end("its end failed")
