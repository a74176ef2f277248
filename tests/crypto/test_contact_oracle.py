"""Addresses and peer ids compared with the packages `multiaddr` and `libp2p`, if the extra `oracle` is
installed.

Ours are a subset: an IP address or a name, a port, a peer. Within that subset both accept and refuse the same
text, except for names: the packages follow IDNA, which the multiaddr specification does not require.
"""

import ipaddress
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from crypto.contact import Address, make_address, parse_address
from crypto.identity import Identity, PeerId, parse_peer, peer_text

MISSING = "the extra oracle is not installed"
multiaddr: Any = pytest.importorskip("multiaddr", reason=MISSING)
libp2p_id: Any = pytest.importorskip("libp2p.peer.id", reason=MISSING)
ed25519: Any = pytest.importorskip("libp2p.crypto.ed25519", reason=MISSING)
multibase: Any = pytest.importorskip("multibase", reason=MISSING)

CID_HEAD = b"\x01\x72"
"""A CID of version 1 that holds a libp2p key."""


def is_plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether glibc, and so `multiaddr`, does not write this address in RFC 4291's "IPv4-compatible"
    form. RFC 4291 itself deprecates that form, and Go does not write it.
    """
    return not 2**16 <= int(address) < 2**32


seeds = st.binary(min_size=32, max_size=32)
peers = seeds.map(lambda seed: Identity(seed).peer)
mapped = st.ip_addresses(v=4).map(lambda address: ipaddress.IPv6Address(f"::ffff:{address}"))
ips_6 = st.ip_addresses(v=6).filter(is_plain) | mapped
names = st.from_regex(r"[a-zA-Z0-9]{1,20}(\.[a-z0-9]([a-z0-9]?-?[a-z0-9]){0,9}){0,3}\.?", fullmatch=True)
"""Host names of RFC 1123."""
names = names.filter(lambda name: make_address(name, 1).kind == "dns")
zones = st.from_regex(r"[a-z]{1,5}[0-9]{0,3}", fullmatch=True)


@st.composite
def addresses(draw: st.DrawFn) -> Address:
    """Draw any address of our kinds."""
    port, peer = draw(st.integers(1, 65_535)), draw(st.none() | peers)
    kind = draw(st.sampled_from(["ip4", "ip6", "zone", "dns", "dns4", "dns6"]))
    if kind == "zone":
        here = draw(st.ip_addresses(network="fe80::/64"))
        return make_address(f"{here}%{draw(zones)}", port, peer)
    if kind in ("ip4", "ip6"):
        return make_address(str(draw(st.ip_addresses(v=4) if kind == "ip4" else ips_6)), port, peer)
    return Address(kind, draw(names), port, peer)


@st.composite
def spellings(draw: st.DrawFn) -> str:
    """Draw an address of our kinds in one of many spellings, some of them invalid."""
    ip = draw(ips_6)
    hosts = {
        "ip4": st.ip_addresses(v=4).map(str)
        | st.sampled_from(["1.2.3", "01.2.3.4", "256.1.1.1", "1.2.3.4 "]),
        "ip6": st.sampled_from([str(ip), ip.exploded, str(ip).upper(), f"[{ip}]", f"{ip}%eth0", f"{ip}/64"]),
        "dns": names,
        "dns4": names,
        "dns6": names,
    }
    kind = draw(st.sampled_from(sorted(hosts)))
    transport = draw(st.sampled_from(["tcp", "udp"]))
    port = draw(st.integers(1, 70_000).map(str) | st.sampled_from(["", "x", "-1", "080"]))
    text = f"/{kind}/{draw(hosts[kind])}/{transport}/{port}"
    if draw(st.booleans()):
        text += f"/p2p/{draw(peers.map(draw(st.sampled_from([peer_text, cid_text]))))}"
    return text


def cid_text(peer: PeerId) -> str:
    """Return the CID form of a peer id, as libp2p's packages write it."""
    there = libp2p_id.ID.from_base58(peer_text(peer))
    return str(multibase.encode("base32", CID_HEAD + there.to_bytes()).decode())


def theirs(text: str) -> Any | None:
    """Return the address after a round trip through `multiaddr` and its bytes; None if `multiaddr` refuses
    it."""
    try:
        return multiaddr.Multiaddr(multiaddr.Multiaddr(text).to_bytes())
    except (ValueError, multiaddr.exceptions.Error):
        return None


def ours(text: str) -> Address | None:
    try:
        return parse_address(text)
    except ValueError:
        return None


@given(addresses())
def test_multiaddr_reads_our_addresses_and_writes_the_same_text(address: Address) -> None:
    assert str(theirs(str(address))) == str(address)
    assert parse_address(str(address)) == address


@given(spellings())
def test_both_read_an_address_spelling_equally_or_both_refuse_it(text: str) -> None:
    read = theirs(text)
    # One port number serves both TCP and UDP, so ours always says tcp.
    assert (None if read is None else str(read).replace("/udp/", "/tcp/")) == (str(ours(text) or "") or None)


@given(addresses(), st.data())
def test_we_refuse_the_addresses_that_multiaddr_refuses(address: Address, data: st.DataObject) -> None:
    text = str(address)
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 3)))
    damaged = text[:at] + data.draw(st.text("/:.%-0f1z~é ", max_size=3)) + text[until:]
    assume(ours(damaged) is not None)
    # Only IDNA refuses such a name: see below.
    assume("--" not in damaged)
    assert theirs(damaged) is not None


@pytest.mark.parametrize("name", ["my_service", "r3---sn-4g5e6nez.example"])
def test_names_that_only_idna_forbids_are_valid_here(name: str) -> None:
    # Such names are in use: RFC 2181, section 11, allows any bytes in a DNS name, and resolvers look them up.
    assert theirs(f"/dns/{name}/tcp/1") is None
    assert parse_address(f"/dns/{name}/tcp/1") == Address("dns", name, 1)


@given(seeds)
def test_a_public_key_gives_the_same_peer_id_in_libp2p(seed: bytes) -> None:
    peer = Identity(seed).peer
    there = libp2p_id.ID.from_pubkey(ed25519.Ed25519PrivateKey.from_bytes(seed).get_public_key())
    assert peer_text(peer) == str(there)
    assert parse_peer(str(there)) == peer
    assert libp2p_id.ID.from_string(peer_text(peer)) == there


@given(peers)
def test_a_peer_id_as_a_cid_is_the_same_peer(peer: PeerId) -> None:
    text = cid_text(peer)
    assert parse_peer(text) == peer
    assert str(theirs(f"/ip4/127.0.0.1/tcp/1/p2p/{text}")).endswith(f"/p2p/{peer_text(peer)}")


@given(peers, st.data())
def test_libp2p_accepts_the_damaged_peer_ids_that_we_accept(peer: PeerId, data: st.DataObject) -> None:
    text = peer_text(peer)
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.text("0IOlz1Ab~", max_size=2)) + text[at + 1 :]
    try:
        read = parse_peer(damaged)
    except ValueError:
        return
    assert libp2p_id.ID.from_string(damaged).to_bytes()[6:] == read
