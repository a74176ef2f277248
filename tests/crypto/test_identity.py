"""Identities, peer ids and signed facts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.facts import Fact, IdentitySigner, signed_bytes
from crypto.identity import Identity, PeerId, parse_peer, peer_text, short_peer, verify

ALICE = Identity(b"a" * 32)
SIGNER = IdentitySigner(ALICE, "test")


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_survives_its_text_form(raw: bytes) -> None:
    text = peer_text(PeerId(raw))
    assert text.startswith("12D3KooW")
    assert parse_peer(text) == raw
    assert short_peer(PeerId(raw)) == "..." + text[-6:]


def test_a_known_peer_id_reads_as_libp2p_writes_it() -> None:
    # The Ed25519 public key from the test vectors of libp2p's peer-ids specification.
    key = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert peer_text(PeerId(key)) == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


CID = "bafzaajaiaejcao3ke66m5nvefvrkhkgqfjxq243fgikxohpciotdvqciugfvtwrj"


def test_the_cid_of_a_peer_id_reads_as_the_same_peer() -> None:
    assert parse_peer(CID) == bytes.fromhex(
        "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29"
    )


@pytest.mark.parametrize(
    "text", [CID.upper(), "b" + "a" * 64, CID[:-1] + "=", CID[:-1] + "1", CID[:-1] + "é"]
)
def test_a_damaged_cid_is_not_a_peer_id(text: str) -> None:
    with pytest.raises(ValueError, match=r"peer id|base32|padding"):
        parse_peer(text)


@given(
    st.text(max_size=60) | st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", min_size=44)
)
def test_malformed_peer_ids_are_refused(text: str) -> None:
    for candidate in (text, ("12D3KooW" + text)[:52].ljust(52, "z")):
        try:
            assert peer_text(parse_peer(candidate)) == candidate
        except ValueError:
            continue


def test_an_identity_comes_from_entropy_and_hides_its_secret() -> None:
    rng = random.Random(1)
    identity = Identity.generate(rng.randbytes)
    assert identity.peer == Identity(identity.seed).peer
    assert identity.seed.hex() not in repr(identity)
    with pytest.raises(ValueError, match="32 bytes"):
        Identity(b"short")


def test_a_signature_is_valid_only_for_its_data_and_its_peer() -> None:
    signature = ALICE.sign(b"data")
    assert verify(ALICE.peer, b"data", signature)
    assert not verify(ALICE.peer, b"date", signature)
    assert not verify(Identity(b"b" * 32).peer, b"data", signature)
    assert not verify(PeerId(b"short"), b"data", signature)


def test_a_signed_fact_is_valid_only_for_its_purpose_and_swarm() -> None:
    fact = SIGNER.sign("contact", b"body")
    assert SIGNER.check("contact", fact) == SIGNER.peer == ALICE.peer
    for signer, purpose in ((SIGNER, "record"), (IdentitySigner(ALICE, "other"), "contact")):
        with pytest.raises(RemoteProtocolError, match="wrong signature"):
            signer.check(purpose, fact)
    with pytest.raises(RemoteProtocolError, match="malformed"):
        SIGNER.check("contact", Fact(b"short", b"body", fact.signature))


@given(st.binary(), st.binary(max_size=70), st.binary(max_size=70))
def test_random_facts_are_refused(body: bytes, author: bytes, signature: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        SIGNER.check("contact", Fact(author, body, signature))


def test_purpose_and_swarm_cannot_be_confused() -> None:
    assert signed_bytes("ab", "c", b"") != signed_bytes("a", "bc", b"")
    with pytest.raises(LocalProtocolError):
        signed_bytes("a\0b", "c", b"")
