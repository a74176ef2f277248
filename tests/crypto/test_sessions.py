"""Datagram sessions between two or three peers: how they start, last, are renewed, and move to new
addresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity, PeerId
from crypto.key_conversion import agreement_private, agreement_public
from crypto.noise import Handshake
from crypto.protocols import PROTOCOL_BYTES_MAX
from crypto.sessions.core import WAIT_SECONDS
from crypto.sessions.macs import mac, mac_key
from crypto.sessions.packets import (
    COOKIE,
    COOKIE_BYTES,
    DATAGRAM_BYTES_MAX,
    INITIATION,
    INITIATION_BYTES_MIN,
    INITIATION_HEAD,
    RESPONSE,
    RESPONSE_BYTES,
    DatagramRefused,
    InitiationOffer,
    SessionRequest,
    payload_bytes_max,
    read_offer,
    write_offer,
)
from crypto.sessions.replay_window import WINDOW_BITS, Window
from crypto.sessions.session import REJECT_SECONDS, REKEY_SECONDS
from crypto.sessions.state import REPLY_SECONDS, RETRY_SECONDS, SILENCE_SECONDS
from crypto.sessions.table import QUEUE_MAX
from crypto.swarm import Swarm
from tests.crypto.meeting import PING, SWARM, WALL, Node, acquainted, carry, wake

ELSEWHERE = ("203.0.113.7", 7)


def refused(node: Node, packet: bytes, now: float = 0.0) -> str:
    with pytest.raises(DatagramRefused) as refusal:
        node.receive(now, packet, ELSEWHERE)
    return refusal.value.reason


# --- unreachable and refused peers ------------------------------------------------------------------------


def test_a_peer_counts_as_silent_after_two_unanswered_initiations() -> None:
    alice, bob = Node(1), Node(2)
    alice.send(0.0, bob, b"question")
    named = []
    for now in (RETRY_SECONDS, 3 * RETRY_SECONDS):
        alice.sessions.wake(now)
        named.append(list(alice.sessions.unanswered))
    assert named == [[], [bob.peer]]
    alice.sessions.wake(3 * RETRY_SECONDS)
    assert alice.sessions.unanswered == [], "one report for each initiation"
    packets = [packet for _, packet in alice.sessions.wake(alice.sessions.deadline)]
    carry(8 * RETRY_SECONDS, alice, bob, packets)
    alice.sessions.wake(alice.sessions.deadline)
    assert alice.sessions.unanswered == []


def test_a_knock_starts_a_session_without_delivering_a_message() -> None:
    alice, bob = Node(1), Node(2)
    carry(0.0, alice, bob, alice.sessions.knock(0.0, bob.peer))
    assert (alice.counters["sessions_begun"], bob.counters["sessions_begun"]) == (1, 1)
    assert (alice.payloads, bob.payloads) == ([], [])
    alice.sessions.knock(1.0, bob.peer)
    assert alice.sessions.knock(1.0, bob.peer) == [], "only one handshake at a time"


def test_a_knock_is_the_shortest_initiation_and_the_waiting_message_follows_it() -> None:
    alice, bob = Node(1), Node(2)
    alice.send(0.0, bob, bytes(800))
    (knock,) = alice.sessions.knock(0.1, bob.peer, anew=True)
    assert len(knock) == INITIATION_BYTES_MIN
    carry(0.1, alice, bob, [knock])
    assert bob.payloads == [bytes(800)]


def test_swarms_that_require_different_work_cannot_have_a_session() -> None:
    alice, bob = Node(1, swarm=Swarm("test", work_bits=4)), Node(2, swarm=Swarm("test", work_bits=5))
    (initiation,) = alice.send(0.0, bob, b"question")
    assert refused(bob, initiation) == "seal"


def test_an_id_that_is_not_admitted_gets_no_session() -> None:
    alice, bob = Node(1), Node(2, admits=lambda _peer: False)
    (initiation,) = alice.send(0.0, bob, b"question")
    assert refused(bob, initiation) == "work"


# --- start --------------------------------------------------------------------------------------------


def test_the_request_needs_one_packet_and_the_reply_a_second_trip() -> None:
    alice, bob = Node(1), Node(2)
    (initiation,) = alice.send(0.0, bob, b"question")
    received = bob.receive(0.0, initiation, alice.source)
    assert received.datagram is not None
    assert (received.datagram.sender, received.datagram.protocol) == (alice.peer, PING)
    assert received.datagram.payload == b"question"
    (reply,) = bob.send(0.0, alice, b"answer")
    for packet in (*received.answers, reply):
        alice.receive(0.0, packet, bob.source)
    assert alice.payloads == [b"answer"]


@pytest.mark.parametrize("protocol", ["/a", "/" + "x" * (PROTOCOL_BYTES_MAX - 1)])
def test_the_longest_payload_exactly_fills_a_datagram(protocol: str) -> None:
    alice, bob = acquainted()
    payload = bytes(payload_bytes_max(protocol))
    (packet,) = alice.send(0.0, bob, payload, protocol)
    assert len(packet) == DATAGRAM_BYTES_MAX
    carry(0.0, alice, bob, [packet])
    assert bob.payloads == [payload]
    with pytest.raises(LocalProtocolError):
        alice.send(0.0, bob, payload + b"x", protocol)


@given(st.integers(0, payload_bytes_max(PING)))
def test_a_message_of_any_length_arrives_with_the_handshake(size: int) -> None:
    alice, bob = Node(1), Node(2)
    packets = alice.send(0.0, bob, bytes(size))
    assert INITIATION_BYTES_MIN <= len(packets[0]) <= DATAGRAM_BYTES_MAX
    carry(0.0, alice, bob, packets)
    assert bob.payloads == [bytes(size)]


@pytest.mark.parametrize("protocol", ["", "/", "ping", "/pi ng", "/ping\n", "/" + "x" * PROTOCOL_BYTES_MAX])
def test_sending_with_an_invalid_protocol_name_raises_a_local_error(protocol: str) -> None:
    with pytest.raises(LocalProtocolError):
        payload_bytes_max(protocol)


def test_simultaneous_initiations_end_with_one_session_and_both_messages() -> None:
    for first, second in ((1, 2), (2, 1)):
        alice, bob = Node(first), Node(second)
        ours, theirs = alice.send(0.0, bob, b"from alice"), bob.send(0.0, alice, b"from bob")
        carry(0.0, alice, bob, ours)
        assert refused(alice, theirs[0]) == "replay"
        people = {alice.peer: alice, bob.peer: bob}
        for now in (0.6, 1.2, 2.0, 3.0):
            wake(now, alice, people)
            wake(now, bob, people)
        assert (alice.payloads, bob.payloads) == ([b"from bob"], [b"from alice"])
        assert (alice.counters["sessions_begun"], bob.counters["sessions_begun"]) == (1, 1)
        assert all(len(one.send(3.0, other, b"")[0]) < 100 for one, other in ((alice, bob), (bob, alice)))


def test_crossing_initiations_that_both_arrive_end_with_one_session() -> None:
    alice, bob = Node(1), Node(2)
    (ours,), (theirs,) = alice.send(0.0, bob, b"from alice"), bob.send(0.0, alice, b"from bob")
    (first, second) = (alice, bob) if alice.peer < bob.peer else (bob, alice)
    to_second = first.receive(0.0, theirs if first is alice else ours, second.source).answers
    to_first = second.receive(0.0, ours if first is alice else theirs, first.source).answers
    # The initiation of the smaller id is repeated, although it has already arrived.
    assert [refused(second, packet) for packet in to_second] == ["replay"]
    carry(0.0, second, first, to_first)
    assert (alice.payloads, bob.payloads) == ([b"from bob"], [b"from alice"])
    assert (alice.counters["sessions_begun"], bob.counters["sessions_begun"]) == (1, 1)


def test_lost_handshake_packets_are_repeated_without_duplicate_delivery() -> None:
    alice, bob = Node(1), Node(2)
    alice.send(0.0, bob, b"first")
    alice.send(0.0, bob, b"second")
    assert alice.sessions.deadline == RETRY_SECONDS
    (again,) = alice.sessions.wake(RETRY_SECONDS)
    bob.receive(RETRY_SECONDS, again[1], alice.source)
    later = alice.sessions.deadline
    assert later == 3 * RETRY_SECONDS
    wake(later, alice, {bob.peer: bob})
    assert bob.payloads == [b"first", b"second"]


def test_waiting_messages_are_bounded_and_finally_dropped() -> None:
    alice, bob = Node(1), Node(2)
    for _ in range(QUEUE_MAX + 5):
        alice.send(0.0, bob, b"x")
    assert alice.counters["datagrams_dropped_unsent"] == 5
    sent = 0
    while alice.sessions.deadline <= WAIT_SECONDS + 30:
        sent += len(alice.sessions.wake(alice.sessions.deadline))
    assert alice.counters["datagrams_dropped_unsent"] == QUEUE_MAX + 5
    assert alice.sessions.peers == ()
    assert alice.sessions.deadline == float("inf")
    assert 4 <= sent <= 10


# --- authorization ----------------------------------------------------------------------------------


def test_an_initiation_for_another_swarm_key_or_receiver_gets_no_answer() -> None:
    alice, bob = Node(1), Node(2)
    (packet,) = alice.send(0.0, bob, b"x")
    assert refused(Node(2, swarm=Swarm("other")), packet) == "swarm"
    assert refused(Node(2, swarm=Swarm("test", (b"k" * 32,))), packet) == "swarm"
    assert refused(Node(3), packet) == "swarm"


def test_keys_rotate_without_a_gap() -> None:
    old, new = b"o" * 32, b"n" * 32
    for ours, theirs in (((old,), (old, new)), ((new, old), (old, new)), ((new,), (new, old))):
        for turn in (1, -1):
            keys = (ours, theirs)[::turn]
            alice, bob = (Node(n, swarm=Swarm("test", k)) for n, k in zip((1, 2), keys, strict=True))
            carry(0.0, alice, bob, alice.send(0.0, bob, b"x"))
            carry(0.0, bob, alice, bob.send(0.0, alice, b"y"))
            assert (alice.payloads, bob.payloads) == ([b"y"], [b"x"])


def initiation(sender: Identity, claimed: PeerId, receiver: PeerId, payload: bytes | None = None) -> bytes:
    """Returns an initiation that only a member can make, with any identity and any payload."""
    handshake = Handshake(
        initiator=True,
        static=agreement_private(sender.seed),
        ephemeral=bytes(range(32)),
        prologue=b"peerloom/session/1\0test",
        cipher="ChaChaPoly",
        pattern="IKpsk2",
        psk=SWARM.secrets[0],
        remote_static=agreement_public(receiver),
    )
    offer = write_offer(InitiationOffer(claimed, 1, True, None)) if payload is None else payload
    body = INITIATION_HEAD.pack(INITIATION, 7) + handshake.write(offer)
    body += mac(mac_key(SWARM.secrets[0], receiver), body)
    return body + bytes(16)


def test_initiations_under_a_false_identity_are_refused() -> None:
    alice, mallory = Identity(b"a" * 32), Identity(b"m" * 32)
    bob = Node(2)
    assert bob.receive(0.0, initiation(alice, alice.peer, bob.peer), ELSEWHERE).peer == alice.peer
    assert refused(bob, initiation(mallory, alice.peer, bob.peer)) == "identity"
    assert refused(bob, initiation(mallory, PeerId(bytes(32)), bob.peer)) == "seal"
    assert refused(bob, initiation(bob.identity, bob.peer, bob.peer)) == "identity"


@given(
    kind=st.sampled_from([INITIATION, RESPONSE, COOKIE]),
    ephemeral=st.sampled_from([bytes(32), b"\1" + bytes(31), b"\xff" * 32])
    | st.binary(min_size=32, max_size=32),
    rest=st.binary(max_size=900),
)
def test_garbage_with_a_valid_mac_is_only_refused(kind: int, ephemeral: bytes, rest: bytes) -> None:
    bob = Node(2)
    packets = bob.send(0.0, Node(1), b"x")
    # In an open swarm any peer can make the mac. A response or cookie can even name one of our own
    # handshakes.
    names = bytes(4) + packets[0][1:5] if kind == RESPONSE else packets[0][1:5]
    body = bytes((kind,)) + names + (ephemeral + rest).ljust(380, b"\0")
    if kind != INITIATION:
        body = body[: (RESPONSE_BYTES if kind == RESPONSE else COOKIE_BYTES) - 16]
    body += mac(mac_key(SWARM.secrets[0], bob.peer), body)
    assert refused(bob, body + bytes(16) if kind == INITIATION else body) in ("seal", "malformed")


def test_a_member_with_a_malformed_payload_is_refused() -> None:
    alice, bob = Identity(b"a" * 32), Node(2)
    good = write_offer(InitiationOffer(alice.peer, 1, True, SessionRequest(b"/x", b"y", stamp=1)))
    later = write_offer(InitiationOffer(alice.peer, 1, True, SessionRequest(b"/x", b"y", stamp=2)))
    for payload in (later, good[:-1] + b"x", good.replace(b"/x", b"xx")):
        assert refused(bob, initiation(alice, alice.peer, bob.peer, payload)) == "malformed"


@given(
    name=st.sampled_from([b"/x", b"/peerloom/dht/1"]),
    payload=st.binary(max_size=900),
    stamp=st.integers(1, 2**64 - 1),
    anew=st.booleans(),
)
def test_an_offer_survives_a_round_trip(name: bytes, payload: bytes, stamp: int, anew: bool) -> None:
    peer = Node(1).peer
    offer = read_offer(
        write_offer(InitiationOffer(peer, stamp, anew, SessionRequest(name, payload, stamp=stamp)))
    )
    assert (offer.peer, offer.stamp, offer.anew) == (peer, stamp, anew)
    assert offer.request is not None
    assert (offer.request.name, offer.request.payload) == (name, payload)


# --- replays, forgeries, windows ----------------------------------------------------------------------


def test_an_initiation_is_accepted_once_and_an_older_one_never() -> None:
    alice, bob = Node(1), Node(2)
    (older,) = alice.send(0.0, bob, b"x")
    ((_, newer),) = alice.sessions.wake(RETRY_SECONDS)
    bob.receive(1.0, newer, alice.source)
    assert refused(bob, newer) == "replay"
    assert refused(bob, older) == "replay"
    assert bob.payloads == [b"x"]


@given(
    which=st.sampled_from(["initiation", "response", "transport"]),
    where=st.integers(0),
    bit=st.integers(0, 7),
)
def test_one_changed_bit_is_refused_and_the_original_still_arrives(which: str, where: int, bit: int) -> None:
    alice, bob = Node(1), Node(2)
    (packet,) = alice.send(0.0, bob, b"hello")
    receiver, sender = bob, alice
    if which != "initiation":
        (packet,), receiver, sender = bob.receive(0.0, packet, alice.source).answers, alice, bob
    if which == "transport":
        carry(0.0, bob, alice, [packet])
        (packet,), receiver, sender = alice.send(0.0, bob, b"hello"), bob, alice
    at = where % (len(packet) - (16 if which == "initiation" else 0))
    changed = packet[:at] + bytes((packet[at] ^ 1 << bit,)) + packet[at + 1 :]
    with pytest.raises(RemoteProtocolError):
        receiver.receive(0.0, changed, sender.source)
    carry(0.0, sender, receiver, [packet])
    assert alice.send(0.0, bob, b"goes on")


@given(st.lists(st.integers(0, 40), max_size=80))
def test_each_packet_opens_once_in_any_order(order: list[int]) -> None:
    alice, bob = acquainted()
    sent = [alice.send(0.0, bob, b"%d" % number)[0] for number in range(41)]
    opened: set[int] = set()
    for number in order:
        if number in opened:
            assert refused(bob, sent[number]) == "replay"
        else:
            assert bob.receive(0.0, sent[number], alice.source).newest == (number > max(opened, default=-1))
            opened.add(number)
    assert len(bob.arrived) == len(opened)


@given(st.lists(st.integers(0, 3_000), max_size=60))
def test_a_replay_window_covers_its_full_size(counters: list[int]) -> None:
    window, seen = Window(), set[int]()
    for counter in counters:
        highest = max(seen, default=-1)
        assert window.is_new(counter) == (counter not in seen and counter > highest - WINDOW_BITS)
        if window.is_new(counter):
            assert window.mark(counter) == (counter > highest)
            seen.add(counter)


def test_a_forged_packet_with_the_largest_counter_is_refused_without_effect() -> None:
    alice, bob = acquainted()
    (packet,) = alice.send(0.0, bob, b"x")
    assert refused(bob, packet[:5] + b"\xff" * 8 + packet[13:]) == "replay"


# --- renewal ------------------------------------------------------------------------------------------


def test_a_session_is_renewed_under_traffic_without_loss() -> None:
    alice, bob = acquainted()
    under_way: list[bytes] = []
    sent = []
    for step in range(1_500):
        now = step * 0.25
        payload = b"%d" % step
        sent.append(payload)
        packets = alice.send(now, bob, payload)
        # Every packet arrives one step late, so some packets of the old session arrive after the new session
        # began.
        carry(now, alice, bob, under_way)
        under_way = packets
        carry(now, bob, alice, bob.send(now, alice, b"pong"))
    carry(375.0, alice, bob, under_way)
    assert bob.payloads == sent
    assert len(alice.arrived) == 1_500
    assert alice.counters["sessions_begun"] == bob.counters["sessions_begun"] == 4
    assert alice.counters["silences_noticed"] == 0


def test_the_responder_renews_if_only_it_sends() -> None:
    alice, bob = acquainted()
    people = {alice.peer: alice, bob.peer: bob}
    for step in range(400):
        carry(float(step), bob, alice, bob.send(float(step), alice, b"x"))
        wake(step + 0.5, alice, people)
        wake(step + 0.5, bob, people)
    assert len(alice.arrived) == 400
    # Bob makes the second handshake at 150 s; from then on there is one every 120 s.
    assert alice.counters["sessions_begun"] == 4


def test_an_expired_session_is_unusable_and_is_forgotten() -> None:
    alice, bob = acquainted()
    (packet,) = alice.send(0.0, bob, b"old")
    assert refused(bob, packet, REJECT_SECONDS) == "expired"
    (packet,) = alice.send(REJECT_SECONDS, bob, b"new")
    assert len(packet) >= INITIATION_BYTES_MIN
    bob.sessions.wake(REJECT_SECONDS)
    assert bob.sessions.peers == ()


def test_an_idle_receiver_sends_one_keepalive_that_gets_no_reply() -> None:
    alice, bob = acquainted()
    carry(1.0, alice, bob, alice.send(1.0, bob, b"one way"))
    ((peer, packet),) = bob.sessions.wake(1.0 + REPLY_SECONDS)
    assert (peer, len(packet)) == (alice.peer, 29)
    assert alice.receive(2.0, packet, bob.source).answers == []
    assert alice.sessions.wake(1.0 + SILENCE_SECONDS + 1) == []
    assert alice.counters["silences_noticed"] == 0


def test_a_restarted_peer_gets_a_new_session_whoever_sends_first() -> None:
    alice, bob = acquainted()
    bob = Node(2, now=10.0, wall=WALL, life=1)
    carry(10.0, bob, alice, bob.send(10.0, alice, b"I am back"))
    carry(10.0, alice, bob, alice.send(10.0, bob, b"welcome"))
    assert (alice.payloads, bob.payloads) == ([b"I am back"], [b"welcome"])
    bob = Node(2, now=20.0, wall=WALL, life=2)
    (lost,) = alice.send(20.0, bob, b"lost")
    assert refused(bob, lost) == "index"
    wake(20.0 + SILENCE_SECONDS, alice, {bob.peer: bob})
    carry(25.0, alice, bob, alice.send(25.0, bob, b"heard"))
    assert bob.payloads == [b"heard"]


def test_a_session_that_may_be_dead_is_renewed_with_the_next_message() -> None:
    alice, bob = acquainted()
    copy = Node(1, now=1.0, wall=WALL + 1_000, life=1)
    carry(1.0, copy, bob, copy.send(1.0, bob, b"I have her keys"))
    (lost,) = bob.send(2.0, alice, b"lost")
    assert refused(alice, lost) == "index"
    alice.sessions.doubt()
    carry(3.0, alice, bob, alice.send(3.0, bob, b"it is me"))
    carry(3.0, bob, alice, bob.send(3.0, alice, b"so it is"))
    assert (alice.payloads, bob.payloads[-1]) == ([b"so it is"], b"it is me")


def test_a_delayed_initiation_does_not_displace_a_live_session() -> None:
    alice, bob = acquainted()
    (held,) = Node(1, wall=WALL + 5_000, life=3).send(0.0, bob, b"late")
    bob.receive(1.0, held, ELSEWHERE)
    carry(2.0, alice, bob, alice.send(2.0, bob, b"still here"))
    carry(5.0, bob, alice, bob.send(5.0, alice, b"me too"))
    assert alice.payloads == [b"me too"]


def test_nothing_is_sent_to_an_id_that_is_not_a_key() -> None:
    alice = Node(1)
    assert alice.sessions.send(0.0, PeerId(bytes(32)), PING, b"x") == []
    assert alice.counters["datagrams_dropped_no_key"] == 1


def test_idle_peers_are_forgotten_and_set_no_timer() -> None:
    alice, bob = acquainted()
    people = {alice.peer: alice, bob.peer: bob}
    now = 0.0
    while min(alice.sessions.deadline, bob.sessions.deadline) < float("inf"):
        now = min(alice.sessions.deadline, bob.sessions.deadline)
        wake(now, alice, people)
        wake(now, bob, people)
    assert now <= REKEY_SECONDS + REJECT_SECONDS
    assert alice.sessions.peers == bob.sessions.peers == ()
