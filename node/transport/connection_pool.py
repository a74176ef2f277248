"""Idle connections between conversations, grouped by peer, the latest used first.

No I/O except checking the connections. An idle connection saves the next conversation with that peer a
handshake. The number of connections and their idle time are bounded.
"""

from collections import OrderedDict
from collections.abc import Hashable

from crypto.contact import Address
from crypto.identity import PeerId
from node.transport.tcp import Connection

IDLE_SECONDS = 30.0
"""How long a connection may be idle. A node asks the same peers again within seconds, or not for a long
time."""
IDLE_PER_PEER_MAX = 4
"""Maximum number of idle connections to one peer: as many as one part of a node uses simultaneously."""
IDLE_MAX = 128
"""Maximum number of idle connections to all peers: the neighbours of a busy node, and a small part of the
files that a process may open."""


class IdleConnections:
    """A bounded pool that ends the connections it drops. `now` is monotonic seconds."""

    def __init__(
        self,
        *,
        seconds: float = IDLE_SECONDS,
        per_peer_max: int = IDLE_PER_PEER_MAX,
        number_max: int = IDLE_MAX,
    ) -> None:
        self._seconds = seconds
        self._per_peer_max = per_peer_max
        self._number_max = number_max
        # When each connection became idle, the longest idle first.
        self._since: OrderedDict[Connection, float] = OrderedDict()
        self._by_peer: dict[PeerId, list[Connection]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def put(self, connection: Connection, now: float) -> None:
        """Keep a connection that has become free."""
        connection.release()
        self._since[connection] = now
        of_peer = self._by_peer.setdefault(connection.peer, [])
        of_peer.append(connection)
        if len(of_peer) > self._per_peer_max:
            of_peer[0].end("more idle connections than needed")
        if len(self._since) > self._number_max:
            next(iter(self._since)).end("more idle connections than needed")

    def take(self, peer: PeerId, at: Address | None = None, *, is_bare: bool = False) -> Connection | None:
        """Return a connection to `peer` that still seems open. If `at` is given, it must lead to that
        address; if `is_bare`, it must not be a channel of a path."""
        for connection in reversed(tuple(self._by_peer.get(peer, ()))):
            if not connection.is_quiet:
                connection.end("the other side closed it while it was idle")
            elif (at is None or connection.source == at) and not (is_bare and connection.path is not None):
                self.forget(connection)
                return connection
        return None

    def drop(self, peer: PeerId) -> None:
        """End all idle connections to `peer`, because one of its connections was found dead."""
        for connection in tuple(self._by_peer.get(peer, ())):
            connection.end("another connection to the same peer was dead")

    def drop_of(self, path: Hashable) -> None:
        """End all idle connections that are channels of a path."""
        for connection in tuple(self._since):
            if connection.path is path:
                connection.end("there is a better path")

    def expire(self, now: float) -> None:
        """End connections that have been idle for too long."""
        for connection, since in tuple(self._since.items()):
            if since + self._seconds > now:
                return
            connection.end("idle for too long")

    def clear(self) -> None:
        """End all connections."""
        for connection in tuple(self._since):
            connection.end("this node is leaving")

    def forget(self, connection: Connection) -> None:
        """Remove a connection that is used again, or has ended; ignore unknown ones."""
        if self._since.pop(connection, None) is not None:
            of_peer = self._by_peer[connection.peer]
            of_peer.remove(connection)
            if not of_peer:
                del self._by_peer[connection.peer]
