"""The X25519 key derived from a peer id is checked against the private key and against known weak points."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId
from crypto.key_conversion import agreement_private, agreement_public

P = 2**255 - 19


@given(st.binary(min_size=32, max_size=32))
def test_public_and_private_identity_keys_give_a_matching_x25519_pair(seed: bytes) -> None:
    private = X25519PrivateKey.from_private_bytes(agreement_private(seed))
    assert agreement_public(Identity(seed).peer) == private.public_key().public_bytes_raw()


def test_a_known_pair_from_libsodium_is_reproduced() -> None:
    # From libsodium's own test of the conversion (test/default/ed25519_convert.c).
    seed = bytes.fromhex("421151a459faeade3d247115f94aedae42318124095afabe4d1451a559faedee")
    assert (
        agreement_public(Identity(seed).peer).hex()
        == "f1814f0e8ff1043d8a44d25babff3cedcae6c22c3edaa48f857ae70de2baae50"
    )
    private = bytearray(agreement_private(seed))
    private[0] &= 248
    private[31] = private[31] & 127 | 64
    assert private.hex() == "8052030376d47112be7f73ed7a019293dd12ad910b654455798b4667d73de166"


def order_of_eight() -> int:
    """Return the y coordinate of a point of order 8. Doubling x = sqrt(-1) y gives a point of order 4, from 0
    = d y^4 + 2 y^2 - 1."""
    d = -121_665 * pow(121_666, -1, P) % P
    root = square_root((1 + d) % P)
    for sign in (1, -1):
        try:
            return square_root((sign * root - 1) * pow(d, -1, P) % P)
        except ValueError:
            continue
    raise AssertionError("there is one")


def square_root(square: int) -> int:
    for root in (pow(square, (P + 3) // 8, P), pow(square, (P + 3) // 8, P) * pow(2, (P - 1) // 4, P) % P):
        if root * root % P == square:
            return root
    raise ValueError("no square")


EIGHT = order_of_eight()


@pytest.mark.parametrize("y", [0, 1, P - 1, EIGHT, P - EIGHT, P, P + 1, 2**255 - 1])
@pytest.mark.parametrize("sign", [0, 1])
def test_weak_points_and_non_canonical_encodings_are_refused(y: int, sign: int) -> None:
    with pytest.raises(RemoteProtocolError):
        agreement_public(PeerId((y | sign << 255).to_bytes(32, "little")))


@given(st.binary(min_size=32, max_size=32))
def test_every_accepted_key_gives_a_secret(peer: bytes) -> None:
    try:
        public = agreement_public(PeerId(peer))
    except RemoteProtocolError:
        return
    secret = X25519PrivateKey.from_private_bytes(bytes(range(32))).exchange(
        X25519PublicKey.from_public_bytes(public)
    )
    assert any(secret)
