"""The real network on 127.0.0.1: what arrives, what is refused, and that the node lives through it."""

import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from crypto.contact import Address, make_address, parse_address
from crypto.datagrams import Seal, payload_bytes_max
from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity, PeerId, short_peer
from crypto.noise import CipherState
from node.errors import StreamClosed, Unreachable, UsageError, WrongPeer
from node.seams import Network, RealClock, Stream
from node.transport import tcp
from node.transport.book import OBSERVED_SECONDS, PEERS_MAX, UNPROVEN_ADDRESSES_MAX, AddressBook
from node.transport.inbox import QueueInbox
from node.transport.listen import dialable
from node.transport.network import INBOUND_PER_PEER_MAX, RealNetwork
from node.transport.records import (
    MESSAGE_BYTES_MAX,
    RECORD_PLAIN_BYTES_MAX,
    RecordReader,
    RecordWriter,
)
from node.transport.router import HELLO_BYTES_MAX, ONE_SHOT_BYTES_MAX, Answer, Hello, Router
from node.transport.tcp import Assembly, Credentials

PING = "/peerloom/ping/1"
BULK = "/peerloom/bulk/1"


def make_network(letter: str, *, swarm: str = "test", **options: Any) -> RealNetwork:
    return RealNetwork(
        Identity(letter.encode() * 32),
        os.urandom(32),
        swarm,
        clock=RealClock(),
        entropy=os.urandom,
        **{"listen": ("127.0.0.1", 0)} | options,
    )


@asynccontextmanager
async def running(*networks: RealNetwork) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for network in networks:
            await nursery.start(network.run)
        yield
        nursery.cancel_scope.cancel()


def acquaint(*networks: RealNetwork) -> None:
    for network in networks:
        for other in networks:
            network.learn(other.peer, other.addresses)


async def arrival(network: RealNetwork, protocol: str = PING) -> tuple[PeerId, bytes]:
    """The next single message."""
    messages = await network.inbox(protocol).take(trio.current_time() + 20)
    assert len(messages) == 1
    return messages[0]


async def until(condition: Callable[[], bool]) -> None:
    """Counters move when the other task gets its turn; the test's own deadline is the limit."""
    while not condition():  # noqa: ASYNC110 - a counter wakes nobody
        await trio.sleep(0.002)


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())


def raw_address(network: RealNetwork) -> tuple[str, int]:
    return "127.0.0.1", network.port


# --- datagrams and messages ------------------------------------------------------------------------


async def test_two_nodes_exchange_datagrams_and_the_second_needs_no_address_of_the_first() -> None:
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


async def test_what_does_not_fit_a_datagram_goes_by_a_stream() -> None:
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


async def test_a_peer_known_by_a_name_only_is_reached_by_stream() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.inbox(PING)
    async with running(alice, bob):
        alice.learn(bob.peer, [Address("dns", "localhost", bob.port)])
        alice.send(bob.peer, PING, b"hello")
        assert await arrival(bob) == (alice.peer, b"hello")
        # The stream has proved a numeric address, so the next one is a datagram.
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


async def test_a_message_for_a_protocol_without_inbox_is_refused_both_ways() -> None:
    alice, bob = make_network("a"), make_network("b")
    async with running(alice, bob):
        acquaint(alice, bob)
        alice.send(bob.peer, PING, b"small")
        alice.send(bob.peer, PING, bytes(5_000))
        await until(lambda: bob.counters["messages_refused_protocol"] == 1)
        await until(lambda: alice.counters["messages_by_stream_failed"] == 1)
        assert bob.counters["streams_refused_protocol"] == 1


async def test_a_replayed_datagram_is_refused() -> None:
    alice, bob = Identity(b"a" * 32), make_network("b")
    bob.inbox(PING)
    data = Seal(alice, "test", 1).seal(bob.peer, PING, b"once")
    async with running(bob):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
            attacker.sendto(data, raw_address(bob))
            attacker.sendto(data, raw_address(bob))
        assert await arrival(bob) == (alice.peer, b"once")
        await until(lambda: bob.counters["datagrams_refused_replay"] == 1)


