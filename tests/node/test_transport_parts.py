"""The transport's parts that need no sockets: inbox, address book, records, hellos and handlers."""

from collections import Counter
from math import inf
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from crypto.contact import make_address
from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from crypto.noise import CipherState
from node.transport.address_book import (
    HEARSAY_MAX,
    OBSERVED_SECONDS,
    PEERS_MAX,
    UNPROVEN_ADDRESSES_MAX,
    AddressBook,
)
from node.transport.buffer_pool import POOLED_BYTES_MIN, Pool
from node.transport.inbox import Alarm, QueueInbox
from node.transport.records import (
    MESSAGE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    RECORD_PLAIN_BYTES_MAX,
    Mark,
    RecordReader,
    RecordWriter,
)
from node.transport.router import HELLO_BYTES_MAX, Hello, HelloAnswer, Router
from node.transport.tcp import ReassemblyBudget
from tests.node.nets import PING, echo


async def test_an_inbox_waits_for_time_or_wake_and_discards_the_newest() -> None:
    counters: Counter[str] = Counter()
    inbox, peer = QueueInbox(counters, Alarm(), messages_max=2, bytes_max=10), PeerId(bytes(32))
    assert await inbox.take(trio.current_time() + 0.01) == []
    inbox.notify()
    assert await inbox.take(float("inf")) == []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.take, float("inf"))
        await trio.testing.wait_all_tasks_blocked()
        inbox.notify()
    for message in (b"1", b"2", b"3"):
        inbox.put(peer, message)
    assert await inbox.take(float("inf")) == [(peer, b"1"), (peer, b"2")]
    inbox.put(peer, bytes(11))
    assert counters["inbox_full"] == 2


def test_one_alarm_ends_the_wait_of_each_inbox_at_its_own_time() -> None:
    alarm, peer = Alarm(), PeerId(bytes(32))
    one, other = (QueueInbox(Counter(), alarm) for _ in range(2))
    running = trio.CancelScope()
    ended: list[tuple[str, float]] = []

    async def run_alarm() -> None:
        with running:
            await alarm.run()

    async def take(name: str, inbox: QueueInbox, until: float) -> None:
        assert await inbox.take(until) == []
        ended.append((name, trio.current_time()))

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_alarm)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(take, "one", one, 3)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(take, "other", other, 2)
            await trio.sleep_until(2.5)
            # No task is waiting. The next take returns immediately, and the take after it waits again.
            other.put(peer, b"1")
            assert await other.take(9) == [(peer, b"1")]
            await take("again", other, 2.75)
            await take("past", other, 1)
            await trio.sleep_until(4)
            with trio.move_on_at(5):
                await one.take(6)
            with trio.move_on_at(8):  # a cancelled wait wakes no task later
                await take("never", one, inf)
            nursery.start_soon(take, "early", one, 100)
            await trio.testing.wait_all_tasks_blocked()
            running.cancel()
            await trio.testing.wait_all_tasks_blocked()
            await take("alone", one, 9)

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
    times = {"other": 2, "again": 2.75, "past": 2.75, "one": 3, "early": 8, "alone": 9}
    assert ended == list(times.items())


def test_the_book_prefers_seen_addresses_but_tries_all_if_they_are_old() -> None:
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


def peer_ids(count: int, *, first: int = 0) -> list[PeerId]:
    return [PeerId(number.to_bytes(32, "big")) for number in range(first, first + count)]


def test_addresses_by_hearsay_are_limited_and_evict_no_peer_that_answered() -> None:
    book, friend = AddressBook(), PeerId(bytes(31) + b"f")
    here = make_address("10.0.0.9", 1)
    book.observe(friend, here, 0.0)
    peers = peer_ids(2 * PEERS_MAX, first=1_000)
    for peer in peers:
        book.claim(peer, [make_address("203.0.113.1", 1)])
    assert book.for_stream(friend) == (here,)
    assert [peer for peer in peers if book.for_stream(peer)] == peers[-HEARSAY_MAX:]


def test_the_source_with_most_peers_in_the_book_loses_one_first() -> None:
    book = AddressBook()
    friends = peer_ids(100)
    for number, friend in enumerate(friends):
        book.observe(friend, make_address(f"10.0.{number}.1", 1), 0.0)
    crowd = peer_ids(2 * PEERS_MAX, first=1_000)
    for number, peer in enumerate(crowd):
        book.observe(peer, make_address(f"203.0.113.{number % 2}", 1), 1.0)
    assert all(book.for_stream(friend) for friend in friends)
    kept = [peer for peer in crowd if book.for_stream(peer)]
    assert len(kept) == PEERS_MAX - len(friends)
    newcomer = PeerId(bytes(31) + b"n")
    book.prove(newcomer, make_address("node.example", 1))
    assert book.for_stream(newcomer)


