"""Relays that a node finds in the DHT. It chooses the nearest, and no record can make it scan hosts."""

import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from operator import eq
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import trio

from crypto.contact import Address, make_address
from crypto.encoding import encode
from crypto.facts import IdentitySigner
from crypto.identity import Identity, PeerId
from dht.records import Record
from node.seams import RealClock
from node.services.discovery import Discovery
from node.services.relays.finding import (
    FOUND_MAX,
    RECORD_VERSION,
    TRIED_MAX,
    FoundRelays,
    RelayFinder,
    RelayRecord,
    listed,
    of_different_networks,
    shard_of,
)
from node.services.relays.ledger import Limits, RelayLedger
from node.services.relays.reservations import Reservations
from node.services.relays.server import RelayServer
from node.services.relays.settings import RelaySettings
from node.transport.network import RealNetwork
from tests.node.nets import PING, echo, make_network, running, until
from tests.node.test_relays import ask
from tests.node.test_transport_parts import peer_ids

FAR_SECONDS = 0.15
PEERS = peer_ids(2 * TRIED_MAX)
PLACE = "45.1.0.2:9747"
HASTY = RelaySettings(publish_look_seconds=0.2, look_seconds=0.2, search_seconds=0.2)


class LaggingNetwork(RealNetwork):
    """A network with a long round trip to one peer."""

    far: PeerId | None = None

    async def keep_ready(self, peer: PeerId, at: Address) -> None:
        await trio.sleep(FAR_SECONDS if peer == self.far else 0)
        await super().keep_ready(peer, at)


@dataclass
class Listed:
    """One node of the DHT, and its search for relays."""

    network: RealNetwork
    discovery: Discovery
    finder: RelayFinder


@asynccontextmanager
async def in_a_dht(letters: str, *, relays: str, asker: str) -> AsyncIterator[dict[str, Listed]]:
    """Make nodes that each know only the first; `relays` publish that they are relays."""
    nodes: dict[str, Listed] = {}
    networks = {letter: make_network(letter, kind=LaggingNetwork) for letter in letters}
    async with running(*networks.values()), trio.open_nursery() as nursery:
        hub = networks[letters[0]]
        for letter, network in networks.items():
            identity = Identity(letter.encode() * 32)
            discovery = Discovery(
                network,
                RealClock(),
                Random(letter),
                IdentitySigner(identity, "test"),
                refuse=lambda *_: None,
                observe=lambda _: None,
            )
            finder = RelayFinder(
                network,
                RealClock(),
                discovery,
                Random(letter),
                is_relay=partial(relays.__contains__, letter),
                is_wanted=partial(eq, letter, asker),
                counters=Counter(),
                settings=HASTY,
            )
            nodes[letter] = Listed(network, discovery, finder)
            await nursery.start(discovery.run)
            if network is not hub:
                network.learn(hub.peer, hub.addresses)
                discovery.join([hub.peer])
        for letter in letters:
            nursery.start_soon(nodes[letter].finder.run)
        with trio.fail_after(60):
            yield nodes
        nursery.cancel_scope.cancel()


async def test_a_node_with_one_known_peer_uses_the_nearest_relay() -> None:
    async with in_a_dht("hnfx", relays="nf", asker="x") as nodes, trio.open_nursery() as nursery:
        near, far, hidden = nodes["n"].network, nodes["f"].network, nodes["x"].network
        assert isinstance(hidden, LaggingNetwork)
        hidden.far = far.peer
        for relay in (near, far):
            RelayServer(relay, RealClock(), RelayLedger(Limits(is_on=True), os.urandom), Counter())
        finder = nodes["x"].finder
        await until(lambda: len(finder.seconds) == 2)
        assert list(finder.seconds) == [near.peer, far.peer]
        assert finder.seconds[far.peer] >= FAR_SECONDS
        places = Reservations(
            hidden,
            RealClock(),
            candidates=lambda: list(finder.seconds)[:1],
            is_wanted=lambda: True,
            changed=lambda: None,
            counters=Counter(),
        )
        hidden.handle(PING, echo)
        nursery.start_soon(places.run)
        await until(lambda: bool(hidden.circuits))
        guest = nodes["h"].network
        guest.learn(hidden.peer, hidden.circuits)
        assert hidden.circuits[0].relay == near.peer
        assert await ask(guest, hidden.peer) == b"there?"
        nursery.cancel_scope.cancel()


def record(number: int, value: bytes) -> Record:
    return cast("Record", SimpleNamespace(publisher=PEERS[number], value=value))


def read(number: int, value: bytes) -> dict[Any, tuple[Address, ...]]:
    shard = shard_of(PEERS[number])
    return listed([record(number, value)], shard, own=PEERS[-1], admits=lambda address: address.port >= 1024)


def test_an_invalid_relay_record_is_ignored() -> None:
    good = encode(RelayRecord(RECORD_VERSION, (PLACE,)))
    assert read(0, good) == {PEERS[0]: (make_address("45.1.0.2", 9747, PEERS[0]),)}
    assert read(-1, good) == {}, "its own record"
    for wrong in (
        b"\xff",
        encode(RelayRecord(RECORD_VERSION, ())),
        encode(RelayRecord(RECORD_VERSION + 1, (PLACE,))),
        encode(RelayRecord(RECORD_VERSION, ("45.1.0.2:22",))),
        encode(RelayRecord(RECORD_VERSION, ("nobody.example:9747",))),
        encode(RelayRecord(RECORD_VERSION, tuple(f"45.1.0.{number}:9747" for number in range(1, 9)))),
        encode(RelayRecord(RECORD_VERSION, (f"/ip4/45.1.0.2/tcp/9747/p2p/{'1' * 52}/p2p-circuit",))),
    ):
        assert read(0, wrong) == {}
    elsewhere = [record(0, good)]
    assert listed(elsewhere, shard_of(PEERS[0]) + 1, own=PEERS[-1], admits=lambda _: True) == {}


def test_only_a_few_relays_are_dialled_and_one_per_network() -> None:
    crowd = {peer: (make_address(f"45.1.0.{number}", 9747),) for number, peer in enumerate(PEERS)}
    assert len(of_different_networks(crowd, Random(1))) == 1
    spread = {peer: (make_address(f"45.{number}.0.2", 9747),) for number, peer in enumerate(PEERS)}
    assert len(of_different_networks(spread, Random(1))) == TRIED_MAX


def test_the_farthest_of_too_many_relays_is_forgotten() -> None:
    found = FoundRelays()
    for number, peer in enumerate(peer_ids(FOUND_MAX + 4)):
        found.note(0.0, peer, float(-number))
    assert len(found) == FOUND_MAX
    assert max(found.seconds(0.0).values()) == -4.0
