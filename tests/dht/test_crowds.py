"""One owner of addresses with unlimited ids can neither surround a key nor fill a store.

The addresses are public ones, because local networks are not divided into groups.
"""

from collections.abc import Callable
from functools import partial
from random import Random

import msgspec
import pytest

from crypto.contact import Address, make_address
from crypto.identity import PeerId
from dht.events import RecordsFound, RecordStored
from dht.groups import crowding_one, is_crowded, spread
from dht.kademlia import Kademlia, Sends
from dht.keys import Key, distance, node_key, record_key
from dht.messages import Hint, Message, Nodes, Ping, Pong, Store, Stored, Values
from dht.records import Refusal
from dht.routing import BUCKET_GROUP_MAX, Contact, Table
from dht.settings import KademliaSettings
from tests.dht.swarm import WALL, Swarm, lone, met, record, signer, token

KEY = record_key("test", b"name")
SYBILS = 20
FIRST_SYBIL = 100_000


def public(number: int) -> Address:
    """Return an address in a network of its own."""
    return make_address(f"8.{number // 250}.{number % 250}.1", 9747)


def crowded(number: int) -> Address:
    """Return an address in the one network that all such addresses share."""
    return make_address(f"45.67.89.{number % 250 + 1}", 9747)


def near(key: Key, count: int, *, among: int = 3_000) -> list[int]:
    """Return the numbers of the `count` ids nearest to a key, out of `among`: a few tenths of a second of
    work."""
    made = range(FIRST_SYBIL, FIRST_SYBIL + among)
    return sorted(made, key=lambda number: distance(node_key(signer(number).peer), key))[:count]


def find(node: Kademlia, now: float) -> tuple[int, Sends]:
    return node.find(now, KEY)


def conspire(hints: tuple[Hint, ...], message: Message) -> Message:
    """A node that names only its accomplices, and no record."""
    if isinstance(message, Nodes):
        return msgspec.structs.replace(message, hints=hints)
    if isinstance(message, Values):
        return msgspec.structs.replace(message, hints=hints, records=(), more=False)
    return message


def surround(swarm: Swarm, claims: Callable[[int], Address]) -> set[PeerId]:
    """Let ids of one owner join next to KEY. They claim to keep records, but do not."""
    numbers = near(KEY, SYBILS)
    hints = tuple(Hint(signer(number).peer, (claims(number).short,)) for number in numbers)
    honest = list(swarm.nodes.values())
    for number in numbers:
        node = swarm.start(number, claims(number))
        node.records.put = lambda *_, **__: None  # type: ignore[method-assign]  # it only says so
        swarm.tamper[node.peer] = partial(conspire, hints)
        swarm.send(node, node.join(swarm.now, [swarm.rng.choice(honest).peer]))
        swarm.run(0.5)
        for other in honest:
            swarm.send(node, [(other.peer, Ping(number, node.addresses))])
        swarm.run(0.5)
    swarm.run(60)
    return {signer(number).peer for number in numbers}


@pytest.mark.parametrize("is_lying", [False, True], ids=["one network", "with false addresses"])
def test_ids_of_one_network_cannot_surround_a_key(is_lying: bool) -> None:
    swarm = Swarm(31)
    nodes = swarm.grow(60, public)
    seen = {node.peer: public(number).host for number, node in enumerate(nodes)}
    if is_lying:
        # Each id claims a network of its own, but cannot choose the address at which it is seen.
        seen |= {signer(number).peer: crowded(number).host for number in near(KEY, SYBILS)}
        for node in nodes:
            node.origins.host_of = seen.get
    claims = (lambda number: public(number % 250 + 20_000)) if is_lying else crowded
    sybils = surround(swarm, claims)
    by_distance = sorted(swarm.nodes, key=lambda peer: distance(node_key(peer), KEY))
    assert set(by_distance[:SYBILS]) == sybils
    stored = swarm.ask(nodes[3], lambda now: nodes[3].store(now, record(3, KEY)), RecordStored)
    keeping = [node for node in nodes if node.records.get(swarm.now + WALL, KEY)]
    assert stored.tried == 20
    assert len(keeping) >= 20 - swarm.settings.group_max
    for node in nodes[::3]:
        found = swarm.ask(node, partial(find, node), RecordsFound)
        assert [each.value for each in found.records] == [b"v"]


def test_a_swarm_within_one_network_works_like_any_other() -> None:
    swarm = Swarm(32)
    nodes = swarm.grow(40, crowded)
    stored = swarm.ask(nodes[0], lambda now: nodes[0].store(now, record(0, KEY)), RecordStored)
    assert (stored.acknowledged, stored.tried) == (20, 20)
    nearest = sorted(nodes, key=lambda node: distance(node.key, KEY))[:20]
    assert all(node.records.get(swarm.now + WALL, KEY) for node in nearest)
    for node in nodes:
        found = swarm.ask(node, partial(find, node), RecordsFound)
        assert len(found.records) == 1