async def test_an_address_moves_with_the_newest_datagram_and_not_back_with_an_older_one() -> None:
    alice, bob = Identity(b"a" * 32), make_network("b")
    bob.inbox(PING)
    seal = Seal(alice, "test", 1)
    older, newer = seal.seal(bob.peer, PING, b""), seal.seal(bob.peer, PING, b"")
    async with running(bob):
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as old,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as new,
        ):
            new.bind(("127.0.0.1", 0))
            new.setblocking(False)
            new.sendto(newer, raw_address(bob))
            await until(lambda: bob.counters["datagrams_received"] == 1)
            old.sendto(older, raw_address(bob))
            await until(lambda: bob.counters["datagrams_received"] == 2)
            bob.send(alice.peer, PING, b"to the new address")
            with trio.fail_after(10):
                await trio.lowlevel.wait_readable(new)


async def test_garbage_is_counted_and_the_node_lives() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.inbox(PING)
    async with running(alice, bob):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for garbage in (b"", b"x", os.urandom(200), os.urandom(4_000)):
                stranger.sendto(garbage, raw_address(bob))
        await until(lambda: bob.counters["datagrams_refused_malformed"] == 4)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x01\x01\xff\xff", b"\x01\x01\x00\x20" + os.urandom(40)):
            connection = await trio.open_tcp_stream(*raw_address(bob))
            await connection.send_all(garbage)
            await hang_up(connection)
        await until(lambda: bob.counters["handshakes_refused"] == 3)
        acquaint(alice, bob)
        alice.send(bob.peer, PING, b"still there?")
        assert await arrival(bob) == (alice.peer, b"still there?")


async def hang_up(connection: trio.SocketStream) -> None:
    """Say that nothing more comes and read until the other side has closed, or reset the connection."""
    with suppress(trio.BrokenResourceError):
        await connection.send_eof()
        while await connection.receive_some():
            pass
    await connection.aclose()


# --- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cipher", ["AESGCM", "ChaChaPoly"])
async def test_messages_of_every_size_come_back_whole_over_a_stream(cipher: str) -> None:
    alice, bob = make_network("a", cipher=cipher), make_network("b")
    bob.handle(BULK, echo)
    edge = RECORD_PLAIN_BYTES_MAX
    async with running(alice, bob):
        acquaint(alice, bob)
        stream: Stream = await alice.open(bob.peer, BULK)
        assert stream.peer == bob.peer
        for size in (0, 1, edge - 5, edge - 4, edge - 3, 2 * edge - 4, 2 * edge, 3_000_000):
            message = os.urandom(size)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send, memoryview(message))
                assert await stream.receive() == message
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(StreamClosed, match="this side"):
            await stream.send(b"x")
        with pytest.raises(StreamClosed, match="this side"):
            await stream.receive()


async def test_a_closed_stream_ends_the_other_side_after_its_last_message() -> None:
    alice, bob = make_network("a"), make_network("b")

    async def say_and_leave(stream: Stream) -> None:
        await stream.send(b"last words")

    bob.handle(BULK, say_and_leave)
    async with running(alice, bob):
        acquaint(alice, bob)
        stream = await alice.open(bob.peer, BULK)
        assert await stream.receive() == b"last words"
        with pytest.raises(StreamClosed, match="other side closed"):
            await stream.receive()


async def test_tasks_that_send_at_once_do_not_mix_their_messages() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.handle(BULK, echo)
    messages = [bytes((number,)) * 2_000_000 for number in range(4)]
    async with running(alice, bob):
        acquaint(alice, bob)
        stream = await alice.open(bob.peer, BULK)
        async with trio.open_nursery() as nursery:
            for message in messages:
                nursery.start_soon(stream.send, message)
            assert sorted([await stream.receive() for _ in messages]) == messages


async def test_a_receive_cancelled_between_messages_loses_nothing() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.handle(BULK, echo)
    async with running(alice, bob):
        acquaint(alice, bob)
        stream = await alice.open(bob.peer, BULK)
        with trio.move_on_after(0.01) as scope:
            await stream.receive()
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.send(b"never begun")
        await stream.send(b"all is well")
        assert await stream.receive() == b"all is well"


