"""Noise: two strangers agree on keys and prove who they are. Bytes in, bytes out.

Follows the Noise Protocol Framework, revision 34 (section numbers below are its), with 25519,
AESGCM or ChaChaPoly, and SHA-256; and the libp2p noise specification for the identity payload:
real `NoiseHandshakePayload` protobuf bytes, an Ed25519 key and its signature over
`noise-libp2p-static-key:` + the X25519 static key. It is not interoperable with a libp2p node: our
prologue holds the swarm's name, and libp2p knows only ChaChaPoly and an empty prologue.

Three layers: `CipherState` (one key, one counter), `Handshake` (any pattern of `PATTERNS`; what its
payloads mean is not its concern) and `PeerHandshake` (XX in which both sides prove a peer id).
How messages lie on a wire is not here: see `node.transport`.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PEER_ID_BYTES, SIGNATURE_BYTES, Identity, PeerId, short_peer, verify

KEY_BYTES = 32
TAG_BYTES = 16
NOISE_BYTES_MAX = 65_535
"""The longest Noise message, tags included (section 3)."""
NONCE_MAX = 2**64 - 1
"""Reserved for rekeying (section 5.1): a cipher state that has come so far is spent."""

_PROLOGUE = b"peerloom/noise/1\0"
_ORDERS = {"AESGCM": "big", "ChaChaPoly": "little"}

Data = bytes | bytearray | memoryview
Tokens = tuple[str, ...]
PATTERNS: dict[str, tuple[Tokens, ...]] = {
    "XX": (("e",), ("e", "ee", "s", "es"), ("s", "se")),
    "XXpsk3": (("e",), ("e", "ee", "s", "es"), ("s", "se", "psk")),
    "IKpsk2": (("e", "es", "s", "ss"), ("e", "ee", "se", "psk")),
}
"""Message patterns by name (sections 7.5 and 9.4); the initiator writes the first, third, ... of them."""
_KNOWING = ("IKpsk2",)
"""The patterns whose initiator knows the responder's static key before (section 7.1)."""


class _Aead(Protocol):
    """What both AEADs of `cryptography` offer."""

    def encrypt(self, nonce: bytes, data: Data, associated_data: bytes | None) -> bytes: ...
    def encrypt_into(self, nonce: bytes, data: Data, associated_data: bytes | None, buf: Data) -> int: ...
    def decrypt(self, nonce: bytes, data: Data, associated_data: bytes | None) -> bytes: ...
    def decrypt_into(self, nonce: bytes, data: Data, associated_data: bytes | None, buf: Data) -> int: ...


class WrongIdentity(RemoteProtocolError):
    """A peer proved an identity, but another than the one that was expected."""

    def __init__(self, expected: PeerId, found: PeerId) -> None:
        super().__init__(f"wanted {short_peer(expected)}, found {short_peer(found)}")
        self.expected = expected
        self.found = found


