"""The Kademlia core in a swarm: every node finds stored records, despite deaths and liars."""

from collections.abc import Callable
from functools import partial
from math import inf
from random import Random

import msgspec
import pytest

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from dht.events import Joined, NodesFound, RecordsFound, RecordStored
from dht.kademlia import Kademlia
from dht.keys import Key, distance, node_key, record_key
from dht.messages import (
    HINTS_MAX,
    FindNode,
    FindValue,
    Hint,
    Message,
    Nodes,
    Ping,
    Pong,
    Store,
    Stored,
    Values,
)
from dht.records import CLOCK_SLACK_SECONDS, VALUE_BYTES_MAX, Refusal, check_record
from dht.settings import KademliaSettings
from tests.dht.swarm import WALL, Swarm, lone, met, record, signer, token

KEY = record_key("test", b"name")


def store(swarm: Swarm, node: Kademlia, fact: Fact) -> RecordStored:
    return swarm.ask(node, lambda now: node.store(now, fact), RecordStored)


def find(swarm: Swarm, node: Kademlia, key: Key = KEY) -> list[bytes]:
    found = swarm.ask(node, lambda now: node.find(now, key), RecordsFound)
    assert found.key == key
    return [record.value for record in found.records]


def holders(swarm: Swarm, key: Key = KEY) -> list[PeerId]:
    wall = swarm.now + WALL
    return [peer for peer, node in swarm.nodes.items() if node.records.get(wall, key)]


def nearest(swarm: Swarm, key: Key, count: int) -> list[PeerId]:
    return sorted(swarm.nodes, key=lambda peer: distance(node_key(peer), key))[:count]


# Storing and finding.


def test_every_stored_record_is_found_from_every_node() -> None:
    swarm = Swarm(1)
    nodes = swarm.grow(40)
    for author in (0, 7, 39):
        key = record_key("test", bytes([author]))
        stored = store(swarm, nodes[author], record(author, key, b"of %d" % author))
        assert (stored.acknowledged, stored.tried) == (20, 20)
        assert sorted(holders(swarm, key)) == sorted(nearest(swarm, key, 20))
        assert all(find(swarm, node, key) == [b"of %d" % author] for node in nodes)
    assert swarm.refused == []


def test_records_are_found_despite_ten_percent_packet_loss() -> None:
    swarm = Swarm(2, loss=0.1)
    nodes = swarm.grow(40)
    stored = store(swarm, nodes[3], record(3, KEY))
    assert stored.acknowledged >= 18
    assert all(find(swarm, node) == [b"v"] for node in nodes)


def test_a_record_outlives_the_death_of_half_its_replicas() -> None:
    swarm = Swarm(3)
    nodes = swarm.grow(45)
    store(swarm, nodes[0], record(0, KEY))
    for peer in nearest(swarm, KEY, 20)[:10]:
        del swarm.nodes[peer]
    started = swarm.now
    alive = [node for node in nodes if node.peer in swarm.nodes]
    assert all(find(swarm, node) == [b"v"] for node in alive)
    # The timeouts of the dead nodes run concurrently.
    assert swarm.now - started < 2.0 * len(alive)


def test_the_highest_sequence_of_each_publisher_is_found() -> None:
    swarm = Swarm(4)
    nodes = swarm.grow(30)
    store(swarm, nodes[1], record(1, KEY, b"old", 1))
    store(swarm, nodes[2], record(2, KEY, b"other", 1))
    # Half of the holders lack the newer record, so a find asks several.
    for peer in nearest(swarm, KEY, 20)[1::2]:
        node = swarm.nodes[peer]
        node.records.put = lambda *_, **__: None  # type: ignore[method-assign]  # deaf to what comes
    store(swarm, nodes[1], record(1, KEY, b"new", 2))
    for node in nodes:
        assert sorted(find(swarm, node)) == [b"new", b"other"]


def test_a_store_with_a_lower_sequence_is_refused_and_counts_no_holder() -> None:
    swarm = Swarm(5)
    nodes = swarm.grow(30)
    assert store(swarm, nodes[1], record(1, KEY, b"new", 2)).acknowledged == 20
    stored = store(swarm, nodes[1], record(1, KEY, b"old", 1))
    assert (stored.acknowledged, stored.tried) == (0, 20)
    assert stored.refusals == (Refusal.OLD,)
    assert find(swarm, nodes[9]) == [b"new"]


