"""A node that cannot be reached queries like any other, but no table lists it (client mode)."""

from random import Random

from dht.events import RecordsFound, RecordStored
from dht.keys import record_key
from dht.messages import CLIENT_ADDRESSES, readable_addresses
from tests.dht.swarm import Swarm, address, record

KEY = record_key("test", b"name")


def tables_with(swarm: Swarm, peer: object) -> int:
    return sum(node.table.get(peer) is not None for node in swarm.nodes.values())  # type: ignore[arg-type]  # a PeerId


def test_a_client_stores_and_finds_but_is_in_no_table() -> None:
    swarm = Swarm(1)
    nodes = swarm.grow(30)
    client = swarm.start(99)
    client.appear((), client=True)
    swarm.send(client, client.join(swarm.now, [nodes[0].peer]))
    swarm.run(30)
    assert len(client.table) >= 10
    stored = swarm.ask(client, lambda now: client.store(now, record(99, KEY)), RecordStored)
    assert stored.acknowledged == 20
    found = swarm.ask(nodes[3], lambda now: nodes[3].find(now, KEY), RecordsFound)
    assert [each.value for each in found.records] == [b"v"]
    found = swarm.ask(client, lambda now: client.find(now, KEY), RecordsFound)
    assert [each.value for each in found.records] == [b"v"]
    assert tables_with(swarm, client.peer) == 0
    assert len(client.records) == 0
    assert swarm.refused == []


def test_a_node_that_becomes_a_client_leaves_routing_tables_and_may_return() -> None:
    swarm = Swarm(2)
    nodes = swarm.grow(20)
    node, rng = nodes[7], Random(1)
    assert tables_with(swarm, node.peer) >= 10
    node.appear((), client=True)
    for _ in range(12):
        key = record_key("test", rng.randbytes(8))
        swarm.ask(node, lambda now, key=key: node.find(now, key), RecordsFound)  # type: ignore[misc]  # mypy and a default
    before = tables_with(swarm, node.peer)
    assert before <= 2
    node.appear((address(7),), client=False)
    for _ in range(12):
        key = record_key("test", rng.randbytes(8))
        swarm.ask(node, lambda now, key=key: node.find(now, key), RecordsFound)  # type: ignore[misc]  # as above
    assert tables_with(swarm, node.peer) >= 10
    assert swarm.refused == []


def test_no_node_stores_records_at_a_client_that_others_named() -> None:
    swarm = Swarm(3)
    nodes = swarm.grow(12)
    client = nodes[5]
    client.appear((), client=True)
    stored = swarm.ask(nodes[0], lambda now: nodes[0].store(now, record(0, KEY)), RecordStored)
    assert stored.acknowledged == stored.tried == 11
    assert len(client.records) == 0


def test_older_versions_see_a_client_as_a_peer_without_addresses() -> None:
    assert readable_addresses(CLIENT_ADDRESSES, Swarm(4).start(1).peer) == ()
