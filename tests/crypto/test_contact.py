"""Addresses as people and peers write them, and messages that are refused before they are decoded."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.contact import (
    ADDRESS_LENGTH_MAX,
    Address,
    make_address,
    parse_address,
)
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner
from crypto.identity import Identity, peer_text

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
SIGNER = IdentitySigner(ALICE, "test")
PEER = peer_text(BOB.peer)

hosts = st.ip_addresses().map(str) | st.from_regex(r"[a-z]{1,20}(\.[a-z]{1,20}){0,3}", fullmatch=True)


@given(hosts, st.integers(1, 65_535), st.sampled_from([None, BOB.peer]))
def test_an_address_survives_both_of_its_text_forms(host: str, port: int, peer: Any) -> None:
    address = make_address(host, port, peer)
    assert parse_address(str(address)) == address
    assert parse_address(address.short) == address.of(None)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.5:9747", Address("ip4", "10.0.0.5", 9747)),
        ("[::1]:9747", Address("ip6", "::1", 9747)),
        ("lab-5:1", Address("dns", "lab-5", 1)),
        ("/ip4/10.0.0.5/udp/9747", Address("ip4", "10.0.0.5", 9747)),
        (f"/dns4/a.example/tcp/1/p2p/{PEER}", Address("dns4", "a.example", 1, BOB.peer)),
        ("/ip6/0:0::0ABC/tcp/1", Address("ip6", "::abc", 1)),
        ("[::FFFF:a00:5]:1", Address("ip6", "::ffff:10.0.0.5", 1)),
        ("[fe80::1%eth0]:9747", Address("ip6", "fe80::1%eth0", 9747)),
        ("/ip6zone/br-0.7/ip6/fe80::1/tcp/1", Address("ip6", "fe80::1%br-0.7", 1)),
    ],
)
def test_typed_addresses_are_parsed(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10.0.0.5:99999", "port must be"),
        ("10.0.0.5:0", "port must be"),
        ("10.0.0.5", "want HOST:PORT"),
        ("::1:80", "want HOST:PORT"),
        ("under score.example:80", "not a host name"),
        ("lab\n:80", "not a host name"),
        ("-a.example:80", "not a host name"),
        ("a-.example:80", "not a host name"),
        ("[lab]:80", "not an IPv6 address"),
        ("[fe80::1%a/b]:80", "not an IPv6 address"),
        ("[fe80::1%]:80", "not an IPv6 address"),
        ("[fe80::1%eth0\n]:80", "only a link-local"),
        ("[fe80::1%abcdefghijklmnop]:80", "only a link-local"),
        ("[2001:db8::1%eth0]:80", "only a link-local"),
        ("/ip6/fe80::1%eth0/tcp/80", "a zone stands before"),
        ("/ip6zone/eth0/ip4/10.0.0.1/tcp/80", "want /ip4"),
        ("/ip6zone/eth0/ip6/::1/tcp/80", "only a link-local"),
        ("/ip6zone//ip6/fe80::1/tcp/80", "not an IPv6 address"),
        ("/ip4/::1/tcp/80", "not an IPv4 address"),
        ("/ip6/10.0.0.1/tcp/80", "not an IPv6 address"),
        ("/unix/x/tcp/80", "not one of"),
        ("/ip4/10.0.0.1/sctp/80", "want /ip4"),
        (f"/ip4/10.0.0.1/tcp/80/onion/{PEER}", "cannot follow a port"),
        ("/ip4/10.0.0.1/tcp/80/p2p/nobody", "not a peer id"),
        ("x" * (ADDRESS_LENGTH_MAX + 1), "at most"),
    ],
)
def test_invalid_addresses_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_address(text)


def test_link_local_addresses_are_written_with_their_zone_first() -> None:
    here = make_address("fe80::1%eth0", 1)
    assert str(here) == "/ip6zone/eth0/ip6/fe80::1/tcp/1"
    assert here.short == "[fe80::1%eth0]:1"
    assert here.is_link_local
    assert make_address("fe80::1", 1).is_link_local
    assert not any(make_address(host, 1).is_link_local for host in ("::1", "fd00::1", "169.254.0.1", "fe80"))


@given(st.text(max_size=80))
def test_any_text_is_an_address_or_a_value_error(text: str) -> None:
    for candidate in (text, "/ip4/" + text, "/ip6zone/" + text, f"[fe80::1%{text}]:80", text + ":80"):
        try:
            assert 1 <= parse_address(candidate).port <= 65_535
        except ValueError:
            continue


@given(st.binary(max_size=300))
def test_random_bytes_as_a_message_are_refused_or_valid(data: bytes) -> None:
    try:
        message: Fact = decode(data, Fact, bytes_max=250)
    except RemoteProtocolError:
        return
    assert decode(encode(message), Fact, bytes_max=1_000) == message


def test_a_message_longer_than_allowed_is_refused_before_decoding() -> None:
    fact = SIGNER.sign("test", b"body")
    data = encode(fact)
    read: Fact = decode(memoryview(data), Fact, bytes_max=len(data))
    assert read == fact
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode(data, Fact, bytes_max=len(data) - 1)


def test_deeply_nested_messagepack_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode(b"\x91" * 100_000 + b"\xc0", Any, bytes_max=2**20)
