"""Which addresses a node announces, which it dials, and in what order. The rules are tested without any
network."""

import ipaddress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.contact import ADDRESSES_MAX, Address, make_address
from crypto.identity import PeerId
from node.transport.address_book import (
    HOST_TRIES_BURST,
    OBSERVED_SECONDS,
    ROTATE_SECONDS,
    TRIES_MAX,
    UNPROVEN_ADDRESSES_MAX,
    AddressBook,
)
from node.transport.address_policy import AddressPolicy, Place
from node.transport.interfaces import InterfaceAddress, Use, read_interfaces, use_of

PORT = 9747
EVERYWHERE: tuple[Place, ...] = (("0.0.0.0", PORT), ("::", PORT))  # a node's default
LOOPBACK = (("lo", "127.0.0.1/8", Use.LOOPBACK), ("lo", "::1/128", Use.LOOPBACK))
PEER = PeerId(bytes(31) + b"p")


def interface(name: str, text: str, use: Use) -> InterfaceAddress:
    found = ipaddress.ip_interface(text)
    return InterfaceAddress(name, found.ip, found.network, use)


def policy(*interfaces: tuple[str, str, Use], places: tuple[Place, ...] = EVERYWHERE) -> AddressPolicy:
    made = AddressPolicy()
    made.look(places, [interface(*each) for each in (*interfaces, *LOOPBACK)])
    return made


def docker() -> AddressPolicy:
    """Return the policy of a machine on a LAN with Docker and a VPN."""
    return policy(
        ("docker0", "172.17.0.1/16", Use.NO_CARRIER),
        ("br-0f1e2d3c4b5a", "172.18.0.1/16", Use.CONTAINERS),
        ("tailscale0", "100.101.102.3/32", Use.TUNNEL),
        ("wlan0", "192.168.1.5/24", Use.DEFAULT_ROUTE),
    )


def at(host: str, port: int = PORT) -> Address:
    return make_address(host, port)


def hosts(addresses: "tuple[Address, ...] | list[Address]") -> list[str]:
    return [address.host for address in addresses]


# --- what this node announces ------------------------------------------------------------------------


def test_cable_addresses_are_announced_before_tunnels_and_bridges() -> None:
    assert hosts(docker().own()) == ["192.168.1.5", "100.101.102.3", "172.18.0.1", "172.17.0.1"]


def test_an_address_over_which_a_peer_connected_is_announced_first() -> None:
    here = docker()
    here.reached("100.101.102.3", "100.101.102.9")
    assert hosts(here.own())[:2] == ["100.101.102.3", "192.168.1.5"]
    # A connection between two nodes of this machine proves nothing.
    here.reached("172.17.0.1", "192.168.1.5")
    assert hosts(here.own())[0] == "100.101.102.3"


def test_many_addresses_of_one_interface_do_not_crowd_out_another() -> None:
    crowded = [("eth0", f"2001:db8::{number:x}/64", Use.CABLE) for number in range(1, 20)]
    here = policy(*crowded, ("eth1", "10.0.0.5/24", Use.CABLE))
    assert "10.0.0.5" in hosts(here.own())
    assert len(here.own()) == ADDRESSES_MAX


def test_loopback_is_announced_only_if_there_is_no_other_address() -> None:
    assert hosts(policy().own()) == ["127.0.0.1", "::1"]
    assert hosts(policy(("eth0", "10.0.0.5/24", Use.CABLE)).own()) == ["10.0.0.5"]
    assert hosts(policy(places=(("127.0.0.2", PORT), ("127.0.0.1", PORT))).own()) == [
        "127.0.0.1",
        "127.0.0.2",
    ]


def test_confirmed_addresses_never_displace_the_best_own_address() -> None:
    confirmed = [at(f"198.51.100.{number}") for number in range(1, 10)]
    told = docker().own(confirmed=confirmed)
    assert hosts(told)[:2] == ["192.168.1.5", "198.51.100.1"]
    assert len(told) == ADDRESSES_MAX
    assert "100.101.102.3" in hosts(told)


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (docker(), "192.168.1.5"),
        (policy(("docker0", "172.17.0.1/16", Use.NO_CARRIER)), None),
        (policy(("br-0f1e2d3c4b5a", "172.18.0.1/16", Use.CONTAINERS)), None),
        (policy(("eth0", "fd00::5/64", Use.CABLE)), "fd00::5"),
        (policy(), None),
    ],
)
def test_only_addresses_that_other_machines_can_use_are_displayed(
    here: AddressPolicy, expected: str | None
) -> None:
    found = here.for_others(here.own())
    assert (None if found is None else found.host) == expected


