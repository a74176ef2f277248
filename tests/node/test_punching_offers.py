"""The packets that one punch offer makes a node send, and pairs of nodes that are punched with these
packets."""

import os
import socket
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from crypto.contact import Address, make_address
from crypto.encoding import encode
from crypto.sessions.core import Sessions
from crypto.sessions.packets import INITIATION_BYTES_MIN, Datagram
from node.seams import RealClock
from node.transport.network import RealNetwork
from node.transport.punch_messages import CANDIDATES_MAX, OFFER_BYTES_MIN, PunchOffer
from node.transport.puncher import Puncher
from node.transport.punching import SYNS_BYTES, OfferAllowance
from node.transport.sockets import Route, UdpSockets
from node.transport.udp import Datagrams
from tests.node.nets import make_network

PORT = 30_000
HOSTS4 = [f"45.1.0.{number}" for number in (2, 3, 4, 5)]
HOSTS6 = [f"2a0f:1::{number}" for number in (2, 3, 4, 5)]
OUTSIDE, ELSEWHERE = make_address(HOSTS4[0], PORT), make_address(HOSTS4[1], PORT)
SWIM = "/peerloom/swim/1"


def header_bytes(host: str) -> int:
    """Return the bytes of the IP and UDP headers of a datagram."""
    return 48 if ":" in host else 28


class SentBytes:
    """Counts the bytes that one offer makes a node send to each host, headers included. No host answers
    datagrams; the hosts in `accepting` accept connections."""

    def __init__(self, accepting: Sequence[str] = ()) -> None:
        self.by_host, self.knocks, self.flights = Counter[str](), Counter[str](), Counter[str]()
        self.packets: list[bytes] = []
        self._accepting = accepting
        self._ends: list[tuple[str, socket.socket]] = []

    def route(self, address: Address) -> Route:
        return 0, (address.host, address.port)

    def send(self, packet: bytes, route: Route) -> None:
        host = route[1][0]
        self.by_host[host] += len(packet) + header_bytes(host)
        self.knocks[host] += 1
        self.packets.append(packet)

    async def connect(self, _places: object, address: Address, _pauses: object = ()) -> trio.SocketStream:
        """Count the packets of a dial, including those that the kernel repeats while the attempt lasts."""
        self.by_host[address.host] += 3 * (80 if address.kind == "ip6" else 60)
        if address.host not in self._accepting:
            await trio.sleep_forever()
        here, there = socket.socketpair()
        here.setblocking(False)
        there.setblocking(False)
        self._ends.append((address.host, there))
        return trio.SocketStream(trio.socket.from_stdlib_socket(here))

    def read_flights(self) -> None:
        """Count the bytes that arrived over the accepted connections."""
        for host, there in self._ends:
            self.flights[host] += len(there.recv(2**16))
            there.close()


def datagrams_over(sockets: object, network: RealNetwork) -> tuple[Sessions, Datagrams]:
    """Make datagrams for a network that leave over these sockets. Return their sessions and the datagrams."""
    credentials = network.credentials
    identity, swarm = credentials.identity, credentials.swarm
    sessions = Sessions(identity, swarm, os.urandom, now=0.0, wall_milliseconds=10**12, counters=Counter())
    datagrams = Datagrams(
        cast("UdpSockets", sockets),
        sessions,
        RealClock(),
        Counter(),
        where=lambda *_: (),
        heard=network._heard,
        arrived=lambda _: None,
        unanswered=lambda *_: None,
    )
    network._datagrams = datagrams
    return sessions, datagrams


def texts(hosts: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(make_address(host, PORT)) for host in hosts)


def sent_for(
    tcp: Sequence[str],
    udp: Sequence[str] | None = None,
    *,
    waiting_bytes: int = 0,
    filling: bytes = bytes(OFFER_BYTES_MIN),
    accepting: Sequence[str] = (),
) -> tuple[SentBytes, int]:
    """Have a node punch with an offer of these hosts; `udp` replaces the hosts for datagrams. Return what the
    node sends and the size of the offer in bytes. A message of `waiting_bytes` waits for a session with the
    peer."""
    sent, other = SentBytes(accepting), make_network("o").peer
    offer = PunchOffer(texts(tcp), texts(tcp if udp is None else udp), filling)

    async def main() -> None:
        network = make_network("n")
        sessions, _ = datagrams_over(sent, network)
        if waiting_bytes:
            sessions.send(RealClock().monotonic(), other, SWIM, bytes(waiting_bytes))
        puncher = Puncher(network, RealClock(), Random(1), list, Counter(), sent.connect)
        await puncher._dial(other, other, offer, 0.0, is_first=True)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    sent.read_flights()
    return sent, len(encode(offer))


