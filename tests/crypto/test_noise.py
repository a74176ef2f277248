"""Noise XX against the published vectors, against the `noiseprotocol` package, and against garbage."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from noise.connection import Keypair, NoiseConnection

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity
from crypto.noise import (
    NONCE_MAX,
    PATTERNS,
    PAYLOAD_BYTES_MAX,
    CipherState,
    Handshake,
    PeerHandshake,
    Session,
    WrongIdentity,
    check_identity_payload,
    identity_payload,
    static_public_key,
)

VECTORS = Path(__file__).parents[3] / "shared" / "data" / "noise_vectors.json"
CIPHERS = ("AESGCM", "ChaChaPoly")
ALICE = Identity(b"a" * 32)
BOB = Identity(b"b" * 32)


def handshake(initiator: bool, **changes: Any) -> PeerHandshake:
    """One side of a handshake between Alice, who opens it, and Bob."""
    arguments: dict[str, Any] = {
        "identity": ALICE if initiator else BOB,
        "static": b"sA" * 16 if initiator else b"sB" * 16,
        "ephemeral": b"eA" * 16 if initiator else b"eB" * 16,
        "swarm": "test",
    }
    return PeerHandshake(initiator=initiator, **arguments | changes)


def test_who_must_know_what_before_is_checked() -> None:
    sides = {"static": b"s" * 32, "ephemeral": b"e" * 32, "prologue": b""}
    for pattern, initiator, more in (
        ("XX", True, {"psk": b"p" * 32}),
        ("XXpsk3", True, {}),
        ("XXpsk3", False, {"psk": b"short"}),
        ("IKpsk2", True, {"psk": b"p" * 32}),
        ("IKpsk2", False, {"psk": b"p" * 32, "remote_static": b"r" * 32}),
        ("IK", True, {}),
    ):
        arguments: dict[str, Any] = {"initiator": initiator, "pattern": pattern, **sides, **more}
        with pytest.raises(LocalProtocolError):
            Handshake(**arguments)


@pytest.mark.parametrize("pattern", ["XXpsk3", "IKpsk2"])
def test_another_psk_is_refused(pattern: str) -> None:
    knows = pattern == "IKpsk2"
    one, other = (
        Handshake(
            initiator=initiator,
            static=(b"sA" if initiator else b"sB") * 16,
            ephemeral=(b"eA" if initiator else b"eB") * 16,
            prologue=b"",
            pattern=pattern,
            psk=(b"pA" if initiator else b"pB") * 16,
            remote_static=static_public_key(b"sB" * 16) if knows and initiator else None,
        )
        for initiator in (True, False)
    )
    *good, last = range(len(PATTERNS[pattern]))
    for number in good:
        writer, reader = (one, other) if number % 2 == 0 else (other, one)
        reader.read(writer.write())
    writer, reader = (one, other) if last % 2 == 0 else (other, one)
    message = writer.write()
    with pytest.raises(RemoteProtocolError, match="does not decrypt"):
        reader.read(message)


def unchanged(_: int, message: bytes) -> bytes:
    return message


def shake(
    alice: PeerHandshake, bob: PeerHandshake, wire: Callable[[int, bytes], bytes] = unchanged
) -> tuple[Session, Session]:
    """Carry the three messages, each through `wire`."""
    answer = bob.receive(wire(0, alice.start()))
    last = alice.receive(wire(1, answer))
    assert bob.receive(wire(2, last)) == b""
    assert alice.session is not None
    assert bob.session is not None
    return alice.session, bob.session


@pytest.mark.skipif(not VECTORS.exists(), reason="the published vectors are not beside this checkout")
@pytest.mark.parametrize("cipher", CIPHERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_published_vectors_are_reproduced_byte_by_byte(pattern: str, cipher: str) -> None:
    vectors = json.loads(VECTORS.read_text())["vectors"]
    vector = next(v for v in vectors if v["protocol_name"] == f"Noise_{pattern}_25519_{cipher}_SHA256")
    sides = [
        Handshake(
            initiator=role == "init",
            static=bytes.fromhex(vector[f"{role}_static"]),
            ephemeral=bytes.fromhex(vector[f"{role}_ephemeral"]),
            prologue=bytes.fromhex(vector[f"{role}_prologue"]),
            cipher=cipher,
            pattern=pattern,
            psk=bytes.fromhex(vector[f"{role}_psks"][0]) if f"{role}_psks" in vector else None,
            remote_static=bytes.fromhex(vector[f"{role}_remote_static"])
            if f"{role}_remote_static" in vector
            else None,
        )
        for role in ("init", "resp")
    ]
    ciphers: list[tuple[CipherState, CipherState]] = []
    for number, message in enumerate(vector["messages"]):
        payload, ciphertext = bytes.fromhex(message["payload"]), bytes.fromhex(message["ciphertext"])
        writer, reader = number % 2, 1 - number % 2
        if number < len(PATTERNS[pattern]):
            assert sides[writer].write(payload) == ciphertext
            assert sides[reader].read(ciphertext) == payload
        else:
            ciphers = ciphers or [side.split() for side in sides]
            assert ciphers[writer][0].encrypt(payload) == ciphertext
            assert ciphers[reader][1].decrypt(ciphertext) == payload
    assert [side.hash.hex() for side in sides] == [vector["handshake_hash"]] * 2


@pytest.mark.parametrize("cipher", CIPHERS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("we_open", [True, False])
def test_the_noiseprotocol_package_understands_us_in_both_roles(
    we_open: bool, pattern: str, cipher: str
) -> None:
    theirs = NoiseConnection.from_name(f"Noise_{pattern}_25519_{cipher}_SHA256".encode())
    theirs.set_prologue(b"prologue")
    theirs.set_keypair_from_private_bytes(Keypair.STATIC, b"t" * 32)
    psk = b"p" * 32 if "psk" in pattern else None
    if psk is not None:
        theirs.set_psks(psk)
    we_know = pattern.startswith("IK") and we_open
    if we_open:
        theirs.set_as_responder()
    else:
        theirs.set_as_initiator()
        if pattern.startswith("IK"):
            theirs.set_keypair_from_public_bytes(Keypair.REMOTE_STATIC, static_public_key(b"o" * 32))
    theirs.start_handshake()
    ours = Handshake(
        initiator=we_open,
        static=b"o" * 32,
        ephemeral=b"e" * 32,
        prologue=b"prologue",
        cipher=cipher,
        pattern=pattern,
        psk=psk,
        remote_static=static_public_key(b"t" * 32) if we_know else None,
    )
    for number in range(len(PATTERNS[pattern])):
        payload = b"payload %d" % number
        if (number % 2 == 0) == we_open:
            assert theirs.read_message(ours.write(payload)) == payload
        else:
            assert ours.read(bytes(theirs.write_message(payload))) == payload
    assert ours.remote_static == static_public_key(b"t" * 32)
    assert ours.hash == theirs.get_handshake_hash()
    sending, receiving = ours.split()
    for number in range(3):
        text = b"record %d" % number
        assert theirs.decrypt(sending.encrypt(text)) == text
        assert receiving.decrypt(bytes(theirs.encrypt(text))) == text


def test_both_sides_learn_who_the_other_is() -> None:
    alice, bob = shake(handshake(True), handshake(False))
    assert (alice.peer, bob.peer) == (BOB.peer, ALICE.peer)
    assert alice.hash == bob.hash
    assert bob.receiving.decrypt(alice.sending.encrypt(b"there")) == b"there"
    assert alice.receiving.decrypt(bob.sending.encrypt(b"back")) == b"back"


def test_an_expected_peer_is_accepted_and_another_refused_with_both_named() -> None:
    shake(handshake(True, expected=BOB.peer), handshake(False))
    with pytest.raises(WrongIdentity) as refusal:
        shake(handshake(True, expected=ALICE.peer), handshake(False))
    assert (refusal.value.expected, refusal.value.found) == (ALICE.peer, BOB.peer)


def test_two_swarms_and_two_ciphers_do_not_meet() -> None:
    with pytest.raises(RemoteProtocolError):
        shake(handshake(True), handshake(False, swarm="other"))
    with pytest.raises(RemoteProtocolError):
        shake(handshake(True), handshake(False, cipher="ChaChaPoly"))


@given(message=st.integers(0, 2), where=st.integers(0), bit=st.integers(0, 7), cut=st.booleans())
def test_a_handshake_with_one_changed_bit_or_byte_less_is_refused(
    message: int, where: int, bit: int, cut: bool
) -> None:
    def wire(number: int, data: bytes) -> bytes:
        if number != message:
            return data
        at = where % len(data)
        return data[:at] if cut else data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :]

    with pytest.raises(RemoteProtocolError):
        shake(handshake(True), handshake(False), wire)


@given(message=st.integers(0, 2), garbage=st.binary(max_size=300))
def test_random_bytes_for_a_handshake_message_are_refused(message: int, garbage: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        shake(handshake(True), handshake(False), lambda n, data: garbage if n == message else data)


def test_a_public_key_of_small_order_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="worthless"):
        handshake(False).receive(bytes(32))


@given(st.binary(max_size=PAYLOAD_BYTES_MAX + 10))
def test_random_bytes_for_an_identity_payload_are_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        check_identity_payload(payload, bytes(32))


@given(st.data())
def test_a_changed_identity_payload_never_names_another_peer(data: st.DataObject) -> None:
    payload = bytearray(identity_payload(ALICE, b"k" * 32))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    with suppress(RemoteProtocolError):
        assert check_identity_payload(bytes(payload), b"k" * 32) == ALICE.peer


def test_unknown_fields_of_an_identity_payload_are_skipped() -> None:
    extensions = bytes((0x22, 3)) + b"abc" + bytes((0x28, 7))
    payload = identity_payload(ALICE, b"k" * 32) + extensions
    assert check_identity_payload(payload, b"k" * 32) == ALICE.peer
    with pytest.raises(RemoteProtocolError, match="signature"):
        check_identity_payload(payload, b"l" * 32)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_a_refused_record_leaves_the_counter_where_it_was(cipher: str) -> None:
    sending, receiving = CipherState(cipher, b"k" * 32), CipherState(cipher, b"k" * 32)
    first = sending.encrypt(b"one")
    with pytest.raises(RemoteProtocolError):
        receiving.decrypt(first[:-1] + bytes((first[-1] ^ 1,)))
    with pytest.raises(RemoteProtocolError):
        receiving.decrypt(b"short")
    assert receiving.decrypt(first) == b"one"
    with pytest.raises(RemoteProtocolError):
        receiving.decrypt(first)


def test_the_last_nonce_is_never_used() -> None:
    spent = CipherState("AESGCM", b"k" * 32)
    spent._counter = NONCE_MAX - 1
    spent.encrypt(b"the last one")
    with pytest.raises(LocalProtocolError, match="spent"):
        spent.encrypt(b"one too many")


def test_calls_out_of_turn_are_our_own_bug() -> None:
    side = Handshake(initiator=True, static=b"s" * 32, ephemeral=b"e" * 32, prologue=b"")
    for call in (lambda: side.read(b"early"), side.split, lambda: side.remote_static):
        with pytest.raises(LocalProtocolError):
            call()
    side.write()
    with pytest.raises(LocalProtocolError):
        side.write()
    with pytest.raises(RemoteProtocolError):
        side.read(b"too short")
    with pytest.raises(LocalProtocolError):
        side.read(b"after a refusal")
    with pytest.raises(LocalProtocolError):
        Handshake(initiator=True, static=b"s" * 32, ephemeral=b"e" * 32, prologue=b"", pattern="NN")


def test_a_static_key_is_the_one_that_x25519_gives() -> None:
    private = X25519PrivateKey.from_private_bytes(b"s" * 32)
    assert static_public_key(b"s" * 32) == private.public_key().public_bytes_raw()
