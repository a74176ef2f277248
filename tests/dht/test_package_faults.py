"""Faults of the `kademlia` package on which this DHT is built: each test fails on the plain package, and
passes on ours.

A test asserts both that the package still has the fault, so our repair is still needed, and that our version
does not have it. The package runs without sockets, on its own event loop.
"""

import asyncio
import inspect
import pickle
import re
import warnings
from collections.abc import Coroutine
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import kademlia.routing
import kademlia.storage
import pytest
from kademlia.crawling import ValueSpiderCrawl
from kademlia.network import Server
from kademlia.node import Node
from kademlia.protocol import KademliaProtocol
from kademlia.routing import RoutingTable
from kademlia.storage import ForgetfulStorage

from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId
from crypto.sessions.core import Sessions
from crypto.sessions.packets import DatagramRefused
from crypto.swarm import Swarm as Name
from dht.events import RecordsFound, RecordStored
from dht.kademlia import Kademlia
from dht.keys import KEY_BITS, Key, distance, record_key
from dht.messages import FindValue, Nodes, Ping, Store, Stored, Values
from dht.records import RecordStore, check_record
from dht.routing import Contact, Table
from dht.settings import KademliaSettings
from node.storage.folder import FolderStorage
from node.storage.records_file import NAME, RecordsFile
from tests.dht.swarm import WALL, Swarm, lone, met, record, signer, token

