"""The multiplexed paths of a node, by peer. It creates paths, chooses one for each stream, and gives them up.

A path is a connection after its handshake: a connection that a peer offers because it cannot be dialled, a
punched one, or a circuit of a relay.
"""

import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import trio

from crypto.contact import Address
from crypto.identity import PeerId, short_peer
from crypto.noise import HandshakeResult
from node.containment import contain
from node.errors import Unreachable
from node.transport.circuits import CircuitEnd
from node.transport.handshake import Credentials, SecuredTransport
from node.transport.multiplexed import MultiplexedPath, Way
from node.transport.relay_messages import PROTOCOL as RELAY_PROTOCOL
from node.transport.settings import PATHS, PathSettings
from node.transport.streams import SecureStream
from node.transport.tcp import Connection

IDLE_SECONDS = 60.0
"""How long a path without a channel is kept. A neighbour is usually asked again within this time, and an
unused path must not hold a relay's place for longer."""
RELAYED_IDLE_SECONDS = 15.0
"""The same for a relayed path, because a relay carries only a bounded number. In a swarm of a hundred members
behind routers, each asks some peer every few seconds, but the same peer again only after a long time."""
REPLACED_IDLE_SECONDS = 2.0
"""The same for a relayed path if there is a better path, because no more channels are opened on it."""
IMPROVE_SECONDS = 60.0
"""Seconds between attempts to find a better path than a relayed one."""
SOUGHT_MAX = 64
"""Maximum number of unreachable peers, the latest, remembered for IMPROVE_SECONDS because others were asked
to introduce them."""
SEEKING_MAX = 8
"""Maximum number of simultaneous attempts, because each costs a few streams for seconds."""
REPLACE_SECONDS = 2.0
"""Seconds between attempts to replace a path to one peer that is dead, or seems so."""
STOOD_SECONDS = 5.0
"""Least age at which the loss of a path puts other connections in doubt. A peer may end a younger path on
purpose."""
DOUBT_AGAIN_SECONDS = 60.0
"""Least time between two lost paths of one peer that put other connections in doubt."""
CIRCUIT_SECONDS = 10.0
"""Time limit for dialling the relay, reaching the peer through it, and the handshake."""
_WAYS: tuple[Way, ...] = ("direct", "punched", "relayed")
"""The kinds of paths, the best first."""


def idle_seconds(way: Way, *, has_better: bool) -> float:
    """Return how long a path without a channel is kept. `has_better` means that a path without a relay leads
    to the same peer."""
    if way != "relayed":
        return IDLE_SECONDS
    return REPLACED_IDLE_SECONDS if has_better else RELAYED_IDLE_SECONDS


class PathHost(Protocol):
    """The part of `node.transport.connections.Connections` that paths use."""

    @property
    def serving(self) -> trio.Nursery | None:
        """The nursery for tasks; None before the start, and once the node is leaving."""

    def make(
        self, transport: trio.SocketStream, session: HandshakeResult, path: MultiplexedPath | None = None
    ) -> Connection:
        """Keep a new connection in the table of all connections until it ends."""

    def serve_channel(self, path: MultiplexedPath, channel: socket.socket) -> None:
        """Serve a channel that a peer has opened."""

    async def open_bare(self, peer: PeerId, protocol: str, at: Address, ahead: bytes) -> SecureStream:
        """Open a stream that has a connection of its own, and send its first message `ahead` of the answer to
        the hello. Raises Unreachable."""

    async def dial_path(self, peer: PeerId, at: Address | None = None) -> Connection:
        """Dial a peer, and agree with it that the connection becomes a path. Raises Unreachable."""

    async def open_on(self, secured: SecuredTransport, protocol: str) -> SecureStream:
        """Open a stream on a connection whose handshake is complete. Raises Unreachable."""

    async def agree_on_path(self, secured: SecuredTransport) -> Connection:
        """Agree with the peer that a punched connection becomes a path. Raises Unreachable."""

    async def serve_punched(self, secured: SecuredTransport) -> None:
        """Serve a punched connection, until it is over."""

    def has_better(self, path: MultiplexedPath) -> None:
        """Note that there is a better path to a peer, so idle connections on this one are not used again."""

    async def reach_again(self, peer: PeerId) -> None:
        """Make a new path to a peer through any of its relays. Raises Unreachable."""

    def doubt(self) -> None:
        """Check soon for other dead connections, because a path was lost."""


@dataclass(eq=False)
class _Coming:
    """A circuit that one task is requesting. Other tasks wait for it, and request it themselves if that task
    gives up."""

    over: trio.Event = field(default_factory=trio.Event)
    has_failed: bool = False


