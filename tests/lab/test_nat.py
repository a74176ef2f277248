"""Each NAT of the laboratory behaves as its name says, seen from plain sockets without the product.

`test_punching.py` tests what nodes do behind these NATs.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.nat import (
    PRESETS,
    SHORT,
    Internet,
    Prober,
    Site,
    can_be_direct,
    internet,
    named,
    probers,
)
from tests.lab.nodes import LOOK_SECONDS, wait_until
from tests.lab.prober import WAIT_SECONDS

PORT = 9747
VAIN_SECONDS = 0.15
"""Seconds to wait for packets that must not come: on one machine, a packet that is let through takes a
millisecond."""
_pause = time.sleep

SITES = (
    Site("a", has_ipv6=True),
    Site("b", has_ipv6=True),
    named("home", "home", "h1", "h2"),
    named("home", "home2"),
    named("symmetric", "symmetric"),
    named("cone", "cone", "c1", "c2"),
    named("carrier", "carrier"),
    named("blocked", "blocked"),
    named("firewall6", "firewall6"),
    named("firewall6", "other6"),
    Site("short", nat=replace(SHORT, seconds=1)),
    named("home", "rebooted"),
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Internet]:
    with internet(SITES) as made:
        yield made


@pytest.fixture(scope="module")
def everybody(lab: Internet) -> "Iterator[dict[str, Prober]]":
    with probers(lab) as made:
        yield made


@pytest.fixture
def at(lab: Internet, everybody: dict[str, Prober]) -> dict[str, Prober]:
    """Return the machines, unknown to every NAT, so that the packets of one test open no way for the next."""
    lab.forget(*(site.name for site in SITES if site.nat is not None))
    for prober in everybody.values():
        prober.begin("open", port=PORT)
    for prober in everybody.values():
        prober.result()
    return everybody


def seen_by(
    at: dict[str, Prober], lab: Internet, name: str, server: str, seconds: float = WAIT_SECONDS
) -> tuple[str, int] | None:
    """Return the endpoint at which a server sees a machine that sends to it."""
    at[name]("send", port=PORT, to=(lab.public(server), PORT))
    came = at[server]("receive", port=PORT, seconds=seconds)
    return None if came is None else (came[0], came[1])


def connected(at: dict[str, Prober], lab: Internet, name: str, server: str) -> tuple[str, int] | None:
    """Return the endpoint at which a server sees a machine that connects to it."""
    at[name].begin("connect", port=PORT, to=(lab.public(server), PORT))
    came = at[server]("accept", port=PORT)
    at[name].result()
    return None if came is None else (came[0], came[1])


def answers(at: dict[str, Prober], server: str, there: Any, name: str, seconds: float = WAIT_SECONDS) -> bool:
    """Return whether a datagram of a server to this endpoint reaches the machine."""
    at[server]("send", port=PORT, to=there)
    return at[name]("receive", port=PORT, seconds=seconds) is not None


def dials(at: dict[str, Prober], server: str, there: Any, name: str, seconds: float = WAIT_SECONDS) -> bool:
    """Return whether a server can connect to this endpoint."""
    at[server].begin("connect", port=0, to=there, seconds=seconds)
    came = at[name]("accept", port=PORT, seconds=seconds)
    at[server].result()
    return came is not None


@pytest.mark.parametrize(("name", "site"), [("h1", "home"), ("carrier", "carrier"), ("short", "short")])
def test_a_home_router_maps_endpoint_independently_and_filters_by_endpoint(
    lab: Internet, at: dict[str, Prober], name: str, site: str
) -> None:
    there = seen_by(at, lab, name, "a")
    assert there is not None
    assert there[0] == lab.public(site)
    assert there[1] != PORT
    assert answers(at, "a", there, name)
    assert not answers(at, "b", there, name, VAIN_SECONDS)
    assert seen_by(at, lab, name, "b") == there
    assert answers(at, "b", there, name)
    assert connected(at, lab, name, "a") == connected(at, lab, name, "b") == there
    assert not dials(at, "a", there, name, VAIN_SECONDS)


def test_a_symmetric_router_maps_to_another_port_for_each_destination(
    lab: Internet, at: dict[str, Prober]
) -> None:
    for see in (seen_by, connected):
        ports = {see(at, lab, "symmetric", server) for server in "ab"}
        assert len(ports) == 2
        assert {place and place[0] for place in ports} == {lab.public("symmetric")}


def test_a_full_cone_router_lets_in_everybody_including_its_own_machines(
    lab: Internet, at: dict[str, Prober]
) -> None:
    there = seen_by(at, lab, "c1", "a")
    assert there == (lab.public("cone"), PORT)
    assert answers(at, "b", there, "c1")
    assert answers(at, "c2", there, "c1")
    assert connected(at, lab, "c1", "a") == there
    assert dials(at, "b", there, "c1")
    assert dials(at, "c2", there, "c1")


def test_a_router_that_blocks_udp_lets_only_tcp_out(lab: Internet, at: dict[str, Prober]) -> None:
    assert seen_by(at, lab, "blocked", "a", VAIN_SECONDS) is None
    assert connected(at, lab, "blocked", "a") == connected(at, lab, "blocked", "b") is not None


def test_an_ipv6_firewall_lets_in_only_answers(lab: Internet, at: dict[str, Prober]) -> None:
    here, server = ((lab.machines[name].hosts[6], PORT) for name in ("firewall6", "a"))
    assert not answers(at, "a", here, "firewall6", VAIN_SECONDS)
    assert not dials(at, "a", here, "firewall6", VAIN_SECONDS)
    at["firewall6"]("send", port=PORT, to=server)
    assert at["a"]("receive", port=PORT)[:2] == here
    assert answers(at, "a", here, "firewall6")


def test_a_short_lived_mapping_expires_without_traffic(lab: Internet, at: dict[str, Prober]) -> None:
    there = seen_by(at, lab, "short", "a")
    wait_until(
        lambda: answers(at, "a", seen_by(at, lab, "short", "a"), "short", VAIN_SECONDS),
        WAIT_SECONDS,
        lambda: "no answer came",
    )
    _pause(1.1)
    assert not answers(at, "a", there, "short", VAIN_SECONDS)


def test_a_rebooted_router_forgets_its_mappings_and_uses_different_ports(
    lab: Internet, at: dict[str, Prober]
) -> None:
    before = seen_by(at, lab, "rebooted", "a")
    lab.reboot("rebooted")
    assert not answers(at, "a", before, "rebooted", VAIN_SECONDS)
    after = seen_by(at, lab, "rebooted", "a")
    assert after not in (before, None)
    assert answers(at, "a", after, "rebooted")


def test_two_machines_behind_one_router_connect_only_by_inner_addresses(
    lab: Internet, at: dict[str, Prober]
) -> None:
    one, other = (seen_by(at, lab, name, "a") for name in ("h1", "h2"))
    assert one is not None
    assert other is not None
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert not answers(at, "h1", other, "h2", VAIN_SECONDS)
    inside = (lab.machines["h2"].hosts[4], PORT)
    assert answers(at, "h1", inside, "h2")
    assert dials(at, "h1", inside, "h2")


@pytest.mark.parametrize(
    ("one", "other"),
    [("h1", "home2"), ("h1", "carrier"), ("h1", "symmetric"), ("c1", "symmetric"), ("carrier", "short")],
)
def test_plain_sockets_punch_holes_exactly_if_the_mappings_allow_it(
    lab: Internet, at: dict[str, Prober], one: str, other: str
) -> None:
    sites = {name: site for site in SITES for name in site.names}
    is_possible = can_be_direct(sites[one], sites[other], "udp")
    assert is_possible == can_be_direct(sites[one], sites[other], "tcp")
    places = {name: seen_by(at, lab, name, "a") for name in (one, other)}
    assert punched(at, one, other, places, is_possible) == is_possible
    places = {name: connected(at, lab, name, "a") for name in (one, other)}
    for name, to in ((one, other), (other, one)):
        at[name].begin(
            "connect", port=PORT, to=places[to], seconds=WAIT_SECONDS if is_possible else VAIN_SECONDS
        )
    assert [at[name].result() for name in (one, other)] == [is_possible] * 2


def punched(at: dict[str, Prober], one: str, other: str, places: dict[str, Any], is_possible: bool) -> bool:
    """Return whether datagrams arrive in both directions. Each machine writes first to the endpoint at which
    the other was seen, and then to the one from which the other writes: a symmetric router shows a different
    port."""
    until = time.monotonic() + (WAIT_SECONDS if is_possible else VAIN_SECONDS)
    reached: set[str] = set()
    while len(reached) < 2 and time.monotonic() < until:
        for name, to in ((one, other), (other, one)):
            at[name]("send", port=PORT, to=places[to])
        for name, to in ((one, other), (other, one)):
            came = at[name]("receive", port=PORT, seconds=LOOK_SECONDS)
            if came is not None:
                reached.add(name)
                places[to] = came[:2]
    return len(reached) == 2


def test_direct_connections_follow_from_the_mappings() -> None:
    never = {
        frozenset((one, other))
        for one in PRESETS
        for other in PRESETS
        if not can_be_direct(PRESETS[one], PRESETS[other], "tcp")
    }
    strict = {"home", "carrier", "blocked", "short"}
    assert never == {
        *(frozenset((one, other)) for one in ("symmetric", "firewall6") for other in strict),
        frozenset(("symmetric",)),
        frozenset(("symmetric", "firewall6")),
    }
    assert not can_be_direct(PRESETS["public"], PRESETS["blocked"], "udp")
