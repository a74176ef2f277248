"""Attacks by datagram: random packets, nearly correct ones, floods of correct ones, and replayed ones."""

import os
import socket
import time
from collections import OrderedDict
from contextlib import suppress

from crypto.contact import make_address
from crypto.identity import Identity
from crypto.sessions.core import Sessions
from crypto.sessions.packets import (
    COOKIE,
    COOKIE_BYTES,
    DATAGRAM_BYTES_MAX,
    INITIATION,
    INITIATION_BYTES_MIN,
    MACS_BYTES,
    RESPONSE,
    RESPONSE_BYTES,
    TRANSPORT,
    TRANSPORT_BYTES_MIN,
    TRANSPORT_HEAD,
    DatagramRefused,
)
from crypto.swarm import Swarm
from node.transport.beacon import BEACON_BYTES_MAX, Beacon, BeaconSeal
from node.transport.multicast import GROUP_4
from tests.hostile.attack import Attack, Target, from_all_hosts

PROTOCOL = "/peerloom/swim/1"
PACKETS_MADE = 2_048
"""Number of packets prepared in advance, so that sending one costs little more than the system call."""
WAITING_MAX = 512
"""Maximum number of handshakes whose answer is awaited."""
SESSION_SECONDS = 60.0
"""Seconds after which the attack makes a new session. An unused session expires after 180 s."""

LIES = 0.1
"""The share of beacons that are well-formed but false; the others are random."""


