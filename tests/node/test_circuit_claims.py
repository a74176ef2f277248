"""Circuits (addresses behind a relay) that a peer claims are dialled as rarely as its other claimed
addresses, so they cannot be used to flood a host.
"""

import socket
from collections import Counter
from typing import Any, NoReturn, cast

import pytest
import trio

from crypto.contact import Address, make_address
from crypto.identity import PeerId
from node.errors import Unreachable
from node.transport.address_book import TRIES_MAX
from node.transport.dialer import Dialer
from node.transport.network import RealNetwork
from node.transport.paths import Paths
from tests.node.nets import make_network, running

RELAY = PeerId(b"r" * 32)
VICTIM = make_address("45.1.0.9", 9747, RELAY).through(None)
NAMED = make_address("relay.example", 9747, RELAY).through(None)


class CountedCircuits:
    """Paths without any relay; counts the requests for each circuit."""

    def __init__(self) -> None:
        self.requests: Counter[Address] = Counter()

    async def through(self, circuit: Address) -> NoReturn:
        self.requests[circuit.of(None)] += 1
        await trio.lowlevel.checkpoint()
        raise Unreachable("refused", "a test")


async def resolve(host: str, *_: object, **__: object) -> list[Any]:
    """Resolve `relay.example` to a private address."""
    assert host == NAMED.host
    await trio.lowlevel.checkpoint()
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.168.77.1", 9747))]


def dialer_of(network: RealNetwork) -> tuple[Dialer, Counter[Address]]:
    circuits = CountedCircuits()
    return Dialer(network.credentials, network._book, cast("Paths", circuits), resolve), circuits.requests


async def test_circuits_of_a_lost_path_are_dialled_as_rarely_as_other_claims() -> None:
    one, member = make_network("o"), make_network("m")
    dialer, dialled = dialer_of(one)
    async with running(one):
        one.learn(member.peer, [VICTIM, NAMED])
        for _ in range(30):
            with pytest.raises(Unreachable):
                await dialer.reach_again(member.peer)
    assert set(dialled) == {VICTIM}
    assert dialled[VICTIM] <= TRIES_MAX


async def test_a_working_circuit_is_dialled_whenever_it_is_needed() -> None:
    one, member = make_network("o"), make_network("m")
    dialer, dialled = dialer_of(one)
    async with running(one):
        one.learn(member.peer, [VICTIM])
        for _ in range(3 * TRIES_MAX):
            with pytest.raises(Unreachable):
                await dialer.reach_again(member.peer)
            one._book.answered(member.peer, VICTIM.of(member.peer))
    assert dialled[VICTIM] == 3 * TRIES_MAX
