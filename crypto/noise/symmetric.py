"""The state into which a handshake mixes keys and messages: chaining key, transcript hash, cipher (Noise,
revision 34, section 5.2).

The order of messages is in `handshake`.
"""

import hashlib
import hmac

from crypto.noise.ciphers import TAG_BYTES, CipherState


class SymmetricState:
    """Chaining key, transcript hash and, once a key has been mixed in, a cipher (section 5.2)."""

    def __init__(self, name: str, cipher: str) -> None:
        label = name.encode()
        self.hash = label.ljust(32, b"\0") if len(label) <= 32 else hashlib.sha256(label).digest()
        self._chaining_key = self.hash
        self._cipher_name = cipher
        self._cipher: CipherState | None = None

    def mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def mix_key(self, material: bytes) -> None:
        self._chaining_key, key = _hkdf(self._chaining_key, material)
        self._cipher = CipherState(self._cipher_name, key)

    def mix_key_and_hash(self, material: bytes) -> None:
        secret = hmac.digest(self._chaining_key, material, "sha256")
        self._chaining_key = hmac.digest(secret, b"\x01", "sha256")
        mixed = hmac.digest(secret, self._chaining_key + b"\x02", "sha256")
        key = hmac.digest(secret, mixed + b"\x03", "sha256")
        self.mix_hash(mixed)
        self._cipher = CipherState(self._cipher_name, key)

    @property
    def sealed_extra_bytes(self) -> int:
        """Number of bytes by which a field is longer on the wire than in the clear."""
        return 0 if self._cipher is None else TAG_BYTES

    def seal(self, plaintext: bytes) -> bytes:
        sealed = plaintext if self._cipher is None else self._cipher.encrypt(plaintext, self.hash)
        self.mix_hash(sealed)
        return sealed

    def unseal(self, sealed: bytes) -> bytes:
        plaintext = sealed if self._cipher is None else self._cipher.decrypt(sealed, self.hash)
        self.mix_hash(sealed)
        return plaintext

    def split(self) -> tuple[CipherState, CipherState]:
        first, second = _hkdf(self._chaining_key, b"")
        return CipherState(self._cipher_name, first), CipherState(self._cipher_name, second)


def _hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    """HKDF with two outputs (section 4.3)."""
    secret = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(secret, b"\x01", "sha256")
    return first, hmac.digest(secret, first + b"\x02", "sha256")
