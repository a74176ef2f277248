"""How the Kademlia core learns contacts, and how it checks that they are alive."""

from collections import Counter

from crypto.contact import make_address
from crypto.encoding import decode, encode
from crypto.identity import PeerId
from dht.events import PeerHeard
from dht.kademlia import Kademlia
from dht.keys import distance, node_key, record_key
from dht.messages import CLIENT_ADDRESSES, MESSAGE_BYTES_MAX, FindNode, Message, Nodes, Ping, Pong
from dht.routing import Contact
from dht.settings import KademliaSettings
from tests.dht.swarm import Swarm, address, lone, met, signer

KEY = record_key("test", b"name")


def test_an_unknown_asker_becomes_a_contact_only_after_answering_us() -> None:
    node = lone()
    stranger = signer(1).peer
    (_, pong), (receiver, ping) = node.receive(0.0, stranger, Ping(5, ("10.0.0.9:1",)))
    assert isinstance(pong, Pong)
    assert isinstance(ping, Ping)
    assert receiver == stranger
    assert node.events == [PeerHeard(stranger, (make_address("10.0.0.9", 1, stranger),))]
    assert node.table.get(stranger) is None
    # During that ping, and after it, further questions cause no further pings.
    assert len(node.receive(0.1, stranger, Ping(6, ()))) == 1
    node.receive(0.2, stranger, Pong(ping.id, ("10.0.0.9:1",)))
    assert node.table.get(stranger) is not None
    assert len(node.receive(0.3, stranger, Ping(7, ()))) == 1


def test_a_peer_named_by_membership_is_pinged_at_its_address() -> None:
    node = lone()
    place = address(1)
    ((receiver, message),) = node.add(0.0, signer(1).peer, [place])
    assert receiver == signer(1).peer
    assert isinstance(message, Ping)
    assert node.events == [PeerHeard(receiver, (place.of(receiver),))]
    assert node.add(0.0, node.peer, [place]) == []


def test_a_peer_that_moved_gets_its_new_address() -> None:
    node = met(lone(), signer(1).peer)
    node.receive(1.0, signer(1).peer, Ping(9, ("10.0.0.9:99",)))
    contact = node.table.get(signer(1).peer)
    assert contact is not None
    assert contact.addresses == ("10.0.0.9:99",)
    assert node.events[-1] == PeerHeard(signer(1).peer, (make_address("10.0.0.9", 99, signer(1).peer),))


def test_pings_to_unknown_peers_are_limited() -> None:
    node = lone()
    sends = [
        send
        for number in range(1, 200)
        for send in node.receive(0.0, signer(number).peer, FindNode(1, (), KEY))
    ]
    pings = [message for _, message in sends if isinstance(message, Ping)]
    assert len(pings) == node.settings.checks_max
    node.wake(1.0)
    assert len(node.receive(1.0, signer(300).peer, Ping(1, ()))) == 2


def test_a_newcomer_replaces_the_oldest_contact_only_if_its_pings_fail() -> None:
    swarm = Swarm(18, settings=KademliaSettings(k=2, alpha=1, find_width=1))
    node = swarm.start(0)
    far = [signer(n).peer for n in range(1, 40) if distance(node_key(signer(n).peer), node.key) >> 159]
    for peer in far[:2]:
        met(node, peer)
    ((_, ping),) = node.add(100.0, far[2], [])
    sends = node.receive(100.0, far[2], Pong(ping.id, ()))
    assert [(peer, type(message)) for peer, message in sends] == [(far[0], Ping)]
    # The oldest contact stays if it answers, and is removed after several failures.
    assert node.table.get(far[0]) is not None
    now = 100.0
    while node.table.get(far[0]) is not None:
        now = node.deadline
        node.wake(now)
    assert now < 115
    assert [contact.peer for contact in node.table] == [far[1], far[2]]


def asked(node: Kademlia, seconds: float) -> Counter[tuple[PeerId, type]]:
    """Return how many requests each peer gets until `seconds`, if no request is answered."""
    counts: Counter[tuple[PeerId, type]] = Counter()
    while node.deadline <= seconds:
        counts.update((peer, type(message)) for peer, message in node.wake(node.deadline))
    return counts


def halves(*, far: int, near: int) -> tuple[Kademlia, list[PeerId], list[PeerId]]:
    """Return a node with k = 2, which met `far` peers in the other half of the key space and `near` in its
    own."""
    node = Swarm(18, settings=KademliaSettings(k=2, alpha=1, find_width=1)).start(0)
    peers = [signer(number).peer for number in range(1, 40)]
    distant = [peer for peer in peers if distance(node_key(peer), node.key) >> 159][:far]
    close = [peer for peer in peers if not distance(node_key(peer), node.key) >> 159][:near]
    for peer in (*distant, *close):
        met(node, peer)
        node.unwatch(peer)
    return node, distant, close


JUST_AFTER = 1.02 * KademliaSettings().refresh_seconds


def test_a_full_bucket_is_pinged_instead_of_refreshed() -> None:
    node, far, near = halves(far=2, near=1)
    counts = asked(node, JUST_AFTER)
    assert all(counts[peer, Ping] for peer in (*far, *near))
    # A lookup asked all known contacts, and passed through the bucket of the node's own key.
    assert {peer for peer, kind in counts if kind is FindNode} == {*far, *near}
    assert sum(counts[peer, FindNode] for peer in far) <= 2 * len(far)


def test_the_bucket_of_the_nodes_own_key_is_refreshed_even_if_full() -> None:
    node, far, near = halves(far=0, near=2)
    assert sum(asked(node, JUST_AFTER)[peer, FindNode] for peer in near) > 0
    assert far == []


