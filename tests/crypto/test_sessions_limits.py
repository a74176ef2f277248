"""Limits on what unknown peers, floods and forged addresses can cost datagram sessions."""

import gc
import random

import pytest

from crypto.identity import Identity, PeerId
from crypto.sessions import limits
from crypto.sessions.core import WAKEN_MAX, Sessions
from crypto.sessions.macs import COOKIE_SECONDS, Cookies, Source, mac, open_cookie
from crypto.sessions.packets import DATAGRAM_BYTES_MAX, INITIATION_BYTES_MIN, DatagramRefused
from crypto.sessions.state import AMPLIFICATION_MAX, HOLD_SECONDS, PeerState
from crypto.sessions.table import SessionLimits
from crypto.token_buckets import TokenBucket, prefix_of
from tests.crypto.meeting import PING, SWARM, WALL, Node, acquainted, carry, wake

VICTIM: Source = ("203.0.113.7", 7)


def stranger(number: int, *, now: float = 0.0) -> Sessions:
    seed = number.to_bytes(32, "big")
    return Sessions(Identity(seed), SWARM, random.Random(number).randbytes, now=now, wall_milliseconds=WALL)


def flood(target: Node, now: float, count: int, *, first: int = 1_000) -> list[int]:
    """Send initiations of unknown peers, none of which continues, from one source. Return the lengths of all
    answers.
    """
    answered = []
    for number in range(first, first + count):
        (packet,) = stranger(number, now=now).send(now, target.peer, PING, b"")
        try:
            answered += [len(answer) for answer in target.sessions.receive(now, packet, VICTIM).answers]
        except DatagramRefused as refusal:
            target.counters[refusal.reason] += 1
    return answered


# --- addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 500, 1_000])
def test_an_unproven_address_gets_at_most_three_times_its_bytes(size: int) -> None:
    bob, mallory = Node(2), stranger(7)
    came = went = 0
    for step in range(20):
        now = step * 0.5
        for packet in mallory.send(now, bob.peer, PING, bytes(size)) if step % 5 == 0 else []:
            came += len(packet)
            went += sum(map(len, bob.receive(now, packet, VICTIM).answers))
        # The application has many bytes for the sender.
        for _ in range(5):
            went += sum(map(len, bob.sessions.send(now, mallory_peer(7), PING, bytes(1_100))))
        went += sum(len(packet) for _, packet in bob.sessions.wake(now))
    assert came > 0
    assert went <= AMPLIFICATION_MAX * came


def mallory_peer(number: int) -> PeerId:
    return Identity(number.to_bytes(32, "big")).peer


def test_answers_to_an_initiation_are_at_most_three_times_longer() -> None:
    assert AMPLIFICATION_MAX * INITIATION_BYTES_MIN >= DATAGRAM_BYTES_MAX


def test_a_peer_that_moves_is_challenged_and_loses_nothing() -> None:
    alice, bob = acquainted()
    alice.source = ("198.51.100.9", 99)
    (packet,) = alice.send(1.0, bob, b"question from elsewhere")
    received = bob.receive(1.0, packet, alice.source)
    assert not received.newest
    (challenge,) = received.answers
    # The reply waits until the new address is proven.
    assert bob.send(1.0, alice, b"reply") == []
    (proof,) = alice.receive(1.1, challenge, bob.source).answers
    proven = bob.receive(1.2, proof, alice.source)
    assert proven.newest
    for answer in proven.answers:
        alice.receive(1.3, answer, bob.source)
    assert alice.payloads == [b"reply"]


def test_a_forged_move_sends_the_victim_only_challenges() -> None:
    alice, bob = acquainted()
    went = 0
    arrived_at = []
    for step in range(100):
        now = 1.0 + step * 0.1
        (packet,) = alice.send(now, bob, b"")
        # An attacker on the path changes the source.
        received = bob.receive(now, packet, VICTIM)
        assert not received.newest
        went += sum(map(len, received.answers))
        packets = bob.send(now, alice, b"%d" % step)
        packets += [packet for _, packet in bob.sessions.wake(now)]
        for each in packets:
            alice.receive(now, each, bob.source)
            arrived_at.append(now)
    assert 0 < went <= AMPLIFICATION_MAX * 100 * len(packet)
    assert arrived_at[0] <= 1.0 + HOLD_SECONDS + 0.5
    assert len(alice.arrived) == 100


def test_a_challenge_answered_from_another_address_proves_nothing() -> None:
    alice, bob = acquainted()
    (packet,) = alice.send(1.0, bob, b"")
    (challenge,) = bob.receive(1.0, packet, VICTIM).answers
    (proof,) = alice.receive(1.0, challenge, bob.source).answers
    received = bob.receive(1.0, proof, alice.source)
    assert received.newest  # alice's address is unchanged
    (packet,) = alice.send(1.0, bob, b"")
    assert not bob.receive(1.0, packet, VICTIM).newest