KEY = record_key("test", b"name")
PAYLOAD_BYTES = 77
"""The request of the reference measurement, which was answered with 794 bytes."""


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def ids(count: int, seed: int = 1) -> list[bytes]:
    rng = Random(seed)
    return [rng.randbytes(KEY_BITS // 8) for _ in range(count)]


class Transport:
    """A transport that collects the package's packets."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, tuple[str, int]]] = []

    def sendto(self, data: bytes, address: tuple[str, int]) -> None:
        self.sent.append((data, address))


def protocol(k: int = 20, own: bytes = bytes(20)) -> Any:
    made = KademliaProtocol(Node(own), ForgetfulStorage(), k)
    made.transport = Transport()
    made.stored = []

    async def call_ping(node: Any) -> tuple[bool, Any]:
        del node
        return True, None

    async def call_store(node: Any, key: bytes, value: Any) -> tuple[bool, Any]:
        made.stored.append((node.id, key, value))
        return False, None

    made.call_ping, made.call_store = call_ping, call_store
    return made


def test_a_flood_of_ids_creates_few_buckets() -> None:
    # These crowds have ids that share 151 bits: a full bucket of them is split bit by bit down to there.
    rng, flood = Random(2), []
    for _ in range(8):
        prefix = rng.getrandbits(151) << 9
        flood += [(prefix | number << 5).to_bytes(20, "big") for number in range(5)]

    async def package() -> int:
        table = RoutingTable(protocol(k=4), 4, Node(bytes(20)))
        for each in flood:
            table.add_contact(Node(each))
        await asyncio.sleep(0)
        return len(table.buckets)

    assert run(package()) > 100
    table = Table(Key(bytes(20)), k=4, failures_max=2)
    for number in range(6_000):
        table.answered(0.0, Contact(PeerId(number.to_bytes(32, "big"))))
    assert len(table.buckets) < 30


def test_a_contact_enters_a_full_bucket_without_an_event_loop() -> None:
    # The first two share five bits, so their bucket is not split, and its head is pinged at once.
    first, second, third = (Node(bytes([number]) + bytes(19)) for number in (0, 7, 3))
    made = protocol(k=2, own=b"\xff" * 20)
    made.call_ping = lambda node: asyncio.sleep(0, node)
    made.router.add_contact(first)
    made.router.add_contact(second)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ping is never awaited
        with pytest.raises(RuntimeError, match="event loop"):
            made.router.add_contact(third)
    ours = Table(Key(b"\xff" * 20), k=2, failures_max=2)
    for number in range(50):
        ours.answered(0.0, Contact(PeerId(number.to_bytes(32, "big"))))
    assert any(bucket.full for bucket in ours.buckets)


def test_all_the_nearest_known_contacts_are_named() -> None:
    async def package() -> float:
        own, others = bytes(20), ids(400)
        table = RoutingTable(protocol(k=20, own=own), 20, Node(own))
        for each in others:
            table.add_contact(Node(each))
        await asyncio.sleep(0)
        held = [node.id for bucket in table.buckets for node in bucket.get_nodes()]
        return recall(held, lambda key: [node.id for node in table.find_neighbors(Node(key))])

    assert run(package()) < 0.97
    table = Table(Key(bytes(20)), k=20, failures_max=2)
    for number in range(400):
        table.answered(0.0, Contact(PeerId(number.to_bytes(32, "big"))))
    held = [contact.id for contact in table]
    assert recall(held, lambda key: [contact.id for contact in table.nearest(Key(key), 20)]) == 1.0


def recall(held: list[Any], name: Any) -> float:
    """For random keys, return how many of the 20 nearest contacts of the table are named."""
    shares = []
    for key in ids(50, seed=9):
        nearest = sorted(held, key=lambda each: distance(each, key))[:20]
        shares.append(len({*name(key)} & {*nearest}) / 20)
    return sum(shares) / len(shares)


def test_the_contact_heard_most_recently_comes_last_with_its_new_address() -> None:
    async def package() -> tuple[bytes, str]:
        made = protocol()
        first, second = ids(2)
        for each, host in ((first, "10.0.0.1"), (second, "10.0.0.2"), (first, "10.9.9.9")):
            made.welcome_if_new(Node(each, host, 1))
        bucket = made.router.buckets[0]
        return bucket.head().id, bucket.nodes[first].ip

    first, _ = ids(2)
    assert run(package()) == (first, "10.0.0.1")
    node = met(met(lone(), signer(1).peer, ("10.0.0.1:1",)), signer(2).peer)
    node.receive(5.0, signer(1).peer, Ping(1, ("10.9.9.9:1",)))
    (bucket,) = node.table.buckets
    assert bucket.head().peer == signer(2).peer
    contact = node.table.get(signer(1).peer)
    assert contact is not None
    assert contact.addresses == ("10.9.9.9:1",)


def test_the_core_reads_no_clock() -> None:
    assert "time.monotonic()" in inspect.getsource(kademlia.routing)
    assert "time.monotonic()" in inspect.getsource(kademlia.storage)
    for kind in (Table, RecordStore, Kademlia):
        source = inspect.getsource(inspect.getmodule(kind) or kind)
        assert not re.search(r"^import time|time\.(monotonic|time)\(", source, re.MULTILINE)


def test_a_peer_waiting_for_a_bucket_place_gets_records_only_once() -> None:
    async def package() -> int:
        made = protocol(k=2, own=b"\xff" * 20)
        made.storage[b"key"] = "value"
        # Bits 0-4 are equal and the depth is a multiple of five, so the full bucket is not split.
        near = [bytes([number]) + bytes(19) for number in range(1, 8)]
        for each in near[:2]:
            made.welcome_if_new(Node(each, "10.0.0.1", 1))
        waiting = near[2]
        # The full bucket is not split. So a newcomer waits for a place, and counts as new forever.
        places = made.router.buckets[0].replacement_nodes
        made.router.add_contact = lambda node: places.update({node.id: node})
        made.router.find_neighbors = lambda node, k=None, exclude=None: []
        await asyncio.sleep(0)
        made.stored.clear()
        for _ in range(10):
            made.welcome_if_new(Node(waiting, "10.0.0.9", 1))
        await asyncio.sleep(0)
        return len(made.stored)

    assert run(package()) == 10
    swarm = Swarm(3, settings=KademliaSettings(k=2, alpha=1, find_width=1, republish_seconds=10_000))
    nodes = swarm.grow(6)
    swarm.ask(nodes[0], lambda now: nodes[0].store(now, record(0, KEY)), RecordStored)
    newcomer = swarm.start(77)
    swarm.send(newcomer, newcomer.join(swarm.now, [nodes[0].peer]))
    swarm.run(10)
    handed: list[PeerId] = []
    for node in nodes:
        for _ in range(10):
            sends = node.receive(swarm.now, newcomer.peer, Ping(9, ()))
            handed += [peer for peer, message in sends if isinstance(message, Store)]
    assert handed == []


def test_a_store_without_any_holder_fails() -> None:
    async def package() -> bool:
        server = Server()
        server.protocol = protocol()
        server.protocol.router.add_contact(Node(ids(1)[0], "10.0.0.1", 1))

        async def call_find_node(node: Any, sought: Any) -> tuple[bool, Any]:
            del node, sought
            return True, []

        server.protocol.call_find_node = call_find_node
        return bool(await server.set("key", "value"))

    assert run(package()) is True  # call_store returned (False, None): no answer came
    swarm = Swarm(4)
    nodes = swarm.grow(5)
    for node in nodes[1:]:
        del swarm.nodes[node.peer]
    stored = swarm.ask(nodes[0], lambda now: nodes[0].store(now, record(0, KEY)), RecordStored)
    assert not stored.is_safe


def test_a_reply_from_a_peer_that_was_not_asked_is_ignored() -> None:
    async def package() -> Any:
        made = protocol()
        answer = made.find_node(("10.0.0.1", 1), bytes(20), bytes(20))
        ((request, _),) = made.transport.sent
        await made._solve_datagram(b"\x01" + request[1:21] + b"\x90", ("6.6.6.6", 666))
        return await answer

    assert run(package()) == (True, [])
    node = met(lone(), signer(1).peer)
    _, ((_, asked),) = node.locate(0.0, KEY)
    with pytest.raises(RemoteProtocolError):
        node.receive(0.0, signer(2).peer, Nodes(asked.id, (), ()))


def test_a_malformed_reply_does_not_end_a_lookup() -> None:
    async def package() -> Any:
        made = protocol()
        peers = [Node(each, "10.0.0.1", place) for place, each in enumerate(ids(3))]

        async def call_find_value(node: Any, sought: Any) -> tuple[bool, Any]:
            del sought
            return (True, 5) if node.port == 0 else (True, {"value": "there"})

        made.call_find_value = call_find_value
        return await ValueSpiderCrawl(made, Node(bytes(20)), peers, 20, 3).find()

    with pytest.raises(TypeError):
        run(package())
    node = met(met(lone(), signer(1).peer), signer(2).peer)
    _, sends = node.find(0.0, KEY)
    asked = dict(sends)
    with pytest.raises(RemoteProtocolError):
        node.receive(0.01, signer(1).peer, Values(asked[signer(1).peer].id, (), (), True, ()))
    node.wake(0.01)
    node.receive(0.015, signer(2).peer, Values(asked[signer(2).peer].id, (), (record(3, KEY),), False, ()))
    assert [len(event.records) for event in node.events if isinstance(event, RecordsFound)] == [1]


def test_records_of_others_are_limited() -> None:
    storage = ForgetfulStorage()
    for number in range(3_000):
        storage[number.to_bytes(20, "big")] = "value"
    assert len(list(storage)) == 3_000
    store = RecordStore(
        KademliaSettings(records_max=100, records_per_key_max=10, records_per_publisher_max=10)
    )
    for number in range(3_000):
        key = record_key("test", number.to_bytes(4, "big"))
        store.put(
            WALL, check_record(signer(0), record(1 + number % 50, key)), source=bytes([number % 250]) * 4
        )
    assert len(store) <= 100


def test_an_unknown_peers_small_packet_gets_no_large_answer() -> None:
    async def package() -> float:
        made = protocol()
        for place, each in enumerate(ids(200)):
            made.router.add_contact(Node(each, "10.0.0.1", 1_000 + place))
        answer = made.find_node(("10.0.0.1", 1), bytes(20), bytes(20))
        ((request, _),) = made.transport.sent
        made.transport.sent.clear()
        await made._accept_request(request[1:21], ["find_node", [bytes(20), ids(1)[0]]], ("6.6.6.6", 666))
        for future, timer in made._outstanding.values():
            timer.cancel()
            future.cancel()
        del answer
        return len(made.transport.sent[0][0]) / len(request)

    assert run(package()) > 8
    # Ours answers only after a session has proven the address, so claiming an address gains nothing.
    entropy = Random(5).randbytes
    sessions = Sessions(Identity(bytes(32)), Name("test", ()), entropy, now=0.0, wall_milliseconds=1)
    for first in range(256):
        packet = bytes([first]) + Random(first).randbytes(PAYLOAD_BYTES - 1)
        with suppress(DatagramRefused):
            answered = sessions.receive(1.0, packet, ("6.6.6.6", 666)).answers
            assert sum(map(len, answered)) <= 3 * len(packet)


def test_no_peer_overwrites_the_value_of_another() -> None:
    made = protocol()
    made.router.is_new_node = lambda node: False
    made.rpc_store(("10.0.0.1", 1), bytes(20), b"key", "mine")
    made.rpc_store(("6.6.6.6", 666), bytes(20), b"key", "theirs")
    assert made.storage.get(b"key") == "theirs"
    node = lone()
    mine, theirs = record(1, KEY, b"mine"), record(2, KEY, b"theirs", sequence=99)
    for author, fact in ((1, mine), (2, theirs)):
        peer = signer(author).peer
        sends = node.receive(0.0, peer, Store(1, (), fact, token(node, peer)))
        assert [answer.refused for _, answer in sends if isinstance(answer, Stored)] == [""]
    sends = node.receive(0.0, signer(3).peer, FindValue(2, (), KEY, b""))
    (page,) = [answer for _, answer in sends if isinstance(answer, Values)]
    found = [check_record(signer(0), fact) for fact in page.records]
    assert {each.publisher: each.value for each in found} == {
        signer(1).peer: b"mine",
        signer(2).peer: b"theirs",
    }


class Bomb:
    """An object that runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_loading_a_saved_state_runs_no_code(tmp_path: Path) -> None:
    went_off = tmp_path / "went off"
    state = pickle.dumps(Bomb(went_off))
    (tmp_path / "state").write_bytes(state)
    with pytest.raises(TypeError):
        run(Server.load_state(tmp_path / "state", 0))
    assert went_off.exists()
    went_off.unlink()
    (tmp_path / NAME).write_bytes(state)
    with closing(RecordsFile(FolderStorage(tmp_path))) as file:
        assert file.load(signer(0), WALL) == ([], [])
    assert not went_off.exists()