# --- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting_bytes", [0, 850])
@pytest.mark.parametrize(
    ("tcp", "udp"),
    [
        (HOSTS4[:1], HOSTS4[:1]),
        ([HOSTS4[0], HOSTS6[0]], [HOSTS4[0], HOSTS6[0]]),
        (HOSTS4, HOSTS4),
        (HOSTS6, HOSTS6),
        (HOSTS4, HOSTS6),
    ],
    ids=["one", "both families", "four", "four of IPv6", "eight"],
)
def test_an_offer_limits_all_bytes_sent_to_silent_hosts(
    tcp: list[str], udp: list[str], waiting_bytes: int
) -> None:
    sent, offered_bytes = sent_for(tcp, udp, waiting_bytes=waiting_bytes)
    assert set(sent.by_host) == {*tcp, *udp}
    assert min(sent.knocks[host] for host in udp) == max(sent.knocks.values())
    assert sent.by_host.total() <= 3 * offered_bytes


def test_the_shortest_offer_allows_a_knock_and_a_dial_per_host() -> None:
    allowance = OfferAllowance(OFFER_BYTES_MIN)
    dialled = [make_address(f"2a0f:2::{number}", PORT) for number in range(1, 1 + CANDIDATES_MAX)]
    assert all(allowance.take(address, SYNS_BYTES[address.kind]) for address in dialled)
    assert allowance.take_datagrams([make_address(host, PORT) for host in HOSTS6], INITIATION_BYTES_MIN)


@pytest.mark.parametrize(
    ("hosts", "knocks"), [(HOSTS4[:1], 3), ([HOSTS4[0], HOSTS6[0]], 3), ([*HOSTS4[:2], HOSTS6[0]], 2)]
)
@pytest.mark.parametrize("waiting_bytes", [0, 300, 850])
def test_each_host_of_a_usual_offer_gets_knocks(hosts: list[str], knocks: int, waiting_bytes: int) -> None:
    sent, _ = sent_for(hosts, waiting_bytes=waiting_bytes)
    assert sent.knocks == dict.fromkeys(hosts, knocks)
    assert {len(packet) for packet in sent.packets} == {INITIATION_BYTES_MIN}


def test_an_older_offer_allows_three_knocks_for_one_host() -> None:
    hosts = HOSTS4[:1]
    filling = OFFER_BYTES_MIN - len(encode(PunchOffer(texts(hosts), texts(hosts), bytes(256)))) + 256
    sent, offered_bytes = sent_for(hosts, filling=bytes(filling))
    assert (sent.knocks, offered_bytes) == ({HOSTS4[0]: 3}, OFFER_BYTES_MIN)


def test_a_host_that_accepts_is_sent_one_more_flight() -> None:
    sent, offered_bytes = sent_for(HOSTS4, accepting=HOSTS4)
    handshake = make_network("n").credentials.handshake(initiator=True, expected=make_network("o").peer)
    assert sent.flights == dict.fromkeys(HOSTS4, len(handshake.start()))
    assert sent.by_host.total() <= 3 * offered_bytes


def test_an_offers_budget_excludes_a_host_that_proves_its_peer() -> None:
    allowance = OfferAllowance(300)
    assert allowance.take(OUTSIDE, 700)
    assert not allowance.take(ELSEWHERE, 700)
    allowance.proved(OUTSIDE)
    assert allowance.take(ELSEWHERE, 700)
    assert not allowance.take(ELSEWHERE, 700)
    assert allowance.take(OUTSIDE, 9_000)


def test_datagrams_are_sent_to_all_addresses_or_none() -> None:
    allowance = OfferAllowance(300)
    assert not allowance.take_datagrams([OUTSIDE, ELSEWHERE], 450)
    assert allowance.take_datagrams([OUTSIDE, ELSEWHERE], 422)
    assert not allowance.take(OUTSIDE, 1)
    allowance.proved(OUTSIDE)
    assert allowance.take_datagrams([OUTSIDE, ELSEWHERE], 422)