def test_a_store_that_reached_nobody_reports_no_success() -> None:
    swarm = Swarm(6)
    nodes = swarm.grow(30)
    # All nodes answer the lookup and then ignore Stores.
    for node in nodes:
        node.records.put = lambda *_, **__: Refusal.FULL  # type: ignore[method-assign]  # a full disk everywhere
    stored = store(swarm, nodes[0], record(0, KEY))
    assert (stored.acknowledged, stored.tried, stored.refusals) == (0, 20, (Refusal.FULL,))


def test_a_store_counts_only_live_holders_when_all_others_die() -> None:
    swarm = Swarm(7)
    nodes = swarm.grow(25)
    for node in nodes[1:]:
        del swarm.nodes[node.peer]
    stored = store(swarm, nodes[0], record(0, KEY))
    assert (stored.acknowledged, stored.tried) == (1, 1)


def test_an_expired_record_is_gone_everywhere() -> None:
    swarm = Swarm(8)
    nodes = swarm.grow(30)
    store(swarm, nodes[0], record(0, KEY, expires=WALL + swarm.now + 100))
    swarm.run(100 + CLOCK_SLACK_SECONDS + 61)
    assert find(swarm, nodes[5]) == []
    assert sum(len(node.records) for node in nodes) == 0


def test_paging_through_a_key_returns_all_its_publishers() -> None:
    swarm = Swarm(9)
    nodes = swarm.grow(22)
    for author in range(12):
        store(swarm, nodes[author], record(author, KEY, bytes([author]) * VALUE_BYTES_MAX))
    values = find(swarm, nodes[21])
    assert sorted(value[0] for value in values) == list(range(12))
    # A reply has room for one record with its hints.
    assert max(len(data) for *_, data in swarm.trace) <= swarm.settings.payload_bytes_max + 300


def test_locate_returns_the_nearest_live_nodes_in_order() -> None:
    swarm = Swarm(10)
    nodes = swarm.grow(60)
    node = nodes[17]
    located = swarm.ask(node, lambda now: node.locate(now, KEY), NodesFound)
    others = [peer for peer in nearest(swarm, KEY, 21) if peer != node.peer]
    assert list(located.peers) == others[:20]


# Alone, joining, leaving.


def test_a_lone_node_stores_records_with_itself_and_finds_them() -> None:
    swarm = Swarm(11)
    node = swarm.start(0)
    assert node.deadline == inf
    assert node.find(0.0, KEY)[1] == []
    request, sends = node.store(0.0, record(0, KEY))
    assert sends == []
    assert node.events == [RecordsFound(request - 1, KEY, ()), RecordStored(request, 1, 1)]
    request, _ = node.find(0.0, KEY)
    event = node.events[-1]
    assert isinstance(event, RecordsFound)
    assert [record.value for record in event.records] == [b"v"]
    request, _ = node.locate(0.0, KEY)
    assert node.events[3:] == [NodesFound(request, KEY, ())]


def test_a_failing_join_is_reported_and_retried() -> None:
    swarm = Swarm(12)
    node = swarm.start(0)
    swarm.send(node, node.join(0.0, [signer(1).peer]))
    swarm.run(5)
    assert swarm.events[node.peer] == [Joined(contacts=0)]
    swarm.start(1)
    swarm.run(20)
    assert swarm.events[node.peer][-1] == Joined(contacts=1)


def test_a_node_rejoins_after_an_outage_of_all_others() -> None:
    swarm = Swarm(13)
    nodes = swarm.grow(8)
    asleep = {node.peer: swarm.nodes.pop(node.peer) for node in nodes[1:]}
    nodes[0].join(swarm.now, [nodes[1].peer])
    swarm.run(700)
    assert len(nodes[0].table) == 0
    swarm.nodes.update(asleep)
    swarm.run(60)
    assert len(nodes[0].table) == 7


