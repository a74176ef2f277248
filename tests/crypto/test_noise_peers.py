"""The handshake of two peers: they agree on a suite and prove their identities, and tampering is detected."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import shake_256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity
from crypto.noise import (
    SUITES,
    HandshakeResult,
    NoCommonSuite,
    PeerHandshake,
    ReplayCache,
    Suite,
    WrongIdentity,
    identity_payload,
    kem,
    preferred,
    static_public_key,
)
from crypto.noise.peer_handshake import MESSAGE_BYTES_MAX
from crypto.swarm import Swarm

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
AES, CHACHA, HYBRID, HYBRID_CHACHA = SUITES
PLAIN = (AES, CHACHA)
KEY, OTHER_KEY = b"1" * 32, b"2" * 32
OPEN, PRIVATE = Swarm("test"), Swarm("test", (KEY,))

Wire = Callable[[int, bytes], bytes]
needs_kem = pytest.mark.skipif(not kem.is_offered(), reason="this installation has no ML-KEM")


def side(initiator: bool, **changes: Any) -> PeerHandshake:
    """Return one side of a handshake between Alice, who initiates, and Bob. Its entropy is always
    the same.
    """
    static = (b"sA" if initiator else b"sB") * 16
    drawn = [0]

    def entropy(count: int) -> bytes:
        drawn[0] += 1
        return shake_256(static + bytes(drawn)).digest(count)

    arguments: dict[str, Any] = {
        "proof": identity_payload(ALICE if initiator else BOB, static_public_key(static)),
        "static": static,
        "swarm": OPEN,
        "suites": PLAIN,
        "entropy": entropy,
        "knocks": ReplayCache(),
    }
    return PeerHandshake(initiator=initiator, **arguments | changes)


class Starved(Exception):
    """Raised if neither side can continue with the bytes that it has; in a real node a deadline ends such a
    handshake."""


class Talk:
    """Carries flights between two sides until both have a session. Every flight passes through `wire`, which
    may change it."""

    def __init__(self, alice: PeerHandshake, bob: PeerHandshake, wire: Wire) -> None:
        self.sides = (alice, bob)
        self.wire = wire
        self.flights: list[tuple[int, bytes]] = []
        """(sender, bytes) of each flight before `wire` changed it."""
        self._came = [b"", b""]

    def run(self) -> tuple[HandshakeResult, HandshakeResult]:
        for number, each in enumerate(self.sides):
            self._sent(number, each.start())
        while any(self._step(number) for number in (1, 0)):
            pass
        first, second = (each.session for each in self.sides)
        if first is None or second is None:
            raise Starved
        return first, second

    def _step(self, number: int) -> bool:
        each, came = self.sides[number], self._came[number]
        if each.session is not None or len(came) < each.wanted:
            return False
        self._came[number] = came[each.wanted :]
        self._sent(number, each.receive(came[: each.wanted]))
        return True

    def _sent(self, number: int, flight: bytes) -> None:
        if flight:
            self._came[1 - number] += self.wire(len(self.flights), flight)
            self.flights.append((number, flight))


def unchanged(_: int, flight: bytes) -> bytes:
    return flight


def shake(
    alice: PeerHandshake, bob: PeerHandshake, wire: Wire = unchanged
) -> tuple[HandshakeResult, HandshakeResult]:
    return Talk(alice, bob, wire).run()


def feed(each: PeerHandshake, data: bytes) -> bytes:
    """Feed a side as much of `data` as it accepts, piece by piece; return all its answers."""
    answers = b""
    while data and len(data) >= each.wanted and each.session is None:
        taken, data = data[: each.wanted], data[each.wanted :]
        answers += each.receive(taken)
    if each.has_opened and not each.wanted and not answers:
        answers += each.receive(b"")
    return answers


def begun(each: PeerHandshake) -> PeerHandshake:
    each.start()
    return each


def check_sessions(alice: HandshakeResult, bob: HandshakeResult, suite: Suite) -> None:
    assert (alice.peer, bob.peer) == (BOB.peer, ALICE.peer)
    assert alice.suite == bob.suite == suite
    assert alice.hash == bob.hash
    assert bob.receiving.decrypt(alice.sending.encrypt(b"there")) == b"there"
    assert alice.receiving.decrypt(bob.sending.encrypt(b"back")) == b"back"


# --- choice of the suite ----------------------------------------------------------------------------


@pytest.mark.parametrize("swarm", [OPEN, PRIVATE])
@pytest.mark.parametrize("suite", preferred(has_aes=True), ids=lambda suite: suite.name)
def test_with_every_suite_both_sides_learn_the_others_identity(suite: Suite, swarm: Swarm) -> None:
    ours = {"suites": (suite,), "swarm": swarm}
    check_sessions(*shake(side(True, **ours), side(False, **ours)), suite)


@needs_kem
@pytest.mark.parametrize("swarm", [OPEN, PRIVATE])
@pytest.mark.parametrize(
    ("offered", "taken", "suite", "flights"),
    [
        ((AES, CHACHA), (CHACHA, AES), AES, 3),
        ((HYBRID, AES), (AES, HYBRID), HYBRID, 3),
        ((HYBRID, AES, CHACHA), (CHACHA, AES), AES, 5),
        ((CHACHA, HYBRID_CHACHA), (HYBRID, HYBRID_CHACHA), HYBRID_CHACHA, 5),
    ],
)
def test_the_initiators_first_suite_that_the_responder_supports_is_chosen(
    offered: Sequence[Suite], taken: Sequence[Suite], suite: Suite, flights: int, swarm: Swarm
) -> None:
    talk = Talk(side(True, suites=offered, swarm=swarm), side(False, suites=taken, swarm=swarm), unchanged)
    check_sessions(*talk.run(), suite)
    # If the initiator guesses the suite right, a round trip is saved.
    assert len(talk.flights) == flights


@pytest.mark.parametrize("swarm", [OPEN, PRIVATE])
def test_without_a_common_suite_both_sides_name_the_others_suites(swarm: Swarm) -> None:
    alice, bob = side(True, suites=(AES,), swarm=swarm), begun(side(False, suites=(CHACHA,), swarm=swarm))
    answer = feed(bob, alice.start())
    with pytest.raises(NoCommonSuite, match="offers only AESGCM"):
        bob.receive(b"")
    with pytest.raises(NoCommonSuite, match="takes only ChaChaPoly"):
        feed(alice, answer)


@pytest.mark.parametrize("swarm", [OPEN, PRIVATE])
def test_a_responder_refuses_before_computing_a_whole_first_flight(swarm: Swarm) -> None:
    drawn = list[int]()

    def entropy(count: int) -> bytes:
        drawn.append(count)
        return bytes(count)

    flight, bob = side(True, swarm=swarm).start(), begun(side(False, swarm=swarm, entropy=entropy))
    while flight:
        assert not bob.has_opened
        taken, flight = flight[: bob.wanted], flight[bob.wanted :]
        assert bob.receive(taken) == b""
    assert bob.has_opened
    assert bob.knows_swarm
    assert drawn == []
    assert bob.receive(b"") != b""


def test_an_unknown_newer_suite_is_skipped() -> None:
    later = Suite(9, "later", "AESGCM", hybrid=False)
    check_sessions(*shake(side(True, suites=(later, CHACHA)), side(False)), CHACHA)
    check_sessions(*shake(side(True, suites=(CHACHA, later)), side(False, suites=(later, CHACHA))), CHACHA)


# --- downgrades ------------------------------------------------------------------------------------


def offer_with(*suites: int) -> Wire:
    """Return an attacker who replaces the list of suites in the offer."""

    def wire(number: int, flight: bytes) -> bytes:
        if number:
            return flight
        count = flight[1]
        return bytes((flight[0], len(suites), *suites)) + flight[2 + count :]

    return wire


@pytest.mark.parametrize("suites", [(1,), (1, 3), (1, 2, 3), (2, 1)])
def test_an_offer_stripped_of_its_better_suites_is_refused(suites: tuple[int, ...]) -> None:
    alice, bob = side(True, suites=PLAIN), side(False, suites=PLAIN)
    with pytest.raises((RemoteProtocolError, Starved)):
        shake(alice, bob, offer_with(*suites))
    assert bob.session is None


def test_an_answer_that_names_a_worse_suite_is_refused() -> None:
    # The attacker tells Alice that Bob supports only ChaCha, and tells Bob the same of Alice.
    alice, bob = begun(side(True, suites=PLAIN)), begun(side(False, suites=PLAIN))
    again = feed(alice, bytes((CHACHA.number, 1, CHACHA.number)))
    answer = feed(bob, bytes((3, 1, CHACHA.number)) + again)
    assert answer[0] == CHACHA.number
    with pytest.raises(RemoteProtocolError, match="does not decrypt"):
        feed(alice, answer[1:])
    assert alice.session is None


def test_a_tampered_list_is_refused_even_if_the_choice_stays() -> None:
    def wire(number: int, flight: bytes) -> bytes:
        return bytes((CHACHA.number, 2, CHACHA.number, 8)) if number == 1 else flight

    later = Suite(9, "later", "AESGCM", hybrid=False)
    with pytest.raises(RemoteProtocolError, match="does not decrypt"):
        shake(side(True, suites=PLAIN), side(False, suites=(CHACHA, later)), wire)


@pytest.mark.parametrize(
    "answer", [(1, 1, 2), (1, 2, 2, 1), (2, 1, 1), (0, 1, 1), (7, 1, 7), (1, 2, 3, 4), (1, 0), (1, 9)]
)
def test_a_chosen_suite_that_contradicts_the_lists_is_refused(answer: tuple[int, ...]) -> None:
    alice = begun(side(True, suites=(Suite(9, "later", "AESGCM", hybrid=False), CHACHA, AES)))
    with pytest.raises(RemoteProtocolError, match=r"does not follow|a list of"):
        feed(alice, bytes(answer) + bytes(10))


# --- tampering ---------------------------------------------------------------------------------------

SITUATIONS: list[tuple[Swarm, Sequence[Suite], Sequence[Suite]]] = [
    (OPEN, PLAIN, PLAIN),
    (PRIVATE, PLAIN, PLAIN),
    (OPEN, PLAIN, PLAIN[::-1][:1]),
]
if kem.is_offered():
    SITUATIONS += [(OPEN, (HYBRID,), (HYBRID,)), (PRIVATE, (HYBRID, AES), (AES,))]


@given(
    situation=st.sampled_from(SITUATIONS),
    changed=st.integers(0, 4),
    where=st.integers(0),
    change=st.sampled_from(["flip", "cut", "drop", "twice", "longer"]),
    bit=st.integers(0, 7),
)
def test_tampered_flights_end_in_a_refusal_or_the_deadline(
    situation: tuple[Swarm, Sequence[Suite], Sequence[Suite]], changed: int, where: int, change: str, bit: int
) -> None:
    swarm, offered, taken = situation
    touched = []

    def wire(number: int, flight: bytes) -> bytes:
        if number != changed:
            return flight
        touched.append(number)
        at = where % len(flight)
        return {
            "flip": flight[:at] + bytes((flight[at] ^ 1 << bit,)) + flight[at + 1 :],
            "cut": flight[:at],
            "drop": b"",
            "twice": flight + flight,
            "longer": flight[:at] + bytes(1) + flight[at:],
        }[change]

    alice, bob = side(True, suites=offered, swarm=swarm), side(False, suites=taken, swarm=swarm)
    talk = Talk(alice, bob, wire)
    try:
        talk.run()
    except (RemoteProtocolError, Starved):
        return
    # Bytes after a side's last flight belong to the records, which have keys of their own.
    assert not touched or (change == "twice" and changed >= len(talk.flights) - 2)


@given(
    st.permutations(range(3)).filter(lambda order: list(order) != [0, 1, 2]), st.sampled_from([OPEN, PRIVATE])
)
def test_flights_of_an_old_handshake_are_refused_in_any_order(order: list[int], swarm: Swarm) -> None:
    talk = Talk(side(True, swarm=swarm), side(False, swarm=swarm), unchanged)
    talk.run()
    flights = [flight for _, flight in talk.flights]
    bob = begun(side(False, swarm=swarm, entropy=lambda count: b"f" * count))
    with suppress(RemoteProtocolError):
        feed(bob, b"".join(flights[number] for number in order))
    assert bob.session is None


@pytest.mark.parametrize("swarm", [OPEN, PRIVATE])
def test_a_replayed_handshake_fails_at_the_first_message_that_needs_a_key(swarm: Swarm) -> None:
    talk = Talk(side(True, swarm=swarm), side(False, swarm=swarm), unchanged)
    talk.run()
    bob = begun(side(False, swarm=swarm, entropy=lambda count: b"f" * count))
    with pytest.raises(RemoteProtocolError, match="does not decrypt"):
        feed(bob, b"".join(flight for sender, flight in talk.flights if sender == 0))


@pytest.mark.parametrize("swarm", [OPEN, PRIVATE])
@given(data=st.binary(max_size=200))
def test_random_bytes_to_a_responder_are_refused_or_wait_for_more(swarm: Swarm, data: bytes) -> None:
    bob = begun(side(False, swarm=swarm))
    with suppress(RemoteProtocolError):
        feed(bob, data)
    assert bob.session is None
    assert bob.wanted <= MESSAGE_BYTES_MAX


def test_oversized_announcements_are_refused_before_reading() -> None:
    for start in (b"\x03\x01\x01" + (MESSAGE_BYTES_MAX + 1).to_bytes(2, "big"), b"\x03\x00", b"\x03\x09"):
        bob = begun(side(False))
        with pytest.raises(RemoteProtocolError, match=r"of (1537 bytes|0 suites|9 suites)"):
            feed(bob, start)
    for start in (b"\x02\x01", b"GET / HTTP/1.1"):
        bob = begun(side(False))
        with pytest.raises(RemoteProtocolError, match="does not begin with our handshake"):
            feed(bob, start)


def test_a_first_message_with_a_payload_or_a_weak_key_is_refused() -> None:
    for message, words in (
        (static_public_key(b"e" * 32) + b"payload", "payload"),
        (bytes(32), "small order"),
    ):
        bob = begun(side(False))
        with pytest.raises(RemoteProtocolError, match=words):
            feed(bob, b"\x03\x01\x01" + len(message).to_bytes(2, "big") + message)


def test_calls_in_the_wrong_order_raise_local_errors() -> None:
    bob = begun(side(False))
    with pytest.raises(LocalProtocolError):
        bob.receive(b"too much")
    with pytest.raises(RemoteProtocolError):
        bob.receive(b"??")
    with pytest.raises(LocalProtocolError):
        bob.receive(b"??")
    with pytest.raises(LocalProtocolError):
        side(True, suites=())


# --- authorization -----------------------------------------------------------------------------------


def test_an_unexpected_peer_is_refused_and_both_ids_are_named() -> None:
    shake(side(True, expected=BOB.peer), side(False))
    with pytest.raises(WrongIdentity) as refusal:
        shake(side(True, expected=ALICE.peer), side(False))
    assert (refusal.value.expected, refusal.value.found) == (ALICE.peer, BOB.peer)


def test_an_impostor_never_learns_the_initiator() -> None:
    talk = Talk(side(True, expected=ALICE.peer), side(False), unchanged)
    with pytest.raises(WrongIdentity):
        talk.run()
    assert [sender for sender, _ in talk.flights] == [0, 1]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (OPEN, Swarm("other")),
        (OPEN, PRIVATE),
        (PRIVATE, OPEN),
        (PRIVATE, Swarm("test", (OTHER_KEY,))),
        (PRIVATE, Swarm("other", (KEY,))),
    ],
)
def test_peers_of_two_swarms_fail_the_handshake(ours: Swarm, theirs: Swarm) -> None:
    alice, bob = side(True, swarm=ours), side(False, swarm=theirs)
    with pytest.raises((RemoteProtocolError, Starved)):
        shake(alice, bob)
    assert alice.session is None
    assert bob.session is None


@pytest.mark.parametrize("theirs", [OPEN, Swarm("other", (KEY,)), Swarm("test", (OTHER_KEY,))])
def test_an_outsider_gets_no_answer(theirs: Swarm) -> None:
    bob = side(False, swarm=PRIVATE)
    talk = Talk(side(True, swarm=theirs), bob, unchanged)
    with pytest.raises((RemoteProtocolError, Starved)):
        talk.run()
    assert [sender for sender, _ in talk.flights] == [0]
    assert not bob.knows_swarm


def test_a_replayed_first_flight_gets_no_answer() -> None:
    knocks = ReplayCache(knocks_max=2)
    flights = [side(True, swarm=PRIVATE, entropy=lambda n, i=i: bytes((i,)) * n).start() for i in range(1, 4)]

    def answer(number: int) -> bytes:
        bob = begun(side(False, swarm=PRIVATE, knocks=knocks))
        try:
            return feed(bob, flights[number])
        except RemoteProtocolError:
            assert not bob.knows_swarm
            return b""

    assert [bool(answer(number)) for number in (0, 0, 1, 0, 1)] == [True, False, True, False, False]
    # The oldest is forgotten after this many others.
    assert [bool(answer(number)) for number in (2, 1, 0)] == [True, False, True]


def test_a_member_reveals_nothing_to_a_responder_without_the_key() -> None:
    # The responder lacks only the key, and answers as well as it can.
    alice = begun(side(True, swarm=PRIVATE))
    with pytest.raises(RemoteProtocolError, match="tag"):
        feed(alice, bytes((AES.number,)) + b"\x00\x68" + bytes(0x68) + bytes(32))


@pytest.mark.parametrize("keys", [(KEY, OTHER_KEY), (OTHER_KEY, KEY)])
def test_a_rotation_accepts_initiators_with_any_of_the_keys(keys: tuple[bytes, ...]) -> None:
    both = Swarm("test", keys)
    for swarm in (PRIVATE, Swarm("test", (OTHER_KEY,))):
        check_sessions(*shake(side(True, swarm=swarm), side(False, swarm=both)), AES)
    # This side initiates with the first key.
    assert (keys[0] == KEY) == _meets(side(True, swarm=both), side(False, swarm=PRIVATE))


def _meets(alice: PeerHandshake, bob: PeerHandshake) -> bool:
    try:
        shake(alice, bob)
    except (RemoteProtocolError, Starved):
        return False
    return True
