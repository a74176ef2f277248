"""ML-KEM-768 (FIPS 203) where `cryptography` and the OpenSSL under it offer it; elsewhere there is none.

It guards against traffic that is recorded today and decrypted by a quantum computer later, always beside
X25519 and never instead of it. `handshake` decides when its secret is mixed in.
"""

from functools import cache

from cryptography.exceptions import UnsupportedAlgorithm

from crypto.errors import LocalProtocolError, RemoteProtocolError

SEED_BYTES = 64
PUBLIC_BYTES = 1_184
CIPHERTEXT_BYTES = 1_088


@cache
def is_offered() -> bool:
    """Return whether this installation offers it; checked once."""
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
        """Return the shared secret, 32 bytes.

        A changed ciphertext gives another secret and no error: the next sealed field fails to decrypt.
        """
        return self._private.decapsulate(ciphertext)


def encapsulate(public: bytes) -> tuple[bytes, bytes]:
    """Return (shared secret, ciphertext) for a received key; RemoteProtocolError if it is invalid.

    The randomness is the library's own: it offers no way to pass any.
    """
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey

    try:
        key = MLKEM768PublicKey.from_public_bytes(public)
    except ValueError:
        raise RemoteProtocolError("a handshake with a malformed ML-KEM key") from None
    return key.encapsulate()