# --- which claimed addresses are dialled --------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        at("127.0.0.1"),
        at("::1"),
        at("169.254.3.4"),
        at("fe80::3"),
        at("10.1.2.3"),
        at("192.168.2.7"),
        at("fd12::7"),
        at("0.0.0.0"),
        at("224.0.0.1"),
        at("255.255.255.255"),
        at("ff02::1"),
        at("::ffff:127.0.0.1"),
        at("192.168.1.7", 22),
        at("203.0.113.5", 443),
    ],
)
def test_claims_on_private_networks_and_system_ports_are_not_dialled(address: Address) -> None:
    assert not docker().admits(address)


@pytest.mark.parametrize(
    "address", [at("192.168.1.7"), at("100.64.9.9"), at("203.0.113.5"), at("2001:db8::7"), at("host.example")]
)
def test_claims_on_shared_and_public_networks_are_dialled(address: Address) -> None:
    assert docker().admits(address)


def test_a_private_network_is_dialled_once_a_peer_was_seen_there() -> None:
    here = docker()
    assert not here.admits(at("10.2.0.7"))
    here.met("192.168.1.9")  # a neighbour proves nothing about the network behind the router
    assert not here.admits(at("192.168.2.7"))
    here.met("10.9.0.1")
    assert here.admits(at("10.2.0.7"))
    assert not here.admits(at("192.168.2.7"))


def test_nodes_of_one_machine_dial_each_other_on_loopback() -> None:
    assert policy(places=(("127.0.0.1", PORT),)).admits(at("127.0.0.1", PORT + 1))


def test_this_node_never_dials_its_own_addresses() -> None:
    here = docker()
    for host in ("172.17.0.1", "192.168.1.5", "127.0.0.1"):
        assert here.is_own(at(host))
        assert not here.admits(at(host))
    assert not here.is_own(at("172.17.0.1", PORT + 1))
    assert not here.is_own(at("172.17.0.2"))
    assert not policy(places=(("127.0.0.1", PORT),)).is_own(at("127.0.0.2"))


def test_claims_on_a_shared_network_are_dialled_first_and_bridges_last() -> None:
    claims = [at("172.18.0.9"), at("2001:db8::9"), at("100.101.102.9"), at("203.0.113.9"), at("192.168.1.9")]
    found = hosts(sorted(claims, key=docker().closeness))
    assert found[:2] == ["192.168.1.9", "203.0.113.9"]
    assert found[-1] == "172.18.0.9"


# --- datagrams to a peer that was not seen yet --------------------------------------------------------


@given(st.integers(1, ADDRESSES_MAX), st.booleans())
def test_repeated_datagrams_reach_every_claimed_address(count: int, is_proved: bool) -> None:
    book = AddressBook(docker())
    claims = [at(f"203.0.113.{number}") for number in range(1, count + 1)]
    book.claim(PEER, claims)
    if is_proved:
        book.prove(PEER, at("203.0.113.99"))
    tried: set[Address] = set()
    for repetition in range(8):
        sent = book.for_datagram(PEER, repetition * 2 * ROTATE_SECONDS)
        assert len(sent) <= UNPROVEN_ADDRESSES_MAX
        assert not is_proved or sent[0] == at("203.0.113.99")
        tried.update(sent)
    assert tried >= set(claims)


def test_a_short_hint_does_not_replace_the_peers_own_claims() -> None:
    book = AddressBook(docker())
    own = [at(f"203.0.113.{number}") for number in range(1, ADDRESSES_MAX + 1)]
    book.claim(PEER, own)
    for number in range(100):
        book.claim(PEER, [at(f"198.51.100.{number}"), at("198.51.100.200")], is_hint=True)
    assert book.for_stream(PEER) == (*own, at("198.51.100.99"), at("198.51.100.200"))
    book.claim(PEER, own[:1])
    assert book.for_stream(PEER)[:1] == (own[0],)
    assert own[1] not in book.for_stream(PEER)


def test_only_dialable_claims_are_remembered() -> None:
    book = AddressBook(docker())
    book.claim(PEER, [at("127.0.0.1", 22), at("10.9.9.9"), at("internal.example"), at("203.0.113.7")])
    assert book.known(PEER) == (at("203.0.113.7"),)