def test_dead_contacts_leave_the_table_and_newcomers_get_the_records() -> None:
    swarm = Swarm(14, settings=KademliaSettings(republish_seconds=300, refresh_seconds=200))
    nodes = swarm.grow(30)
    store(swarm, nodes[0], record(0, KEY))
    for peer in [peer for peer in nearest(swarm, KEY, 20) if peer != nodes[0].peer]:
        del swarm.nodes[peer]
    for number in range(30, 45):
        node = swarm.start(number)
        swarm.send(node, node.join(swarm.now, [nodes[0].peer]))
    swarm.run(1_000)
    assert sorted(holders(swarm)) == sorted(nearest(swarm, KEY, 20))
    contacts = [contact.peer for node in swarm.nodes.values() for contact in node.table]
    stale = [peer for peer in contacts if peer not in swarm.nodes]
    assert len(stale) <= 0.1 * len(contacts)


def test_a_forgotten_record_is_not_stored_again() -> None:
    swarm = Swarm(15, settings=KademliaSettings(republish_seconds=50))
    nodes = swarm.grow(3)
    store(swarm, nodes[0], record(0, KEY))
    nodes[0].forget(KEY)
    before = len(swarm.trace)
    swarm.run(54)  # its own timer ends after 55 s at most, and no holder republishes before that
    assert len(swarm.trace) == before


def test_a_member_reported_dead_is_removed_and_delays_no_lookup() -> None:
    swarm = Swarm(16)
    nodes = swarm.grow(25)
    dead = nearest(swarm, KEY, 5)
    asker = next(node for node in nodes if node.peer not in dead)
    for peer in dead:
        del swarm.nodes[peer]
    _, sends = asker.locate(swarm.now, KEY)
    swarm.send(asker, sends)
    for peer in dead:
        swarm.send(asker, asker.remove(swarm.now, peer))
    swarm.run(0.45)
    assert any(isinstance(event, NodesFound) for event in swarm.events[asker.peer])
    assert all(asker.table.get(peer) is None for peer in dead)


# Liars.


def test_an_answer_of_a_wrong_peer_or_kind_is_ignored() -> None:
    node = lone()
    asked, other = signer(1).peer, signer(2).peer
    ((_, ping),) = node.add(0.0, asked, [])
    with pytest.raises(RemoteProtocolError, match="not asked"):
        node.receive(0.1, other, Pong(ping.id, ()))
    with pytest.raises(RemoteProtocolError, match="Stored in answer to Ping"):
        node.receive(0.1, asked, Stored(ping.id, (), ""))
    assert node.receive(0.1, other, Pong(ping.id + 1, ())) == []
    assert len(node.table) == 0
    node.receive(0.2, asked, Pong(ping.id, ()))
    assert len(node.table) == 1


def test_a_message_from_ourselves_is_refused() -> None:
    node = lone()
    with pytest.raises(RemoteProtocolError):
        node.receive(0.0, node.peer, Ping(1, ()))


def test_a_forged_record_is_neither_stored_nor_accepted_from_an_answer() -> None:
    node = met(lone(), signer(1).peer)
    forged = msgspec.structs.replace(record(2, KEY), author=signer(3).peer)
    with pytest.raises(RemoteProtocolError):
        node.receive(0.0, signer(1).peer, Store(1, (), forged, token(node, signer(1).peer)))
    with pytest.raises(RemoteProtocolError):
        node.store(0.0, forged)
    _, ((_, asked),) = node.find(0.0, KEY)
    elsewhere = record(2, record_key("test", b"elsewhere"))
    pages: list[tuple[tuple[Fact, ...], bool]] = [
        ((forged,), False),
        ((elsewhere,), False),
        ((record(2, KEY), record(2, KEY)), False),
        ((), True),
    ]
    for facts, more in pages:
        with pytest.raises(RemoteProtocolError):
            node.receive(0.0, signer(1).peer, Values(asked.id, (), facts, more, ()))
    assert len(node.records) == 0
    # A bad answer counts as no answer, so the right one is still accepted.
    node.receive(0.1, signer(1).peer, Values(asked.id, (), (record(2, KEY),), False, ()))
    event = node.events[-1]
    assert isinstance(event, RecordsFound)
    assert len(event.records) == 1