# --- load ---------------------------------------------------------------------------------------------


def test_a_flood_of_unknown_peers_gets_cookies_and_ends_no_session() -> None:
    alice, bob = acquainted()
    answered = flood(bob, 1.0, 400)
    assert bob.counters["cookies_sent"] >= 400 - limits.FREE_BURST
    assert max(answered) < INITIATION_BYTES_MIN
    carry(1.0, alice, bob, alice.send(1.0, bob, b"still here"))
    carry(1.0, bob, alice, bob.send(1.0, alice, b"me too"))
    assert (alice.payloads, bob.payloads) == ([b"me too"], [b"still here"])


def test_an_honest_peer_is_admitted_by_cookie_during_a_flood() -> None:
    alice, bob = Node(1), Node(2)
    flood(bob, 0.0, 300)
    carry(0.0, alice, bob, alice.send(0.0, bob, b"let me in"))
    assert bob.payloads == []
    wake(0.0, alice, {bob.peer: bob})
    assert bob.payloads == [b"let me in"]
    carry(0.0, bob, alice, bob.send(0.0, alice, b"welcome"))
    assert alice.payloads == [b"welcome"]


def test_a_session_is_renewed_during_a_flood_without_loss() -> None:
    alice, bob = acquainted()
    for step in range(1_200, 1_220):
        now = step / 10
        flood(bob, now, 20, first=step * 100)
        if step == 1_200:
            flood(bob, now, 250)
        carry(now, alice, bob, alice.send(now, bob, b"%d" % step))
        wake(now, alice, {bob.peer: bob})
    assert bob.payloads == [b"%d" % step for step in range(1_200, 1_220)]
    assert alice.counters["cookies_shown"] == 1
    assert alice.counters["sessions_begun"] == bob.counters["sessions_begun"] == 2


def test_a_cookie_expires_and_is_bound_to_its_address() -> None:
    cookies, key = Cookies(random.Random(1).randbytes), b"k" * 32
    here, there = ("10.0.0.1", 1), ("10.0.0.2", 1)
    cookie = open_cookie(cookies.answer(0.0, key, 5, b"m" * 16, here), key, b"m" * 16)
    assert cookie is not None
    shown = mac(cookie, b"packet")
    assert cookies.is_shown(0.0, b"packet", shown, here)
    assert not cookies.is_shown(0.0, b"packet", shown, there)
    assert not cookies.is_shown(0.0, b"other", shown, here)
    assert cookies.is_shown(COOKIE_SECONDS, b"packet", shown, here)
    assert not cookies.is_shown(2 * COOKIE_SECONDS, b"packet", shown, here)


def test_a_cookie_for_another_packet_or_with_a_changed_bit_is_refused() -> None:
    alice, bob = Node(1), Node(2)
    flood(bob, 0.0, 300)
    (packet,) = alice.send(0.0, bob, b"x")
    (cookie,) = bob.receive(0.0, packet, alice.source).answers
    with pytest.raises(DatagramRefused):
        alice.receive(0.0, cookie[:-1] + bytes((cookie[-1] ^ 1,)), bob.source)
    (later,) = Node(1, life=1).send(0.0, bob, b"x")
    assert later != packet
    with pytest.raises(DatagramRefused):
        Node(1, life=1).receive(0.0, cookie, bob.source)
    assert alice.receive(0.0, cookie, bob.source).answers == []


def test_one_source_with_cookies_is_held_to_its_own_rate() -> None:
    bob = Node(2)
    flood(bob, 0.0, 250)
    refusals = []
    for number in range(5_000, 5_000 + 150):
        eager = stranger(number)
        (packet,) = eager.send(0.0, bob.peer, PING, b"")
        (cookie,) = bob.receive(0.0, packet, VICTIM).answers
        eager.receive(0.0, cookie, bob.source)
        ((_, again),) = eager.wake(0.0)
        try:
            bob.receive(0.0, again, VICTIM)
        except DatagramRefused as refusal:
            refusals.append(refusal.reason)
    assert refusals == ["busy"] * (150 - int(limits.SOURCE_BURST))


def test_unknown_peers_evict_only_unknown_peers() -> None:
    alice, bob = acquainted(peers_max=10, strangers_max=6, wanted_max=5)
    flood(bob, 1.0, 50)
    assert len(bob.sessions.peers) <= 1 + 6
    assert alice.peer in bob.sessions.peers
    friends = [Node(number) for number in range(10, 22)]
    for friend in friends:
        carry(2.0, bob, friend, bob.send(2.0, friend, b""))
    flood(bob, 3.0, 50, first=9_000)
    assert len(bob.sessions.peers) == 10 + 6
    assert {friend.peer for friend in friends[-10:]} <= set(bob.sessions.peers)