class CipherState:
    """One direction's key and message counter (section 5.1).

    The counter moves only on success, so a message that was refused leaves the state as it was.
    """

    def __init__(self, cipher: str, key: bytes) -> None:
        self._aead: _Aead = AESGCM(key) if cipher == "AESGCM" else ChaCha20Poly1305(key)
        self._big_endian = _ORDERS[cipher] == "big"
        self._counter = 0

    def encrypt(self, plaintext: Data, associated: bytes = b"") -> bytes:
        """The ciphertext: `TAG_BYTES` longer than `plaintext`."""
        ciphertext = self._aead.encrypt(self._nonce(), plaintext, associated)
        self._counter += 1
        return ciphertext

    def encrypt_into(self, plaintext: Data, buffer: Data) -> None:
        """As `encrypt` without associated data, into a buffer of exactly the ciphertext's length."""
        self._aead.encrypt_into(self._nonce(), plaintext, None, buffer)
        self._counter += 1

    def decrypt(self, ciphertext: Data, associated: bytes = b"") -> bytes:
        """The plaintext, or RemoteProtocolError if anybody touched it."""
        try:
            plaintext = self._aead.decrypt(self._nonce(), ciphertext, associated)
        except InvalidTag:
            raise RemoteProtocolError("a message that does not decrypt") from None
        self._counter += 1
        return plaintext

    def decrypt_into(self, ciphertext: Data, buffer: Data) -> None:
        """As `decrypt` without associated data, into a buffer of exactly the plaintext's length.

        The buffer's content is worthless after a refusal.
        """
        try:
            self._aead.decrypt_into(self._nonce(), ciphertext, None, buffer)
        except InvalidTag:
            raise RemoteProtocolError("a message that does not decrypt") from None
        self._counter += 1

    def seek(self, counter: int) -> None:
        """The next message is number `counter` (SetNonce, section 11.4): for packets that come in any order.
        To whoever decrypts only; what was accepted before is the caller's to know."""
        self._counter = counter

    def _nonce(self) -> bytes:
        if self._counter >= NONCE_MAX:
            raise LocalProtocolError("this cipher state is spent; open a new connection")
        return bytes(4) + self._counter.to_bytes(8, "big" if self._big_endian else "little")


class _SymmetricState:
    """Chaining key, transcript hash and, once a key was mixed in, a cipher (section 5.2)."""

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
        """How much longer a field is on the wire than in the clear."""
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


