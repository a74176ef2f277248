"""Connections that other peers open: handshakes with unknown peers, admission, and answers to hellos.

A connection carries one conversation after another, and each begins with a hello. The table of all
connections, and the connections that this node opens, are in `connections`.
"""

import itertools
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import trio

from crypto.errors import RemoteProtocolError
from crypto.noise import HandshakeResult
from crypto.token_buckets import prefix_of
from node.containment import contain
from node.errors import StreamClosed
from node.transport.accept_queue import PendingConnection, PendingConnections
from node.transport.connection_pool import IDLE_SECONDS
from node.transport.half_open import HalfOpenQueue
from node.transport.handshake import Credentials, accept
from node.transport.multiplexed import MultiplexedPath, Way
from node.transport.paths import Paths
from node.transport.router import Hello, Router
from node.transport.settings import TransportSettings
from node.transport.streams import SecureStream
from node.transport.tcp import STRANGERS_ASSEMBLY_BYTES_MAX, Connection, ReassemblyBudget

INBOUND_IDLE_SECONDS = 2 * IDLE_SECONDS
"""How long an idle accepted connection is kept: twice as long as its opener keeps it. After that, the opener
has forgotten it."""


class ArrivalHost(Protocol):
    """The table of connections: `node.transport.connections.Connections`."""

    paths: Paths

    @property
    def serving(self) -> trio.Nursery | None:
        """The nursery for tasks; None before the start, and once the node is leaving."""

    def make(
        self, transport: trio.SocketStream, session: HandshakeResult, path: MultiplexedPath | None = None
    ) -> Connection:
        """Keep a new connection in the table of all connections until it ends."""

    def carries(self, connection: Connection, stream: SecureStream | None) -> None:
        """Note the stream that a connection carries; None for none."""

    def note_way(self, connection: Connection, transport: trio.SocketStream) -> None:
        """Note at which of its own addresses this machine was reached."""


