"""The two ends of a circuit through a relay: the cost to open it, and the behaviour that an end rejects."""

import os
from collections import Counter
from typing import Any, cast

import pytest
import trio

from crypto.contact import Address, make_address
from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId
from node.seams import RealClock, Stream
from node.services.relays.reservations import TAKING_MAX, Reservations
from node.services.relays.server import STREAMS
from node.transport.address_book import HOST_TRIES_BURST, AddressBook
from node.transport.circuits import CircuitEnd
from node.transport.network import RealNetwork
from node.transport.relay_messages import PROTOCOL, CircuitAnnounced, PlaceKept
from tests.node.nets import make_network, running, until
from tests.node.test_relays import ask, behind_a_relay


def rests_at(network: RealNetwork, relay: RealNetwork) -> bool:
    of_relay = network._connections._idle._by_peer.get(relay.peer, [])
    return any(connection.path is None for connection in of_relay)


async def test_a_circuit_uses_a_spare_connection_at_the_relay() -> None:
    async with behind_a_relay() as world:
        await until(lambda: bool(world.hidden.circuits) and rests_at(world.hidden, world.relay))
        await world.guest.identify(world.relay.addresses[0])
        assert rests_at(world.guest, world.relay)
        before = [network.counters["connections_used_again"] for network in (world.hidden, world.guest)]
        assert await ask(world.guest, world.hidden.peer) == b"there?"
        after = [network.counters["connections_used_again"] for network in (world.hidden, world.guest)]
        assert [later - earlier for earlier, later in zip(before, after, strict=True)] == [1, 1]
        # A spare connection is ready for the next circuit too.
        await until(lambda: rests_at(world.hidden, world.relay))


@pytest.mark.parametrize("flaw", ["half", "two", "nonsense"])
def test_an_invalid_first_flight_gets_no_answer(flaw: str) -> None:
    hidden, guest = make_network("h"), make_network("g")
    whole = guest.credentials.handshake(initiator=True, expected=hidden.peer).start()
    flight = {"half": whole[: len(whole) // 2], "two": 2 * whole, "nonsense": os.urandom(300)}[flaw]
    with pytest.raises(RemoteProtocolError):
        CircuitEnd.taking(hidden.credentials, guest.peer, bytes(16), flight)
    assert CircuitEnd.taking(hidden.credentials, guest.peer, bytes(16), whole).request


def test_addresses_of_unknown_relays_at_one_host_are_dialled_rarely() -> None:
    book = AddressBook()
    relays = [Identity(number.to_bytes(32, "big")).peer for number in range(1, 4 * int(HOST_TRIES_BURST))]
    dialled = [
        relay
        for number, relay in enumerate(relays)
        if book.may_dial(relay, make_address("46.1.2.3", 2_000 + number), 0.0)
    ]
    assert len(dialled) == HOST_TRIES_BURST


class HangingNetwork:
    """A network whose connections never become ready."""

    def __init__(self, network: RealNetwork) -> None:
        self._network = network
        self.begun = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    async def keep_ready(self, relay: PeerId, at: Address) -> None:
        self.begun += 1
        await trio.sleep_forever()


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_flood_from_a_relay_opens_at_most_one_connection(is_announced: bool) -> None:
    hidden, relay = make_network("h"), make_network("r")
    counters, network = Counter[str](), HangingNetwork(hidden)

    async def flood(stream: Stream) -> None:
        await stream.receive()
        await stream.send(encode(PlaceKept(60, 0)))
        for number in range(4 * TAKING_MAX):
            announced = CircuitAnnounced(number.to_bytes(16, "big"), hidden.peer, b"no flight")
            await stream.send(encode(announced if is_announced else PlaceKept(60, 0)))
        await trio.sleep_forever()

    relay.handle(PROTOCOL, flood, STREAMS)
    places = Reservations(
        cast("RealNetwork", network),
        RealClock(),
        candidates=lambda: [relay.peer],
        is_wanted=lambda: True,
        changed=lambda: None,
        counters=counters,
    )
    async with running(hidden, relay), trio.open_nursery() as nursery:
        hidden.learn(relay.peer, relay.addresses)
        nursery.start_soon(places.run)
        counted, wanted = ("circuits_not_taken", 4 * TAKING_MAX) if is_announced else ("relays_failed", 1)
        with trio.fail_after(60):
            await until(lambda: counters[counted] >= wanted)
        assert network.begun <= 1
        nursery.cancel_scope.cancel()