# --- pairs -----------------------------------------------------------------------------------------


class Side:
    """One of two nodes behind routers. Only its IPv4 packets arrive, except the first `lost` ones."""

    def __init__(self, letter: str, host: str, round_trip_seconds: float, lost: int) -> None:
        self.address = make_address(host, PORT)
        self.other: Side = self
        self.arrived: list[Datagram] = []
        self.nursery: trio.Nursery
        self._seconds, self._lost = round_trip_seconds / 2, lost
        self.network = make_network(letter)
        self.sessions, self.datagrams = datagrams_over(self, self.network)
        self.datagrams._arrived = self.arrived.append

    def route(self, address: Address) -> Route:
        return 0, (address.host, address.port)

    def note(self, _address: Address, _route: Route) -> None:
        """Ignore which socket reaches an address, because there is only one."""

    def send(self, packet: bytes, route: Route) -> None:
        if route[1] == (self.other.address.host, PORT):
            self._lost -= 1
            if self._lost < 0:
                self.nursery.start_soon(self._carry, packet)

    async def _carry(self, packet: bytes) -> None:
        await trio.sleep(self._seconds)
        self.other.datagrams._take(packet, (0, (self.address.host, PORT)))

    async def punch(self) -> None:
        """Dial the other node; no connection is ever made."""
        puncher = Puncher(self.network, RealClock(), Random(1), list, Counter(), SentBytes().connect)
        offered = texts([self.other.address.host, self.other.address.host.replace("45.1.0.", "2a0f:1::")])
        offer, peer = PunchOffer(offered, offered, bytes(OFFER_BYTES_MIN)), self.other.network.peer
        await puncher._dial(peer, peer, offer, 2 * self._seconds, is_first=True)

    @property
    def is_through(self) -> bool:
        state = self.sessions._table.peers.get(self.other.network.peer)
        return state is not None and state.current is not None


def punched(round_trip_seconds: float, *, lost: int = 0, waiting: bytes = b"") -> list[Side]:
    """Punch a pair of nodes with IPv4 and IPv6, where IPv6 is filtered. Return both nodes."""
    sides: list[Side] = []

    async def main() -> None:
        sides.extend(Side(each, f"45.1.0.{each}", round_trip_seconds, lost) for each in "12")
        sides[0].other, sides[1].other = sides[1], sides[0]
        async with trio.open_nursery() as nursery:
            for side in sides:
                side.nursery = nursery
                nursery.start_soon(side.datagrams.wake_forever)
                if waiting:
                    side.sessions.send(trio.current_time(), side.other.network.peer, SWIM, waiting)
            async with trio.open_nursery() as dialling:
                for side in sides:
                    dialling.start_soon(side.punch)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return sides


@pytest.mark.parametrize("round_trip_seconds", [0.05, 0.26, 0.4, 0.6, 0.8])
def test_a_pair_with_both_families_is_punched_at_any_round_trip(round_trip_seconds: float) -> None:
    assert [side.is_through for side in punched(round_trip_seconds)] == [True, True]


def test_a_pair_is_punched_although_its_first_knocks_are_lost() -> None:
    assert [side.is_through for side in punched(0.1, lost=1)] == [True, True]


@pytest.mark.parametrize("size_bytes", [300, 850])
def test_a_waiting_message_follows_the_punched_session_once(size_bytes: int) -> None:
    message = bytes(size_bytes)
    for side in punched(0.1, waiting=message):
        assert side.is_through
        assert [each.payload for each in side.arrived] == [message]


def test_a_knock_that_may_not_be_sent_does_not_affect_the_handshake() -> None:
    async def main() -> None:
        sent, alice, bob = SentBytes(), make_network("a"), make_network("b")
        sessions, datagrams = datagrams_over(sent, alice)
        others, _ = datagrams_over(SentBytes(), bob)
        datagrams.knock(0.0, bob.peer, [OUTSIDE], anew=True)
        datagrams.knock(0.1, bob.peer, [OUTSIDE], anew=True, may_send=lambda _addresses, _count: False)
        (packet,) = sent.packets
        (answer,) = others.receive(0.2, packet, ("45.1.0.9", PORT)).answers
        assert sessions.receive(0.3, answer, (OUTSIDE.host, PORT)).peer == bob.peer

    trio.run(main, clock=MockClock(autojump_threshold=0))