async def test_a_send_cancelled_inside_a_message_closes_the_stream_on_both_sides() -> None:
    alice, bob = make_network("a"), make_network("b")
    endings: list[str] = []
    go_on = trio.Event()

    async def listen_late(stream: Stream) -> None:
        await go_on.wait()
        try:
            await stream.receive()
        except StreamClosed as closed:
            endings.append(str(closed))

    bob.handle(BULK, listen_late)
    async with running(alice, bob):
        acquaint(alice, bob)
        stream = await alice.open(bob.peer, BULK)
        with trio.move_on_after(0.2) as scope:
            await stream.send(bytes(MESSAGE_BYTES_MAX))
        assert scope.cancelled_caught
        with pytest.raises(StreamClosed, match="cut short"):
            await stream.receive()
        go_on.set()
        await until(lambda: bool(endings))
    assert "inside a message" in endings[0] or "broke" in endings[0]


async def test_a_receive_cancelled_inside_a_message_closes_the_stream() -> None:
    async with half_sent_message() as stream:
        with trio.move_on_after(0.05) as scope:
            await stream.receive()
        assert scope.cancelled_caught
        with pytest.raises(StreamClosed, match="inside a message"):
            await stream.receive()


async def test_a_stream_that_ends_inside_a_message_is_closed_with_that_reason() -> None:
    async with half_sent_message(hang_up=True) as stream:
        with pytest.raises(StreamClosed, match="ended inside a message"):
            await stream.receive()


async def test_a_sender_that_stalls_inside_a_message_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "STALL_SECONDS", 0.05)
    async with half_sent_message() as stream:
        with pytest.raises(StreamClosed, match="no byte in"):
            await stream.receive()


@asynccontextmanager
async def half_sent_message(*, hang_up: bool = False) -> AsyncIterator[tcp.SecureStream]:
    """A stream on which the other side sends the first half of a message."""
    alice, bob = make_network("a"), make_network("b")

    async def send_half(stream: Stream) -> None:
        assert isinstance(stream, tcp.SecureStream)
        chunk = next(stream._writer.chunks(bytes(1_000)))
        await stream._transport.send_all(chunk[:500])
        if not hang_up:
            await trio.sleep_forever()

    bob.handle(BULK, send_half)
    async with running(alice, bob):
        acquaint(alice, bob)
        yield await alice.open(bob.peer, BULK)


async def test_a_peer_that_breaks_the_record_rules_loses_its_stream_and_is_counted() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.handle(BULK, echo)
    async with running(alice, bob):
        acquaint(alice, bob)
        stream = await alice.open(bob.peer, BULK)
        await stream._transport.send_all(b"\x00\x20" + os.urandom(32))
        with pytest.raises(StreamClosed):
            await stream.receive()
        await until(lambda: bob.counters["streams_broken"] == 1)


async def test_a_message_over_the_limit_is_our_own_bug_and_the_stream_lives() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.handle(BULK, echo)
    async with running(alice, bob):
        acquaint(alice, bob)
        stream = await alice.open(bob.peer, BULK)
        with pytest.raises(LocalProtocolError):
            await stream.send(bytes(MESSAGE_BYTES_MAX + 1))
        await stream.send(b"small")
        assert await stream.receive() == b"small"


# --- who is there ----------------------------------------------------------------------------------


def unused_address() -> Address:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return make_address(*probe.getsockname())


async def test_identify_says_who_is_there() -> None:
    alice, bob = make_network("a"), make_network("b")
    async with running(alice, bob):
        typed = parse_address(f"localhost:{bob.port}")
        assert await alice.identify(typed) == bob.peer
        assert await alice.identify(bob.addresses[0]) == bob.peer
        # Having proved who is there, nothing need be learnt to open a stream.
        bob.handle(BULK, echo)
        await (await alice.open(bob.peer, BULK)).aclose()


