"""Random choices of a simulation: each is derived from one seed and a name, so the order of the draws does
not matter.

A draw is a keyed hash (BLAKE2b, RFC 7693) of its labels. The same labels give the same draw under every
driver and in every process, whatever was drawn before. The draws are not secret; do not use them for keys of
real nodes.
"""

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from random import Random

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, signed_bytes
from crypto.identity import PEER_ID_BYTES, SEED_BYTES, SIGNATURE_BYTES, Identity, PeerId

DRAW_BYTES = 64
MARKS_MAX = 4_096
_KEY_BYTES = 32
_SHARE_BYTES = 6
"""Number of bytes in a share: as many as a float holds without rounding up to 1."""
_SHARE_RANGE = 2.0 ** (8 * _SHARE_BYTES)


def draw(seed: int, *labels: bytes | str | int) -> bytes:
    """Return 64 bytes that depend only on `seed` and the labels."""
    return blake2b(b"".join(map(_label, labels)), key=_key(seed), digest_size=DRAW_BYTES).digest()


def draw_share(seed: int, *labels: bytes | str | int) -> float:
    """Return a uniform number from 0 to below 1; it is the same for the same labels."""
    return int.from_bytes(draw(seed, *labels)[:_SHARE_BYTES], "little") / _SHARE_RANGE


def seeded_rng(seed: int, *labels: bytes | str | int) -> Random:
    """Return a random generator for one core of one peer: the `rng` seam."""
    return Random(int.from_bytes(draw(seed, "rng", *labels), "little"))  # noqa: S311 - choices, not keys


def seeded_entropy(seed: int, *labels: bytes | str | int) -> Callable[[int], bytes]:
    """Return an endless stream of bytes from a hash and a counter: the `entropy` seam."""
    block = 0
    rest = b""

    def entropy(count: int) -> bytes:
        nonlocal block, rest
        while len(rest) < count:
            rest += draw(seed, "entropy", block, *labels)
            block += 1
        taken, rest = rest[:count], rest[count:]
        return taken

    return entropy


def seeded_peer(seed: int, index: int) -> PeerId:
    """Return a peer id for experiments without real keys: it can be named and compared, but not verified."""
    return PeerId(draw(seed, "peer", index)[:PEER_ID_BYTES])


def seeded_identity(seed: int, index: int) -> Identity:
    """Return a real key pair, for experiments with Ed25519 signatures."""
    return Identity(draw(seed, "identity", index)[:SEED_BYTES])


class HashSigner:
    """A `crypto.facts.Signer` by keyed hash, about fifty times cheaper than Ed25519.

    All signers with the same seed share one key, so any of them could forge. An experiment about liars must
    use `crypto.facts.IdentitySigner`.
    """

    def __init__(self, peer: PeerId, swarm: str, seed: int) -> None:
        self._peer = peer
        self._swarm = swarm
        self._secret = _key(seed)

    @property
    def peer(self) -> PeerId:
        return self._peer

    def sign(self, purpose: str, body: bytes) -> Fact:
        return Fact(self._peer, body, self._mark(self._peer, purpose, body))

    def check(self, purpose: str, fact: Fact) -> PeerId:
        if len(fact.author) != PEER_ID_BYTES:
            raise RemoteProtocolError(f"{purpose} fact with a malformed author or signature")
        if fact.signature != self._mark(fact.author, purpose, fact.body):
            raise RemoteProtocolError(f"{purpose} fact with a wrong signature")
        return PeerId(fact.author)

    def _mark(self, author: bytes, purpose: str, body: bytes) -> bytes:
        return _mark(self._secret, self._swarm, author, purpose, body)


@lru_cache(maxsize=MARKS_MAX)
def _mark(secret: bytes, swarm: str, author: bytes, purpose: str, body: bytes) -> bytes:
    # The result is cached, because every peer of the simulation checks the same fact, mostly within a few
    # virtual seconds.
    data = author + signed_bytes(purpose, swarm, body)
    return blake2b(data, key=secret, digest_size=SIGNATURE_BYTES).digest()


def _key(seed: int) -> bytes:
    return seed.to_bytes(_KEY_BYTES, "little", signed=True)


def _label(label: bytes | str | int) -> bytes:
    if isinstance(label, bytes):
        kind, part = b"b", label
    elif isinstance(label, str):
        kind, part = b"s", label.encode()
    else:
        kind, part = b"i", str(label).encode()
    # The length prefix distinguishes ("ab", "c") from ("a", "bc"); the kind distinguishes 1 from "1".
    return kind + len(part).to_bytes(4, "little") + part
