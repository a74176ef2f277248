"""One key with one counter: AES-256-GCM or ChaCha20-Poly1305 as Noise defines them (revision 34, sections 5.1
and 12).

Callers decide what to encrypt, and when the key changes.
"""

from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from crypto.errors import LocalProtocolError, RemoteProtocolError

KEY_BYTES = 32
TAG_BYTES = 16
NONCE_MAX = 2**64 - 1
"""Reserved for rekeying (section 5.1): a cipher state that has reached this counter cannot be used any
more."""
CIPHERS = ("AESGCM", "ChaChaPoly")

_ORDERS = {"AESGCM": "big", "ChaChaPoly": "little"}

Data = bytes | bytearray | memoryview


class _Aead(Protocol):
    """The interface that both AEADs of `cryptography` share."""

    def encrypt(self, nonce: bytes, data: Data, associated_data: bytes | None) -> bytes: ...
    def encrypt_into(self, nonce: bytes, data: Data, associated_data: bytes | None, buf: Data) -> int: ...
    def decrypt(self, nonce: bytes, data: Data, associated_data: bytes | None) -> bytes: ...
    def decrypt_into(self, nonce: bytes, data: Data, associated_data: bytes | None, buf: Data) -> int: ...


class CipherState:
    """The key and message counter of one direction (section 5.1).

    The counter moves only on success, so a rejected message leaves the state unchanged.
    """

    def __init__(self, cipher: str, key: bytes) -> None:
        self._aead: _Aead = AESGCM(key) if cipher == "AESGCM" else ChaCha20Poly1305(key)
        self._big_endian = _ORDERS[cipher] == "big"
        self._counter = 0

    def encrypt(self, plaintext: Data, associated: bytes = b"") -> bytes:
        """Return the ciphertext, `TAG_BYTES` longer than `plaintext`."""
        ciphertext = self._aead.encrypt(self._nonce(), plaintext, associated)
        self._counter += 1
        return ciphertext

    def encrypt_into(self, plaintext: Data, buffer: Data) -> None:
        """Encrypt without associated data, like `encrypt`, into a buffer of exactly the ciphertext's
        length."""
        self._aead.encrypt_into(self._nonce(), plaintext, None, buffer)
        self._counter += 1

    def decrypt(self, ciphertext: Data, associated: bytes = b"") -> bytes:
        """Return the plaintext. Raises RemoteProtocolError if the message was tampered with."""
        try:
            plaintext = self._aead.decrypt(self._nonce(), ciphertext, associated)
        except InvalidTag:
            raise RemoteProtocolError("a message that does not decrypt") from None
        self._counter += 1
        return plaintext

    def decrypt_into(self, ciphertext: Data, buffer: Data) -> None:
        """Decrypt without associated data, like `decrypt`, into a buffer of exactly the plaintext's length.

        If the message is rejected, the buffer's content is undefined.
        """
        try:
            self._aead.decrypt_into(self._nonce(), ciphertext, None, buffer)
        except InvalidTag:
            raise RemoteProtocolError("a message that does not decrypt") from None
        self._counter += 1

    def seek(self, counter: int) -> None:
        """Set the number of the next message to `counter` (SetNonce, section 11.4), for packets that arrive
        in any order. This is only for decryption; the caller keeps track of the numbers it has accepted."""
        self._counter = counter

    def _nonce(self) -> bytes:
        if self._counter >= NONCE_MAX:
            raise LocalProtocolError("this cipher state is spent; open a new connection")
        return bytes(4) + self._counter.to_bytes(8, "big" if self._big_endian else "little")
