"""Attacks on connections by peers of the swarm whose handshakes are correct and whose later messages are not.

In an open swarm anybody can run any number of such peers.
"""

import os
import socket
import struct
from collections import deque
from contextlib import suppress
from itertools import count

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import Identity
from node.seams import MESSAGE_BYTES_USUAL
from node.transport.buffer_pool import Pool
from node.transport.records import Mark, RecordReader, RecordWriter
from node.transport.router import ACCEPTED, Hello, HelloAnswer
from tests.hostile.attack import Attack, Target
from tests.hostile.visitors import REFUSALS, handshake, read

ECHO = "/hostile/echo/1"
"""The stream protocol that the victim serves to everybody: it echoes what it receives."""
ANSWER_SECONDS = 3.0
GREEDY_BYTES = 60_000
SOCKET_BYTES = 4_096


class Guest:
    """One connection after its handshake. Raises OSError, or EOFError if the victim has closed the
    connection."""

    def __init__(self, target: Target, host: str, identity: Identity | None = None) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # A small receive buffer, so that unread data burdens the victim and not this process.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
            self.socket.settimeout(ANSWER_SECONDS)
            self.socket.bind((host, 0))
            self.socket.connect(target.place)
            hands = handshake(target, identity)
            outgoing = hands.start()
            while True:
                self.socket.sendall(outgoing)
                if hands.session is not None:
                    break
                outgoing = hands.receive(read(self.socket, hands.wanted))
        except BaseException:
            self.socket.close()
            raise
        self._cipher = hands.session.sending
        self._writer = RecordWriter(hands.session.sending, Pool())
        self._reader = RecordReader(hands.session.receiving, Pool())

    def say(self, message: bytes) -> None:
        whole = self._writer.whole(message)
        assert whole is not None
        self.socket.sendall(whole)

    def mark(self) -> None:
        self.socket.sendall(self._writer.mark(Mark.END))

    def seal(self, plain: bytes) -> None:
        """Send a record with any content."""
        sealed = self._cipher.encrypt(plain)
        self.socket.sendall(len(sealed).to_bytes(2, "big") + sealed)

    def open(self, protocol: str = ECHO) -> None:
        """Request a stream, and read the answer."""
        self.say(encode(Hello("stream", (protocol,))))
        while (answer := self._reader.next_message()) is None:
            space = self._reader.space()
            length = self.socket.recv_into(space[:1_000])
            if not length:
                raise EOFError
            self._reader.filled(length)
        if not isinstance(answer, tuple) or answer[0] != encode(HelloAnswer(ACCEPTED)):
            raise EOFError

    def close(self) -> None:
        self.socket.close()


class Guests(Attack):
    """Complete a handshake, do what `misbehave` does, and stay connected until the victim closes the
    connection."""

    counters: tuple[str, ...] = (*REFUSALS, "hellos_refused", "streams_broken", "streams_refused_busy")
    held_max = 100

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._held: deque[Guest] = deque()
        self.turns = count()
        """Counts the strikes so far. An attack with several misbehaviours uses them in turn."""

    def guest(self) -> Guest:
        return Guest(self.target, self.host())

    def misbehave(self, guest: Guest) -> None:
        raise AssertionError("a subclass must implement `misbehave`")

    def strike(self) -> None:
        with suppress(OSError, EOFError, RemoteProtocolError):
            guest = self.guest()
            self._held.append(guest)
            if len(self._held) > self.held_max:
                self._held.popleft().close()
            self.misbehave(guest)

    def close(self) -> None:
        for guest in self._held:
            guest.close()


class WrongHellos(Guests):
    """Send hellos that are garbage, contain a wrong mark, are unknown, or are too long."""

    rate = 20.0
    counters = (*Guests.counters, "streams_refused_protocol")

    def misbehave(self, guest: Guest) -> None:
        match next(self.turns) % 6:
            case 0:
                guest.say(self.rng.randbytes(100))
            case 1:
                guest.mark()
            case 2:
                for _ in range(30):
                    guest.say(encode(Hello("stream", ("/nobody/speaks/this",))))
            case 3:
                guest.say(bytes(5_000))
            case 4:
                guest.say(encode(["stream", ["/" + "x" * 500] * 50]))
            case 5:
                guest.say(b"")


class GarbledGuests(Guests):
    """Send unsealed records, valid records without a message, and messages in tiny pieces."""

    rate = 20.0

    def misbehave(self, guest: Guest) -> None:
        match next(self.turns) % 4:
            case 0:
                guest.socket.sendall(b"\x01\x00" + self.rng.randbytes(256))
            case 1:
                guest.socket.sendall(b"\x00\x00")
            case 2:
                guest.open()
                guest.seal(self.rng.randbytes(3))
            case 3:
                guest.open()
                guest.seal(struct.pack(">II", 1_000, 0) + bytes(10))


class HugeGuests(Guests):
    """Send forbidden lengths, and the longest allowed ones, with nothing after them."""

    rate = 20.0

    def misbehave(self, guest: Guest) -> None:
        guest.open()
        match next(self.turns) % 3:
            case 0:
                guest.seal(struct.pack(">II", 2**32 - 2, 0) + bytes(65_000))
            case 1:
                guest.seal(struct.pack(">II", MESSAGE_BYTES_USUAL, 0) + bytes(65_511))
            case 2:
                guest.seal(struct.pack(">II", 10, 2**32 - 1) + bytes(10))


class DrippingGuests(Guests):
    """Send a hello, and messages in its streams, one byte at a time. `rate` is bytes per second over all
    connections."""

    rate = 60.0
    held_max = 60

    def misbehave(self, guest: Guest) -> None:
        if len(self._held) % 2:
            guest.open()

    def strike(self) -> None:
        if len(self._held) < self.held_max:
            super().strike()
            return
        guest = self._held.popleft()
        try:
            # It begins with the length of a long record.
            guest.socket.sendall(b"\xff")
        except OSError:
            guest.close()
            return
        self._held.append(guest)


class GreedyGuests(Guests):
    """One peer opens as many streams as it can, requests much on all of them, and reads nothing."""

    rate = 30.0
    held_max = 200

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._identity = Identity(os.urandom(32))

    def guest(self) -> Guest:
        return Guest(self.target, self.host(), self._identity)

    def misbehave(self, guest: Guest) -> None:
        guest.open()
        guest.socket.settimeout(0.01)
        for _ in range(20):
            guest.say(bytes(GREEDY_BYTES))


class CrowdingGuests(Guests):
    """New peers each open a stream and stay: enough of them to leave no room for others."""

    rate = 50.0
    held_max = 2_000

    def misbehave(self, guest: Guest) -> None:
        guest.open()