class Crowd:
    """Invented peers. Each completes valid handshakes, and all use a few addresses."""

    def __init__(self, hosts: list[str]) -> None:
        self.members: dict[PeerId, Node] = {}
        self._hosts = hosts

    def come(self, now: float, target: Node, count: int) -> None:
        """Add `count` peers and try to give each a session with `target`."""
        for _ in range(count):
            number = len(self.members)
            member = Node(3, life=number, now=now)
            member.sessions = stranger(50_000 + number, now=now)
            member.peer = mallory_peer(50_000 + number)
            member.source = (self._hosts[number % len(self._hosts)], 1_000 + number)
            self.members[member.peer] = member
            carry_or_refuse(now, member, target, member.send(now, target, b"in"))

    def speak(self, now: float, target: Node) -> None:
        """Have every peer with a session send over it."""
        for peer, member in self.members.items():
            if peer in target.sessions.peers:
                carry_or_refuse(now, member, target, member.send(now, target, b"."))


def carry_or_refuse(now: float, sender: Node, receiver: Node, packets: list[bytes]) -> None:
    for packet in packets:
        try:
            answers = receiver.receive(now, packet, sender.source).answers
        except DatagramRefused as refusal:
            receiver.counters[refusal.reason] += 1
        else:
            carry_or_refuse(now, receiver, sender, answers)


def friends_of(bob: Node, count: int) -> list[Node]:
    friends = [Node(number) for number in range(100, 100 + count)]
    for number, friend in enumerate(friends):
        friend.source = (f"10.{number}.0.1", 9_000)
        carry(0.0, friend, bob, friend.send(0.0, bob, b"hello"))
    return friends


TWO = ["203.0.113.7", "198.51.100.4"]
NETWORK = [f"203.0.113.{host}" for host in range(1, 101)]


@pytest.mark.parametrize("hosts", [TWO, NETWORK], ids=["two addresses", "one network"])
def test_many_peers_with_valid_handshakes_do_not_lock_out_others(hosts: list[str]) -> None:
    bob, crowd = Node(2, limits=SessionLimits(peers_max=60, strangers_max=10, wanted_max=5)), Crowd(hosts)
    friends = friends_of(bob, 20)
    now = 1.0
    for _ in range(10):
        now += 2.0
        crowd.come(now, bob, 12)
        crowd.speak(now, bob)
    kept = set(bob.sessions.peers)
    assert {friend.peer for friend in friends} <= kept
    assert len(kept & set(crowd.members)) >= 40
    # All sessions have just sent a packet. Newcomers are still admitted, with their first packets.
    newcomers = [Node(number) for number in range(200, 210)]
    for number, newcomer in enumerate(newcomers):
        newcomer.source = (f"192.0.{number}.1", 9_000)
        carry(now, newcomer, bob, newcomer.send(now, bob, b"let me in"))
        crowd.come(now, bob, 1)
    assert {node.peer for node in (*friends, *newcomers)} <= set(bob.sessions.peers)
    assert bob.payloads.count(b"let me in") == 10
    assert len(bob.sessions.peers) <= 60 + 10


def test_many_abandoned_handshakes_do_not_delay_a_newcomer() -> None:
    bob, newcomer = Node(2, limits=SessionLimits(strangers_max=10)), Node(3)
    (packet,) = newcomer.send(0.0, bob, b"let me in")
    answers = bob.receive(0.0, packet, newcomer.source).answers
    flood(bob, 0.0, 50)
    for answer in answers:
        carry(0.0, newcomer, bob, newcomer.receive(0.0, answer, bob.source).answers)
    carry(1.0, newcomer, bob, newcomer.send(1.0, bob, b"in time"))
    assert bob.payloads == [b"let me in", b"in time"]


def test_peers_known_only_by_hearsay_evict_few_sessions() -> None:
    bob = Node(2, limits=SessionLimits(peers_max=30, wanted_max=5))
    friends = friends_of(bob, 30)
    for number in range(100):
        bob.sessions.send(1.0, mallory_peer(7_000 + number), PING, b"are you there?")
    assert sum(friend.peer in bob.sessions.peers for friend in friends) == 25
    assert len(bob.sessions.peers) == 30


def test_an_initiation_captured_before_a_flood_is_still_refused_after_it() -> None:
    alice, bob, crowd = (
        Node(1),
        Node(2, limits=SessionLimits(memories_max=50, peers_max=10, seen_max=10, wanted_max=5)),
        Crowd(TWO),
    )
    (caught,) = alice.send(0.0, bob, b"pay")
    carry(0.0, alice, bob, [caught])
    for step in range(30):
        # A few peers, each with a session of some minutes; alice left long ago.
        now = 300.0 + 200.0 * step
        bob.sessions.wake(now)
        crowd.come(now, bob, 8)
    flood(bob, now, 100, first=90_000)
    assert alice.peer not in bob.sessions.peers
    with pytest.raises(DatagramRefused, match="older"):
        bob.receive(now + 60.0, caught, alice.source)
    assert bob.payloads.count(b"pay") == 1