def test_messages_received_halfway_share_one_memory_limit() -> None:
    assembly = ReassemblyBudget(100)
    ended: list[str] = []

    def hold(who: str, held_bytes: int, *, anew: bool = False) -> None:
        def give_up() -> None:
            ended.append(who)
            assembly.release(who)

        assembly.hold(who, held_bytes, give_up, anew=anew)

    hold("first", 10)
    hold("second", 40)
    hold("third", 40)
    hold("first", 20)
    assert ended == []
    # It has begun a new message since, so the second has waited longest.
    hold("first", 30, anew=True)
    assert ended == ["second"]
    hold("fourth", 90)
    assert ended == ["second", "third", "first"]
    hold("fourth", 0)
    hold("fifth", 100)
    hold("sixth", 101)
    assert ended[3:] == ["fifth", "sixth"]
    hold("seventh", 100)
    assembly.release("seventh")
    assembly.release("seventh")
    hold("eighth", 100)
    assert len(ended) == 5


def read_all(
    reader: RecordReader, data: bytes, step: int, payload_bytes_max: int = 0
) -> list[tuple[bytes, memoryview]]:
    messages = []
    while data:
        space = reader.space()
        count = min(step, len(space), len(data))
        space[:count] = data[:count]
        reader.filled(count)
        data = data[count:]
        while (message := reader.next_message(payload_bytes_max)) is not None:
            assert isinstance(message, tuple)
            messages.append(message)
    return messages


def make_cipher() -> CipherState:
    return CipherState("AESGCM", b"k" * 32)


def pair() -> tuple[RecordWriter, RecordReader]:
    return RecordWriter(make_cipher(), Pool()), RecordReader(make_cipher(), Pool())


EDGE = RECORD_PLAIN_BYTES_MAX
SIZES = st.one_of(st.integers(0, 200_000), st.sampled_from([EDGE - 8, EDGE - 7, EDGE, 2 * EDGE]))


@given(
    sizes=st.lists(st.tuples(SIZES, st.lists(SIZES, max_size=3)), max_size=5),
    step=st.sampled_from([977, 65_537, 10**6]),
)
def test_records_carry_messages_and_payloads_in_pieces_of_any_size(
    sizes: list[tuple[int, list[int]]], step: int
) -> None:
    writer, reader = pair()
    sent = [
        (bytes((number,)) * size, [bytes((100 + index,)) * piece for index, piece in enumerate(pieces)])
        for number, (size, pieces) in enumerate(sizes)
    ]
    data = b"".join(bytes(chunk) for message, pieces in sent for chunk in writer.chunks(message, *pieces))
    arrived = [(message, bytes(payload)) for message, payload in read_all(reader, data, step, 10**6)]
    assert arrived == [(message, b"".join(pieces)) for message, pieces in sent]
    assert not reader.inside
    assert reader.held_bytes == 0


@given(
    spoken=st.lists(st.one_of(st.sampled_from(Mark), st.binary(max_size=300)), max_size=20),
    step=st.integers(1, 400),
)
def test_marks_keep_their_place_between_messages(spoken: list[Mark | bytes], step: int) -> None:
    writer, reader = pair()
    data = b"".join(
        writer.mark(each) if isinstance(each, Mark) else writer.whole(each) or b"" for each in spoken
    )
    heard: list[Mark | bytes] = []
    while data:
        space = reader.space()
        count = min(step, len(space), len(data))
        space[:count] = data[:count]
        reader.filled(count)
        data = data[count:]
        while (received := reader.next_message()) is not None:
            heard.append(received[0] if isinstance(received, tuple) else received)
        reader.release()
    assert heard == spoken


def test_a_long_payload_uses_a_counted_borrowed_buffer() -> None:
    writer, reader = pair()
    tensor = np.arange(500_000, dtype=np.float32).reshape(1_000, 500)
    first, *rest = [bytes(chunk) for chunk in writer.chunks(b"tensor", tensor.data)]
    assert read_all(reader, first, 65_537, tensor.nbytes) == []
    assert reader.held_bytes > len(first)
    ((message, payload),) = read_all(reader, b"".join(rest), 10**6, tensor.nbytes)
    assert message == b"tensor"
    assert payload.readonly
    assert np.array_equal(np.frombuffer(payload, np.float32).reshape(tensor.shape), tensor)
    assert reader.held_bytes == 0


def test_a_reader_takes_little_memory_until_much_of_a_record_arrived() -> None:
    writer, reader = pair()
    long = writer.whole(bytes(60_000))
    assert long is not None
    taken = 0
    while reader.next_message() is None:
        space = reader.space()
        assert len(space) <= 4_096 or taken >= 2_048
        part = long[taken : taken + min(1_000, len(space))]
        space[: len(part)] = part
        reader.filled(len(part))
        taken += len(part)
    assert taken == len(long)
    assert len(reader.space()) > len(long)