class ServedConnections:
    """The accepted connections of one node. In the router's register, a peer takes up one place for each of
    its connections."""

    def __init__(
        self,
        host: ArrivalHost,
        credentials: Credentials,
        router: Router,
        assembly: ReassemblyBudget,
        counters: Counter[str],
        settings: TransportSettings,
    ) -> None:
        self._host = host
        self._settings = settings
        self._credentials = credentials
        self._router = router
        self._assembly = assembly
        self._counters = counters
        self._strangers_assembly = ReassemblyBudget(STRANGERS_ASSEMBLY_BYTES_MAX)
        self._register = router.register
        self._doorway = HalfOpenQueue[PendingConnection](settings.half_open_max)
        # Connections that wait for their next hello, the longest wait first.
        self._waiting: dict[Connection, None] = {}

    def ended(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._waiting.pop(connection, None)
        self._register.leave(connection)

    def send_away(self) -> None:
        """End the connections that wait for their next hello, because the node is leaving."""
        for connection in tuple(self._waiting):
            connection.end("this node is leaving")

    async def serve_punched(self, connection: Connection) -> None:
        """Serve a connection made by hole punching. The other peer states its purpose."""
        place = connection.source
        if place is not None and self._enter(connection, prefix_of(place.host)) is not None:
            await self._serve_entered(connection)

    def serve_channel(self, path: MultiplexedPath, connection: Connection) -> None:
        """Serve a channel of a path that the peer has opened."""
        # Peers behind one relay share nothing but the relay, so they are not grouped by address. `paths`
        # bounds their number.
        source = path.peer if path.way == "relayed" or path.address is None else prefix_of(path.address.host)
        serving = self._host.serving
        if serving is None:
            connection.end("this node is leaving")
        elif self._enter(connection, source) is not None:
            serving.start_soon(self._serve_entered, connection)

    async def _serve_entered(self, connection: Connection) -> None:
        with contain("a channel that came in"):
            await self._serve_peer(connection)

    async def listen(
        self,
        listening: Sequence[socket.socket],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept connections on these sockets until cancelled, while the host is running."""
        serving = self._host.serving
        assert serving is not None

        def shake_hands(stranger: PendingConnection) -> None:
            serving.start_soon(self._serve, stranger, strangers)

        strangers = PendingConnections(
            self._credentials, self._doorway, self._counters, self._has_room, shake_hands
        )
        task_status.started()
        await strangers.run(listening)

    async def _serve(self, stranger: PendingConnection, strangers: PendingConnections) -> None:
        """Serve one accepted connection, from its first flight to its end."""
        with contain("a connection that came in"):
            connection = None
            try:
                connection = await self._shake_hands(stranger)
            finally:
                strangers.leave(stranger, is_peer=connection is not None)
                if connection is None:
                    stranger.socket.close()
            if connection is not None:
                await self._serve_peer(connection)

    async def _shake_hands(self, stranger: PendingConnection) -> Connection | None:
        assert stranger.handshake is not None
        assert stranger.scope is not None
        transport = trio.SocketStream(trio.socket.from_stdlib_socket(stranger.socket))
        try:
            with stranger.scope as scope:
                session = await accept(transport, stranger.handshake, stranger.came)
                connection = self._host.make(transport, session)
                self._host.note_way(connection, transport)
                return self._enter(connection, stranger.source)
            is_late = trio.current_time() >= scope.deadline
            self._counters["handshakes_timed_out" if is_late else "handshakes_displaced"] += 1
        except RemoteProtocolError:
            self._counters["handshakes_refused"] += 1
        except (trio.BrokenResourceError, OSError):
            self._counters["handshakes_broken"] += 1
        return None

    def _has_room(self, source: bytes) -> bool:
        """Return whether a peer from this source would be admitted."""
        return self._register.has_room(trio.current_time(), source)

    def _enter(self, connection: Connection, source: bytes) -> Connection | None:
        """Count a connection, making room if necessary. Return None if no room can be made."""
        evicted = self._register.admit(trio.current_time(), connection, connection.peer, source)
        if evicted is None:
            self._counters["connections_over_limit"] += 1
            connection.end("there is no room")
            return None
        for each in evicted:
            self._router.evict(each)
        if not self._register.is_known(connection.peer):
            connection.charge(self._strangers_assembly)
        return connection

    async def _serve_peer(self, connection: Connection) -> None:
        peer = connection.peer
        if self._register.count(peer) > self._settings.inbound_per_peer_max:
            # A connection that only waits for its next hello can be given up: its opener dials again when it
            # needs one.
            spare = next((each for each in self._waiting if each.peer == peer), None)
            if spare is not None:
                self._router.evict(spare)
        busy = self._register.count(peer) > self._settings.inbound_per_peer_max
        try:
            refusals = 0
            for number in itertools.count():
                welcomed = await self._welcome(connection, busy=busy, is_first=number == 0)
                refusals = 0 if welcomed is not None else refusals + 1
                is_over = busy or refusals > self._settings.refusals_max or connection.why is not None
                if is_over or (welcomed is not None and not await self._converse(connection, *welcomed)):
                    break
        finally:
            self._router.forget(connection)
            connection.end("the conversation is over")

    async def _welcome(
        self, connection: Connection, *, busy: bool, is_first: bool
    ) -> tuple[Hello, str] | None:
        """Return the next request; None if there is none or it was refused."""
        seconds = self._settings.handshake_seconds
        if not is_first:
            seconds = INBOUND_IDLE_SECONDS
            connection.release()
            connection.is_spare = True
            self._waiting[connection] = None
        try:
            with trio.fail_after(seconds):
                return await self._router.welcome(connection, busy=busy)
        except RemoteProtocolError as error:
            self._counters["hellos_refused"] += 1
            connection.end(f"the other side broke the protocol: {error}")
        except (StreamClosed, trio.TooSlowError):
            # A reusable connection may end without another hello.
            self._counters["hellos_refused"] += is_first
            connection.end("no hello came")
        finally:
            connection.is_spare = False
            self._waiting.pop(connection, None)
        return None

    async def _converse(self, connection: Connection, hello: Hello, protocol: str) -> bool:
        """Hold one conversation; return whether the connection is free for another one."""
        if hello.kind == "identify":
            return self._host.serving is not None
        if hello.kind == "path":
            self._register.credit(connection)
            way: Way = "punched" if connection.is_punched else "direct"
            await self._host.paths.carry(connection, is_first=False, way=way, address=connection.source)
            return False
        if hello.kind == "message":
            return await self._router.take_one_shot(connection, protocol) and self._host.serving is not None
        self._counters["streams_served"] += 1
        stream = SecureStream(connection, protocol)
        self._host.carries(connection, stream)
        try:
            await self._router.serve(stream)
        finally:
            stream.close()
        is_free = await stream.finish()
        if is_free:
            self._register.credit(connection)
            connection.charge(self._assembly)
        if connection.why is None:
            self._host.carries(connection, None)
        return is_free and self._host.serving is not None
