"""Datagrams over a node's UDP sockets. It drives `crypto.sessions` and delivers authentic messages.

Refused packets are counted. Not here: the choice of a peer's address (`address_book`).
"""

from collections import Counter
from collections.abc import Callable, Sequence

import trio

from crypto.contact import Address
from crypto.identity import PeerId
from crypto.sessions.core import Sessions
from crypto.sessions.packets import DATAGRAM_BYTES_MAX, INITIATION_BYTES_MIN, Datagram, DatagramRefused
from node.containment import contain, note
from node.seams import Clock
from node.transport.sockets import Route, UdpSockets, address_of
from node.waker import Waker

FAILED_SECONDS = 1.0
"""How long to pause before sessions are woken again after a failure. Their deadline does not change, so
without a pause this would be a busy loop."""


class Datagrams:
    """The datagrams of one node. `where(peer, now)` returns the destinations. `heard(peer, source, now)` is
    called for each authentic packet that is the newest, with any content; `arrived(datagram)` for each
    message; `unanswered(peer, now)` when handshakes fail."""

    def __init__(
        self,
        sockets: UdpSockets,
        sessions: Sessions,
        clock: Clock,
        counters: Counter[str],
        where: Callable[[PeerId, float], Sequence[Address]],
        heard: Callable[[PeerId, Address, float], None],
        arrived: Callable[[Datagram], None],
        unanswered: Callable[[PeerId, float], None],
    ) -> None:
        self._sockets = sockets
        self._sessions = sessions
        self._clock = clock
        self._counters = counters
        self._where = where
        self._heard = heard
        self._arrived = arrived
        self._unanswered = unanswered
        self._waker = Waker(clock, lambda: sessions.deadline)

    def send(
        self, now: float, peer: PeerId, protocol: str, payload: bytes, addresses: Sequence[Address]
    ) -> bool:
        """Send one message to each address; the peer accepts only one copy. Return False if no address can be
        used."""
        routes = self._routes(addresses)
        if not routes:
            return False
        self._counters["datagrams_sent"] += 1
        for packet in self._sessions.send(now, peer, protocol, payload):
            for route in routes:
                self._sockets.send(packet, route)
        self._waker.hasten()
        return True

    def knock(
        self,
        now: float,
        peer: PeerId,
        addresses: Sequence[Address],
        *,
        anew: bool = False,
        may_send: Callable[[Sequence[Address], int], bool] = lambda _addresses, _count: True,
    ) -> None:
        """Test whether datagrams get through to a peer; with `anew`, even during such a test.

        Before a packet goes to each of the addresses, `may_send(addresses, bytes)` must agree. A new test
        replaces the current one, whose answers are then refused, so it begins only if it can reach all the
        addresses."""
        ways = [(address, route) for address in addresses if (route := self._sockets.route(address))]
        if not ways or not may_send([address for address, _ in ways], INITIATION_BYTES_MIN):
            return
        for packet in self._sessions.knock(now, peer, anew=anew):
            for _, route in ways:
                self._sockets.send(packet, route)
        self._waker.hasten()

    def doubt(self) -> None:
        """Start new sessions with all peers."""
        self._sessions.doubt()

    async def receive_forever(self) -> None:
        """Run until cancelled."""
        await self._sockets.receive_forever(DATAGRAM_BYTES_MAX, self._take, self._waker.hasten)

    async def wake_forever(self) -> None:
        """Send due packets, until cancelled."""
        while True:
            with contain("sessions: their deadline") as part:
                due = await self._waker.wake_when_due(self._sessions)
                if due is None:
                    continue
                now = self._clock.monotonic()
                for peer, packet in due:
                    for route in self._routes(self._where(peer, now)):
                        self._sockets.send(packet, route)
                for peer in self._sessions.unanswered:
                    self._unanswered(peer, now)
            if part.error is not None:
                await trio.sleep(FAILED_SECONDS)

    def _take(self, packet: bytes, route: Route) -> bool:
        """Return whether a packet is an authentic packet of a peer. A packet on which this code fails counts
        as lost."""
        try:
            return self._take_authentic(packet, route)
        except Exception as error:
            note(error, "sessions: a packet")
            return False

    def _take_authentic(self, packet: bytes, route: Route) -> bool:
        source, now = route[1], self._clock.monotonic()
        try:
            received = self._sessions.receive(now, packet, source)
        except DatagramRefused as refusal:
            self._counters[f"datagrams_refused_{refusal.reason}"] += 1
            return False
        for answer in received.answers:
            self._sockets.send(answer, route)
        if received.newest and received.peer is not None:
            # A late copy from an old address must not move the peer back there.
            address = address_of(source)
            self._sockets.note(address, route)
            self._heard(received.peer, address, now)
        if received.datagram is not None:
            self._counters["datagrams_received"] += 1
            self._arrived(received.datagram)
        return received.peer is not None

    def _routes(self, addresses: Sequence[Address]) -> list[Route]:
        return [route for address in addresses if (route := self._sockets.route(address)) is not None]
