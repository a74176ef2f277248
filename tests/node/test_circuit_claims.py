"""Circuits that a peer claims are dialled as rarely as its other claimed addresses, and cannot
flood a host.
"""

import socket
from collections import Counter
from typing import Any, NoReturn

import pytest
import trio

from crypto.contact import Address, make_address
from crypto.identity import PeerId
from node.errors import Unreachable
from node.transport.address_book import TRIES_MAX
from tests.node.nets import make_network, running

RELAY = PeerId(b"r" * 32)
VICTIM = make_address("45.1.0.9", 9747, RELAY).through(None)
NAMED = make_address("relay.example", 9747, RELAY).through(None)


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> Counter[Address]:
    """Count the requests for each circuit; `relay.example` resolves to this machine's own network."""
    found: Counter[Address] = Counter()

    async def through(_: object, circuit: Address) -> NoReturn:
        found[circuit.of(None)] += 1
        await trio.lowlevel.checkpoint()
        raise Unreachable("refused", "a test")

    real = trio.socket.getaddrinfo

    async def look_up(host: str, *arguments: Any, **options: Any) -> Any:
        if host != NAMED.host:
            return await real(host, *arguments, **options)
        await trio.lowlevel.checkpoint()
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.168.77.1", 9747))]

    monkeypatch.setattr("node.transport.paths.Paths.through", through)
    monkeypatch.setattr("trio.socket.getaddrinfo", look_up)
    return found


async def test_circuits_of_a_lost_path_are_dialled_as_rarely_as_other_claims(
    dialled: Counter[Address],
) -> None:
    one, member = make_network("o"), make_network("m")
    async with running(one):
        one.learn(member.peer, [VICTIM, NAMED])
        for _ in range(30):
            with pytest.raises(Unreachable):
                await one._connections.reach_again(member.peer)
    assert set(dialled) == {VICTIM}
    assert dialled[VICTIM] <= TRIES_MAX


async def test_a_working_circuit_is_dialled_whenever_it_is_needed(
    dialled: Counter[Address],
) -> None:
    one, member = make_network("o"), make_network("m")
    book = one._connections._book
    async with running(one):
        one.learn(member.peer, [VICTIM])
        for _ in range(3 * TRIES_MAX):
            with pytest.raises(Unreachable):
                await one._connections.reach_again(member.peer)
            book.answered(member.peer, VICTIM.of(member.peer))
    assert dialled[VICTIM] == 3 * TRIES_MAX