async def test_a_wrong_peer_is_refused_with_both_named() -> None:
    alice, bob, carol = make_network("a"), make_network("b"), make_network("c")
    async with running(alice, bob):
        address = bob.addresses[0].of(carol.peer)
        alice.learn(carol.peer, [address])
        calls: list[Callable[[], Awaitable[object]]] = [
            partial(alice.identify, address),
            partial(alice.open, carol.peer, BULK),
        ]
        for call in calls:
            with pytest.raises(WrongPeer) as refusal:
                await call()
            assert refusal.value.reason == "wrong key"
            assert short_peer(bob.peer) in refusal.value.detail
            assert short_peer(carol.peer) in refusal.value.detail


async def test_every_way_to_fail_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_SECONDS", 0.1)
    alice, bob, other = make_network("a"), make_network("b"), make_network("o", swarm="other")
    async with running(alice, other):
        silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
        mute = make_address(*silent[0].socket.getsockname())
        expected = [
            (unused_address(), "refused", "no node listens on port"),
            (other.addresses[0], "refused", "another swarm or not a peerloom node"),
            (mute, "timeout", "did not shake hands"),
            (Address("dns", "no-such-machine.invalid", 1), "unknown", "no-such-machine.invalid"),
        ]
        for address, reason, words in expected:
            with pytest.raises(Unreachable) as refusal:
                await alice.identify(address.of(None))
            assert refusal.value.reason == reason
            assert words in refusal.value.detail
        await silent[0].aclose()
        with pytest.raises(Unreachable) as refusal:
            await alice.open(bob.peer, BULK)
        assert refusal.value.reason == "unknown"


async def test_two_swarms_never_mix_by_datagram_either() -> None:
    alice, other = make_network("a"), make_network("o", swarm="other")
    other.inbox(PING)
    async with running(alice, other):
        acquaint(alice, other)
        alice.send(other.peer, PING, b"hello?")
        await until(lambda: other.counters["datagrams_refused_swarm"] == 1)


async def test_an_unknown_protocol_is_refused_in_words() -> None:
    alice, bob = make_network("a"), make_network("b")
    async with running(alice, bob):
        acquaint(alice, bob)
        with pytest.raises(Unreachable, match="does not speak /peerloom/bulk/1") as refusal:
            await alice.open(bob.peer, BULK)
        assert refusal.value.reason == "refused"
        assert bob.counters["streams_refused_protocol"] == 1


async def test_one_peer_cannot_take_all_the_streams() -> None:
    alice, bob = make_network("a"), make_network("b")
    bob.handle(BULK, echo)
    async with running(alice, bob):
        acquaint(alice, bob)
        streams = [await alice.open(bob.peer, BULK) for _ in range(INBOUND_PER_PEER_MAX)]
        with pytest.raises(Unreachable, match="too many streams"):
            await alice.open(bob.peer, BULK)
        for stream in streams:
            await stream.aclose()
        await until(lambda: not bob._inbound)
        await (await alice.open(bob.peer, BULK)).aclose()


async def test_half_open_handshakes_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.transport.network.HALF_OPEN_MAX", 2)
    monkeypatch.setattr("node.transport.network.HANDSHAKE_SECONDS", 0.5)
    alice, bob = make_network("a"), make_network("b")
    async with running(alice, bob):
        idle = [await trio.open_tcp_stream(*raw_address(bob)) for _ in range(2)]
        await until(lambda: bob._half_open == 2)
        with pytest.raises(Unreachable):
            await alice.identify(bob.addresses[0])
        assert bob.counters["connections_over_limit"] == 1
        await until(lambda: bob.counters["handshakes_timed_out"] == 2)
        assert await alice.identify(bob.addresses[0]) == bob.peer
        for connection in idle:
            await connection.aclose()


