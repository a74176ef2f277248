"""The Noise engine is tested against the published vectors, against the `noiseprotocol` package, and with
garbage.
"""

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st
from noise.connection import Keypair, NoiseConnection

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity
from crypto.noise import (
    CIPHERS,
    NONCE_MAX,
    PATTERNS,
    PAYLOAD_BYTES_MAX,
    CipherState,
    Handshake,
    check_identity_payload,
    identity_payload,
    kem,
    preferred,
    static_public_key,
    suites_named,
)

VECTORS = Path(__file__).parent / "noise_vectors.json"
"""The test vectors of cacophony, which other implementations of Noise use too; the file names its source."""
ALICE = Identity(b"a" * 32)
needs_kem = pytest.mark.skipif(not kem.is_offered(), reason="this installation has no ML-KEM")


def test_the_keys_that_each_pattern_needs_are_checked() -> None:
    sides = {"static": b"s" * 32, "ephemeral": b"e" * 32, "prologue": b""}
    for pattern, initiator, more in (
        ("XX", True, {"psk": b"p" * 32}),
        ("XXpsk3", True, {}),
        ("XXpsk3", False, {"psk": b"short"}),
        ("IKpsk2", True, {"psk": b"p" * 32}),
        ("IKpsk2", False, {"psk": b"p" * 32, "remote_static": b"r" * 32}),
        ("IK", True, {}),
        ("XXhfs", True, {}),
        ("XXhfs", False, {"kem_seed": b"k" * 64}),
        ("XX", True, {"kem_seed": b"k" * 64}),
    ):
        arguments: dict[str, Any] = {"initiator": initiator, "pattern": pattern, **sides, **more}
        with pytest.raises(LocalProtocolError):
            Handshake(**arguments)


@pytest.mark.parametrize("pattern", ["XXpsk3", "IKpsk2"])
def test_a_handshake_with_a_different_psk_is_refused(pattern: str) -> None:
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
def test_the_noiseprotocol_package_interoperates_in_both_roles(
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


def hybrid(initiator: bool, *, cipher: str = "AESGCM", psk: bytes | None = None) -> Handshake:
    return Handshake(
        initiator=initiator,
        static=(b"sA" if initiator else b"sB") * 16,
        ephemeral=(b"eA" if initiator else b"eB") * 16,
        prologue=b"prologue",
        cipher=cipher,
        pattern="XXhfs" if psk is None else "XXhfs+psk3",
        psk=psk,
        kem_seed=b"k" * 64 if initiator else None,
    )


@needs_kem
@pytest.mark.parametrize("cipher", CIPHERS)
@pytest.mark.parametrize("psk", [None, b"p" * 32])
def test_a_hybrid_handshake_carries_payloads_and_gives_both_sides_the_same_keys(
    cipher: str, psk: bytes | None
) -> None:
    one, other = (hybrid(initiator, cipher=cipher, psk=psk) for initiator in (True, False))
    for number in range(3):
        writer, reader = (one, other) if number % 2 == 0 else (other, one)
        assert reader.read(writer.write(b"payload %d" % number)) == b"payload %d" % number
    assert one.hash == other.hash
    assert (one.remote_static, other.remote_static) == (
        static_public_key(b"sB" * 16),
        static_public_key(b"sA" * 16),
    )
    assert other.split()[1].decrypt(one.split()[0].encrypt(b"there")) == b"there"


@needs_kem
def test_a_hybrid_handshake_matches_its_description_byte_by_byte() -> None:
    # This is a second implementation from the description, because no vectors are published for it.
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey

    name = b"Peerloom_XXhfs_25519+MLKEM768_ChaChaPoly_SHA256"
    one, other = (hybrid(initiator, cipher="ChaChaPoly") for initiator in (True, False))
    first = one.write(b"first")
    assert other.read(first) == b"first"
    second = other.write(b"second")
    key = MLKEM768PrivateKey.from_seed_bytes(b"k" * 64)
    e_a, e_b = (X25519PrivateKey.from_private_bytes(seed * 16) for seed in (b"eA", b"eB"))
    chain = transcript = sha256(name)
    transcript = sha256(transcript + b"prologue")
    parts = (public_bytes(e_a), key.public_key().public_bytes_raw(), b"first")
    assert first == b"".join(parts)
    for part in parts:
        transcript = sha256(transcript + part)
    assert second[:32] == public_bytes(e_b)
    transcript = sha256(transcript + second[:32])
    chain, sealing = hkdf(chain, e_a.exchange(e_b.public_key()))
    sealed, rest = second[32 : 32 + 1_088 + 16], second[32 + 1_088 + 16 :]
    secret = key.decapsulate(ChaCha20Poly1305(sealing).decrypt(bytes(12), sealed, transcript))
    transcript = sha256(transcript + sealed)
    chain, sealing = hkdf(chain, secret)
    static = ChaCha20Poly1305(sealing).decrypt(bytes(12), rest[:48], transcript)
    assert static == static_public_key(b"sB" * 16)
    transcript = sha256(transcript + rest[:48])
    chain, sealing = hkdf(chain, e_a.exchange(X25519PublicKey.from_public_bytes(static)))
    assert ChaCha20Poly1305(sealing).decrypt(bytes(12), rest[48:], transcript) == b"second"
    one.read(second)
    assert one.hash == sha256(transcript + rest[48:])


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def public_bytes(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def hkdf(salt: bytes, material: bytes) -> tuple[bytes, bytes]:
    both = HKDF(hashes.SHA256(), length=64, salt=salt, info=b"").derive(material)
    return both[:32], both[32:]


@needs_kem
@given(message=st.integers(0, 2), where=st.integers(0), bit=st.integers(0, 7), cut=st.booleans())
def test_a_hybrid_handshake_with_a_damaged_message_is_refused(
    message: int, where: int, bit: int, cut: bool
) -> None:
    one, other = hybrid(True), hybrid(False)

    def carry() -> None:
        for number in range(3):
            writer, reader = (one, other) if number % 2 == 0 else (other, one)
            data = writer.write()
            if number == message:
                at = where % len(data)
                data = data[:at] if cut else data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :]
            reader.read(data)

    with pytest.raises(RemoteProtocolError):
        carry()


@needs_kem
def test_a_malformed_kem_key_is_refused() -> None:
    other = hybrid(False)
    other.read(static_public_key(b"e" * 32) + b"\xff" * 1_184)
    with pytest.raises(RemoteProtocolError, match="malformed ML-KEM key"):
        other.write()
    with pytest.raises(LocalProtocolError):
        other.write()


def test_without_ml_kem_the_hybrids_are_not_offered() -> None:
    offered = {has_aes: preferred(has_aes=has_aes, has_kem=False) for has_aes in (True, False)}
    assert [suite.name for suite in offered[True]] == ["AESGCM", "ChaChaPoly"]
    assert [suite.name for suite in offered[False]] == ["ChaChaPoly", "AESGCM"]
    with pytest.raises(LocalProtocolError, match="MLKEM768-AESGCM"):
        suites_named(["MLKEM768-AESGCM"], has_kem=False)


def test_ml_kem_is_reported_missing_if_the_library_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes the import fail like that of a missing module.
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.mlkem", None)
    assert not kem.is_offered.__wrapped__()


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
def test_a_refused_record_does_not_advance_the_counter(cipher: str) -> None:
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


def test_calls_in_the_wrong_order_raise_local_errors() -> None:
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