def test_a_bucket_of_contacts_that_membership_watches_is_seldom_checked() -> None:
    refreshes, questions = 80, []
    for watched in (3, 4):
        swarm = Swarm(19)
        node, *others = swarm.grow(5)
        for other in others[:watched]:
            swarm.send(node, node.add(swarm.now, other.peer, []))
        before = len(swarm.trace)
        swarm.run(refreshes * node.settings.refresh_seconds)
        sent: list[Message] = [
            decode(data, Message, bytes_max=MESSAGE_BYTES_MAX)
            for _, peer, _, data in swarm.trace[before:]
            if peer == node.peer
        ]
        questions.append(sum(isinstance(message, FindNode) for message in sent))
    assert questions[0] > refreshes * len(others) * 0.8
    assert questions[0] / 6 < questions[1] < questions[0] / 2.5


def test_silent_contacts_that_membership_watches_are_seldom_pinged() -> None:
    node, far, _ = halves(far=2, near=0)
    node.add(0.0, far[0], [])
    assert node.deadline == node.settings.refresh_seconds
    sends = node.wake(node.deadline)
    assert [peer for peer, message in sends if isinstance(message, Ping)] == [far[1]]


def test_a_watched_peer_that_became_a_client_is_detected() -> None:
    node, far, _ = halves(far=2, near=1)
    node.add(0.0, far[0], [])
    questions: list[Ping] = []
    while not questions:
        sends = node.wake(node.deadline)
        questions = [message for peer, message in sends if peer == far[0] and isinstance(message, Ping)]
        assert node.deadline < 10 * node.settings.refresh_seconds
    node.receive(node.deadline, far[0], Pong(questions[0].id, CLIENT_ADDRESSES))
    assert node.table.get(far[0]) is None


def test_a_peer_unwatched_before_it_answers_becomes_an_unwatched_contact() -> None:
    for forget in (Kademlia.unwatch, lambda node, peer: node.remove(0.0, peer)):
        node = lone()
        peer = signer(1).peer
        ((_, ping),) = node.add(0.0, peer, [])
        forget(node, peer)
        assert isinstance(ping, Ping)
        node.receive(0.1, peer, Pong(ping.id, ()))
        assert not node.table.get(peer).watched  # type: ignore[union-attr]  # it answered


def test_a_peer_watched_before_it_answers_becomes_a_watched_contact() -> None:
    node = lone()
    peer = signer(1).peer
    _, (_, ping) = node.receive(0.0, peer, Ping(5, ()))
    assert node.add(0.1, peer, []) == []
    node.receive(0.2, peer, Pong(ping.id, ()))
    assert node.table.get(peer).watched  # type: ignore[union-attr]  # it answered


def test_a_peer_added_by_membership_during_its_ping_becomes_watched() -> None:
    node = lone()
    peer = signer(1).peer
    ((_, ping),) = node.add(0.0, peer, [])
    assert isinstance(ping, Ping)
    node.table.answered(0.1, Contact(peer))
    node.receive(0.2, peer, Pong(ping.id, ()))
    assert node.table.get(peer).watched  # type: ignore[union-attr]  # it answered


def test_a_member_that_moved_is_asked_at_its_new_address() -> None:
    node = met(lone(), signer(1).peer, ("10.0.0.9:1",))
    ((receiver, question),) = node.add(1.0, signer(1).peer, [make_address("10.0.0.9", 99)])
    assert receiver == signer(1).peer
    node.receive(1.0, receiver, Pong(question.id, ("10.0.0.9:99",)))
    assert node.table.get(receiver).addresses == ("10.0.0.9:99",)  # type: ignore[union-attr]  # it answered
    assert node.add(2.0, receiver, [make_address("10.0.0.9", 99)]) == []


def test_a_replacement_of_a_lost_contact_is_pinged() -> None:
    node, far, _ = halves(far=3, near=1)
    full = node.table.bucket_of(node_key(far[0]))
    assert list(full.replacement_nodes) == [node_key(far[2])]
    assert [(peer, type(message)) for peer, message in node.remove(70.0, far[0])] == [(far[2], Ping)]
    assert node.remove(71.0, far[1]) == []  # no peer waits in its replacement list


def test_a_known_contact_becomes_watched_when_membership_adds_it() -> None:
    node = lone()
    peer = signer(1).peer
    _, (_, ping) = node.receive(0.0, peer, Ping(5, ("10.0.0.9:1",)))
    node.receive(0.0, peer, Pong(ping.id, ("10.0.0.9:1",)))
    contact = node.table.get(peer)
    assert contact is not None
    seen = [contact.watched]
    assert node.add(1.0, peer, []) == []
    seen.append(contact.watched)
    node.unwatch(signer(2).peer)  # a peer that it does not know
    node.unwatch(peer)
    assert [*seen, contact.watched] == [False, True, False]


def test_a_reply_names_the_nearest_contacts_that_fit_into_it() -> None:
    node = lone()
    for number in range(1, 40):
        met(node, signer(number).peer, (f"[2001:db8::{number}]:65535", f"10.0.0.{number}:65535"))
    ((_, nodes),) = node.receive(1.0, signer(1).peer, FindNode(1, (), KEY))
    assert isinstance(nodes, Nodes)
    named = [PeerId(hint.peer) for hint in nodes.hints]
    known = [contact.peer for contact in node.table.nearest(KEY, 20, without=signer(1).peer)]
    assert 8 < len(named) < 20
    assert named == known[: len(named)]
    assert 900 < len(encode(nodes)) <= node.settings.payload_bytes_max
