"""Keys and messages: bytes from the wire are limited and checked before use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.contact import make_address, parse_address
from crypto.encoding import clean_text, decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from dht.keys import KEY_BYTES, distance, node_key, record_key
from dht.messages import (
    HINT_ADDRESSES_MAX,
    HINTS_MAX,
    MESSAGE_BYTES_MAX,
    FindNode,
    FindValue,
    Hint,
    Message,
    Nodes,
    Ping,
    Pong,
    Store,
    Stored,
    Values,
    address_texts,
    cut_to_fit,
    readable_addresses,
)

PEER = PeerId(bytes(range(32)))

keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
peers = st.binary(min_size=32, max_size=32)
ids = st.integers(0, 2**63 - 1)
texts = st.text(max_size=64).map(clean_text)
addresses = st.lists(texts, max_size=HINT_ADDRESSES_MAX).map(tuple)
hints = st.lists(st.builds(Hint, peers, addresses), max_size=HINTS_MAX).map(tuple)
facts = st.builds(Fact, peers, st.binary(max_size=50), st.binary(max_size=64))
messages = st.one_of(
    st.builds(Ping, ids, addresses),
    st.builds(Pong, ids, addresses),
    st.builds(FindNode, ids, addresses, keys),
    st.builds(Nodes, ids, addresses, hints),
    st.builds(FindValue, ids, addresses, keys, peers | st.just(b"")),
    st.builds(Values, ids, addresses, st.lists(facts, max_size=4).map(tuple), st.booleans(), hints),
    st.builds(Store, ids, addresses, facts),
    st.builds(Stored, ids, addresses, st.text(max_size=24).map(clean_text)),
)


@given(messages)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message), Message, bytes_max=10**6) == message


def decode_or_refuse(data: bytes) -> None:
    try:
        message: object = decode(data, Message, bytes_max=MESSAGE_BYTES_MAX)
    except RemoteProtocolError:
        return
    assert isinstance(message, Message)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_a_valid_message(data: bytes) -> None:
    decode_or_refuse(data)


@given(messages, st.integers(0, 400), st.integers(1, 255))
def test_a_message_with_one_changed_byte_is_refused_or_valid(
    message: Message, place: int, change: int
) -> None:
    data = bytearray(encode(message))
    data[place % len(data)] ^= change
    decode_or_refuse(bytes(data))


@pytest.mark.parametrize(
    "message",
    [
        Nodes(1, (), (Hint(PEER, ()),) * (HINTS_MAX + 1)),
        Nodes(1, (), (Hint(PEER[:-1], ()),)),
        Nodes(1, (), (Hint(PEER, ("a",) * (HINT_ADDRESSES_MAX + 1)),)),
        Nodes(1, (), (Hint(PEER, ("a" * 65,)),)),
        FindNode(-1, (), bytes(KEY_BYTES)),
        FindNode(2**63, (), bytes(KEY_BYTES)),
        FindNode(1, (), bytes(KEY_BYTES + 1)),
        Ping(1, ("a",) * (HINT_ADDRESSES_MAX + 1)),
        Stored(1, (), "x" * 25),
        Store(1, (), Fact(PEER, bytes(MESSAGE_BYTES_MAX), bytes(64))),
    ],
)
def test_a_message_out_of_bounds_is_refused(message: Message) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(encode(message), Message, bytes_max=MESSAGE_BYTES_MAX)


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(0, 300))
def test_a_list_is_cut_to_the_first_entries_that_fit(items: list[bytes], room: int) -> None:
    cut = cut_to_fit(items, room)
    assert list(cut) == items[: len(cut)]
    assert sum(len(encode(item)) for item in cut) <= room
    if len(cut) < len(items):
        assert sum(len(encode(item)) for item in items[: len(cut) + 1]) > room


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("/ip4/10.0.0.5/tcp/9747", "10.0.0.5:9747"),
        ("/ip6/fd00::1/tcp/9747", "[fd00::1]:9747"),
        ("/dns/peer.example/tcp/9747", "peer.example:9747"),
        ("/dns6/peer.example/tcp/9747", "/dns6/peer.example/tcp/9747"),
    ],
)
def test_an_address_has_a_minimal_encoding_that_reads_back(typed: str, text: str) -> None:
    address = parse_address(typed)
    assert address_texts([address.of(PEER)]) == (text,)
    assert readable_addresses([text], PEER) == (address.of(PEER),)


def test_addresses_beyond_the_bound_are_omitted() -> None:
    long = make_address("a" * 63 + ".example", 1)
    rest = [make_address("10.0.0.1", port) for port in (1, 2, 3)]
    assert address_texts([long, *rest]) == ("10.0.0.1:1", "10.0.0.1:2")


def test_unreadable_addresses_and_those_of_other_peers_are_skipped() -> None:
    other = str(make_address("10.0.0.1", 1, PeerId(bytes(32))))
    assert readable_addresses([other, "/quic/x", "", "[fe80::1%eth0]:2", "10.0.0.1:2"], PEER) == (
        make_address("10.0.0.1", 2, PEER),
    )


def test_a_record_key_separates_purpose_and_name() -> None:
    assert record_key("ab", b"c") != record_key("a", b"bc")
    assert len(record_key("ab", b"c")) == len(node_key(PEER)) == KEY_BYTES
    with pytest.raises(ValueError, match="zero byte"):
        record_key("a\0", b"")


@given(keys, keys, keys)
def test_distance_is_a_metric(one: bytes, two: bytes, three: bytes) -> None:
    assert distance(one, one) == 0
    assert distance(one, two) == distance(two, one)
    assert distance(one, three) <= distance(one, two) + distance(two, three)