class Handshake:
    """One side of a handshake (section 5.3).

    `static` and `ephemeral` are X25519 private keys of 32 bytes; an ephemeral key must be fresh for every
    handshake. `psk` are 32 bytes that both sides know, for the patterns that take them; `remote_static` is
    the responder's X25519 public key, for an initiator that knows it before. After a refused message the
    object is dead: every later call is our own bug.
    """

    def __init__(
        self,
        *,
        initiator: bool,
        static: bytes,
        ephemeral: bytes,
        prologue: bytes,
        cipher: str = "AESGCM",
        pattern: str = "XX",
        psk: bytes | None = None,
        remote_static: bytes | None = None,
    ) -> None:
        if cipher not in _ORDERS or pattern not in PATTERNS:
            raise LocalProtocolError(f"no Noise pattern {pattern} with {cipher} here")
        self._pending = list(PATTERNS[pattern])
        takes_psk = any("psk" in tokens for tokens in self._pending)
        if takes_psk != (psk is not None) or (psk is not None and len(psk) != KEY_BYTES):
            raise LocalProtocolError(f"{pattern} {'needs' if takes_psk else 'takes no'} key of 32 bytes")
        if (initiator and pattern in _KNOWING) != (remote_static is not None):
            raise LocalProtocolError(f"{pattern}: who knows the other side's static key before")
        self._symmetric = _SymmetricState(f"Noise_{pattern}_25519_{cipher}_SHA256", cipher)
        self._symmetric.mix_hash(prologue)
        self._initiator = initiator
        self._keys = {
            "s": X25519PrivateKey.from_private_bytes(static),
            "e": X25519PrivateKey.from_private_bytes(ephemeral),
        }
        self._remote: dict[str, bytes] = {}
        self._psk = psk
        if pattern in _KNOWING:
            responders = remote_static or self._keys["s"].public_key().public_bytes_raw()
            self._symmetric.mix_hash(responders)
        if remote_static is not None:
            self._remote["s"] = remote_static
        self._our_turn = initiator
        self._failed = False

    @property
    def finished(self) -> bool:
        return not self._pending

    @property
    def hash(self) -> bytes:
        """The transcript's hash, the same on both sides; final once finished (channel binding)."""
        return self._symmetric.hash

    @property
    def remote_static(self) -> bytes:
        """The other side's X25519 public key, 32 bytes; LocalProtocolError before it has come."""
        if "s" not in self._remote:
            raise LocalProtocolError("the other side's static key has not come yet")
        return self._remote["s"]

    def write(self, payload: bytes = b"") -> bytes:
        """The next message to send, carrying `payload` (in the clear as long as no key is mixed in)."""
        parts = []
        for word in self._take_turn(ours=True):
            if word == "e":
                public = self._keys["e"].public_key().public_bytes_raw()
                self._mix_ephemeral(public)
                parts.append(public)
            elif word == "s":
                parts.append(self._symmetric.seal(self._keys["s"].public_key().public_bytes_raw()))
            else:
                self._mix_shared(word)
        parts.append(self._symmetric.seal(payload))
        message = b"".join(parts)
        if len(message) > NOISE_BYTES_MAX:
            raise LocalProtocolError(f"a handshake payload of {len(payload)} bytes is too long")
        return message

    def read(self, message: bytes) -> bytes:
        """The payload of the message that came; RemoteProtocolError if it is not a right one."""
        tokens = self._take_turn(ours=False)
        try:
            if len(message) > NOISE_BYTES_MAX:
                raise RemoteProtocolError(f"a handshake message of {len(message)} bytes")
            for word in tokens:
                if word == "e":
                    self._remote["e"], message = _cut(message, KEY_BYTES)
                    self._mix_ephemeral(self._remote["e"])
                elif word == "s":
                    sealed, message = _cut(message, KEY_BYTES + self._symmetric.sealed_extra_bytes)
                    self._remote["s"] = self._symmetric.unseal(sealed)
                else:
                    self._mix_shared(word)
            return self._symmetric.unseal(message)
        except RemoteProtocolError:
            self._failed = True
            raise

    def split(self) -> tuple[CipherState, CipherState]:
        """(for sending, for receiving), once finished."""
        if not self.finished or self._failed:
            raise LocalProtocolError("a handshake can be split only once it has finished")
        first, second = self._symmetric.split()
        return (first, second) if self._initiator else (second, first)

    def _take_turn(self, *, ours: bool) -> Tokens:
        if self._failed or self.finished or self._our_turn is not ours:
            raise LocalProtocolError("the handshake is over, or it is the other side's turn")
        self._our_turn = not self._our_turn
        return self._pending.pop(0)

    def _mix_ephemeral(self, public: bytes) -> None:
        self._symmetric.mix_hash(public)
        if self._psk is not None:
            self._symmetric.mix_key(public)  # section 9.2: nothing is sealed by the psk alone

    def _mix_shared(self, word: str) -> None:
        """`es` and its kin: the first letter is the initiator's key, the second the responder's."""
        if word == "psk":
            assert self._psk is not None
            self._symmetric.mix_key_and_hash(self._psk)
            return
        ours, theirs = (word[0], word[1]) if self._initiator else (word[1], word[0])
        public = X25519PublicKey.from_public_bytes(self._remote[theirs])
        try:
            self._symmetric.mix_key(self._keys[ours].exchange(public))
        except ValueError:
            # A point of small order gives a secret that everybody knows.
            raise RemoteProtocolError("a handshake with a worthless public key") from None


def _cut(data: bytes, length: int) -> tuple[bytes, bytes]:
    if len(data) < length:
        raise RemoteProtocolError("a handshake message that ends too early")
    return data[:length], data[length:]


# --- libp2p's identity payload ---------------------------------------------------------------------

_SIGNATURE_PREFIX = b"noise-libp2p-static-key:"
_KEY_PREFIX = bytes.fromhex("08011220")
"""libp2p's PublicKey protobuf: Type = Ed25519, Data = 32 bytes, which follow."""
_IDENTITY_KEY_FIELD = 1
_IDENTITY_SIGNATURE_FIELD = 2
PAYLOAD_BYTES_MAX = 1_024
"""Ours has 104 bytes; the rest is room for extensions that we skip."""


def identity_payload(identity: Identity, static_public: bytes) -> bytes:
    """`NoiseHandshakePayload` bytes that bind `identity` to an X25519 public key."""
    key = _KEY_PREFIX + identity.peer
    signature = identity.sign(_SIGNATURE_PREFIX + static_public)
    return bytes((0x0A, len(key))) + key + bytes((0x12, len(signature))) + signature


