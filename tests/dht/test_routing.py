"""The routing table is bounded for any ids, ordered by last contact, and exact about the nearest contacts."""

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from crypto.identity import PeerId
from dht.keys import KEY_MAX, Key, distance, node_key
from dht.routing import Contact, Table

K = 4
OWN = PeerId(bytes(32))
PEERS = [PeerId(number.to_bytes(32, "big")) for number in range(1, 120)]


def table(k: int = K) -> Table:
    return Table(node_key(OWN), k=k, failures_max=2)


class TableRules(RuleBasedStateMachine):
    """Check the table's invariants after any order of answers, failures and removals."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.now = 0.0
        self.known: set[PeerId] = set()

    @rule(peer=st.sampled_from(PEERS))
    def answers(self, peer: PeerId) -> None:
        self.now += 1
        waits = self.table.answered(self.now, Contact(peer))
        self.known.add(peer)
        if waits is not None:
            assert waits.peer != peer
            inside = self.table.bucket_of(node_key(peer)).nodes.values()
            assert waits.heard == min(contact.heard for contact in inside)

    @rule(peer=st.sampled_from([*PEERS, OWN]))
    def asks(self, peer: PeerId) -> None:
        self.now += 1
        before = self.table.get(peer)
        assert self.table.heard(self.now, peer) is before
        if before is not None:
            assert before.heard == self.now
            assert not self.table.wants(peer)

    @rule(peer=st.sampled_from(PEERS))
    def fails(self, peer: PeerId) -> None:
        self.now += 1
        self.table.failed(self.now, peer, self.now - 0.5)

    @rule(peer=st.sampled_from(PEERS))
    def dies(self, peer: PeerId) -> None:
        bucket = self.table.bucket_of(node_key(peer))
        waiting = list(bucket.replacement_nodes.values()) if node_key(peer) in bucket.nodes else []
        taking = self.table.remove(peer)
        assert self.table.get(peer) is None
        assert taking is max(waiting, key=lambda contact: contact.heard, default=None)

    @invariant()
    def the_buckets_cover_the_key_space_once(self) -> None:
        ranges = [bucket.range for bucket in self.table.buckets]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == KEY_MAX
        assert all(one[1] + 1 == two[0] for one, two in pairwise(ranges))

    @invariant()
    def contacts_stand_once_in_their_range_and_answered_themselves(self) -> None:
        seen = []
        for bucket in self.table.buckets:
            assert len(bucket.nodes) <= K
            assert len(bucket.replacement_nodes) <= K
            # No contact waits in the replacement list while the bucket has room.
            assert len(bucket.nodes) == K or not bucket.replacement_nodes
            for contact in (*bucket.nodes.values(), *bucket.replacement_nodes.values()):
                assert bucket.has_in_range(contact)
                seen.append(contact.peer)
        assert len(seen) == len(set(seen))
        assert set(seen) <= self.known
        assert OWN not in seen

    @invariant()
    def contacts_come_in_the_order_in_which_they_were_heard_of(self) -> None:
        for bucket in self.table.buckets:
            heard = [contact.heard for contact in bucket.get_nodes()]
            assert heard == sorted(heard)
            assert not heard or bucket.head().heard == heard[0]


TestTableRules = TableRules.TestCase
TestTableRules.settings = settings(max_examples=40)


@given(st.lists(st.sampled_from(PEERS)), st.binary(min_size=20, max_size=20), st.integers(1, 30))
def test_nearest_is_exact_over_all_buckets(peers: list[PeerId], key: bytes, count: int) -> None:
    full = table()
    for peer in peers:
        full.answered(0.0, Contact(peer))
    everyone = sorted(full, key=lambda contact: distance(contact.id, key))
    assert full.nearest(Key(key), count) == everyone[:count]


def test_a_flood_of_ids_splits_buckets_only_logarithmically() -> None:
    rng = Random(1)
    flooded = table(k=20)
    for _ in range(5_000):
        flooded.answered(0.0, Contact(PeerId(rng.randbytes(32))))
    # 5,000 / 20 is about 2 to the 8th; chance adds a few more.
    assert len(flooded.buckets) <= 12
    assert len(flooded) <= 20 * len(flooded.buckets)


def test_a_contact_that_answers_again_moves_to_the_end_of_its_bucket() -> None:
    contacts = table(k=20)
    for peer in PEERS[:3]:
        contacts.answered(0.0, Contact(peer))
    contacts.heard(1.0, PEERS[0])
    assert [contact.peer for contact in contacts] == [PEERS[1], PEERS[2], PEERS[0]]


def test_the_newest_replacement_replaces_a_failed_contact() -> None:
    far = [peer for peer in PEERS if distance(node_key(peer), node_key(OWN)) >> 159]
    contacts = table()
    for peer in far[: K + 2]:
        waits = contacts.answered(0.0, Contact(peer))
    # The bucket splits once. After that its far half is full, and keeps its oldest contact for now.
    assert waits is not None
    assert waits.peer == far[0]
    assert contacts.failed(1.0, far[0], asked=0.5) is waits
    taking = contacts.failed(2.0, far[0], asked=1.5)
    assert taking is contacts.get(far[K + 1])
    assert [contact.peer for contact in contacts] == [*far[1:K], far[K + 1]]


def test_many_unanswered_requests_in_one_silence_count_as_one_failure() -> None:
    contacts = table()
    contacts.answered(0.0, Contact(PEERS[0]))
    for asked in (0.5, 0.6, 0.9):
        contacts.failed(1.0, PEERS[0], asked)
    assert contacts.get(PEERS[0]) is not None
    contacts.failed(2.0, PEERS[0], asked=1.5)
    assert contacts.get(PEERS[0]) is None


def test_a_failed_contact_is_not_named_until_it_answers() -> None:
    contacts = table()
    contacts.answered(0.0, Contact(PEERS[0]))
    contacts.failed(1.0, PEERS[0], asked=0.5)
    assert contacts.nearest(node_key(PEERS[0]), 1) == []
    assert len(contacts.nearest(node_key(PEERS[0]), 1, failing=True)) == 1
    contacts.heard(1.0, PEERS[0])  # a request from it proves nothing; only an answer does
    assert contacts.nearest(node_key(PEERS[0]), 1) == []
    contacts.answered(1.0, Contact(PEERS[0]))
    assert len(contacts.nearest(node_key(PEERS[0]), 1)) == 1
    assert contacts.nearest(node_key(PEERS[0]), 1, without=PEERS[0]) == []


def test_a_full_bucket_accepts_unknown_peers_only_as_waiting_replacements() -> None:
    far = [peer for peer in PEERS if distance(node_key(peer), node_key(OWN)) >> 159]
    contacts = table()
    for peer in far[: 2 * K]:
        assert contacts.wants(peer)
        contacts.answered(0.0, Contact(peer))
    assert not contacts.wants(far[2 * K])
    assert not contacts.wants(far[0])
    assert not contacts.wants(OWN)
