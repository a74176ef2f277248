"""The lookup as a state machine: it ends within its limits, despite silent peers and liars."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from crypto.identity import PeerId
from dht.keys import Key, distance, node_key, record_key
from dht.lookup import Lookup
from dht.records import check_record
from dht.routing import Contact
from dht.settings import KademliaSettings
from tests.dht.swarm import record, signer

KEY = record_key("test", b"sought")
OWN = PeerId(bytes(32))
PEERS = [PeerId(number.to_bytes(32, "big")) for number in range(1, 61)]
SMALL = KademliaSettings(k=4, find_width=2, lookup_requests_max=24)


def nearest(peers: list[PeerId], key: Key = KEY) -> list[PeerId]:
    return sorted(peers, key=lambda peer: distance(node_key(peer), key))


def contacts(peers: list[PeerId]) -> list[Contact]:
    return [Contact(peer) for peer in peers]


def begin(seeds: list[PeerId], settings: KademliaSettings = SMALL, *, values: bool = False) -> Lookup:
    return Lookup(KEY, OWN, contacts(seeds), settings, values=values)


def answer(lookup: Lookup, contact: Contact, names: list[PeerId]) -> None:
    lookup.named(contact.peer, contacts(names))
    lookup.answered(contact)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.randoms(use_true_random=False)), max_size=200),
    st.sets(st.sampled_from(PEERS)),
    st.sets(st.sampled_from(PEERS)),
)
def test_a_lookup_respects_its_request_limit_and_asks_each_peer_once(
    moves: list[tuple[int, Random]], silent: set[PeerId], liars: set[PeerId]
) -> None:
    lookup = begin(PEERS[:3])
    asked: list[Contact] = []
    waiting: list[Contact] = []
    steps = iter(moves)
    while not lookup.done:
        new = lookup.next()
        asked += new
        waiting += new
        assert waiting, "an unfinished lookup waits for no peer"
        place, rng = next(steps, (0, Random(0)))
        contact = waiting.pop(place % len(waiting))
        if contact.peer in silent:
            lookup.passed_over(contact.peer)
        elif contact.peer in liars:
            answer(lookup, contact, [PeerId(rng.randbytes(32)) for _ in range(20)])
        else:
            answer(lookup, contact, rng.sample(PEERS, 6))
    names = [contact.peer for contact in asked]
    assert len(names) == len(set(names)) == lookup.requests <= SMALL.lookup_requests_max
    assert OWN not in names
    assert len(lookup.nearest) <= SMALL.k


def test_a_lookup_ends_when_the_nearest_live_peers_have_answered() -> None:
    order = nearest(PEERS)
    lookup = begin(order[-3:])
    dead = set(order[:2])
    asked = 0
    while not lookup.done:
        for contact in lookup.next():
            asked += 1
            if contact.peer in dead:
                lookup.passed_over(contact.peer)
            else:
                answer(lookup, contact, order[:8])
    assert [contact.peer for contact in lookup.nearest] == order[2:6]
    assert asked < 12


def test_a_lookup_without_contacts_ends_immediately() -> None:
    lookup = begin([OWN])
    assert lookup.done
    assert lookup.next() == []
    assert lookup.nearest == []


def test_a_slow_peer_delays_nothing_and_its_late_answer_counts() -> None:
    order = nearest(PEERS)
    lookup = begin(order[:5])
    slow, *others = lookup.next()
    assert len(others) == SMALL.alpha - 1
    for contact in others:
        answer(lookup, contact, order[:5])
    lookup.passed_over(slow.peer)
    for contact in lookup.next():
        answer(lookup, contact, order[:5])
    assert lookup.done
    answer(lookup, slow, [])
    assert lookup.nearest[0] is slow


def test_a_lookup_without_progress_widens_to_all_the_nearest() -> None:
    order = nearest(PEERS)
    lookup = begin(order[:10], KademliaSettings(k=10, find_width=8))
    for contact in lookup.next():
        answer(lookup, contact, order[:10])
    assert len(lookup.next()) == 7


def test_a_peer_that_names_invented_peers_loses_only_its_own_hints() -> None:
    order = nearest(PEERS)
    liar, honest = order[40], order[41]
    settings = KademliaSettings(k=20)
    lookup = begin([liar, honest], settings)
    first, second = sorted(lookup.next(), key=lambda contact: contact.peer != liar)
    answer(lookup, first, order[:20])
    answer(lookup, second, [order[10], order[30]])
    ghosts = 0
    while not lookup.done:
        for contact in lookup.next():
            if contact.peer in order[:20] and contact.peer != order[10]:
                ghosts += 1
                lookup.passed_over(contact.peer)
            else:
                answer(lookup, contact, [])
    # After the first four peers did not answer, the others that only the liar had named were not asked.
    assert ghosts <= 4 + settings.alpha
    assert [contact.peer for contact in lookup.nearest] == [order[10], order[30], liar, honest]


def test_a_wrong_address_hint_does_not_hide_the_right_address() -> None:
    lookup = begin(PEERS[:2])
    one, two = lookup.next()
    sought = PEERS[9]
    lookup.named(one.peer, [Contact(sought, ("10.0.0.1:1", "10.0.0.1:2"))])
    lookup.named(two.peer, [Contact(sought, ("10.0.0.1:2", "10.0.0.1:3"))])
    assert lookup.addresses[sought] == ("10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3")


def test_a_lookup_for_a_record_ends_early_once_the_record_is_found() -> None:
    order = nearest(PEERS)
    lookup = begin(order[:4], values=True)
    for contact in lookup.next()[:2]:
        answer(lookup, contact, [])
    assert not lookup.done
    lookup.learn(check_record(signer(0), record(1, KEY)))
    assert lookup.done


def test_the_newest_record_of_each_publisher_is_kept_within_a_bound() -> None:
    lookup = begin([], KademliaSettings(found_max=2), values=True)
    for author, sequence in ((1, 1), (2, 5), (1, 3), (1, 2), (3, 9)):
        lookup.learn(check_record(signer(0), record(author, KEY, sequence=sequence)))
    kept = [(kept.publisher, kept.sequence) for kept in lookup.records.values()]
    assert kept == [(signer(1).peer, 3), (signer(2).peer, 5)]


def test_a_peer_known_to_be_dead_is_not_asked() -> None:
    order = nearest(PEERS)
    lookup = begin(order[:3])
    lookup.passed_over(order[0])
    assert [contact.peer for contact in lookup.next()] == order[1:3]
