"""ML-KEM-768 (FIPS 203) where `cryptography` and the OpenSSL under it offer it; elsewhere there is none.

What is recorded today and broken by a quantum computer later: this is what guards against that, always
beside X25519 and never instead of it. When its secret is mixed in is `handshake`'s.
"""

from functools import cache

from cryptography.exceptions import UnsupportedAlgorithm

from crypto.errors import LocalProtocolError, RemoteProtocolError

SEED_BYTES = 64
PUBLIC_BYTES = 1_184
CIPHERTEXT_BYTES = 1_088


@cache
def is_offered() -> bool:
    """Return whether this installation can do it: asked once."""
    try:
        KemKey(bytes(SEED_BYTES))
    except (ImportError, UnsupportedAlgorithm):
        return False
    return True


class KemKey:
    """A decapsulation key from its seed of 64 bytes (d and z of FIPS 203), which are the secret."""

    def __init__(self, seed: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey

        if len(seed) != SEED_BYTES:
            raise LocalProtocolError(f"a seed of {len(seed)} bytes; ML-KEM takes {SEED_BYTES}")
        self._private = MLKEM768PrivateKey.from_seed_bytes(seed)
        self.public = self._private.public_key().public_bytes_raw()

    def decapsulate(self, ciphertext: bytes) -> bytes:
        """The shared secret, 32 bytes.

        A ciphertext that somebody changed gives another secret and no error: what is sealed next tells.
        """
        return self._private.decapsulate(ciphertext)


def encapsulate(public: bytes) -> tuple[bytes, bytes]:
    """(shared secret, ciphertext) for a key that came; RemoteProtocolError if it is none.

    The randomness is the library's own: it offers no way to give it some.
    """
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey

    try:
        key = MLKEM768PublicKey.from_public_bytes(public)
    except ValueError:
        raise RemoteProtocolError("a handshake with a malformed ML-KEM key") from None
    return key.encapsulate()