def test_an_oversized_payload_is_refused_before_memory_is_allocated() -> None:
    writer, reader = pair()
    data = b"".join(bytes(chunk) for chunk in writer.chunks(b"", bytes(10), bytes(11)))
    with pytest.raises(RemoteProtocolError, match="a payload of 21"):
        read_all(reader, data, 10**6, 20)
    assert reader.held_bytes == 0
    with pytest.raises(LocalProtocolError, match="payload"):
        next(writer.chunks(b"", bytes(PAYLOAD_BYTES_MAX), b"x"))


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_the_pool_reuses_memory_once_nothing_refers_to_it() -> None:
    pool, length = Pool(4 * POOLED_BYTES_MIN), POOLED_BYTES_MIN + 1
    view = pool.lend(length)
    assert len(view) == length
    place = address_of(view)
    array = np.frombuffer(view.toreadonly()[8:16], np.uint8)
    del view
    other = pool.lend(length)
    assert address_of(other) != place
    del array
    again = pool.lend(length)
    assert address_of(again) == place


def test_the_pool_frees_buffers_unused_between_two_sweeps() -> None:
    pool = Pool()
    pool.lend(POOLED_BYTES_MIN)[0] = 7
    for _ in range(3):
        # The buffer is borrowed between two sweeps, so it stays. It returns immediately, because nothing
        # refers to it.
        pool.look()
        assert pool.lend(POOLED_BYTES_MIN)[0] == 7
    pool.look()
    pool.look()
    assert pool._bytes == 0
    assert pool.lend(POOLED_BYTES_MIN)[0] == 0


def test_a_sweep_frees_no_lent_buffer() -> None:
    pool = Pool()
    pool.lend(POOLED_BYTES_MIN)[0] = 7
    again = pool.lend(POOLED_BYTES_MIN)
    for _ in range(3):
        pool.look()
    assert again[0] == 7
    del again
    pool.look()
    assert pool.lend(POOLED_BYTES_MIN)[0] == 7


def test_the_pool_keeps_recent_buffers_up_to_its_limit() -> None:
    pool, length = Pool(4 * POOLED_BYTES_MIN), POOLED_BYTES_MIN
    views = [pool.lend(length) for _ in range(6)]
    places = [address_of(view) for view in views]
    while views:
        del views[0]
    # Six buffers are borrowed simultaneously again, so that no address can repeat by chance.
    views = [pool.lend(length) for _ in range(6)]
    assert [address_of(view) for view in views[:4]] == places[:1:-1]
    del views
    whole = pool.lend(4 * length)
    del whole
    assert len(pool.lend(4 * length)) == 4 * length


@given(st.binary(min_size=2, max_size=500))
def test_random_bytes_as_records_are_refused_or_wait_for_more(data: bytes) -> None:
    _, reader = pair()
    if len(data) >= 2 + int.from_bytes(data[:2], "big"):
        with pytest.raises(RemoteProtocolError):
            read_all(reader, data, 1_000)
    else:
        assert read_all(reader, data, 1_000) == []
        assert reader.inside


def head(message_bytes: int, payload_bytes: int = 0) -> bytes:
    return message_bytes.to_bytes(4, "big") + payload_bytes.to_bytes(4, "big")


@pytest.mark.parametrize(
    "records",
    [
        [b""],
        [b"\0\0\0"],
        [head(5) + b"abc"],
        [head(1) + b"abc"],
        [head(0), b""],
        [head(65_536) + bytes(EDGE - 8), b"in crumbs"],
        [head(MESSAGE_BYTES_MAX + 1) + bytes(EDGE - 8)],
        [head(0, 65_536), b"in crumbs"],
        [head(0, 3), b"four"],
        [head(0, 3) + b"abc"],
        [head(0, 100_001)],
        [head(2**32 - 1, 2)],
        [head(2**32 - 1, 1) + b"more"],
        [head(0, 65_536) + b"", head(2**32 - 1, 1)],
    ],
)
def test_authentic_records_that_break_the_framing_are_refused(records: list[bytes]) -> None:
    cipher = make_cipher()
    sealed = [cipher.encrypt(record) for record in records]
    data = b"".join(len(record).to_bytes(2, "big") + record for record in sealed)
    with pytest.raises(RemoteProtocolError):
        read_all(pair()[1], data, 10**6, 100_000)


@given(st.binary(max_size=HELLO_BYTES_MAX + 10))
def test_random_bytes_as_a_hello_are_either_refused_or_valid(data: bytes) -> None:
    for kind in (Hello, HelloAnswer):
        try:
            message: Any = decode(data, kind, bytes_max=HELLO_BYTES_MAX)
        except RemoteProtocolError:
            continue
        assert isinstance(message, kind)


def test_a_second_handler_for_a_protocol_is_a_programming_error() -> None:
    router = Router(Counter())
    router.handle(PING, echo)
    with pytest.raises(LocalProtocolError):
        router.handle(PING, echo)
    with pytest.raises(LocalProtocolError):
        router.inbox("no slash")
    assert len(encode(Hello("stream", (PING,) * 4))) < HELLO_BYTES_MAX