# Stores.


def keep(node: Kademlia, sender: int, place: Address, author: int, key: Key = KEY) -> str:
    """Send one Store and return the answer; the ping that the store then sends stays unanswered."""
    given = token(node, signer(sender).peer)
    message = Store(1, (place.short,), record(author, key), given)
    sends = node.receive(0.0, signer(sender).peer, message)
    (answer,) = [each for _, each in sends if isinstance(each, Stored)]
    return answer.refused


def test_invented_publishers_of_one_network_leave_room_under_a_key() -> None:
    node = lone()
    publishers_max = node.settings.records_per_key_max
    for author in range(1_000, 1_000 + publishers_max):
        assert keep(node, author, crowded(author % 7), author) == ""
    assert keep(node, 2_000, crowded(3), 2_000) == Refusal.KEY_FULL
    for author in range(1, 9):
        assert keep(node, author, public(author), author) == ""
    kept = {each.publisher for each in node.records.get(WALL, KEY)}
    assert {signer(author).peer for author in range(1, 9)} <= kept
    assert len(kept) == publishers_max
    # Later records do not evict them either.
    for author in range(3_000, 3_050):
        keep(node, author, crowded(author % 7), author)
    assert {signer(author).peer for author in range(1, 9)} <= {
        each.publisher for each in node.records.get(WALL, KEY)
    }


def small_node() -> Kademlia:
    small = KademliaSettings(records_max=100, records_per_source_max=40, records_per_publisher_max=10)
    return Swarm(17, settings=small).start(0)


def test_one_address_fills_only_its_share_of_a_store() -> None:
    node = small_node()
    keys = [record_key("junk", number.to_bytes(2, "big")) for number in range(400)]
    for number, key in enumerate(keys[:100]):
        keep(node, 1_000 + number % 40, crowded(1), 1_000 + number % 40, key)
    assert len(node.records) == 40
    for number, key in enumerate(keys):
        keep(node, 1_000 + number % 40, crowded(number % 5), 1_000 + number % 40, key)
    assert len(node.records) == 100
    for author in range(1, 30):
        assert keep(node, author, public(author), author, record_key("test", bytes([author]))) == ""
    assert len(node.records) == 100
    kept = [node.records.get(WALL, record_key("test", bytes([author]))) for author in range(1, 30)]
    assert all(kept)


def test_records_near_a_node_survive_the_limit_of_one_address() -> None:
    node = small_node()
    keys = [record_key("test", number.to_bytes(2, "big")) for number in range(300)]
    for number, key in enumerate(keys):
        keep(node, 1_000 + number % 40, crowded(1), 1_000 + number % 40, key)
    kept = [key for key in keys if node.records.get(WALL, key)]
    nearest = sorted(keys, key=lambda key: distance(key, node.key))
    assert len(kept) == 40
    assert sum(key in nearest[:80] for key in kept) >= 30


def test_forwarding_a_record_does_not_charge_it_to_the_sender() -> None:
    node = lone()
    assert keep(node, 1, public(1), 1) == ""
    for author in range(1_000, 1_063):
        assert keep(node, author, crowded(1), author) == ""
    assert keep(node, 1_000, crowded(1), 1) == ""
    for author in range(2, 40):
        assert keep(node, author, public(author), author) == ""
    assert signer(1).peer in {each.publisher for each in node.records.get(WALL, KEY)}


