"""Guarantees of every network about discovery on the local network, and how beacons find neighbours on each
kind of network."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
import trio

from crypto.contact import Address
from crypto.identity import PeerId
from crypto.swarm import Swarm
from node.seams import LocalNetwork, Network, RealClock
from node.services.lan_discovery import Neighbours
from node.transport.beacon import BEACON_BYTES_MAX
from sim.local import PACKETS_MAX
from tests.node.behaviour.worlds import World, content, on_both_networks, running

WAIT_SECONDS = 5.0
BATCH = 64
"""Number of packets sent at once. A kernel's buffer has room for all of them."""


def local_of(network: Network) -> LocalNetwork:
    """Skip a test if the machine has no multicast on loopback."""
    local = network.local
    assert local is not None
    if getattr(local, "interfaces", ("simulated",)) == ():
        pytest.skip("this machine has no multicast on loopback")
    return local


async def heard(local: LocalNetwork, *, but: bytes = b"") -> list[tuple[str, bytes]]:
    """Return the packets that arrive within some seconds. They may include this node's own packets."""
    packets = []
    until = trio.current_time() + WAIT_SECONDS
    while trio.current_time() < until:
        packets += [packet for packet in await local.take(until) if packet[1] != but]
    return packets


@on_both_networks
async def test_local_discovery_works_only_while_its_network_runs(world: World) -> None:
    near, without = world.network("n", has_local=True), world.network("w")

    def used() -> tuple[bool, bool]:
        return near.local is not None, without.local is not None

    assert used() == (False, False)
    async with running(near, without):
        assert used() == (True, False)
    assert used() == (False, False)


@on_both_networks
async def test_a_packet_reaches_all_neighbours_and_names_its_host(world: World) -> None:
    alice, bob, carol = (world.network(letter, has_local=True) for letter in "abc")
    without = world.network("w")
    async with running(alice, bob, carol, without):
        packet = content(1, BEACON_BYTES_MAX)
        local_of(alice).send(packet)
        for other in (bob, carol):
            assert await heard(local_of(other)) == [(alice.addresses[0].host, packet)]
        assert await heard(local_of(alice), but=packet) == []


@on_both_networks
async def test_a_waiting_take_ends_at_its_deadline(world: World) -> None:
    alice = world.network("a", has_local=True)
    async with running(alice):
        begun = trio.current_time()
        assert await local_of(alice).take(begun + 5) == []
        assert trio.current_time() == pytest.approx(begun + 5)
        assert await local_of(alice).take(begun) == []


@on_both_networks
async def test_unread_packets_are_bounded_and_the_newest_are_discarded(world: World) -> None:
    alice, bob = world.network("a", has_local=True), world.network("b", has_local=True)
    async with running(alice, bob):
        for batch in range(2 * PACKETS_MAX // BATCH):
            for number in range(BATCH):
                local_of(alice).send(content(batch, 2 + number))
            await trio.sleep(WAIT_SECONDS)
        packets = await local_of(bob).take(trio.current_time())
        assert len(packets) == PACKETS_MAX
        assert {data[0] for _, data in packets} == set(range(PACKETS_MAX // BATCH))
        assert bob.counters["beacons_dropped"] == PACKETS_MAX


@on_both_networks
async def test_beacons_are_understood_only_within_the_swarm(
    world: World,
) -> None:
    alice, bob, other = (world.network(letter, has_local=True) for letter in "abo")
    found: dict[PeerId, dict[PeerId, Sequence[Address]]] = {}
    counters: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        for number, (network, swarm) in enumerate(((alice, "home"), (bob, "home"), (other, "away"))):
            await nursery.start(network.run)
            mine = found[network.peer] = {}
            beacons = Neighbours(
                local_of(network),
                network.peer,
                Swarm(swarm),
                RealClock(),
                Random(number),
                lambda length: bytes(length),
                counters=counters,
                heard=mine.__setitem__,
            )
            await nursery.start(beacons.run)
        await trio.sleep(60)
        assert {peer: list(heard) for peer, heard in found.items()} == {
            alice.peer: [bob.peer],
            bob.peer: [alice.peer],
            other.peer: [],
        }
        for address in found[alice.peer][bob.peer]:
            assert address.peer == bob.peer
            assert await alice.identify(address) == bob.peer
        nursery.cancel_scope.cancel()
