"""Checks before any answer: a keyed check of every handshake packet, and cookies under load.

mac1 covers a handshake packet with a key derived from the swarm's secret and the receiver's peer id. A sender
that does not know both gets no answer and costs us only a hash. A cookie is a MAC over the sender's address
with a key that only we have. Sending it back (mac2 is keyed with it) proves that the sender receives packets
at that address. This follows WireGuard's paper, section 5.4.7. The cookie is sealed under a key that only
members can compute, and it is bound to the packet that it answers.
"""

import hmac
from collections.abc import Callable
from hashlib import blake2s

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from crypto.identity import PeerId
from crypto.sessions.packets import COOKIE, COOKIE_HEAD, COOKIE_NONCE_BYTES, MAC_BYTES

COOKIE_SECONDS = 120.0
"""How long a cookie key is used. The previous key is still accepted, so a cookie is valid for at least 120
s."""

Source = tuple[str, int]
"""The host and port that a packet came from."""

_SECRET_BYTES = 32
_MAC1 = b"peerloom/mac1/1\0"
_SEAL = b"peerloom/cookie/1\0"


def mac(key: bytes, data: bytes | memoryview) -> bytes:
    """Return 16 bytes of keyed BLAKE2s (RFC 7693)."""
    return blake2s(data, key=key, digest_size=MAC_BYTES).digest()


def mac_key(secret: bytes, receiver: PeerId) -> bytes:
    """Return the 32-byte key of mac1 on packets to `receiver`; `secret` is one of `Swarm.secrets`."""
    return blake2s(_MAC1 + receiver, key=secret).digest()


def find_key(keys: tuple[bytes, ...], covered: bytes, found: bytes) -> int | None:
    """Return the index of the key in `keys` that made the mac `found`, or None."""
    for number, key in enumerate(keys):
        if hmac.compare_digest(mac(key, covered), found):
            return number
    return None


class Cookies:
    """Makes and checks this node's cookies."""

    def __init__(self, entropy: Callable[[int], bytes]) -> None:
        self._entropy = entropy
        self._secrets = (entropy(_SECRET_BYTES), entropy(_SECRET_BYTES))
        self._changes_at: float | None = None

    def answer(self, now: float, key: bytes, index: int, mac1: bytes, source: Source) -> bytes:
        """Return the packet that gives `source` its cookie. `mac1` (made with `key`) comes from the packet
        that it answers."""
        self._change(now)
        nonce = self._entropy(COOKIE_NONCE_BYTES)
        cookie = mac(self._secrets[0], _name(source))
        sealed = ChaCha20Poly1305(_seal_key(key, nonce)).encrypt(bytes(12), cookie, mac1)
        return COOKIE_HEAD.pack(COOKIE, index, nonce) + sealed

    def is_shown(self, now: float, covered: bytes, mac2: bytes, source: Source) -> bool:
        """Return whether `mac2` over `covered` was made with one of our cookies for `source`."""
        if not any(mac2):
            return False
        self._change(now)
        name = _name(source)
        return any(hmac.compare_digest(mac(mac(secret, name), covered), mac2) for secret in self._secrets)

    def _change(self, now: float) -> None:
        if self._changes_at is None:
            self._changes_at = now + COOKIE_SECONDS
        elif now >= self._changes_at:
            self._secrets = (self._entropy(_SECRET_BYTES), self._secrets[0])
            self._changes_at = now + COOKIE_SECONDS


def open_cookie(packet: bytes, key: bytes, mac1: bytes) -> bytes | None:
    """Return the cookie in an answer to our packet with `mac1`; None if it is not authentic."""
    _, _, nonce = COOKIE_HEAD.unpack_from(packet)
    try:
        return ChaCha20Poly1305(_seal_key(key, nonce)).decrypt(bytes(12), packet[COOKIE_HEAD.size :], mac1)
    except InvalidTag:
        return None


def _seal_key(key: bytes, nonce: bytes) -> bytes:
    """Return a key that is fresh for every cookie, so that the cipher's own nonce can be zero."""
    return blake2s(_SEAL + nonce, key=key).digest()


def _name(source: Source) -> bytes:
    return f"{source[0]} {source[1]}".encode()
