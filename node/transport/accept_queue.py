"""Accepts connections and holds them until a valid first flight has arrived. All connections share one queue
and one task.

The task takes connections from the kernel, reads them, and closes those that send something else, hang up, or
take too long. Under load it handles many in one turn of the event loop, because a turn costs more than all
other work for a connection. A connection is ready once its first flight is complete and, in a private swarm,
proves that the sender has a swarm key. It goes on to the handshake as soon as `HandshakeGate` admits it, and
keeps its place in the queue until the handshake ends.

In a private swarm an outsider gets no byte and learns nothing from timing. Whatever it sends, its connection
is closed when it hangs up or at the deadline, just like a silent connection.
"""

import errno
import selectors
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

import trio

from crypto.errors import RemoteProtocolError
from crypto.noise import PeerHandshake
from crypto.noise.negotiation import HEAD_BYTES, check_head
from crypto.token_buckets import TokenBucket, prefix_of
from node.containment import contain, note
from node.forks import keep_from_children
from node.transport.half_open import HalfOpenQueue
from node.transport.handshake import FLIGHT_BYTES_MAX, Credentials
from node.transport.handshake_limits import HandshakeGate

TAKEN_AT_ONCE_MAX = 64
"""Maximum number of connections accepted from one listening socket in one turn, so that other tasks are not
delayed for more than some milliseconds."""
TURNS_RATE, TURNS_BURST = 2.0, 10.0
"""Immediate turns of the event loop for unknown peers: the rate per second, and the burst. A turn that yields
a peer is not counted."""
GATHER_SECONDS = 0.05
"""How long to pause between turns beyond that rate, while new connections gather. A turn costs at least 100
us, and each further connection in it 30 us. An honest peer that arrives in a crowd waits for this pause once
or twice."""
GATHERED_PART = 1 / 8
"""The share of the queue's places that may fill in one turn before the pause becomes shorter. The connections
of one turn must have time to shake hands before a whole queue of newer ones has arrived."""
READ_BYTES_MAX = 2**16
"""Maximum number of bytes read from an outsider. They are discarded, so that its connection ends like a
silent one. Beyond this, nothing more is read and the outsider's own kernel blocks. Bytes that arrived before
the rejection count too; otherwise the number of bytes that it can still send would reveal how much of its
flight was right."""

FAILED_SECONDS = 1.0
"""How long to pause after a turn that failed because of a bug in this program."""

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
"""After these errors the kernel keeps the connection, and the next turn tries again to accept it. Even
in a crowd turns are infrequent, so retrying costs little."""
_FILES = tuple(
    kind
    for name in ("EpollSelector", "KqueueSelector")
    if (kind := getattr(selectors, name, None)) is not None
)
"""Selectors that have a file descriptor of their own, which is readable when one of their sockets is."""


class PendingConnection:
    """One connection until its handshake is over, which must be by `due_at`."""

    __slots__ = (
        "came", "due_at", "gathers", "handshake", "is_heard", "is_outsider", "read_bytes", "scope", "socket",
        "source",
    )  # fmt: skip

    def __init__(self, connection: socket.socket, source: bytes, due_at: float) -> None:
        self.socket = connection
        keep_from_children(connection)
        self.source = source
        self.due_at = due_at
        self.came = b""
        self.handshake: PeerHandshake | None = None
        self.read_bytes = 0
        self.is_outsider = False
        """Whether it has proved to be an outsider's, so its bytes are discarded."""
        self.is_heard = False
        """Whether the selector watches it for incoming bytes."""
        self.gathers = False
        """Whether its bytes gather in the kernel until a minimum number has arrived."""
        self.scope: trio.CancelScope | None = None
        """The scope of the handshake's task, once there is one."""

    @property
    def missing_bytes(self) -> int:
        """The number of bytes still needed to judge the connection or to complete its first flight."""
        wanted = HEAD_BYTES if self.handshake is None else self.handshake.wanted
        return wanted - len(self.came)

    def gather(self, bytes_min: int) -> None:
        """Let the socket count as readable only once this many bytes have arrived, or at its end. On systems
        that do not support this, one byte is enough."""
        if self.gathers or bytes_min > 1:
            with suppress(OSError, AttributeError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, bytes_min)
                self.gathers = bytes_min > 1

    def hear(self, data: bytes, credentials: Credentials) -> bool:
        """Take received bytes; return whether the first flight is complete. Raises RemoteProtocolError if the
        sender is not a peer of this swarm."""
        self.came += data
        if self.handshake is None:
            if len(self.came) < HEAD_BYTES:
                return False
            # Most garbage is rejected here, before any handshake state exists for it.
            check_head(self.came)
            self.handshake = credentials.handshake(initiator=False)
            self.handshake.start()
        while not self.handshake.has_opened and len(self.came) >= (wanted := self.handshake.wanted):
            taken, self.came = self.came[:wanted], self.came[wanted:]
            self.handshake.receive(taken)
        return self.handshake.has_opened