def test_a_dropped_peer_leaves_nothing_behind() -> None:
    bob = Node(2, limits=SessionLimits(peers_max=30, wanted_max=5))
    friends_of(bob, 30)
    gc.collect()
    before_count = sum(isinstance(each, PeerState) for each in gc.get_objects())
    for number in range(100):
        bob.sessions.send(1.0, mallory_peer(7_000 + number), PING, b"are you there?")
    assert sum(isinstance(each, PeerState) for each in gc.get_objects()) == before_count


def test_messages_to_unknown_peers_do_not_displace_messages_to_known_ones() -> None:
    bob = Node(2, limits=SessionLimits(queued_bytes_max=2 * 16 * 16 * 1_000, strangers_max=16))
    flood(bob, 0.0, 16)
    absent = mallory_peer(7)
    bob.sessions.send(0.0, absent, PING, bytes(1_000))
    before = bob.counters["datagrams_dropped_unsent"]
    for number in range(1_000, 1_016):
        for _ in range(60):
            bob.sessions.send(0.0, mallory_peer(number), PING, bytes(1_000))
    assert bob.counters["datagrams_dropped_unsent"] > before
    for _ in range(60):
        bob.sessions.send(0.0, absent, PING, bytes(1_000))
    waiting = sum(len(state.queue) for state in bob.sessions._table.peers.values() if state.peer == absent)
    assert waiting == 61


def come_with_cookies(bob: Node, now: float, sources: list[Source], *, first: int) -> int:
    """Return how many of these unknown peers, each from its own source, get their handshake computed."""
    computed = 0
    for number, source in enumerate(sources):
        eager = stranger(first + number, now=now)
        (packet,) = eager.send(now, bob.peer, PING, b"")
        (cookie,) = bob.receive(now, packet, source).answers
        eager.receive(now, cookie, bob.source)
        ((_, again),) = eager.wake(now)
        try:
            bob.receive(now, again, source)
            computed += 1
        except DatagramRefused as refusal:
            bob.counters[refusal.reason] += 1
    return computed


def test_one_network_with_cookies_leaves_handshakes_for_others() -> None:
    bob = Node(2)
    flood(bob, 0.0, 250)
    crowd: list[Source] = [(f"203.0.113.{number % 200}", 7) for number in range(500)]
    others: list[Source] = [(f"10.0.{number}.1", 7) for number in range(100)]
    assert come_with_cookies(bob, 0.0, crowd, first=5_000) == limits.SHOWN_BURST - limits.SPARED
    assert come_with_cookies(bob, 0.0, others, first=6_000) == 100
    assert bob.counters["busy"] == 500 - (limits.SHOWN_BURST - limits.SPARED)


def test_one_network_may_use_all_handshakes_if_no_other_needs_them() -> None:
    bob = Node(2)
    flood(bob, 0.0, 250)
    crowd: list[Source] = [(f"203.0.113.{number % 200}", 7) for number in range(500)]
    come_with_cookies(bob, 0.0, crowd, first=5_000)
    flood(bob, 1.0, 250, first=20_000)
    assert come_with_cookies(bob, 1.0, crowd[:250], first=7_000) == limits.SHOWN_RATE


def test_silent_peers_are_retried_a_few_at_a_time() -> None:
    node = Node(1)
    for number in range(100, 200):
        node.sessions.send(0.0, Identity(number.to_bytes(32, "big")).peer, PING, b"")
    now, again = 20.0, 0
    while node.sessions.deadline <= now:
        packets = node.sessions.wake(now)
        assert len(packets) <= WAKEN_MAX
        again += 1
    assert again >= 100 // WAKEN_MAX


def test_messages_waiting_for_all_peers_are_bounded() -> None:
    alice = Node(1, limits=SessionLimits(queued_bytes_max=30_000, strangers_max=1))
    for number in range(10, 20):
        for _ in range(5):
            alice.send(0.0, Node(number), bytes(1_000))
    assert alice.counters["datagrams_dropped_unsent"] == 21


def test_a_token_bucket_allows_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=2.0, burst=3.0, tokens=3.0, at=0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(0.5), bucket.take(0.5), bucket.take(0.4)] == [True, False, False]
    assert sum(bucket.take(100.0) for _ in range(10)) == 3


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::2:3", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
    ],
)
def test_addresses_of_one_owner_share_a_prefix(one: str, other: str, same: bool) -> None:
    assert (prefix_of(one) == prefix_of(other)) == same