class Paths:
    """All paths of one node."""

    def __init__(
        self,
        host: PathHost,
        credentials: Credentials,
        counters: Counter[str],
        settings: PathSettings = PATHS,
    ) -> None:
        self._settings = settings
        self._host = host
        self._credentials = credentials
        self._counters = counters
        # The oldest path comes first.
        self._paths: dict[PeerId, list[MultiplexedPath]] = {}
        self._connecting: dict[Address, _Coming] = {}
        self._improved: dict[PeerId, float] = {}
        # The oldest attempt comes first.
        self._sought: dict[PeerId, float] = {}
        self._seeking: set[PeerId] = set()
        self._replaced: set[PeerId] = set()
        self._doubted: dict[PeerId, float] = {}
        self.lost_punched: Callable[[PeerId], None] | None = None
        """Called with each peer whose punched path was lost."""
        self.introduce: Callable[[PeerId], Awaitable[None]] | None = None
        """Tries to reach a peer that has no path, through an introduction by a peer that knows both."""
        self.punch: Callable[[PeerId], Awaitable[None]] | None = None
        """Tries to reach a peer by hole punching; set by `puncher`."""

    def __len__(self) -> int:
        return sum(map(len, self._paths.values()))

    def __iter__(self) -> Iterator[MultiplexedPath]:
        return iter([path for paths in self._paths.values() for path in paths])

    def of(self, peer: PeerId) -> tuple[MultiplexedPath, ...]:
        """Return the open paths to a peer, the best first."""
        standing = [path for path in self._paths.get(peer, ()) if path.stands]
        return tuple(sorted(standing, key=lambda path: (path.is_silent, _WAYS.index(path.way), -path.since)))

    def best(self, peer: PeerId) -> MultiplexedPath | None:
        """Return the path for a new stream to a peer; None if the peer should be dialled."""
        paths = self.of(peer)
        if not paths or any(path.is_own_dial for path in paths):
            return None
        return paths[0]

    # --- creation ------------------------------------------------------------------------------------

    async def adopt(self, secured: SecuredTransport, *, is_first: bool, way: Way) -> MultiplexedPath:
        """Make a path out of a connection right after its handshake. Both peers do this, and one of them
        `is_first`. Streams to the peer are opened on it, and streams that the peer opens are served. Raises
        Unreachable."""
        connection = self._host.make(secured.transport, secured.session)
        return await self._start(connection, is_first=is_first, way=way, address=secured.address)

    async def offer(self, peer: PeerId, at: Address | None = None) -> MultiplexedPath:
        """Dial a peer and keep the connection as a path by which the peer reaches this node. Raises
        Unreachable."""
        connection = await self._host.dial_path(peer, at)
        return await self._start(connection, is_first=True, way="direct", address=connection.source)

    def offer_soon(self, peer: PeerId) -> None:
        """Offer a path to a peer that has none, if that was not tried recently."""
        serving = self._host.serving
        if serving is not None and not self.of(peer) and peer not in self._improved:
            self._improved[peer] = trio.current_time()
            serving.start_soon(self._offer_quietly, peer)

    @contextmanager
    def seeking(self, peer: PeerId) -> Iterator[None]:
        """Run a block that dials a peer. If that fails, ask others, not too often, to introduce the peer to
        this node."""
        try:
            yield
        except Unreachable:
            self.seek(peer)
            raise

    def seek(self, peer: PeerId) -> None:
        """Ask others, not too often, to introduce a peer that this node cannot reach."""
        serving, introduce = self._host.serving, self.introduce
        if serving is not None and introduce is not None and self._may_seek(peer):
            if len(self._sought) >= SOUGHT_MAX:
                del self._sought[next(each for each in self._sought if each not in self._seeking)]
            self._sought[peer] = trio.current_time()
            self._seeking.add(peer)
            serving.start_soon(self._seek_quietly, introduce, peer)

    def _may_seek(self, peer: PeerId) -> bool:
        is_sought = peer in self._sought or peer in self._seeking
        return not self.of(peer) and not is_sought and len(self._seeking) < SEEKING_MAX

    async def _seek_quietly(self, introduce: Callable[[PeerId], Awaitable[None]], peer: PeerId) -> None:
        try:
            with contain("asking for an introduction to a peer"):
                await introduce(peer)
        finally:
            self._seeking.discard(peer)

    async def _offer_quietly(self, peer: PeerId) -> None:
        with contain("offering a path"):
            try:
                await self.offer(peer)
            except Unreachable:
                self._counters["paths_not_offered"] += 1

    async def offer_on(self, secured: SecuredTransport) -> MultiplexedPath:
        """Make a path out of a punched connection on which the peer waits to be told its purpose. Raises
        Unreachable."""
        connection = await self._host.agree_on_path(secured)
        return await self._start(connection, is_first=True, way="punched", address=connection.source)

    async def open_on(self, secured: SecuredTransport, protocol: str) -> SecureStream:
        """Open a stream on a connection whose handshake is complete. Raises Unreachable."""
        return await self._host.open_on(secured, protocol)

    def serve_punched(self, secured: SecuredTransport) -> None:
        """Serve a connection made by hole punching. The other peer states its purpose."""
        if self._host.serving is None:
            secured.transport.socket.close()
        else:
            self._host.serving.start_soon(self._host.serve_punched, secured)

    async def through(self, circuit: Address) -> MultiplexedPath:
        """Return the path through a circuit: an open one, one being opened, or a new one. Raises
        Unreachable."""
        peer, relay = circuit.peer, circuit.relay
        assert relay is not None
        if peer is None:
            raise Unreachable("unknown", f"{circuit} does not name the peer behind the relay")
        if relay == self._credentials.identity.peer:
            raise Unreachable("unknown", f"{circuit} leads through this node itself")
        while True:
            for path in self.of(peer):
                if path.relay == relay and not path.is_silent:
                    return path
            if (before := self._connecting.get(circuit)) is None:
                break
            await before.over.wait()
            if before.has_failed:
                raise Unreachable(
                    "refused", f"{short_peer(relay)} did not make a connection to {short_peer(peer)}"
                )
        coming = self._connecting[circuit] = _Coming()
        try:
            with trio.move_on_after(CIRCUIT_SECONDS):
                end = CircuitEnd.asking(self._credentials, peer)
                at = circuit.of_relay
                stream = await self._host.open_bare(relay, RELAY_PROTOCOL, at, end.request)
                transport, session = await end.connect(stream)
                secured = SecuredTransport(circuit, transport, session)
                return await self.adopt(secured, is_first=True, way="relayed")
            raise Unreachable("timeout", f"{short_peer(peer)} did not answer through {short_peer(relay)}")
        except Unreachable:
            coming.has_failed = True
            raise
        finally:
            del self._connecting[circuit]
            coming.over.set()

    async def accept(
        self, relay: PeerId, at: Address, token: bytes, peer: PeerId, flight: bytes
    ) -> MultiplexedPath:
        """Let `peer` reach this node through the relay that has announced it. `flight` begins the handshake.
        Raises Unreachable, or RemoteProtocolError if the flight is invalid."""
        with trio.move_on_after(CIRCUIT_SECONDS):
            end = CircuitEnd.taking(self._credentials, peer, token, flight)
            stream = await self._host.open_bare(relay, RELAY_PROTOCOL, at, end.request)
            transport, session = await end.connect(stream)
            secured = SecuredTransport(at.of(relay).through(peer), transport, session)
            return await self.adopt(secured, is_first=False, way="relayed")
        raise Unreachable("timeout", f"{short_peer(peer)} did not connect through {short_peer(relay)}")

    async def carry(
        self,
        connection: Connection,
        *,
        is_first: bool,
        way: Way,
        address: Address | None,
        task_status: trio.TaskStatus[MultiplexedPath] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run the path of a negotiated connection until it is over."""
        path = MultiplexedPath(
            connection,
            is_first=is_first,
            way=way,
            address=address,
            opened=self._host.serve_channel,
            fell_silent=self._fell_silent,
            counters=self._counters,
            settings=self._settings,
        )
        self._make_room(path.peer, path.relay)
        # Count the path only now, because any number of paths may be about to start.
        self._paths.setdefault(path.peer, []).append(path)
        self._counters[f"paths_{way}"] += 1
        for other in self.of(path.peer):
            self._host.has_better(other)
            # A peer with a new path may have lost the previous one.
            other.doubt()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(path.run)
                self._compare(path.peer)
                self._improve(path, path.since)
                task_status.started(path)
        finally:
            left = [each for each in self._paths.pop(path.peer, []) if each is not path]
            if left:
                self._paths[path.peer] = left
            self._compare(path.peer)
            if path.is_lost:
                self._lose(path)

    def _compare(self, peer: PeerId) -> None:
        """Note which paths to a peer are less direct than its best path."""
        paths = self.of(peer)
        for path in paths:
            path.has_better = _WAYS.index(path.way) > min(_WAYS.index(each.way) for each in paths)

    async def _start(
        self, connection: Connection, *, is_first: bool, way: Way, address: Address | None
    ) -> MultiplexedPath:
        serving = self._host.serving
        if serving is None:
            raise Unreachable("refused", str(connection.end("this node is leaving")))
        task = partial(self._carry, connection, is_first=is_first, way=way, address=address)
        path: MultiplexedPath = await serving.start(task)
        return path

    async def _carry(
        self,
        connection: Connection,
        *,
        is_first: bool,
        way: Way,
        address: Address | None,
        task_status: trio.TaskStatus[MultiplexedPath],
    ) -> None:
        with contain("a path"):
            await self.carry(connection, is_first=is_first, way=way, address=address, task_status=task_status)

    # --- replacement ---------------------------------------------------------------------------------

    def _fell_silent(self, path: MultiplexedPath) -> None:
        """Look for a different path to a peer that has not answered a ping. This also shows whether the
        present path is dead."""
        if path.is_kept:
            path.doubt()  # the task that keeps the path makes a new one
        else:
            self._replace_soon(path)

    def _lose(self, path: MultiplexedPath) -> None:
        self._counters["paths_lost"] += 1
        now = trio.current_time()
        if path.since + STOOD_SECONDS <= now and path.peer not in self._doubted:
            self._doubted[path.peer] = now
            self._host.doubt()
        if path.way == "punched":
            self._improved.pop(path.peer, None)
            if self.lost_punched is not None:
                self.lost_punched(path.peer)
        others = self.of(path.peer)
        for other in others:
            self._improve(other, now)
        if not path.is_kept and (not others or others[0].is_silent):
            self._replace_soon(path)

    def _replace_soon(self, path: MultiplexedPath) -> None:
        serving = self._host.serving
        if serving is not None and path.peer not in self._replaced:
            self._replaced.add(path.peer)
            serving.start_soon(self._replace, path)

    async def _replace(self, path: MultiplexedPath) -> None:
        began = trio.current_time()
        try:
            with contain("replacing a path"):
                try:
                    if path.is_own_dial:
                        await self.offer(path.peer)
                    else:
                        await self._host.reach_again(path.peer)
                    self._counters["paths_replaced"] += 1
                except Unreachable:
                    self._counters["paths_not_replaced"] += 1
            await trio.sleep_until(began + REPLACE_SECONDS)
        finally:
            self._replaced.discard(path.peer)

    # --- upkeep --------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Give up unused paths, and look for better paths to replace relayed ones."""
        for path in self:
            has_better = any(each.way != "relayed" for each in self.of(path.peer))
            idle_until = path.used_at + idle_seconds(path.way, has_better=has_better)
            if not len(path) and not path.is_kept and idle_until <= now:
                path.end("idle for too long")
        self._improved = {peer: at for peer, at in self._improved.items() if at + IMPROVE_SECONDS > now}
        self._sought = {peer: at for peer, at in self._sought.items() if at + IMPROVE_SECONDS > now}
        self._doubted = {peer: at for peer, at in self._doubted.items() if at + DOUBT_AGAIN_SECONDS > now}
        for path in self:
            self._improve(path, now)

    def _improve(self, path: MultiplexedPath, now: float) -> None:
        """Dial a peer that came through a relay, because it may be reachable although it cannot dial this
        node. The node that was reached does this, because it is the one that cannot be dialled."""
        serving = self._host.serving
        is_only = all(each.way == "relayed" or each.is_silent for each in self.of(path.peer))
        if serving is None or path.is_first or not is_only or path.peer in self._improved:
            return
        self._improved[path.peer] = now
        serving.start_soon(self._dial_instead, path.peer)

    async def _dial_instead(self, peer: PeerId) -> None:
        with contain("dialling a peer that came through a relay"):
            async with trio.open_nursery() as nursery:
                if self.punch is not None:
                    nursery.start_soon(self.punch, peer)
                try:
                    await self.offer(peer)
                    nursery.cancel_scope.cancel()
                except Unreachable:
                    self._counters["paths_not_improved"] += 1

    def _make_room(self, peer: PeerId, relay: PeerId | None) -> None:
        standing = [path for path in self if path.connection.why is None]
        own = [path for path in standing if path.peer == peer]
        if len(own) >= self._settings.per_peer_max:
            spare = min(own, key=lambda path: (not path.is_silent, path.is_kept, path.used_at))
            spare.end("more paths than needed")
            return
        carried = [path for path in standing if path.relay == relay] if relay is not None else []
        if len(carried) >= self._settings.per_relay_max:
            min(carried, key=lambda path: (len(path) > 0, path.used_at)).end("others need the room")
        elif len(standing) >= self._settings.paths_max:
            unkept = [path for path in standing if not path.is_kept] or standing
            min(unkept, key=lambda path: (len(path) > 0, path.used_at)).end("others need the room")
