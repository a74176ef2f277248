"""Defences against liars: disjoint paths, timeouts per peer, limits per address group, and proof of work."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.contact import make_address
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import Identity, PeerId
from dht.events import RecordsFound, RecordStored
from dht.keys import distance, node_key, record_key
from dht.messages import Hint, Message, Nodes, Ping, Pong, Store, Values
from dht.paths import DisjointLookup
from dht.requests import AnswerPatience
from dht.routing import BUCKET_GROUP_MAX, Contact, Table
from dht.settings import KademliaSettings
from dht.work import WORK_BITS_MAX, find_seed, has_work, work_of
from tests.dht.swarm import WALL, Swarm, lone, met, record, signer

KEY = record_key("test", b"sought")
OWN = PeerId(bytes(32))
PEERS = [PeerId(number.to_bytes(32, "big")) for number in range(1, 61)]
SMALL = KademliaSettings(k=4, find_width=2, lookup_requests_max=24)


def contacts(peers: list[PeerId]) -> list[Contact]:
    return [Contact(peer) for peer in sorted(peers, key=lambda peer: distance(node_key(peer), KEY))]


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 59)), max_size=300),
    st.sets(st.sampled_from(PEERS)),
)
def test_no_peer_is_asked_on_two_paths_and_all_paths_end(
    count: int, moves: list[tuple[int, int]], silent: set[PeerId]
) -> None:
    lookup = DisjointLookup(KEY, OWN, contacts(PEERS[:8]), SMALL, values=True, count=count)
    asked: list[PeerId] = []
    waiting: list[Contact] = []
    steps = iter(moves)
    while not lookup.done:
        new = lookup.next()
        asked += [contact.peer for contact in new]
        waiting += new
        assert waiting, "an unfinished lookup waits for no peer"
        place, named = next(steps, (0, 0))
        contact = waiting.pop(place % len(waiting))
        if contact.peer in silent:
            lookup.passed_over(contact.peer)
        else:
            lookup.named(contact.peer, contacts(PEERS[named : named + 4]))
            lookup.answered(contact)
    assert len(asked) == len(set(asked)) <= count * SMALL.lookup_requests_max
    assert {contact.peer for contact in lookup.answers}.isdisjoint(silent)


def test_one_path_without_liars_finds_records_that_other_paths_hide() -> None:
    swarm = Swarm(21, settings=KademliaSettings(k=8, find_width=4))
    nodes = swarm.grow(40)
    by_distance = sorted(nodes, key=lambda node: distance(node.key, KEY))
    publisher = by_distance[-1]
    stored = swarm.ask(publisher, lambda now: publisher.store(now, record_of(publisher.peer)), RecordStored)
    assert stored.acknowledged == 8
    # All but two of the lookup's starting contacts name only each other, and hide their records.
    asker = by_distance[-2]
    seeds = [contact.peer for contact in asker.table.nearest(KEY, 16)]
    liars = [peer for peer in seeds if peer not in {node.peer for node in by_distance[3:6]}]
    names = tuple(Hint(peer, ()) for peer in liars[:8])

    def lie(message: Message) -> Message:
        match message:
            case Nodes():
                return Nodes(message.id, message.addresses, names)
            case Values():
                return Values(message.id, message.addresses, (), False, names)
        return message

    for peer in liars:
        swarm.tamper[peer] = lie
    found = swarm.ask(asker, lambda now: asker.find(now, KEY, paths=4), RecordsFound)
    assert [each.publisher for each in found.records] == [publisher.peer]


def record_of(peer: PeerId, value: bytes = b"v") -> Fact:
    author = next(number for number in range(100) if signer(number).peer == peer)
    return record(author, KEY, value, expires=WALL + 20_000)


# Timeouts.


def test_a_far_peer_gets_more_time_than_a_near_one() -> None:
    patience, near, far, unknown = (
        AnswerPatience(KademliaSettings()),
        Contact(PEERS[0]),
        Contact(PEERS[1]),
        Contact(PEERS[2]),
    )
    for _ in range(20):
        patience.learn(near, 0.04)
        patience.learn(far, 0.8)
    assert patience.silence_seconds(near) < 0.2
    assert 1.6 < patience.silence_seconds(far) <= KademliaSettings().request_seconds_max
    assert patience.silence_seconds(unknown) <= KademliaSettings().request_seconds


def test_an_answer_after_its_timeout_raises_the_next_timeout() -> None:
    node = met(lone(), signer(1).peer)
    for start in (100.0, 200.0, 300.0):
        _, ((_, ping),) = node.ping(start, signer(1).peer)
        while node.deadline < start + 0.9:
            node.wake(node.deadline)
        assert isinstance(ping, Ping)
        node.receive(start + 0.9, signer(1).peer, Pong(ping.id, ()))
    contact = node.table.get(signer(1).peer)
    assert contact is not None
    assert contact.silence is None
    assert contact.trip is not None
    assert contact.trip[0] > 0.2


# Address groups.


def placed(number: int, group: int) -> Contact:
    return Contact(PeerId(number.to_bytes(32, "big")), (), b"" if group < 0 else bytes([1, 2, group]))


def test_one_network_is_limited_in_a_table_and_in_a_bucket() -> None:
    table = Table(node_key(OWN), k=20, failures_max=2)
    for number in range(1, 400):
        table.answered(float(number), placed(number, 0))
    crowded = len(table)
    for number in range(400, 600):
        table.answered(float(number), placed(number, number % 200 + 1))
    groups = [contact.group for contact in table]
    assert crowded > 20  # one network alone is not limited
    assert max(groups.count(group) for group in set(groups)) <= 3
    for number in range(600, 900):
        table.answered(float(number), placed(number, 0))
        assert sum(contact.group == bytes([1, 2, 0]) for contact in table) <= 3
    for bucket in table.buckets:
        inside = [contact.group for contact in bucket.nodes.values()]
        assert max((inside.count(group) for group in inside), default=0) <= max(BUCKET_GROUP_MAX, 3)


def test_an_unknown_peer_from_a_network_at_its_limit_is_not_pinged() -> None:
    table = Table(node_key(OWN), k=8, failures_max=2)
    for number in range(1, 60):
        table.answered(float(number), placed(number, number))
    for number in range(100, 160):
        table.answered(float(number), placed(number, 77))
    crowded = PeerId((999).to_bytes(32, "big"))
    assert not table.wants(crowded, group=bytes([1, 2, 77]))


# Proof of work.


def with_work(bits: int, salt: int = 0) -> Identity:
    rng = Random(salt)
    return Identity(find_seed(rng.randbytes, bits))


def test_an_id_is_found_with_the_required_work() -> None:
    for bits in (0, 1, 6):
        assert has_work(with_work(bits).peer, bits)
    works = [work_of(PeerId(Random(number).randbytes(32))) for number in range(4_000)]
    assert 0.4 < sum(each >= 1 for each in works) / 4_000 < 0.6
    assert sum(each >= 6 for each in works) < 130
    with pytest.raises(ValueError, match="work_bits"):
        KademliaSettings(work_bits=WORK_BITS_MAX + 1)


def test_a_peer_without_work_is_neither_answered_nor_added_nor_asked() -> None:
    settings = KademliaSettings(work_bits=8)
    node = Swarm(30, settings=settings).start(0)
    lazy = next(peer for peer in PEERS if not has_work(peer, 8))
    with pytest.raises(RemoteProtocolError):
        node.receive(0.0, lazy, Ping(1, ()))
    assert node.add(0.0, lazy, [make_address("10.0.0.9", 1)]) == []
    diligent = with_work(8).peer
    ((receiver, ping),) = node.add(0.0, diligent, [])
    assert receiver == diligent
    assert isinstance(ping, Ping)
    node.receive(0.0, diligent, Pong(ping.id, ()))
    _, ((_, asked),) = node.locate(1.0, KEY)
    sends = node.receive(1.0, diligent, Nodes(asked.id, (), (Hint(lazy, ()),)))
    assert sends == []


def test_a_store_without_work_is_refused_before_signature_checks() -> None:
    node = Swarm(31, settings=KademliaSettings(work_bits=12)).start(0)
    lazy = next(number for number in range(1, 50) if not has_work(signer(number).peer, 12))
    with pytest.raises(RemoteProtocolError):
        node.receive(0.0, signer(lazy).peer, Store(1, (), record(lazy, KEY), b"12345678"))
    assert len(node.records) == 0