class Packets(Attack):
    """Sends the packets that `packet` returns, each from a random host."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.sockets = from_all_hosts(socket.SOCK_DGRAM)

    def strike(self) -> None:
        self.send(self.packet())

    def packet(self) -> bytes:
        raise AssertionError("a subclass must implement `packet`")

    def send(self, packet: bytes) -> None:
        with suppress(OSError):  # the send buffer is full
            self.rng.choice(self.sockets).sendto(packet, self.target.place)

    def close(self) -> None:
        for each in self.sockets:
            each.close()


class RandomPackets(Packets):
    """Random packets of all sizes, from empty to too long."""

    rate = 10_000.0
    counters = (
        "datagrams_refused_malformed",
        "datagrams_refused_swarm",
        "datagrams_refused_index",
    )

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._packets = [self.rng.randbytes(self.rng.randrange(1_400)) for _ in range(PACKETS_MADE)]

    def packet(self) -> bytes:
        return self.rng.choice(self._packets)


class NearlyPackets(RandomPackets):
    """Packets with a valid first byte and a valid size, but random content."""

    rate = 2_000.0

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._packets = [self._nearly() for _ in range(PACKETS_MADE)]

    def _nearly(self) -> bytes:
        kind, least, most = self.rng.choice(
            [
                (INITIATION, INITIATION_BYTES_MIN, DATAGRAM_BYTES_MAX),
                (RESPONSE, RESPONSE_BYTES, RESPONSE_BYTES),
                (COOKIE, COOKIE_BYTES, COOKIE_BYTES),
                (TRANSPORT, TRANSPORT_BYTES_MIN, DATAGRAM_BYTES_MAX),
            ]
        )
        return bytes((kind,)) + self.rng.randbytes(self.rng.randint(least, most) - 1)


def stranger(swarm: str) -> Sessions:
    """Return the sessions of a peer that nobody knows."""
    identity = Identity(os.urandom(32))
    now, wall = time.monotonic(), int(time.time() * 1000)
    return Sessions(identity, Swarm(swarm), os.urandom, now=now, wall_milliseconds=wall)


def initiation(sessions: Sessions, target: Target) -> bytes:
    """Return a first packet (initiation) to the target, with a message in it."""
    (packet,) = sessions.send(time.monotonic(), target.peer, PROTOCOL, b"let me in")
    return packet


class OtherSwarmPackets(Packets):
    """Perfect initiations of members of another swarm, and initiations of this swarm with one wrong byte."""

    rate = 1_000.0
    counters = ("datagrams_refused_swarm",)

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._packets = [initiation(stranger("another"), target) for _ in range(50)]
        for _ in range(50):
            packet = bytearray(initiation(stranger(target.swarm), target))
            packet[self.rng.randrange(1, len(packet) - MACS_BYTES // 2)] ^= 1
            self._packets.append(bytes(packet))

    def packet(self) -> bytes:
        return self.rng.choice(self._packets)


class ReplayedPackets(Packets):
    """Perfect initiations that have been sent before."""

    rate = 1_000.0
    counters = ("datagrams_refused_replay",)

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._packets = [initiation(stranger(target.swarm), target) for _ in range(20)]

    def packet(self) -> bytes:
        return self.rng.choice(self._packets)


class UnwelcomePackets(Packets):
    """Initiations of ever new members of the swarm that forge their addresses, so no answer reaches them."""

    rate = 500.0
    counters = ("cookies_sent", "datagrams_refused_busy")

    def packet(self) -> bytes:
        return initiation(stranger(self.target.swarm), self.target)


class PatientPackets(Packets):
    """The same initiations from real addresses: the members answer with the cookie, go on, and fill the
    tables."""

    rate = 300.0
    counters = ("cookies_sent", "datagrams_refused_busy")

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._waiting: OrderedDict[bytes, Sessions] = OrderedDict()

    def strike(self) -> None:
        sessions, own = stranger(self.target.swarm), self.rng.choice(self.sockets)
        packet = initiation(sessions, self.target)
        self._waiting[packet[1:5]] = sessions
        if len(self._waiting) > WAITING_MAX:
            self._waiting.popitem(last=False)
        with suppress(OSError):
            own.sendto(packet, self.target.place)
        for each in self.sockets:
            self._read(each)

    def _read(self, own: socket.socket) -> None:
        """Continue every handshake for which an answer has arrived."""
        now = time.monotonic()
        with suppress(OSError):
            while True:
                answer, source = own.recvfrom(2_048)
                index = answer[5:9] if answer[:1] == bytes((RESPONSE,)) else answer[1:5]
                sessions = self._waiting.get(index)
                if sessions is None:
                    continue
                with suppress(DatagramRefused):
                    packets = sessions.receive(now, answer, source).answers
                    for each in [*packets, *(packet for _, packet in sessions.wake(now))]:
                        own.sendto(each, self.target.place)


class KnownIndexPackets(Packets):
    """Transport packets of an existing session, with a body that nobody sealed, or replayed."""

    rate = 2_000.0
    counters = ("datagrams_refused_seal", "datagrams_refused_replay")

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._old = b""
        self._until = 0.0

    def strike(self) -> None:
        if time.monotonic() > self._until:
            self._meet()
        elif self._old:
            super().strike()

    def packet(self) -> bytes:
        if self.rng.random() < 0.25:
            return self._old
        _, index, _ = TRANSPORT_HEAD.unpack_from(self._old)
        head = TRANSPORT_HEAD.pack(TRANSPORT, index, self.rng.randrange(1_000, 100_000))
        return head + self.rng.randbytes(self.rng.randint(16, 1_000))

    def _meet(self) -> None:
        """Start a session for the attack; under load this takes more than one attempt."""
        sessions = stranger(self.target.swarm)
        self._until = time.monotonic() + 0.5
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.settimeout(0.1)
            own.bind((self.host(), 0))
            packets = [initiation(sessions, self.target)]
            with suppress(OSError, DatagramRefused):
                while True:
                    for packet in packets:
                        own.sendto(packet, self.target.place)
                        if packet[0] == TRANSPORT:
                            self._old, self._until = packet, time.monotonic() + SESSION_SECONDS
                            return
                    answer, source = own.recvfrom(2_048)
                    packets = sessions.receive(time.monotonic(), answer, source).answers
                    packets += [packet for _, packet in sessions.wake(time.monotonic())]


class Beacons(Attack):
    """Beacons to the local network: random ones of all sizes, and a member's beacons with addresses where
    nobody listens."""

    rate = 1_000.0
    counters = ("beacons_dropped", "beacons_over_rate", "beacons_of_others", "beacons_refused_size")

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._seal = BeaconSeal(Swarm(target.swarm).secrets, os.urandom)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind((target.host, 0))
        here = socket.inet_aton(target.host)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, here)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)

    def strike(self) -> None:
        data = self.rng.randbytes(self.rng.randrange(2 * BEACON_BYTES_MAX))
        if self.rng.random() < LIES:
            nobody = make_address(self.host(), self.rng.randrange(1, 1_024))
            data = self._seal.seal(Beacon(True, Identity(os.urandom(32)).peer, (str(nobody),)))
        with suppress(OSError):
            self._socket.sendto(data, (GROUP_4, self.target.beacon_port))

    def close(self) -> None:
        self._socket.close()
