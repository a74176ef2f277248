"""One engine for all the Noise handshake patterns that we use, and for our hybrid of Noise with ML-KEM-768.

`PATTERNS` has patterns of the Noise Protocol Framework, revision 34 (section numbers below refer to it), with
25519 and SHA-256. `HYBRIDS` follow the idea of Noise's draft for hybrid forward secrecy (hfs) and add two
tokens.

    e1       in the first message, after e: the initiator's fresh ML-KEM-768 encapsulation key (1,184 bytes)
             goes through EncryptAndHash, which encrypts it only if a key has been mixed in already
    ekem1    in the second, after ee: the ciphertext (1,088 bytes) made for that key is sealed, under the key
             that resulted from ee, and so hashed; then its shared secret is mixed in (MixKey)

So everything from the responder's static key on is sealed under both X25519 and ML-KEM: breaking only one of
them reveals nothing. Authentication rests on X25519 and Ed25519 alone. That is enough, because a future
quantum computer cannot forge a handshake that happens today. The draft has neither ML-KEM nor a published
test vector. So the protocol's name, which is hashed first, begins with `Peerloom_` instead of `Noise_`.

Not here: the meaning of payloads (`peer_handshake`), and the framing of messages (`node.transport`).
"""

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.noise import kem
from crypto.noise.ciphers import CIPHERS, KEY_BYTES, CipherState
from crypto.noise.symmetric import SymmetricState

NOISE_BYTES_MAX = 65_535
"""Maximum length of a Noise message, including tags (section 3)."""

PrivateKey = bytes | X25519PrivateKey
"""32 bytes, or the same key as an object. A caller that uses a key often saves the cost of loading it each
time."""

Tokens = tuple[str, ...]
PATTERNS: dict[str, tuple[Tokens, ...]] = {
    "XX": (("e",), ("e", "ee", "s", "es"), ("s", "se")),
    "XXpsk3": (("e",), ("e", "ee", "s", "es"), ("s", "se", "psk")),
    "IKpsk2": (("e", "es", "s", "ss"), ("e", "ee", "se", "psk")),
}
"""Message patterns by name (sections 7.5 and 9.4). The initiator writes the first and every second message
after it."""
HYBRIDS: dict[str, tuple[Tokens, ...]] = {
    "XXhfs": (("e", "e1"), ("e", "ee", "ekem1", "s", "es"), ("s", "se")),
    "XXhfs+psk3": (("e", "e1"), ("e", "ee", "ekem1", "s", "es"), ("s", "se", "psk")),
}
"""Our own patterns, see above. In a pattern with a psk, the key in the first message is sealed too, but under
a key that anybody can compute."""
_KNOWING = ("IKpsk2",)
"""The patterns whose initiator must already know the responder's static key (section 7.1)."""


