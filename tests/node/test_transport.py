"""The real network's datagrams, messages, ports and addresses, on 127.0.0.1."""

import os
import socket
from collections import Counter
from contextlib import suppress

import pytest
import trio
import trio.testing

from crypto.contact import Address, make_address, parse_address
from crypto.errors import LocalProtocolError
from crypto.identity import Identity
from crypto.sessions.core import Sessions
from crypto.sessions.packets import payload_bytes_max
from crypto.swarm import Swarm
from node.errors import UsageError
from node.seams import Network
from node.transport.listen import BoundSockets, bind_all, dialable
from node.transport.router import ONE_SHOT_BYTES_MAX
from node.transport.sockets import (
    REFUSED_PAUSE_SECONDS,
    Route,
    UdpSockets,
    address_of,
    socket_name,
    source_of_name,
)
from tests.node.nets import (
    LOOPBACK,
    PING,
    acquaint,
    arrival,
    make_network,
    raw_address,
    running,
    until,
    unused_address,
)


async def test_a_datagram_is_answered_without_a_known_sender_address() -> None:
    alice, bob = make_network("a"), make_network("b")
    seam: Network = alice
    bob.inbox(PING)
    alice.inbox(PING)
    async with running(alice, bob):
        seam.learn(bob.peer, bob.addresses)
        seam.send(bob.peer, PING, b"hello")
        assert await arrival(bob) == (alice.peer, b"hello")
        bob.send(alice.peer, PING, b"hello back")
        assert await arrival(alice) == (bob.peer, b"hello back")
    assert alice.counters["datagrams_sent"] == bob.counters["datagrams_sent"] == 1


async def test_messages_too_long_for_a_datagram_are_sent_by_stream() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.inbox(PING)
    longest = bytes(payload_bytes_max(PING))
    async with running(alice, bob):
        acquaint(alice, bob)
        for message in (longest, longest + b"x", os.urandom(ONE_SHOT_BYTES_MAX)):
            alice.send(bob.peer, PING, message)
            assert await arrival(bob) == (alice.peer, message)
        await until(lambda: alice.counters["messages_by_stream"] == 2)
        assert bob.counters["datagrams_received"] == 1
        with pytest.raises(LocalProtocolError):
            alice.send(bob.peer, PING, bytes(ONE_SHOT_BYTES_MAX + 1))


async def test_a_port_in_use_is_an_error_if_it_is_fixed() -> None:
    async with running(alice := make_network("a")):
        place = ("127.0.0.1", alice.port)
        with pytest.raises(UsageError, match=f"127.0.0.1:{alice.port}: the port is taken"):
            await bind_all([place], may_move=False)
        (bound,) = await bind_all([place])
        assert bound.port != alice.port
        bound.close()


async def test_a_peer_known_only_by_host_name_is_reached_by_stream() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.inbox(PING)
    async with running(alice, bob):
        alice.learn(bob.peer, [Address("dns", "localhost", bob.port)])
        alice.send(bob.peer, PING, b"hello")
        assert await arrival(bob) == (alice.peer, b"hello")
        # The stream has proved a numeric address, so the next message is sent as a datagram.
        alice.send(bob.peer, PING, b"again")
        assert await arrival(bob) == (alice.peer, b"again")
        assert bob.counters["datagrams_received"] == 1


async def test_messages_that_cannot_be_sent_are_counted() -> None:
    alice, bob = make_network("a"), make_network("b")
    alice.send(bob.peer, PING, b"before the start")
    async with running(alice):
        alice.send(bob.peer, PING, b"nobody knows where")
        nobody = unused_address()
        alice.learn(bob.peer, [nobody])
        alice.send(bob.peer, PING, bytes(5_000))
        await until(lambda: alice.counters["messages_by_stream_failed"] == 1)
    assert alice.counters["messages_while_not_running"] == 1
    assert alice.counters["messages_without_address"] == 1