async def test_what_a_stranger_does_to_a_handler_stays_there_and_our_own_bug_comes_out() -> None:
    async def offended(stream: Stream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise RemoteProtocolError(f"nonsense of {len(await stream.receive())} bytes")

    async def buggy(stream: Stream) -> None:
        raise KeyError(stream.peer)

    alice, bob = make_network("a"), make_network("b")
    bob.handle(PING, offended)
    bob.handle(BULK, buggy)

    async def main() -> None:
        async with running(alice, bob):
            acquaint(alice, bob)
            stream = await alice.open(bob.peer, PING)
            await stream.send(b"nonsense")
            await until(lambda: bob.counters["streams_broken"] == 1)
            await alice.open(bob.peer, BULK)
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as group:
        await main()
    assert group.value.subgroup(KeyError) is not None
    assert group.value.split(KeyError)[1] is None


# --- ports and addresses ---------------------------------------------------------------------------


async def test_a_taken_port_is_reported_and_the_next_one_used() -> None:
    alice = make_network("a")
    async with running(alice):
        bob = make_network("b", listen=("127.0.0.1", alice.port))
        async with running(bob):
            assert alice.port in bob.taken
            assert bob.port in range(alice.port + 1, alice.port + 11)
            assert bob.addresses == (make_address("127.0.0.1", bob.port, bob.peer),)


async def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    for host in ("192.0.2.1", "no-such-machine.invalid"):
        with pytest.raises(UsageError, match="cannot listen"):
            await make_network("a", listen=(host, 0)).run()


async def test_announced_addresses_are_told_as_they_are() -> None:
    announced = parse_address("/dns4/example.org/tcp/9747")
    alice = make_network("a", announce=[announced])
    async with running(alice):
        assert alice.addresses == (announced.of(alice.peer),)


def test_listening_everywhere_announces_what_others_can_dial() -> None:
    for host in ("0.0.0.0", "::"):
        addresses = dialable(host, 9747)
        assert addresses
        assert all(address.port == 9747 and address.host not in ("0.0.0.0", "::") for address in addresses)
        assert [address.kind for address in addresses] == sorted(address.kind for address in addresses)
        loopback = [address.host.startswith("127.") or address.host == "::1" for address in addresses]
        assert all(loopback) or not any(loopback)


async def test_a_node_on_both_families_is_reached_by_the_old_one() -> None:
    try:
        probe = await trio.open_tcp_listeners(0, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    await probe[0].aclose()
    alice, bob = make_network("a"), make_network("b", listen=("::", 0))
    alice.inbox(PING)
    bob.inbox(PING)
    async with running(alice, bob):
        alice.learn(bob.peer, [make_address("127.0.0.1", bob.port)])
        alice.send(bob.peer, PING, b"four to six")
        assert await arrival(bob) == (alice.peer, b"four to six")
        bob.send(alice.peer, PING, b"six to four")
        assert await arrival(alice) == (bob.peer, b"six to four")


# --- the parts without sockets ---------------------------------------------------------------------


async def test_an_inbox_waits_until_its_time_or_a_wake_and_drops_the_newest() -> None:
    counters: Counter[str] = Counter()
    inbox, peer = QueueInbox(counters, messages_max=2, bytes_max=10), PeerId(bytes(32))
    assert await inbox.take(trio.current_time() + 0.01) == []
    inbox.wake()
    assert await inbox.take(float("inf")) == []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.take, float("inf"))
        await trio.testing.wait_all_tasks_blocked()
        inbox.wake()
    for message in (b"1", b"2", b"3"):
        inbox.put(peer, message)
    assert await inbox.take(float("inf")) == [(peer, b"1"), (peer, b"2")]
    inbox.put(peer, bytes(11))
    assert counters["inbox_full"] == 2


def test_the_book_prefers_what_was_seen_and_spreads_when_that_is_old() -> None:
    book, peer = AddressBook(), PeerId(bytes(32))
    claimed = [make_address("10.0.0.1", port) for port in range(1, 6)]
    proved, observed = make_address("10.0.0.2", 1), make_address("10.0.0.3", 1)
    assert book.for_datagram(peer, 0.0) == book.for_stream(peer) == ()
    book.claim(peer, claimed)
    assert book.for_datagram(peer, 0.0) == tuple(claimed[:UNPROVEN_ADDRESSES_MAX])
    book.prove(peer, proved)
    book.observe(peer, observed, 10.0)
    book.claim(peer, [])
    assert book.for_datagram(peer, 10.0 + OBSERVED_SECONDS) == (observed,)
    assert book.for_datagram(peer, 11.0 + OBSERVED_SECONDS) == (observed, proved, claimed[0])
    assert book.for_stream(peer) == (proved, observed, *claimed)


def test_the_book_is_bounded_and_keeps_the_latest() -> None:
    book = AddressBook()
    peers = [PeerId(number.to_bytes(32, "big")) for number in range(PEERS_MAX + 1)]
    for peer in peers:
        book.claim(peer, [make_address("10.0.0.1", 1)])
    assert not book.for_stream(peers[0])
    assert book.for_stream(peers[1])


def test_half_received_messages_share_one_limit() -> None:
    assembly = Assembly(100)
    assembly.change(90)
    with pytest.raises(RemoteProtocolError):
        assembly.change(20)
    assembly.change(-110)
    assembly.change(100)


def read_all(reader: RecordReader, data: bytes, step: int) -> list[bytes]:
    messages: list[bytes] = []
    while data:
        space = reader.space()
        count = min(step, len(space), len(data))
        space[:count] = data[:count]
        reader.filled(count)
        data = data[count:]
        while (message := reader.next_message()) is not None:
            messages.append(message)
    return messages


def pair() -> tuple[RecordWriter, RecordReader]:
    return RecordWriter(CipherState("AESGCM", b"k" * 32)), RecordReader(CipherState("AESGCM", b"k" * 32))


@given(sizes=st.lists(st.integers(0, 200_000), max_size=6), step=st.sampled_from([977, 65_537, 10**6]))
def test_records_carry_messages_in_whatever_pieces_they_come(sizes: list[int], step: int) -> None:
    writer, reader = pair()
    messages = [bytes((number,)) * size for number, size in enumerate(sizes)]
    data = b"".join(bytes(chunk) for message in messages for chunk in writer.chunks(message))
    assert read_all(reader, data, step) == messages
    assert not reader.inside
    assert reader.held_bytes == 0


@given(st.binary(min_size=2, max_size=500))
def test_random_bytes_as_records_are_refused_or_wait_for_more(data: bytes) -> None:
    _, reader = pair()
    if len(data) >= 2 + int.from_bytes(data[:2], "big"):
        with pytest.raises(RemoteProtocolError):
            read_all(reader, data, 1_000)
    else:
        assert read_all(reader, data, 1_000) == []
        assert reader.inside


@pytest.mark.parametrize(
    "records",
    [
        [b""],
        [b"\0\0\0"],
        [b"\0\0\0\x05abc"],
        [b"\0\0\0\x01abc"],
        [b"\0\0\0\0", b""],
        [b"\0\x01\0\0" + bytes(RECORD_PLAIN_BYTES_MAX - 4), b"in crumbs"],
        [(MESSAGE_BYTES_MAX + 1).to_bytes(4, "big") + bytes(RECORD_PLAIN_BYTES_MAX - 4)],
    ],
)
def test_authentic_records_that_break_the_framing_are_refused(records: list[bytes]) -> None:
    cipher = CipherState("AESGCM", b"k" * 32)
    sealed = [cipher.encrypt(record) for record in records]
    data = b"".join(len(record).to_bytes(2, "big") + record for record in sealed)
    with pytest.raises(RemoteProtocolError):
        read_all(pair()[1], data, 10**6)


@given(st.binary(max_size=HELLO_BYTES_MAX + 10))
def test_random_bytes_as_a_hello_are_refused_or_are_one(data: bytes) -> None:
    for kind in (Hello, Answer):
        try:
            message: Any = decode(data, kind, bytes_max=HELLO_BYTES_MAX)
        except RemoteProtocolError:
            continue
        assert isinstance(message, kind)


def test_a_second_handler_for_a_protocol_is_our_own_bug() -> None:
    router = Router(Counter())
    router.handle(PING, echo)
    with pytest.raises(LocalProtocolError):
        router.handle(PING, echo)
    with pytest.raises(LocalProtocolError):
        router.inbox("no slash")
    assert len(encode(Hello("identify", PING))) < HELLO_BYTES_MAX


def test_a_handshake_uses_a_fresh_ephemeral_key_each_time() -> None:
    credentials = Credentials(Identity(b"a" * 32), b"s" * 32, "test", os.urandom)
    first, second = (credentials.handshake(initiator=True, cipher="AESGCM").start() for _ in range(2))
    assert first != second