class Handshake:
    """One side of a handshake (section 5.3).

    `static` and `ephemeral` are X25519 private keys. An ephemeral key must be fresh for every handshake, and
    so must `kem_seed`, 64 bytes for the initiator of a hybrid. `psk` is a 32-byte secret that both sides
    know, for the patterns that use one. `remote_static` is the responder's X25519 public key, for an
    initiator that already knows it. After a rejected message the object is unusable: every later call raises
    LocalProtocolError.

    Loading a key costs as much as agreeing on a secret. So `static` may be passed as a loaded object, and the
    ephemeral key is loaded only when it is needed: a rejected first message costs only its own checks.
    """

    def __init__(
        self,
        *,
        initiator: bool,
        static: PrivateKey,
        ephemeral: bytes,
        prologue: bytes,
        cipher: str = "AESGCM",
        pattern: str = "XX",
        psk: bytes | None = None,
        remote_static: bytes | None = None,
        kem_seed: bytes | None = None,
    ) -> None:
        self._pending = _check(initiator, cipher, pattern, psk, remote_static, kem_seed)
        self._symmetric = SymmetricState(_name(pattern, cipher), cipher)
        self._symmetric.mix_hash(prologue)
        self._initiator = initiator
        self._keys = {"s": load_private_key(static)}
        self._ephemeral = ephemeral
        self._kem_key = None if kem_seed is None else kem.KemKey(kem_seed)
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
        """The hash of the transcript, the same on both sides. It is final once the handshake has finished
        (channel binding)."""
        return self._symmetric.hash

    @property
    def remote_static(self) -> bytes:
        """The other side's X25519 public key, 32 bytes. Raises LocalProtocolError if it has not arrived
        yet."""
        if "s" not in self._remote:
            raise LocalProtocolError("the other side's static key has not arrived yet")
        return self._remote["s"]

    def write(self, payload: bytes = b"") -> bytes:
        """Return the next message to send, which carries `payload` (in the clear as long as no key is mixed
        in)."""
        try:
            fields = [self._write_field(word) for word in self._take_turn(ours=True)]
        except RemoteProtocolError:
            self._failed = True
            raise
        message = b"".join((*fields, self._symmetric.seal(payload)))
        if len(message) > NOISE_BYTES_MAX:
            raise LocalProtocolError(f"a handshake payload of {len(payload)} bytes is too long")
        return message

    def read(self, message: bytes) -> bytes:
        """Return the payload of a received message; RemoteProtocolError if it is invalid."""
        tokens = self._take_turn(ours=False)
        try:
            if len(message) > NOISE_BYTES_MAX:
                raise RemoteProtocolError(f"a handshake message of {len(message)} bytes")
            for word in tokens:
                message = self._read_field(word, message)
            return self._symmetric.unseal(message)
        except RemoteProtocolError:
            self._failed = True
            raise

    def split(self) -> tuple[CipherState, CipherState]:
        """Return the ciphers (for sending, for receiving) of a finished handshake."""
        if not self.finished or self._failed:
            raise LocalProtocolError("a handshake can be split only once it has finished")
        first, second = self._symmetric.split()
        return (first, second) if self._initiator else (second, first)

    def _take_turn(self, *, ours: bool) -> Tokens:
        if self._failed or self.finished or self._our_turn is not ours:
            raise LocalProtocolError("the handshake is over, or it is the other side's turn")
        self._our_turn = not self._our_turn
        return self._pending.pop(0)

    def _write_field(self, word: str) -> bytes:
        """Return the bytes that a message has for one token; empty for a token that only mixes keys."""
        if word == "e":
            public = self._load_ephemeral().public_key().public_bytes_raw()
            self._mix_ephemeral(public)
            return public
        if word == "s":
            return self._symmetric.seal(self._keys["s"].public_key().public_bytes_raw())
        if word == "e1":
            assert self._kem_key is not None
            return self._symmetric.seal(self._kem_key.public)
        if word == "ekem1":
            secret, ciphertext = kem.encapsulate(self._remote["e1"])
            sealed = self._symmetric.seal(ciphertext)
            self._symmetric.mix_key(secret)
            return sealed
        self._mix_shared(word)
        return b""

    def _read_field(self, word: str, message: bytes) -> bytes:
        """Consume the bytes for one token from the beginning of `message`; return the rest."""
        if word == "e":
            self._remote["e"], message = _cut(message, KEY_BYTES)
            self._mix_ephemeral(self._remote["e"])
        elif word == "s":
            self._remote["s"], message = self._unseal_field(message, KEY_BYTES)
        elif word == "e1":
            self._remote["e1"], message = self._unseal_field(message, kem.PUBLIC_BYTES)
        elif word == "ekem1":
            assert self._kem_key is not None
            ciphertext, message = self._unseal_field(message, kem.CIPHERTEXT_BYTES)
            self._symmetric.mix_key(self._kem_key.decapsulate(ciphertext))
        else:
            self._mix_shared(word)
        return message

    def _unseal_field(self, message: bytes, length: int) -> tuple[bytes, bytes]:
        sealed, rest = _cut(message, length + self._symmetric.sealed_extra_bytes)
        return self._symmetric.unseal(sealed), rest

    def _load_ephemeral(self) -> X25519PrivateKey:
        key = self._keys["e"] = X25519PrivateKey.from_private_bytes(self._ephemeral)
        return key

    def _mix_ephemeral(self, public: bytes) -> None:
        self._symmetric.mix_hash(public)
        if self._psk is not None:
            self._symmetric.mix_key(public)  # section 9.2: nothing may be sealed under the psk alone

    def _mix_shared(self, word: str) -> None:
        """Mix in the shared secret of a token such as `es`: its first letter names the initiator's key, its
        second the responder's."""
        if word == "psk":
            assert self._psk is not None
            self._symmetric.mix_key_and_hash(self._psk)
            return
        ours, theirs = (word[0], word[1]) if self._initiator else (word[1], word[0])
        public = X25519PublicKey.from_public_bytes(self._remote[theirs])
        try:
            self._symmetric.mix_key(self._keys[ours].exchange(public))
        except ValueError:
            # A point of small order gives a publicly known secret.
            raise RemoteProtocolError("a handshake with a public key of small order") from None


def static_public_key(static: PrivateKey) -> bytes:
    """Return the X25519 public key of a private one, 32 bytes."""
    return load_private_key(static).public_key().public_bytes_raw()


def load_private_key(key: PrivateKey) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(key) if isinstance(key, bytes) else key


def _name(pattern: str, cipher: str) -> str:
    """Return the protocol's name (section 8), which is hashed first."""
    if pattern in HYBRIDS:
        return f"Peerloom_{pattern}_25519+MLKEM768_{cipher}_SHA256"
    return f"Noise_{pattern}_25519_{cipher}_SHA256"


def _check(
    initiator: bool,
    cipher: str,
    pattern: str,
    psk: bytes | None,
    remote_static: bytes | None,
    kem_seed: bytes | None,
) -> list[Tokens]:
    """Return the pattern's messages. Raises LocalProtocolError if the arguments do not fit the pattern."""
    messages = (PATTERNS | HYBRIDS).get(pattern)
    if cipher not in CIPHERS or messages is None:
        raise LocalProtocolError(f"no Noise pattern {pattern} with {cipher} here")
    takes_psk = any("psk" in tokens for tokens in messages)
    if takes_psk != (psk is not None) or (psk is not None and len(psk) != KEY_BYTES):
        raise LocalProtocolError(f"{pattern} {'needs a' if takes_psk else 'takes no'} key of 32 bytes")
    if (initiator and pattern in _KNOWING) != (remote_static is not None):
        raise LocalProtocolError(
            f"{pattern}: `remote_static` is given by the initiator of a pattern with it, and by nobody else"
        )
    if (initiator and pattern in HYBRIDS) != (kem_seed is not None):
        raise LocalProtocolError(
            f"{pattern}: `kem_seed` is given by the initiator of a hybrid pattern, and by nobody else"
        )
    return list(messages)


def _cut(data: bytes, length: int) -> tuple[bytes, bytes]:
    if len(data) < length:
        raise RemoteProtocolError("a handshake message that ends too early")
    return data[:length], data[length:]