def test_an_address_that_never_answers_is_tried_ever_less_often() -> None:
    book = AddressBook(docker())
    book.claim(PEER, [at("203.0.113.1")])
    sent = sum(bool(book.for_datagram(PEER, float(second))) for second in range(600))
    assert TRIES_MAX <= sent <= TRIES_MAX + 16
    # An address that answers is proved, so it is tried each time.
    book.observe(PEER, at("203.0.113.1"), 600.0)
    late = 601.0 + OBSERVED_SECONDS
    assert all(book.for_datagram(PEER, late + second) for second in range(100))


def test_many_invented_peers_cannot_make_a_node_flood_a_host() -> None:
    book = AddressBook(docker())
    crowd = [PeerId(number.to_bytes(32, "big")) for number in range(1_000)]
    for peer in crowd:
        book.claim(peer, [at("203.0.113.1", 20_000)])
    assert sum(bool(book.for_datagram(peer, 0.0)) for peer in crowd) == HOST_TRIES_BURST


def test_connections_to_claimed_addresses_are_limited_like_datagrams() -> None:
    book = AddressBook(policy())
    there = at("203.0.113.1", 20_000)
    book.claim(PEER, [there])
    times = [second for second in range(400) if book.may_dial(PEER, there, float(second))]
    assert times[:TRIES_MAX] == list(range(TRIES_MAX))
    pauses = [after - before for before, after in pairwise(times[TRIES_MAX - 1 :])]
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert set(pauses[7:]) == {64}
    book.prove(PEER, there)
    assert all(book.may_dial(PEER, there, 400.0) for _ in range(100))
    crowd = [PeerId(number.to_bytes(32, "big")) for number in range(1_000, 2_000)]
    for peer in crowd:
        book.claim(peer, [there])
    assert sum(book.may_dial(peer, there, 500.0) for peer in crowd) == HOST_TRIES_BURST


def test_an_address_that_failed_sorts_after_one_that_answered() -> None:
    book = AddressBook(docker())
    one, other = at("192.168.1.7"), at("100.101.102.9")
    book.prove(PEER, other)
    book.prove(PEER, one)
    assert book.for_stream(PEER) == (one, other)
    book.failed(PEER, one)
    assert book.for_stream(PEER) == (other, one)


def test_the_preferred_path_is_dialled_first_until_it_fails() -> None:
    here = policy(("eth0", "10.0.0.1/24", Use.CABLE), ("eth1", "10.0.1.1/24", Use.CABLE))
    book = AddressBook(here)
    slow, fast = at("10.0.0.2"), at("10.0.1.2")
    book.claim(PEER, [slow, fast, at("172.17.0.1")])
    assert book.paths(PEER) == (slow, fast)
    book.prove(PEER, slow)
    book.prefer(PEER, fast)
    assert book.for_stream(PEER) == (fast, slow)
    book.failed(PEER, fast)
    assert book.for_stream(PEER) == (slow, fast)


# --- classes of interfaces ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "host", "has_carrier", "is_default", "use"),
    [
        ("eth0", "192.168.1.5", True, True, Use.DEFAULT_ROUTE),
        ("br0", "192.168.1.5", True, True, Use.DEFAULT_ROUTE),
        ("br0", "192.168.9.1", True, False, Use.CABLE),
        ("wlp3s0", "192.168.1.5", True, False, Use.CABLE),
        ("en0", "192.168.1.5", True, False, Use.CABLE),
        ("docker0", "172.17.0.1", True, False, Use.CONTAINERS),
        ("br-0f1e2d3c4b5a", "172.18.0.1", True, False, Use.CONTAINERS),
        ("docker0", "172.17.0.1", False, False, Use.NO_CARRIER),
        ("virbr0", "192.168.122.1", True, False, Use.CONTAINERS),
        ("wg0", "10.8.0.2", True, True, Use.TUNNEL),
        ("utun4", "100.64.0.2", True, False, Use.TUNNEL),
        ("eth0", "169.254.3.4", True, False, Use.LINK_LOCAL),
        ("eth0", "fe80::1", True, False, Use.LINK_LOCAL),
        ("lo", "127.0.0.1", True, False, Use.LOOPBACK),
    ],
)
def test_an_interface_is_classified_by_its_name_carrier_and_route(
    name: str, host: str, has_carrier: bool, is_default: bool, use: Use
) -> None:
    assert use_of(name, ipaddress.ip_address(host), has_carrier=has_carrier, is_default=is_default) is use


def test_this_machine_has_loopback_and_addresses_within_their_networks() -> None:
    found = read_interfaces()
    assert any(each.host.is_loopback for each in found)
    assert all(each.host in each.network for each in found)
    assert [each.use for each in found] == sorted(each.use for each in found)
