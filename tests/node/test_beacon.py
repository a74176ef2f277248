"""Beacons on the local network: the core in virtual time, the sockets on loopback, and simulated whole
nodes."""

import os
from collections import Counter
from random import Random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from crypto.contact import Address, make_address
from crypto.identity import PeerId
from crypto.swarm import Swarm
from node import config
from node.transport.beacon import (
    ANSWERS_ENOUGH,
    BEACON_BYTES_MAX,
    HERE,
    NEWS_PER_MINUTE_MAX,
    PERIOD_SECONDS,
    RETELL_SECONDS,
    SOURCE_BURST_MAX,
    Beacon,
    Beacons,
    BeaconSeal,
    NeighbourHeard,
)
from node.transport.multicast import Multicast, interfaces_of
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import SimNetworkFabric
from tests.node.nets import free_port, make_network, running
from tests.node.simulated import simulated_node

SWARM = Swarm("test")
HOST = "192.168.1.20"


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def seal(swarm: Swarm = SWARM) -> BeaconSeal:
    return BeaconSeal(swarm.secrets, os.urandom)


def beacons(number: int = 0, *, swarm: Swarm = SWARM, now: float = 0.0) -> tuple[Beacons, Counter[str]]:
    counters: Counter[str] = Counter()
    own = [make_address(f"192.168.1.{number}", 9747)]
    return Beacons(peer(number), seal(swarm), Random(number), counters, lambda: own, now), counters


def said(number: int, *, asks: bool = False, host: str = HOST) -> bytes:
    return seal().seal(Beacon(asks, peer(number), (f"/ip4/{host}/tcp/9747",)))


def settled(number: int = 0) -> tuple[Beacons, Counter[str], float]:
    """Return a core that has sent all its questions, its counters, and a time two seconds after the last
    question."""
    core, counters = beacons(number)
    now = 0.0
    for _ in range(4):
        now = core.deadline
        assert core.wake(now)
    assert now < 10
    return core, counters, now + 2


def test_a_newcomer_asks_a_few_times_and_then_rarely_sends_beacons() -> None:
    core, _, _ = settled()
    previous = 7.0
    opener = seal()
    for _ in range(20):
        now = core.deadline
        assert 0.7 * PERIOD_SECONDS < now - previous < 1.3 * PERIOD_SECONDS
        (packet,) = core.wake(now)
        beacon = opener.open(packet)
        assert beacon is not None
        assert not beacon.asks
        previous = now


def test_a_node_that_moves_to_a_new_network_asks_like_a_newcomer() -> None:
    own = [make_address("192.168.1.1", 9747)]
    core = Beacons(peer(1), seal(), Random(1), Counter(), lambda: own, 0.0)
    while (now := core.deadline) < 10:
        core.wake(now)
    own[:] = [make_address("192.168.2.1", 9747)]
    for later in (0.0, 1.0, 3.0, 7.0):
        assert core.deadline == now + later
        (packet,) = core.wake(now + later)
        beacon = seal().open(packet)
        assert beacon is not None
        assert beacon.asks


def test_a_question_is_soon_answered_unless_others_already_did() -> None:
    core, _, now = settled()
    core.receive(now, HOST, said(1, asks=True))
    assert now < core.deadline < now + 0.5
    assert core.wake(core.deadline)
    core.receive(now + 5, HOST, said(1, asks=True))
    for number in range(2, 2 + ANSWERS_ENOUGH):
        core.receive(now + 5, HOST, said(number))
    assert core.deadline > now + 10


def test_a_node_answers_many_questions_with_one_beacon_a_second() -> None:
    core, _, now = settled()
    spoken = []
    for tick in range(500):
        at = now + tick / 100
        core.receive(at, f"192.168.1.{tick % 200}", said(tick + 1, asks=True))
        if core.wake(at):
            spoken.append(at)
    assert 2 <= len(spoken) <= 5


