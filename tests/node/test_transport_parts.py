"""The transport's parts that need no sockets: inbox, address book, records, hellos, handlers."""

import os
from collections import Counter
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from crypto.contact import make_address
from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity, PeerId
from crypto.noise import CipherState
from node.transport.book import OBSERVED_SECONDS, PEERS_MAX, UNPROVEN_ADDRESSES_MAX, AddressBook
from node.transport.inbox import QueueInbox
from node.transport.records import MESSAGE_BYTES_MAX, RECORD_PLAIN_BYTES_MAX, RecordReader, RecordWriter
from node.transport.router import HELLO_BYTES_MAX, Answer, Hello, Router
from node.transport.tcp import Assembly, Credentials
from tests.node.nets import PING, echo


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