def check_identity_payload(payload: bytes, static_public: bytes) -> PeerId:
    """Who signed `static_public`; RemoteProtocolError if nobody did. Unknown fields are skipped."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise RemoteProtocolError(f"an identity payload of {len(payload)} bytes")
    fields = _parse_fields(payload)
    key = fields.get(_IDENTITY_KEY_FIELD, b"")
    signature = fields.get(_IDENTITY_SIGNATURE_FIELD, b"")
    if len(key) != len(_KEY_PREFIX) + PEER_ID_BYTES or not key.startswith(_KEY_PREFIX):
        raise RemoteProtocolError("an identity payload without an Ed25519 key")
    peer = PeerId(key[len(_KEY_PREFIX) :])
    if len(signature) != SIGNATURE_BYTES or not verify(peer, _SIGNATURE_PREFIX + static_public, signature):
        raise RemoteProtocolError("an identity payload with a wrong signature")
    return peer


def _parse_fields(data: bytes) -> dict[int, bytes]:
    """The length-delimited fields of a protobuf message; varint fields are skipped, the last one wins."""
    fields: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        tag, at = _parse_varint(data, at)
        value, at = _parse_varint(data, at)
        if tag & 7 == 2:
            if value > len(data) - at:
                raise RemoteProtocolError("an identity payload that ends inside a field")
            fields[tag >> 3] = data[at : at + value]
            at += value
        elif tag & 7 != 0:
            raise RemoteProtocolError("an identity payload with a field of unknown kind")
    return fields


def _parse_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    # Five bytes hold more than any tag or length that could be right here.
    for shift, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise RemoteProtocolError("an identity payload with a broken number")


# --- XX between two peers --------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """What a handshake ends in: who is there, and a cipher for each direction."""

    peer: PeerId
    sending: CipherState
    receiving: CipherState
    hash: bytes


class PeerHandshake:
    """XX in which both sides prove their peer ids. `session` is there once it has finished.

    The initiator begins with `start`; then each side hands what came to `receive` and sends what that
    returns. The responder's identity is checked before the initiator shows its own.
    """

    def __init__(
        self,
        *,
        initiator: bool,
        identity: Identity,
        static: bytes,
        ephemeral: bytes,
        swarm: str,
        cipher: str = "AESGCM",
        expected: PeerId | None = None,
    ) -> None:
        self._initiator = initiator
        self._expected = expected
        self._payload = identity_payload(identity, static_public_key(static))
        self._handshake = Handshake(
            initiator=initiator,
            static=static,
            ephemeral=ephemeral,
            prologue=_PROLOGUE + swarm.encode(),
            cipher=cipher,
        )
        self._started = False
        self.session: Session | None = None

    def start(self) -> bytes:
        """The initiator's first message. It carries nothing, since anybody could read it."""
        self._started = True
        return self._handshake.write()

    def receive(self, message: bytes) -> bytes:
        """What to send in answer, empty for nothing.

        Raises:
            WrongIdentity: somebody else than `expected` proved to be there.
            RemoteProtocolError: anything else that no correct peer sends.
        """
        payload = self._handshake.read(message)
        if not self._initiator and not self._started:
            self._started = True
            if payload:
                raise RemoteProtocolError("a first handshake message with a payload")
            return self._handshake.write(self._payload)
        peer = check_identity_payload(payload, self._handshake.remote_static)
        if self._expected is not None and peer != self._expected:
            raise WrongIdentity(self._expected, peer)
        answer = self._handshake.write(self._payload) if self._initiator else b""
        sending, receiving = self._handshake.split()
        self.session = Session(peer, sending, receiving, self._handshake.hash)
        return answer


def static_public_key(static: bytes) -> bytes:
    """The X25519 public key of a private one, 32 bytes each."""
    return X25519PrivateKey.from_private_bytes(static).public_key().public_bytes_raw()