def ghosts(swarm: Swarm, message: Message, *, count: int) -> Message:
    """A node that names nonexistent peers, nearer to the key than any real one."""
    if not isinstance(message, Nodes | Values):
        return message
    made = [PeerId(swarm.rng.randbytes(32)) for _ in range(2_000)]
    made.sort(key=lambda peer: distance(node_key(peer), KEY))
    hints = tuple(Hint(peer, ("garbage", "10.9.9.9:9")) for peer in made[:count])
    return msgspec.structs.replace(message, hints=hints)


def no_records(message: Message) -> Message:
    return msgspec.structs.replace(message, records=()) if isinstance(message, Values) else message


def endless(message: Message) -> Message:
    return msgspec.structs.replace(message, more=True) if isinstance(message, Values) else message


@pytest.mark.parametrize(
    "lie",
    [
        lambda swarm: partial(ghosts, swarm, count=20),
        lambda swarm: partial(ghosts, swarm, count=HINTS_MAX + 1),
        lambda swarm: no_records,
        lambda swarm: endless,
    ],
    ids=["ghosts near the key", "an oversize list", "no records", "endless pages"],
)
def test_liars_among_a_fifth_of_nodes_neither_end_nor_inflate_a_lookup(
    lie: Callable[[Swarm], Callable[[Message], Message]],
) -> None:
    swarm = Swarm(19)
    nodes = swarm.grow(40)
    store(swarm, nodes[0], record(0, KEY))
    for node in nodes[1::5]:
        swarm.tamper[node.peer] = lie(swarm)
    for node in nodes[2::9]:
        before = len(swarm.trace)
        started = swarm.now
        assert find(swarm, node) == [b"v"]
        assert swarm.now - started < 10
        assert len(swarm.trace) - before < 2 * swarm.settings.lookup_requests_max


# Determinism, and settings.


def test_the_same_seed_gives_the_same_trace() -> None:
    def trace() -> list[tuple[float, PeerId, PeerId, bytes]]:
        swarm = Swarm(20, loss=0.05)
        nodes = swarm.grow(12)
        store(swarm, nodes[0], record(0, KEY))
        swarm.run(700)
        return swarm.trace

    assert trace() == trace()


def test_random_messages_never_crash_a_node() -> None:
    rng = Random(21)
    node = lone()
    for number in range(1, 30):
        met(node, signer(number).peer)
    for step in range(500):
        sender = signer(rng.randrange(1, 40)).peer
        number = rng.getrandbits(48)
        hints = tuple(Hint(rng.randbytes(32), ("x",)) for _ in range(rng.randrange(20)))
        choices: list[Message] = [
            Ping(number, ("",)),
            Pong(number, ()),
            FindNode(number, (), rng.randbytes(20)),
            FindValue(number, (), rng.randbytes(20), rng.randbytes(8)),
            Nodes(number, (), hints),
            Values(number, (), (), False, hints),
            Stored(number, (), "?"),
        ]
        node.receive(step * 0.01, sender, rng.choice(choices))
        if node.deadline <= step * 0.01:
            node.wake(step * 0.01)
    assert len(node.events) < 500


def test_an_error_names_the_setting_that_is_out_of_bounds() -> None:
    with pytest.raises(ValueError, match="alpha, find_width"):
        KademliaSettings(k=2)
    with pytest.raises(ValueError, match="payload_bytes_max"):
        KademliaSettings(payload_bytes_max=100)


def test_an_address_hint_that_is_too_long_is_omitted() -> None:
    long = Address("dns", "a" * 63 + ".example", 1)
    node = Kademlia(signer(0), KademliaSettings(), Random(1), (long,))
    ((_, ping),) = node.add(0.0, signer(1).peer, [])
    assert ping.addresses == ()


def test_correcting_the_clock_deletes_no_stored_record() -> None:
    node = lone()
    kept = check_record(signer(0), record(1, KEY, expires=int(WALL + 3_600)))
    node.adopt(0.0, kept)
    node.own_wall_offset, node.wall_offset = WALL, WALL + 1e9
    for now in range(1, 400, 10):
        node.wake(float(now))
    assert list(node.records) == [kept]
    node.own_wall_offset = WALL + 1e9
    for now in range(400, 800, 10):
        node.wake(float(now))
    assert len(node.records) == 0
