"""Attacks on connections by visitors without an identity: silent, slow, garbled, aborted and replayed."""

import os
import socket
from collections import deque
from contextlib import suppress

from crypto.identity import Identity
from crypto.noise import PeerHandshake, ReplayCache, identity_payload, static_public_key
from crypto.noise.ciphers import KEY_BYTES
from crypto.swarm import Swarm
from node.transport.handshake import default_suites
from tests.hostile.attack import Attack, Target

HELD_MAX = 2_000
"""Maximum number of sockets that one attack keeps open, the latest; fewer than the files that a process may
open."""
REFUSALS = (
    "handshakes_displaced",
    "handshakes_refused",
    "handshakes_broken",
    "handshakes_timed_out",
    "connections_over_limit",
)


def handshake(target: Target, identity: Identity | None = None) -> PeerHandshake:
    """Return an initiator's side of a handshake, by default with a new identity."""
    static = os.urandom(KEY_BYTES)
    return PeerHandshake(
        initiator=True,
        proof=identity_payload(identity or Identity(os.urandom(32)), static_public_key(static)),
        static=static,
        swarm=Swarm(target.swarm),
        suites=default_suites(),
        entropy=os.urandom,
        knocks=ReplayCache(),
    )


class Visitors(Attack):
    """Connects, sends `words`, and then waits until the victim closes the connection."""

    counters = REFUSALS
    held_max = HELD_MAX

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._held: deque[tuple[socket.socket, bytes]] = deque()

    def words(self) -> bytes:
        return b""

    def strike(self) -> None:
        visitor = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        visitor.setblocking(False)
        with suppress(OSError):
            visitor.bind((self.host(), 0))
            visitor.connect_ex(self.target.place)
        self._held.append((visitor, _send(visitor, self.words())))
        if len(self._held) > self.held_max:
            self._held.popleft()[0].close()
        # A visitor whose connection was not established yet gets another chance to send.
        oldest, left = self._held.popleft()
        self._held.append((oldest, _send(oldest, left)))

    def close(self) -> None:
        for visitor, _ in self._held:
            visitor.close()


def _send(visitor: socket.socket, words: bytes) -> bytes:
    """Return the bytes that were not sent; all of them while the connection is not established."""
    try:
        return words[visitor.send(words) :] if words else b""
    except BlockingIOError:
        return words
    except OSError:
        return b""


class SilentVisitors(Visitors):
    """Connect, and send nothing."""

    rate = 200.0


class GarbledVisitors(Visitors):
    """Speak a different protocol or none, or announce a length that no message has."""

    rate = 200.0

    def words(self) -> bytes:
        return self.rng.choice(
            [
                b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                bytes.fromhex("160301020001000001fc0303") + self.rng.randbytes(500),
                self.rng.randbytes(self.rng.randrange(1, 4_000)),
                b"\x03\xff" + self.rng.randbytes(255),
                b"\x03\x01\x01\xff\xff" + self.rng.randbytes(60_000),
                b"\x03\x01\x01\x00\x00",
            ]
        )


class HastyVisitors(Visitors):
    """Connect, and reset the connection at once."""

    rate = 200.0

    def strike(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as visitor, suppress(OSError):
            visitor.setblocking(False)
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            visitor.bind((self.host(), 0))
            visitor.connect_ex(self.target.place)


class HalfVisitors(Visitors):
    """Send a correct first flight with a false answer after it: this is the most computation that an unknown
    peer can cause before it has shown its identity."""

    rate = 50.0

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._flights = [handshake(target).start() for _ in range(20)]

    def words(self) -> bytes:
        return self.rng.choice(self._flights)


class RecordedVisitors(HalfVisitors):
    """Replay both flights of another peer's handshake, which was valid in its time, and more of its bytes."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._flights = [record(target) for _ in range(10)]


def record(target: Target) -> bytes:
    """Return all that an initiator sends to the victim in a handshake, as an eavesdropper records it."""
    said = b""
    with socket.create_connection(target.place, timeout=20) as connection:
        hands = handshake(target)
        outgoing = hands.start()
        while True:
            connection.sendall(outgoing)
            said += outgoing
            if hands.session is not None:
                return said
            outgoing = hands.receive(read(connection, hands.wanted))


def read(connection: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes. Raises EOFError, OSError."""
    came = b""
    while len(came) < count:
        more = connection.recv(count - len(came))
        if not more:
            raise EOFError
        came += more
    return came


class DrippingVisitors(Visitors):
    """Send a correct first flight one byte at a time: `rate` bytes per second, spread over all visitors."""

    rate = 200.0
    held_max = 200

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._flight = handshake(target).start()

    def strike(self) -> None:
        if len(self._held) < self.held_max:
            super().strike()
        visitor, left = self._held.popleft()
        try:
            left = left or self._flight
            left = left[visitor.send(left[:1]) :]
        except BlockingIOError:
            pass  # it is served again in its turn
        except OSError:
            visitor.close()
            return
        self._held.append((visitor, left))