def test_a_neighbour_is_reported_once_and_again_when_it_moves() -> None:
    core, _, now = settled()
    for _ in range(3):
        core.receive(now, HOST, said(1))
    assert core.events == [NeighbourHeard(peer(1), (make_address(HOST, 9747, peer(1)),))]
    core.events.clear()
    core.receive(now, "fe80::1", said(1))
    assert core.events == []
    core.receive(now, "192.168.1.21", said(1, host="192.168.1.21"))
    assert [event.addresses[0].host for event in core.events] == ["192.168.1.21"]


def by_link(number: int, *texts: str) -> bytes:
    return seal().seal(Beacon(False, peer(number), texts))


def test_an_own_beacon_is_ignored_unless_it_shows_a_new_address() -> None:
    core, _ = beacons(20)
    core.wake(now := core.deadline)
    core.receive(now, HOST, said(20))
    assert core.events == []
    core.receive(now, "192.168.1.21", said(20, host="192.168.1.21"))
    assert core.events == [NeighbourHeard(peer(20), (make_address("192.168.1.21", 9747, peer(20)),))]


def test_link_local_addresses_use_the_packets_source_and_come_last() -> None:
    core, _, now = settled()
    texts = (f"/ip6/{HERE}/tcp/9747", "/ip4/10.0.0.7/tcp/9747", "/ip6zone/eth7/ip6/fe80::7/tcp/1")
    core.receive(now, "fe80::5%eth0", by_link(1, *texts))
    # Only the packet's source address is valid on this link, whatever address and zone the packet names.
    assert [[address.short for address in event.addresses] for event in core.events] == [
        ["10.0.0.7:9747", "[fe80::5%eth0]:9747", "[fe80::5%eth0]:1"]
    ]
    for number, source in enumerate((HOST, "fe80::5", "fd00::5"), start=2):
        core.receive(now, source, by_link(number, f"/ip6/{HERE}/tcp/9747"))
    assert len(core.events) == 1


def test_a_neighbour_heard_over_ipv4_and_ipv6_is_reported_once() -> None:
    core, _, now = settled()
    texts = (f"/ip4/{HOST}/tcp/9747", f"/ip6/{HERE}/tcp/9747")
    for _ in range(5):
        for source in (HOST, "fe80::5%eth0"):
            core.receive(now, source, by_link(1, *texts))
        now += PERIOD_SECONDS
    assert [len(event.addresses) for event in core.events] == [1, 2]
    core.receive(now + RETELL_SECONDS, HOST, by_link(1, *texts))
    assert len(core.events) == 3


def test_a_node_is_announced_only_on_links_where_it_listens() -> None:
    def told(*hosts: str) -> list[int]:
        addresses = Multicast([(host, port) for port, host in enumerate(hosts, start=1)], Counter()).addresses
        return [address.port for address in addresses if address.host == HERE]

    assert told("0.0.0.0", "::1", "fd00::1") == []
    assert told("0.0.0.0", "::", "fe80::1%eth0") == [2, 3]


def test_a_packet_from_elsewhere_cannot_make_a_node_dial_itself() -> None:
    core, _, now = settled()
    core.receive(now, HOST, said(1, host="127.0.0.1"))
    assert core.events == []
    core.receive(now, "127.0.0.1", said(1, host="127.0.0.1"))
    assert len(core.events) == 1


def test_beacons_of_a_private_swarm_tell_an_outsider_nothing() -> None:
    private = Swarm("test", (b"k" * 32,))
    packet = seal(private).seal(Beacon(True, peer(1), (f"/ip4/{HOST}/tcp/9747",)))
    again = seal(private).seal(Beacon(True, peer(1), (f"/ip4/{HOST}/tcp/9747",)))
    core, counters, now = settled()
    core.receive(now, HOST, packet)
    assert (core.events, counters["beacons_of_others"]) == ([], 1)
    # No byte sequence repeats between the packets, so they reveal neither a common swarm nor a common peer.
    assert not any(packet[at : at + 4] in again for at in range(len(packet) - 4))
    rotated = seal(Swarm("test", (b"n" * 32, b"k" * 32)))
    assert rotated.open(packet) == Beacon(True, peer(1), (f"/ip4/{HOST}/tcp/9747",))


