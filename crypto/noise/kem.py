"""ML-KEM-768 (FIPS 203), if `cryptography` and the OpenSSL under it support it.

It protects traffic that is recorded today against a future quantum computer. It is always used in addition to
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
    """Return whether this installation supports ML-KEM-768; checked once."""
    try:
        KemKey(bytes(SEED_BYTES))
    except (ImportError, UnsupportedAlgorithm):
        return False
    return True


class KemKey:
    """A decapsulation key, derived from a secret seed of 64 bytes (d and z of FIPS 203)."""

    def __init__(self, seed: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey

        if len(seed) != SEED_BYTES:
            raise LocalProtocolError(f"a seed of {len(seed)} bytes; ML-KEM takes {SEED_BYTES}")
        self._private = MLKEM768PrivateKey.from_seed_bytes(seed)
        self.public = self._private.public_key().public_bytes_raw()

    def decapsulate(self, ciphertext: bytes) -> bytes:
        """Return the shared secret, 32 bytes.

        A modified ciphertext raises no error: it gives a different secret, so the next sealed field fails to
        decrypt.
        """
        return self._private.decapsulate(ciphertext)


def encapsulate(public: bytes) -> tuple[bytes, bytes]:
    """Return (shared secret, ciphertext) for a received key. Raises RemoteProtocolError if the key is
    invalid.

    The library generates its own randomness: it offers no way to pass any.
    """
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey

    try:
        key = MLKEM768PublicKey.from_public_bytes(public)
    except ValueError:
        raise RemoteProtocolError("a handshake with a malformed ML-KEM key") from None
    return key.encapsulate()