def test_a_store_far_from_the_node_is_refused() -> None:
    node, rng = lone(), Random(33)
    others = [PeerId(rng.randbytes(32)) for _ in range(1_000)]
    for peer in others:
        node.table.answered(0.0, Contact(peer))
    junk = [record_key("junk", number.to_bytes(2, "big")) for number in range(500)]
    answers = {
        key: keep(node, 1_000, public(1), 1_000 + number // 100, key) for number, key in enumerate(junk)
    }
    assert set(answers.values()) == {"", Refusal.DISTANT}
    assert list(answers.values()).count("") <= 75
    for key, answer in answers.items():
        nearer = sum(distance(node_key(peer), key) < distance(node.key, key) for peer in others)
        if nearer < node.settings.k:
            assert answer == ""
    # A record that is already stored may be renewed from any distance.
    kept = next(key for key, answer in answers.items() if answer == "")
    for peer in sorted(others, key=lambda peer: distance(node_key(peer), kept))[:100]:
        node.table.answered(1.0, Contact(peer))
    assert keep(node, 1_000, public(1), 1_000 + junk.index(kept) // 100, kept) == ""


def test_no_node_refuses_an_honest_store_for_its_distance() -> None:
    swarm = Swarm(34)
    nodes = swarm.grow(120)
    for author in range(20):
        made = record(author, record_key("test", bytes([author])))
        stored = swarm.ask(nodes[author], partial(nodes[author].store, fact=made), RecordStored)
        assert stored.acknowledged == 20


# Tables.


def flooded_table(seed: int) -> Table:
    """Return a table of contacts in many networks, after ten times as many later contacts from one
    network."""
    rng = Random(seed)
    table = Table(node_key(PeerId(bytes(32))), k=8, failures_max=2)
    for number in range(60):
        table.answered(0.0, Contact(PeerId(rng.randbytes(32)), (), b"%d" % number))
    for _ in range(600):
        table.answered(1.0, Contact(PeerId(rng.randbytes(32)), (), b"crowd"))
    return table


def test_a_network_that_filled_buckets_makes_room_for_other_networks() -> None:
    table, rng = Table(node_key(PeerId(bytes(32))), k=8, failures_max=2), Random(2)
    for _ in range(600):
        table.answered(1.0, Contact(PeerId(rng.randbytes(32)), (), b"crowd"))
    # These two buckets cover half and a quarter of all keys; buckets nearer to the node get few newcomers.
    far = sorted(table.buckets, key=lambda bucket: bucket.range[0] - bucket.range[1])[:2]
    assert all(bucket.full and len(bucket.replacement_nodes) == 8 for bucket in far)
    for number in range(100):
        newcomer = Contact(PeerId(rng.randbytes(32)), (), b"new %d" % number)
        if table.wants(newcomer.peer, group=newcomer.group):
            table.answered(2.0, newcomer)
    for bucket in far:
        groups = [contact.group for contact in bucket.nodes.values()]
        assert len(groups) == 8
        assert groups.count(b"crowd") <= BUCKET_GROUP_MAX
    # Nor does the crowd come back.
    for _ in range(600):
        table.answered(3.0, Contact(PeerId(rng.randbytes(32)), (), b"crowd"))
    for bucket in far:
        for contact in list(bucket.nodes.values())[:5]:
            table.remove(contact.peer)
        groups = [contact.group for contact in bucket.nodes.values()]
        assert groups.count(b"crowd") <= BUCKET_GROUP_MAX


def test_only_few_of_the_nearest_contacts_share_one_network() -> None:
    table = flooded_table(5)
    key = node_key(PeerId(b"k" * 32))
    nearest = table.nearest(key, 8)
    groups = [contact.group for contact in nearest]
    assert len(nearest) == 8
    assert groups.count(b"crowd") <= 3
    distances = [distance(contact.id, key) for contact in nearest]
    assert distances == sorted(distances)


def test_a_network_may_exceed_its_limit_if_table_slots_stay_empty() -> None:
    members = [Contact(PeerId(bytes([number]) * 32), (), b"ab"[number % 2 :][:1]) for number in range(12)]
    assert spread(members, 6, 3) == members[:6]
    one = [Contact(PeerId(bytes([number]) * 32), (), b"a") for number in range(12)]
    assert spread(one, 8, 3) == one[:8]
    alone = [Contact(PeerId(bytes([number + 100]) * 32)) for number in range(3)]
    assert spread([*one, *alone], 6, 3) == [*one[:3], *alone]
    assert is_crowded(one[:4], 3)
    assert not is_crowded([*one[:3], *alone], 3)
    assert crowding_one([*one, *alone], b"b", 2) is one[-1]
    assert crowding_one([*one, *alone], b"a", 2) is None


def test_local_peers_have_no_group_by_default() -> None:
    texts = (
        "10.0.0.1:1",
        "127.0.0.1:1",
        "192.168.1.1:1",
        "[fd00::1]:1",
        "node.example:1",
        "garbage",
        "8.8.8.8:1",
    )
    for groups_local, count in ((False, 1), (True, 5)):
        node = Swarm(1, settings=KademliaSettings(groups_local=groups_local)).start(0)
        groups = [node.origins.group(signer(1).peer, (text,)) for text in texts]
        assert sum(group is not None for group in groups) == count
    place = met(lone(), signer(1).peer, ("8.8.8.8:1",)).table.get(signer(1).peer)
    assert place is not None
    assert place.group == bytes((8, 8, 8))


def test_a_contacts_group_is_that_of_its_observed_address() -> None:
    node = lone()
    node.origins.host_of = {signer(1).peer: "45.67.89.1"}.get
    ((_, ping),) = node.add(0.0, signer(1).peer, [public(1)])
    node.receive(0.0, signer(1).peer, Pong(ping.id, (public(1).short,)))
    place = node.table.get(signer(1).peer)
    assert place is not None
    assert place.group == bytes((45, 67, 89))