def test_a_flood_is_counted_and_uses_bounded_memory() -> None:
    core, counters, now = settled()
    for number in range(1, 3_000):
        core.receive(now, HOST, b"x" * 100)
        core.receive(now, f"10.{number >> 8}.{number & 255}.1", said(number))
    assert counters["beacons_over_rate"] > 5_000
    assert counters["beacons_of_others"] <= SOURCE_BURST_MAX
    assert len(core.events) <= NEWS_PER_MINUTE_MAX
    assert all(size <= limit for size, limit in core.sizes.values())


@given(st.binary(max_size=BEACON_BYTES_MAX + 10), st.integers(0, 200), st.integers(1, 255))
def test_garbage_and_tampered_packets_change_nothing(garbage: bytes, place: int, flip: int) -> None:
    core, counters, now = settled()
    packet = bytearray(said(1))
    packet[place % len(packet)] ^= flip
    for data in (garbage, bytes(packet), said(1)[:-1], seal()._ciphers[0].encrypt(bytes(12), garbage, None)):
        core.receive(now, HOST, data)
    assert core.events == []
    assert core.deadline > now + 10
    assert sum(counters[name] for name in counters if name not in ("beacons_sent", "beacons_heard")) == 4


# --- sockets ---------------------------------------------------------------------------------------


def test_a_node_on_loopback_beacons_only_on_loopback() -> None:
    (only,) = interfaces_of(["127.0.0.1"])
    assert only.host == "127.0.0.1"
    everywhere = interfaces_of(["0.0.0.0"])
    assert all(not each.host.startswith("127.") for each in everywhere) or everywhere == (only,)


async def test_nodes_of_one_machine_hear_each_other_on_loopback() -> None:
    port = free_port()
    counters: Counter[str] = Counter()
    one, other = (Multicast([("127.0.0.1", number)], counters, port=port) for number in (1, 2))
    async with trio.open_nursery() as nursery:
        await nursery.start(one.run)
        await nursery.start(other.run)
        if not (one.interfaces and other.interfaces):
            pytest.skip("this machine has no multicast on loopback")
        one.send(b"x" * BEACON_BYTES_MAX)
        for each in (one, other):
            assert await each.take(trio.current_time() + 20) == [("127.0.0.1", b"x" * BEACON_BYTES_MAX)]
        assert await other.take(trio.current_time()) == []
        nursery.cancel_scope.cancel()
    assert one.addresses == (make_address("127.0.0.1", 1),)
    assert not counters


async def test_a_network_has_local_discovery_only_if_enabled() -> None:
    with_beacons, without = make_network("a", beacon_port=free_port()), make_network("b")
    async with running(with_beacons, without):
        assert without.local is None
        assert with_beacons.local is not None
        assert with_beacons.local.addresses == (make_address("127.0.0.1", with_beacons.port),)


# --- whole nodes, in virtual time --------------------------------------------------------------------


def test_nodes_of_one_local_network_form_a_swarm_without_any_address() -> None:
    medium = SimNetworkFabric(SimLinks(NetworkModel(), 1), has_local=True)

    async def scenario() -> None:
        away = {"swarm": config.SwarmSettings(name="other")}
        async with (
            simulated_node(medium, 0) as first,
            simulated_node(medium, 1) as second,
            simulated_node(medium, 2, settings=away) as other,
        ):
            await trio.sleep(15)
            assert set(first.membership.live) == {first.peer, second.peer}
            assert list(other.membership.live) == [other.peer]
            assert [join.found_by for join in first.state.joins] == ["beacon"]
            async with simulated_node(medium, 3, settings={"join": config.JoinSettings(lan=False)}) as shy:
                await trio.sleep(60)
                assert list(shy.membership.live) == [shy.peer]

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_beacons_yield_only_numeric_addresses() -> None:
    core, _, now = settled()
    names = ("/dns/evil.example/tcp/1", "nonsense", f"/ip4/{HOST}/tcp/2")
    core.receive(now, HOST, seal().seal(Beacon(False, peer(1), names)))
    assert core.events == [NeighbourHeard(peer(1), (Address("ip4", HOST, 2, peer(1)),))]
