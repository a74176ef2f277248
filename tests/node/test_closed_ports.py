"""A host reports that a port is closed: the peer at that port is marked, and no other packet is lost."""

import socket
import sys
from collections import Counter

import pytest
import trio

from crypto.contact import Address
from node.transport.sockets import UdpSockets, address_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports closed ports")


def bound(host: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_DGRAM)
    own.bind((host, 0))
    return own


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_closed_port_is_reported_and_other_packets_still_arrive(host: str) -> None:
    try:
        own, other, gone = bound(host), bound(host), bound(host)
    except OSError:
        pytest.skip("no IPv6 here")
    closed: list[Address] = []
    counters: Counter[str] = Counter()
    sockets = UdpSockets([own], counters, closed.append)
    other.setblocking(False)
    place = address_of(gone.getsockname())
    gone.close()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sockets.receive_forever, 1_232, lambda _packet, _route: True, lambda: None)
            while not closed:
                route = sockets.route(place)
                assert route is not None
                sockets.send(b"anybody?", route)
                await trio.sleep(0.01)
            to_other = sockets.route(address_of(other.getsockname()))
            assert to_other is not None
            route = sockets.route(place)
            assert route is not None
            for _ in range(20):
                sockets.send(b"lost", route)
                sockets.send(b"kept", to_other)
            await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
    assert set(closed) == {place}
    got = []
    for _ in range(20):
        got.append(other.recv(100))
    assert got == [b"kept"] * 20
    assert counters["datagrams_faulty_socket"] == 0
    sockets.close()
    other.close()
