"""The signed datagram: only from whom it says, only to us, only in our swarm, only once."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.datagrams import (
    DATAGRAM_BYTES_MAX,
    PROTOCOL_BYTES_MAX,
    WINDOW_BITS,
    DatagramRefused,
    Opener,
    Seal,
    payload_bytes_max,
)
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity

ALICE = Identity(b"a" * 32)
BOB = Identity(b"b" * 32)
PING = "/peerloom/ping/1"


def refused(opener: Opener, data: bytes) -> str:
    with pytest.raises(DatagramRefused) as refusal:
        opener.open(data)
    return refusal.value.reason


def seals(count: int, *, boot: int = 1) -> list[bytes]:
    seal = Seal(ALICE, "test", boot)
    return [seal.seal(BOB.peer, PING, b"%d" % number) for number in range(count)]


@given(st.binary(max_size=payload_bytes_max(PING)))
def test_a_datagram_arrives_as_it_was_sent(payload: bytes) -> None:
    data = Seal(ALICE, "test", 7).seal(BOB.peer, PING, payload)
    assert len(data) <= DATAGRAM_BYTES_MAX
    datagram = Opener(BOB.peer, "test").open(data)
    assert (datagram.sender, datagram.protocol, datagram.payload) == (ALICE.peer, PING, payload)


@pytest.mark.parametrize("protocol", ["/a", "/" + "x" * (PROTOCOL_BYTES_MAX - 1)])
def test_the_longest_payload_fills_a_datagram_and_one_byte_more_does_not_fit(protocol: str) -> None:
    seal = Seal(ALICE, "test", 7)
    payload = bytes(payload_bytes_max(protocol))
    assert len(seal.seal(BOB.peer, protocol, payload)) == DATAGRAM_BYTES_MAX
    with pytest.raises(LocalProtocolError):
        seal.seal(BOB.peer, protocol, payload + b"x")


@pytest.mark.parametrize("protocol", ["", "/", "ping", "/pi ng", "/ping\n", "/" + "x" * PROTOCOL_BYTES_MAX])
def test_a_name_that_is_no_protocol_is_our_own_bug(protocol: str) -> None:
    with pytest.raises(LocalProtocolError):
        payload_bytes_max(protocol)


def test_a_datagram_is_refused_by_another_swarm_and_by_another_peer() -> None:
    data = seals(1)[0]
    assert refused(Opener(BOB.peer, "other"), data) == "swarm"
    assert refused(Opener(ALICE.peer, "test"), data) == "receiver"


@given(where=st.integers(0), bit=st.integers(0, 7))
def test_one_changed_bit_is_refused_and_moves_no_window(where: int, bit: int) -> None:
    opener, data = Opener(BOB.peer, "test"), seals(1)[0]
    at = where % len(data)
    refused(opener, data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :])
    assert opener.open(data).payload == b"0"


@given(st.binary(max_size=DATAGRAM_BYTES_MAX + 10))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Opener(BOB.peer, "test").open(data)


@given(st.binary(max_size=200))
def test_random_bytes_behind_a_right_header_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Opener(BOB.peer, "test").open(seals(1)[0][:89] + data)


@given(st.lists(st.integers(0, 40), max_size=80))
def test_each_datagram_opens_once_in_whatever_order_they_come(order: list[int]) -> None:
    opener, sent, opened = Opener(BOB.peer, "test"), seals(41), set[int]()
    for number in order:
        if number in opened:
            assert refused(opener, sent[number]) == "replay"
        else:
            assert opener.open(sent[number]).newest == (number > max(opened, default=-1))
            opened.add(number)


def test_a_datagram_older_than_the_window_is_refused_and_one_inside_is_not() -> None:
    opener, sent = Opener(BOB.peer, "test"), seals(WINDOW_BITS + 1)
    opener.open(sent[-1])
    assert opener.open(sent[1]).payload == b"1"
    assert refused(opener, sent[0]) == "replay"


def test_a_newer_boot_begins_anew_and_the_older_one_is_over() -> None:
    opener = Opener(BOB.peer, "test")
    old, new = seals(2, boot=1), seals(2, boot=2)
    opener.open(old[0])
    assert opener.open(new[1]).newest
    assert opener.open(new[0]).payload == b"0"
    assert refused(opener, old[1]) == "replay"


def test_only_the_latest_senders_are_remembered() -> None:
    opener = Opener(BOB.peer, "test", senders_max=2)
    first, second, third = (
        Seal(Identity(letter * 32), "test", 1).seal(BOB.peer, PING, b"") for letter in (b"1", b"2", b"3")
    )
    for data in (first, second, third):
        opener.open(data)
    assert refused(opener, third) == "replay"
    assert refused(opener, second) == "replay"
    assert opener.open(first).newest


@pytest.mark.parametrize("make", [lambda: Seal(ALICE, "test", -1), lambda: Seal(ALICE, "test", 2**64)])
def test_a_boot_that_does_not_fit_is_our_own_bug(make: Callable[[], Seal]) -> None:
    with pytest.raises(LocalProtocolError):
        make()