class PendingConnections:
    """The queue of pending connections, served by one `run`. `has_room(source)` returns whether a peer from
    that source would be admitted at all. `shake_hands(connection)` starts a task that continues with `accept`
    and finally calls `leave`.
    """

    def __init__(
        self,
        credentials: Credentials,
        doorway: HalfOpenQueue[PendingConnection],
        counters: Counter[str],
        has_room: Callable[[bytes], bool],
        shake_hands: Callable[[PendingConnection], None],
        make_selector: Callable[[], selectors.BaseSelector] = selectors.DefaultSelector,
    ) -> None:
        self._credentials = credentials
        self._doorway = doorway
        self._counters = counters
        self._has_room = has_room
        self._shake_hands = shake_hands
        self._selector = make_selector()
        if sys.platform == "linux" and isinstance(self._selector, _FILES):  # kqueue is not inherited at all
            keep_from_children(self._selector)
        # Connections in the order of their deadlines.
        self._standing: dict[PendingConnection, None] = {}
        # The connections whose first flight is complete.
        self._ready: dict[PendingConnection, None] = {}
        now = trio.current_time()
        self._admission = HandshakeGate(now)
        self._turns = TokenBucket(TURNS_RATE, TURNS_BURST, TURNS_BURST, now)

    async def run(self, listening: Iterable[socket.socket]) -> None:
        """Take connections until cancelled; on cancellation, close the waiting connections that have no task
        yet."""
        try:
            for each in listening:
                self._selector.register(each, selectors.EVENT_READ)
            while True:
                with trio.move_on_at(self._next_due()):
                    await self._something_to_read()
                with contain("the doorway's turn") as part:
                    pause_seconds = self._take_turn()
                if part.error is not None:
                    await trio.sleep(FAILED_SECONDS)
                elif not self._turns.take(trio.current_time()):
                    await trio.sleep(pause_seconds)
        finally:
            for stranger in tuple(self._standing):
                self._send_away(stranger, "handshakes_cut_short")
            self._selector.close()

    def enter(self, connection: socket.socket, host: str) -> None:
        """Add a connection from this host."""
        connection.setblocking(False)
        source = prefix_of(host)
        if not self._has_room(source):
            self._counters["connections_over_limit"] += 1
            connection.close()
            return
        due_at = trio.current_time() + self._credentials.handshake_seconds
        stranger = PendingConnection(connection, source, due_at)
        gone = self._doorway.enter(stranger, source)
        if gone is not None:
            self._displace(gone)
        self._standing[stranger] = None
        # Most connections have already delivered some bytes.
        self._hear(stranger)

    def leave(self, stranger: PendingConnection, *, is_peer: bool) -> None:
        """Record that a handshake is over, and whether it ended in a peer."""
        self._doorway.leave(stranger, stranger.source)
        if is_peer:
            self._admission.proved(stranger.source, trio.current_time())
            self._turns.give()
            self._turns.give()

    # --- a turn ------------------------------------------------------------------------------------

    async def _something_to_read(self) -> None:
        """Wait for readable sockets; poll if the system's selector cannot be waited for."""
        if isinstance(self._selector, _FILES):
            await trio.lowlevel.wait_readable(self._selector.fileno())
        else:
            await trio.sleep(GATHER_SECONDS)

    def _next_due(self) -> float:
        if self._ready:
            return trio.current_time() + GATHER_SECONDS
        return next((stranger.due_at for stranger in self._standing), float("inf"))

    def _take_turn(self) -> float:
        """Do all that is due; return for how many seconds new connections may gather before the next turn."""
        taken, is_all = 0, True
        for key, _ in self._selector.select(0):
            if isinstance(key.data, PendingConnection):
                # A newer connection may have displaced this one during the same turn.
                if key.data.is_heard:
                    self._hear(key.data)
            elif isinstance(key.fileobj, socket.socket):
                count = self._take_connections(key.fileobj)
                taken, is_all = taken + count, is_all and count < TAKEN_AT_ONCE_MAX
        self._expire()
        self._admit()
        if not is_all:
            return 0.0
        return GATHER_SECONDS * min(1.0, GATHERED_PART * self._doorway.places_max / max(1, taken))

    def _take_connections(self, listening: socket.socket) -> int:
        """Accept connections; return their number. TAKEN_AT_ONCE_MAX means that the kernel may hold more."""
        for number in range(TAKEN_AT_ONCE_MAX):
            try:
                connection, address = listening.accept()
            except BlockingIOError:
                return number
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._counters["connections_not_taken"] += 1
                    return number
                # The connection was gone before we accepted it, or a firewall forbids it.
                self._counters["handshakes_broken"] += 1
                continue
            self.enter(connection, address[0])
        return TAKEN_AT_ONCE_MAX

    def _hear(self, stranger: PendingConnection) -> None:
        if stranger.is_outsider:
            self._ignore(stranger)
            return
        try:
            data = stranger.socket.recv(FLIGHT_BYTES_MAX)
            stranger.read_bytes += len(data)
            if not data:
                self._refuse(stranger)
            elif stranger.hear(data, self._credentials):
                self._unregister(stranger)
                self._ready[stranger] = None
            else:
                # Slow senders must not wake the loop once per byte.
                stranger.gather(stranger.missing_bytes)
                self._register(stranger)
        except BlockingIOError:
            stranger.gather(stranger.missing_bytes)  # a single first byte must not wake the task either
            self._register(stranger)
        except RemoteProtocolError:
            if self._credentials.swarm.is_private:
                stranger.is_outsider = True
                stranger.came = b""
                self._register(stranger)
            else:
                self._refuse(stranger)
        except OSError:
            self._send_away(stranger, "handshakes_broken")
        except Exception as error:
            self._send_away(stranger, "handshakes_failed")
            note(error, "a stranger's first flight")

    def _ignore(self, stranger: PendingConnection) -> None:
        """Read and discard an outsider's bytes."""
        try:
            data = stranger.socket.recv(READ_BYTES_MAX - stranger.read_bytes)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.read_bytes += len(data)
        if not data:
            self._refuse(stranger)
        elif stranger.read_bytes >= READ_BYTES_MAX:
            self._unregister(stranger)

    def _expire(self) -> None:
        now = trio.current_time()
        while self._standing and (stranger := next(iter(self._standing))).due_at <= now:
            is_outsider = self._credentials.swarm.is_private and stranger not in self._ready
            counter = "handshakes_by_outsiders" if is_outsider else "handshakes_timed_out"
            self._send_away(stranger, counter)

    def _admit(self) -> None:
        while self._ready:
            # Take the newest connection of each source. If some must wait in vain, let it be the oldest: it
            # is nearest to its deadline, so it has the least time left to shake hands.
            newest = {stranger.source: stranger for stranger in self._ready}
            source = self._admission.choose(newest, trio.current_time())
            if source is None:
                break
            stranger = newest[source]
            del self._ready[stranger], self._standing[stranger]
            stranger.gather(1)
            stranger.scope = trio.CancelScope(deadline=stranger.due_at)
            self._shake_hands(stranger)

    # --- endings -----------------------------------------------------------------------------------

    def _displace(self, stranger: PendingConnection) -> None:
        if stranger.scope is not None:
            stranger.scope.cancel()
        else:
            self._send_away(stranger, "handshakes_displaced")

    def _refuse(self, stranger: PendingConnection) -> None:
        is_private = self._credentials.swarm.is_private
        self._send_away(stranger, "handshakes_by_outsiders" if is_private else "handshakes_refused")

    def _send_away(self, stranger: PendingConnection, counter: str) -> None:
        self._counters[counter] += 1
        self._unregister(stranger)
        self._doorway.leave(stranger, stranger.source)
        self._standing.pop(stranger, None)
        self._ready.pop(stranger, None)
        if self._credentials.swarm.is_private:
            stranger.gather(1)
            with suppress(OSError):
                stranger.socket.recv(READ_BYTES_MAX)  # unread bytes would turn the close into a reset
        stranger.socket.close()

    def _register(self, stranger: PendingConnection) -> None:
        if not stranger.is_heard:
            self._selector.register(stranger.socket, selectors.EVENT_READ, stranger)
            stranger.is_heard = True

    def _unregister(self, stranger: PendingConnection) -> None:
        if stranger.is_heard:
            self._selector.unregister(stranger.socket)
            stranger.is_heard = False
