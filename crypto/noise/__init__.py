"""Noise: two peers that do not trust each other yet agree on keys and prove their identities. Bytes in, bytes
out.

    ciphers      one key, one counter
    symmetric    the state into which a handshake mixes keys and messages
    kem          ML-KEM-768, if this installation has it
    handshake    any pattern of the tables; payloads are opaque to it
    identity     libp2p's signed payload: an Ed25519 key vouches for an X25519 key
    suites       ciphers and key agreements, in the order of preference
    negotiation  how two peers settle on a suite, and the prologue that binds it
    replay_cache the first flights that a node of a private swarm has accepted
    peer_handshake  a stream's handshake, from the first byte to a `HandshakeResult`

Based on the Noise Protocol Framework, revision 34, and libp2p's noise specification. It is not interoperable
with libp2p nodes, whose prologue is empty and whose cipher is always ChaChaPoly. Transport of the bytes is
not here: see `node.transport`.
"""

from crypto.noise.ciphers import CIPHERS, KEY_BYTES, NONCE_MAX, TAG_BYTES, CipherState, Data
from crypto.noise.handshake import (
    HYBRIDS,
    NOISE_BYTES_MAX,
    PATTERNS,
    Handshake,
    PrivateKey,
    load_private_key,
    static_public_key,
)
from crypto.noise.identity import PAYLOAD_BYTES_MAX, check_identity_payload, identity_payload
from crypto.noise.peer_handshake import HandshakeResult, NoCommonSuite, PeerHandshake, WrongIdentity
from crypto.noise.replay_cache import ReplayCache
from crypto.noise.suites import SUITES, Suite, preferred, suites_named

__all__ = [
    "CIPHERS",
    "HYBRIDS",
    "KEY_BYTES",
    "NOISE_BYTES_MAX",
    "NONCE_MAX",
    "PATTERNS",
    "PAYLOAD_BYTES_MAX",
    "SUITES",
    "TAG_BYTES",
    "CipherState",
    "Data",
    "Handshake",
    "HandshakeResult",
    "NoCommonSuite",
    "PeerHandshake",
    "PrivateKey",
    "ReplayCache",
    "Suite",
    "WrongIdentity",
    "check_identity_payload",
    "identity_payload",
    "load_private_key",
    "preferred",
    "static_public_key",
    "suites_named",
]
