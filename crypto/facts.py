"""Signed facts: statements that third parties must be able to check (ARCHITECTURE law 8).

A fact is signed by its author over the exact body bytes, with a purpose and the swarm's name in
front, so that a signature made for one purpose or swarm proves nothing in another. Packets and
frames on a session are *not* facts; a MAC serves them.
"""

from typing import Protocol

import msgspec

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PEER_ID_BYTES, SIGNATURE_BYTES, Identity, PeerId, verify

_DOMAIN = b"peerloom/1"


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """A signed statement. `body` is exactly what its author signed; it is unverified until `Signer.check`."""

    author: bytes
    body: bytes
    signature: bytes


class Signer(Protocol):
    """Makes and checks facts for one swarm. The simulator may use a keyed hash instead of signatures."""

    @property
    def peer(self) -> PeerId:
        """The author of every fact this signer makes."""

    def sign(self, purpose: str, body: bytes) -> Fact:
        """Sign a fact by this peer."""

    def check(self, purpose: str, fact: Fact) -> PeerId:
        """Return the author if the signature is valid; raise RemoteProtocolError otherwise."""


class IdentitySigner:
    """The real `Signer`: Ed25519 by this node's identity."""

    def __init__(self, identity: Identity, swarm: str) -> None:
        self._identity = identity
        self._swarm = swarm

    @property
    def peer(self) -> PeerId:
        return self._identity.peer

    def sign(self, purpose: str, body: bytes) -> Fact:
        data = signed_bytes(purpose, self._swarm, body)
        return Fact(self._identity.peer, body, self._identity.sign(data))

    def check(self, purpose: str, fact: Fact) -> PeerId:
        if len(fact.author) != PEER_ID_BYTES or len(fact.signature) != SIGNATURE_BYTES:
            raise RemoteProtocolError(f"{purpose} fact with a malformed author or signature")
        author = PeerId(fact.author)
        if not verify(author, signed_bytes(purpose, self._swarm, fact.body), fact.signature):
            raise RemoteProtocolError(f"{purpose} fact with a wrong signature")
        return author


def signed_bytes(purpose: str, swarm: str, body: bytes) -> bytes:
    """Return the signed bytes: domain, purpose and swarm, each ended by a zero byte, then the body."""
    prefix = b"\0".join((_DOMAIN, purpose.encode(), swarm.encode()))
    if prefix.count(b"\0") != 2:
        raise LocalProtocolError("a purpose or swarm name must not hold a zero byte")
    return prefix + b"\0" + body
