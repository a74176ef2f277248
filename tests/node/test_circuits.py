"""The two ends of a circuit: how little it costs to open one, and what no end puts up with."""

import os

import pytest

from crypto.contact import make_address
from crypto.identity import Identity
from node.errors import Unreachable
from node.transport.address_book import HOST_TRIES_BURST, AddressBook
from node.transport.circuits import CircuitEnd
from node.transport.network import RealNetwork
from tests.node.nets import make_network, until
from tests.node.test_relays import ask, behind_a_relay


def rests_at(network: RealNetwork, relay: RealNetwork) -> bool:
    of_relay = network._connections._idle._by_peer.get(relay.peer, [])
    return any(connection.path is None for connection in of_relay)


async def test_a_circuit_needs_no_new_connection_where_one_rests_at_the_relay() -> None:
    async with behind_a_relay() as world:
        await until(lambda: bool(world.hidden.circuits) and rests_at(world.hidden, world.relay))
        await world.guest.identify(world.relay.addresses[0])
        assert rests_at(world.guest, world.relay)
        before = [network.counters["connections_used_again"] for network in (world.hidden, world.guest)]
        assert await ask(world.guest, world.hidden.peer) == b"there?"
        after = [network.counters["connections_used_again"] for network in (world.hidden, world.guest)]
        assert [later - earlier for earlier, later in zip(before, after, strict=True)] == [1, 1]
        # The next circuit finds one too.
        await until(lambda: rests_at(world.hidden, world.relay))


@pytest.mark.parametrize("flaw", ["half", "two", "nonsense"])
def test_a_flight_that_is_none_is_answered_with_nothing(flaw: str) -> None:
    hidden, guest = make_network("h"), make_network("g")
    whole = guest.credentials.handshake(initiator=True, expected=hidden.peer).start()
    flight = {"half": whole[: len(whole) // 2], "two": 2 * whole, "nonsense": os.urandom(300)}[flaw]
    with pytest.raises(Unreachable):
        CircuitEnd.taking(hidden.credentials, guest.peer, bytes(16), flight)
    assert CircuitEnd.taking(hidden.credentials, guest.peer, bytes(16), whole).request


def test_addresses_of_unknown_relays_at_one_host_are_dialled_seldom() -> None:
    book = AddressBook()
    relays = [Identity(number.to_bytes(32, "big")).peer for number in range(1, 4 * int(HOST_TRIES_BURST))]
    dialled = [
        relay
        for number, relay in enumerate(relays)
        if book.may_dial(relay, make_address("46.1.2.3", 2_000 + number), 0.0)
    ]
    assert len(dialled) == HOST_TRIES_BURST