async def test_a_message_for_a_protocol_without_inbox_is_refused_by_both_ends() -> None:
    alice, bob = make_network("a"), make_network("b")
    async with running(alice, bob):
        acquaint(alice, bob)
        alice.send(bob.peer, PING, b"small")
        alice.send(bob.peer, PING, bytes(5_000))
        await until(lambda: bob.counters["messages_refused_protocol"] == 1)
        await until(lambda: alice.counters["messages_by_stream_failed"] == 1)
        assert bob.counters["streams_refused_protocol"] == 1


def raw_sessions(letter: str) -> Sessions:
    """A peer whose packets the test itself carries."""
    identity = Identity(letter.encode() * 32)
    return Sessions(identity, Swarm("test"), os.urandom, now=0.0, wall_milliseconds=1)


def raw_socket() -> socket.socket:
    """Bind any port; packets must arrive within 10 s."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    made.setblocking(False)
    return made


async def raw_arrival(receiver: socket.socket) -> bytes:
    with trio.fail_after(10):
        await trio.lowlevel.wait_readable(receiver)
    return receiver.recv(2_000)


async def test_a_replayed_datagram_is_refused() -> None:
    alice, bob = raw_sessions("a"), make_network("b")
    bob.inbox(PING)
    (initiation,) = alice.send(0.0, bob.peer, PING, b"once")
    async with running(bob):
        with raw_socket() as attacker:
            attacker.sendto(initiation, raw_address(bob))
            attacker.sendto(initiation, raw_address(bob))
            assert await arrival(bob) == (Identity(b"a" * 32).peer, b"once")
            await until(lambda: bob.counters["datagrams_refused_replay"] == 1)
            alice.receive(0.0, await raw_arrival(attacker), raw_address(bob))
            (packet,) = alice.send(0.0, bob.peer, PING, b"twice")
            attacker.sendto(packet, raw_address(bob))
            attacker.sendto(packet, raw_address(bob))
            assert (await arrival(bob))[1] == b"twice"
            await until(lambda: bob.counters["datagrams_refused_replay"] == 2)


async def test_only_a_newer_datagram_changes_a_peers_address() -> None:
    alice, bob, peer = raw_sessions("a"), make_network("b"), Identity(b"a" * 32).peer
    bob.inbox(PING)
    async with running(bob):
        with raw_socket() as old, raw_socket() as new:
            old.sendto(alice.send(0.0, bob.peer, PING, b"")[0], raw_address(bob))
            confirmed = alice.receive(0.0, await raw_arrival(old), raw_address(bob))
            old.sendto(confirmed.answers[0], raw_address(bob))
            (older,), (newer,) = (alice.send(0.0, bob.peer, PING, b"") for _ in range(2))
            new.sendto(newer, raw_address(bob))
            await until(lambda: bob.counters["datagrams_received"] == 2)
            old.sendto(older, raw_address(bob))
            await until(lambda: bob.counters["datagrams_received"] == 3)
            bob.send(peer, PING, b"to the new address")
            payloads: list[bytes] = []
            while not payloads:
                # The first packet is a challenge that checks whether the peer really is at this address.
                received = alice.receive(0.0, await raw_arrival(new), raw_address(bob))
                for answer in received.answers:
                    new.sendto(answer, raw_address(bob))
                payloads += [] if received.datagram is None else [received.datagram.payload]
            assert payloads == [b"to the new address"]


async def test_a_message_arrives_at_a_peer_that_starts_late() -> None:
    alice = make_network("a")
    async with running(alice):
        (bound,) = await bind_all([LOOPBACK])
        bob = make_network("b", listen=("127.0.0.1", bound.port), may_move=False)
        bob.inbox(PING)
        alice.learn(bob.peer, [make_address("127.0.0.1", bound.port)])
        alice.send(bob.peer, PING, b"are you there yet?")
        await raw_arrival(bound.udp)
        bound.close()
        async with running(bob):
            assert await arrival(bob) == (alice.peer, b"are you there yet?")


async def test_link_local_addresses_are_not_announced() -> None:
    alice = make_network("a")
    async with running(alice):
        told = alice.addresses
        alice.announce(make_address("fe80::1%lo", 1))
        assert alice.addresses == told
        alice.announce(make_address("fd00::1", 1))
        assert len(alice.addresses) == len(told) + 1
    assert dialable([("fe80::1%lo", 1)]) == ()
    with pytest.raises(UsageError, match="needs its interface"):
        await bind_all([("fe80::1", 0)])


def test_the_system_may_name_an_address_with_its_zone_apart() -> None:
    index = socket.if_nametoindex("lo")
    assert socket_name("fe80::1%lo", 7) == socket_name(f"fe80::1%{index}", 7) == ("fe80::1", 7, 0, index)
    assert socket_name("fd00::1", 7) == ("fd00::1", 7)
    assert source_of_name(("fe80::1", 7, 0, index)) == ("fe80::1%lo", 7)
    assert source_of_name(("fe80::1", 7, 0, 2**20)) == (f"fe80::1%{2**20}", 7)
    assert source_of_name(("fd00::1", 7, 0, 0)) == ("fd00::1", 7)
    assert source_of_name(("10.0.0.1", 7)) == ("10.0.0.1", 7)
    assert address_of(("fe80::1", 7, 0, index)) == make_address("fe80::1%lo", 7)
    with pytest.raises(OSError, match=r"No such device|no interface"):
        socket_name("fe80::1%no-such-link", 7)


async def test_garbage_is_counted_and_the_node_keeps_running() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.inbox(PING)
    async with running(alice, bob):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for garbage in (b"", b"x", b"y" * 200, b"\4" * 4_000):
                stranger.sendto(garbage, raw_address(bob))
        await until(lambda: bob.counters["datagrams_refused_malformed"] == 4)
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x01\x01\x00\x20",
            b"\x02\x01\xff\xff",
            b"\x02\x01\x00\x20" + os.urandom(40),
        ):
            connection = await trio.open_tcp_stream(*raw_address(bob))
            await connection.send_all(garbage)
            await hang_up(connection)
        await until(lambda: bob.counters["handshakes_refused"] == 4)
        acquaint(alice, bob)
        alice.send(bob.peer, PING, b"still there?")
        assert await arrival(bob) == (alice.peer, b"still there?")


def test_only_packets_of_unknown_peers_are_gathered_in_batches() -> None:
    clock = trio.testing.MockClock()

    async def main() -> None:
        came: list[bytes] = []

        def arrived(packet: bytes, _: Route) -> bool:
            came.append(packet)
            return packet.startswith(b"peer")

        with raw_socket() as own, raw_socket() as other:
            sockets = UdpSockets([own], Counter())

            async def after(packet: bytes) -> list[bytes]:
                other.sendto(packet, own.getsockname())
                await trio.testing.wait_all_tasks_blocked(0.02)
                return came

            async with trio.open_nursery() as nursery:
                nursery.start_soon(sockets.receive_forever, 100, arrived, lambda: None)
                assert await after(b"peer 1") == [b"peer 1"]
                assert await after(b"peer 2") == [b"peer 1", b"peer 2"]
                came.clear()
                assert await after(b"stranger 1") == [b"stranger 1"]
                # The clock does not move.
                assert await after(b"stranger 2") == [b"stranger 1"]
                assert await after(b"peer 3") == [b"stranger 1"]
                clock.jump(REFUSED_PAUSE_SECONDS)
                assert (await after(b"peer 4"))[1:] == [b"stranger 2", b"peer 3", b"peer 4"]
                nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)


async def hang_up(connection: trio.SocketStream) -> None:
    """End this half of the stream, and read until the other end has closed or reset the connection."""
    with suppress(trio.BrokenResourceError):
        await connection.send_eof()
        while await connection.receive_some():
            pass
    await connection.aclose()


async def skip_without_ipv6() -> None:
    try:
        probe = await trio.open_tcp_listeners(0, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    await probe[0].aclose()


# --- ports and addresses ---------------------------------------------------------------------------


async def test_a_port_in_use_is_reported_and_the_next_one_used() -> None:
    alice = make_network("a")
    async with running(alice):
        bob = make_network("b", listen=("127.0.0.1", alice.port))
        async with running(bob):
            assert bob.moved == ((alice.port, bob.port),)
            assert bob.port in range(alice.port + 1, alice.port + 11)
            assert bob.addresses == (make_address("127.0.0.1", bob.port, bob.peer),)


async def test_a_node_listens_at_several_ipv4_and_ipv6_addresses() -> None:
    await skip_without_ipv6()
    alice = make_network("a")
    bob = make_network("b", listen=[("127.0.0.1", 0), ("127.0.0.2", 0), ("::1", 0)])
    inbox = bob.inbox(PING)
    async with running(alice, bob):
        assert [address.host for address in bob.addresses] == ["127.0.0.1", "127.0.0.2", "::1"]
        assert tuple(address.port for address in bob.addresses) == bob.ports
        for number, address in enumerate(bob.addresses[:2]):
            assert await alice.identify(address) == bob.peer
            newcomer = make_network(str(number))
            newcomer.inbox(PING)
            async with running(newcomer):
                newcomer.learn(bob.peer, [address])
                newcomer.send(bob.peer, PING, b"here")
                assert await inbox.take(trio.current_time() + 20) == [(newcomer.peer, b"here")]
                # The answer comes from the address that was asked, not from another address of bob's.
                bob.send(newcomer.peer, PING, b"there")
                assert await arrival(newcomer) == (bob.peer, b"there")
                assert newcomer._book.for_datagram(bob.peer, trio.current_time()) == (address.of(None),)
        six = make_network("s", listen=("::1", 0))
        async with running(six):
            six.learn(bob.peer, bob.addresses[2:])
            six.send(bob.peer, PING, b"six")
            assert await arrival(bob) == (six.peer, b"six")


async def test_ipv4_and_ipv6_wildcards_do_not_take_each_others_port() -> None:
    await skip_without_ipv6()
    everywhere = "0.0.0.0"  # bound for a moment; nothing serves there
    for _ in range(20):
        first = await bind_all([(everywhere, 0), ("::", 0)])
        second: tuple[BoundSockets, ...] = ()
        try:
            # Each port is free in the family in which the first network has not taken it, unless another
            # program has.
            wanted = first[0].port, first[1].port
            second = await bind_all([("::", wanted[0]), (everywhere, wanted[1])])
            if tuple(each.port for each in second) == wanted:
                return
        finally:
            for each in (*first, *second):
                each.close()
    pytest.fail("one family's port keeps the other family from it")


async def test_one_unavailable_address_frees_the_others() -> None:
    place = unused_address()
    with pytest.raises(UsageError, match="cannot listen"):
        await make_network("a", listen=[(place.host, place.port), ("192.0.2.1", 0)]).run()
    again = make_network("a", listen=(place.host, place.port))
    async with running(again):
        assert again.moved == ()


async def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    for host in ("192.0.2.1", "no-such-machine.invalid"):
        with pytest.raises(UsageError, match="cannot listen"):
            await make_network("a", listen=(host, 0)).run()


async def test_announced_addresses_are_published_unchanged() -> None:
    announced = parse_address("/dns4/example.org/tcp/9747")
    alice = make_network("a", announce=[announced])
    async with running(alice):
        assert alice.addresses == (announced.of(alice.peer),)


def test_listening_on_all_addresses_announces_dialable_ones() -> None:
    for host in ("0.0.0.0", "::"):
        addresses = dialable([(host, 9747)])
        assert addresses
        assert all(address.port == 9747 and address.host not in ("0.0.0.0", "::") for address in addresses)
        assert [address.kind for address in addresses] == sorted(address.kind for address in addresses)
        loopback = [address.host.startswith("127.") or address.host == "::1" for address in addresses]
        assert all(loopback) or not any(loopback)


async def test_a_node_on_both_families_is_reached_over_ipv4() -> None:
    await skip_without_ipv6()
    alice, bob = make_network("a"), make_network("b", listen=("::", 0))
    alice.inbox(PING)
    bob.inbox(PING)
    async with running(alice, bob):
        alice.learn(bob.peer, [make_address("127.0.0.1", bob.port)])
        alice.send(bob.peer, PING, b"four to six")
        assert await arrival(bob) == (alice.peer, b"four to six")
        bob.send(alice.peer, PING, b"six to four")
        assert await arrival(alice) == (bob.peer, b"six to four")
