"""The handshake on a stream: two peers settle on a suite, show that they know the swarm, and prove their ids.

    initiator                                     responder
    offer | framed message | tag           ->
                                           <-     answer | framed message | tag        the guess was right
                                       or  <-     answer | tag                         it was not
    framed message | tag                   ->
                                           <-     framed message | tag
    framed message                         ->

A framed message is a Noise message preceded by its length in two bytes. `negotiation` has offer and answer,
`suites` the patterns. Only a private swarm has tags: HMAC-SHA-256, keyed with a secret of the swarm, over
everything sent so far. So a responder spends one hash on an outsider and does not answer. An initiator shows
an outsider nothing of itself: it sends its own keys and id only after the peer has proved that it knows the
secret and is the expected peer. A replayed first flight is treated like an outsider's, see `replay_cache`.

No sockets, no clocks: the driver passes it exactly `wanted` bytes at a time, which is a bounded number, and
enforces its own deadline. On failure the driver also decides whether to close the connection or to keep it
open in silence, see `PeerHandshake.knows_swarm`.
"""

import hashlib
import hmac
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId, short_peer
from crypto.noise import kem, negotiation
from crypto.noise.ciphers import KEY_BYTES, CipherState
from crypto.noise.handshake import Handshake, PrivateKey
from crypto.noise.identity import check_identity_payload
from crypto.noise.replay_cache import ReplayCache
from crypto.noise.suites import Suite
from crypto.swarm import Swarm

MESSAGE_BYTES_MAX = 1_536
"""Maximum size of a handshake message. The longest has 1,304 bytes; the rest is room for extensions of the
payload."""
SWARM_TAG_BYTES = 32

_LENGTH_BYTES = 2
_TAG_KEY = b"peerloom/knock/1\0"


class WrongIdentity(RemoteProtocolError):
    """A peer proved an identity that differs from the expected one."""

    def __init__(self, expected: PeerId, found: PeerId) -> None:
        super().__init__(f"wanted {short_peer(expected)}, found {short_peer(found)}")
        self.expected = expected
        self.found = found


class NoCommonSuite(RemoteProtocolError):
    """The other side accepts none of our suites."""


@dataclass(frozen=True)
class HandshakeResult:
    """The result of a handshake: the peer, and a cipher for each direction."""

    peer: PeerId
    suite: Suite
    sending: CipherState
    receiving: CipherState
    hash: bytes


Reading = Generator[int, bytes, bytes]
"""A generator that yields how many bytes it wants next, is sent those bytes, and returns what it has read."""


class PeerHandshake:
    """One side of the handshake. `session` is set once the handshake has finished.

    `static` is an X25519 private key, and `proof` our `identity_payload` for it. `suites` are the accepted
    suites, best first; `entropy(n)` returns n unpredictable bytes (the entropy seam); `knocks` is one replay
    cache for all handshakes of this node. Begin with `start`. Then, until there is a `session`, pass the next
    `wanted` bytes to `receive` and send what it returns. The responder's identity is checked before the
    initiator shows its own.
    """

    def __init__(
        self,
        *,
        initiator: bool,
        proof: bytes,
        static: PrivateKey,
        swarm: Swarm,
        suites: Sequence[Suite],
        entropy: Callable[[int], bytes],
        knocks: ReplayCache,
        expected: PeerId | None = None,
    ) -> None:
        if not 1 <= len(suites) <= negotiation.SUITES_MAX:
            raise LocalProtocolError(f"a handshake with {len(suites)} suites")
        self._initiator = initiator
        self._proof = proof
        self._static = static
        self._swarm = swarm
        self._secrets = swarm.secrets if swarm.is_private else ()
        # A responder learns from the first tag which secret the initiator uses.
        self._secret = self._secrets[0] if initiator and self._secrets else None
        self._suites = suites
        self._entropy = entropy
        self._knocks = knocks
        self._expected = expected
        self._tag = b""
        self._outgoing = b""
        self._steps = self._initiate() if initiator else self._respond()
        self._over = False
        self.wanted = 0
        self.is_last = False
        """Whether the wanted bytes belong to the last message. Only after the last message may other data
        follow; before that, a peer waits for an answer to each flight."""
        self.has_opened = False
        """Whether a responder has received a whole first flight. In a private swarm, the flight must also
        have shown a key of the swarm. The later steps are the expensive ones."""
        self.session: HandshakeResult | None = None

    @property
    def knows_swarm(self) -> bool:
        """Whether the two sides have agreed on a key of our swarm. Always true in an open swarm, which has no
        keys."""
        return not self._swarm.is_private or self._secret is not None

    def start(self) -> bytes:
        """Return the initiator's first flight; empty for a responder."""
        return self._go_on(None)

    def receive(self, data: bytes) -> bytes:
        """Return the bytes to send in answer to the `wanted` bytes (which may be zero); empty if nothing is
        to be sent.

        Raises:
            WrongIdentity: a peer other than `expected` proved its identity.
            NoCommonSuite: no suite in common.
            RemoteProtocolError: anything else that no correct peer sends. The handshake is then over.
        """
        if len(data) != self.wanted:
            raise LocalProtocolError(f"{len(data)} bytes for a handshake that wants {self.wanted}")
        return self._go_on(data)

    def _go_on(self, data: bytes | None) -> bytes:
        if self._over:
            raise LocalProtocolError("this handshake is over")
        self._over = True
        try:
            self.wanted = next(self._steps) if data is None else self._steps.send(data)
            self._over = False
        except StopIteration as end:
            self.wanted, self.session = 0, end.value
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    # --- the two sides -----------------------------------------------------------------------------

    def _initiate(self) -> Generator[int, bytes, HandshakeResult]:
        suite, offer = self._suites[0], negotiation.offer_of(self._suites)
        noise = self._begin(suite, offer, bytes((suite.number,)))
        first = offer + _framed(noise.write())
        self._send(first)
        answer = yield 1
        if answer[0] != suite.number:
            suite, answer = yield from self._read_other_choice(answer)
            noise = self._begin(suite, first, answer)
            self._send(_framed(noise.write()))
            answer = b""
        message = yield from self._read_flight(answer)
        peer = self._check_peer(noise.read(message), noise)
        self._outgoing += _framed(noise.write(self._proof))
        return _session(peer, suite, noise)

    def _read_other_choice(self, chosen: bytes) -> Generator[int, bytes, tuple[Suite, bytes]]:
        """Read a choice made from both lists after a wrong guess; return (suite, answer)."""
        count = yield 1
        listed = yield negotiation.check_count(count[0])
        answer = chosen + count + listed
        yield from self._check_tag(answer)
        suite = negotiation.choose(negotiation.numbers_of(self._suites), listed)
        if (suite.number if suite else negotiation.NONE_TAKEN) != chosen[0]:
            raise RemoteProtocolError("a choice of suite that does not follow from the lists")
        if suite is None:
            raise NoCommonSuite(f"it takes only {negotiation.names_of(listed)}")
        return suite, answer

    def _respond(self) -> Generator[int, bytes, HandshakeResult]:
        head = yield negotiation.HEAD_BYTES
        offered = yield negotiation.check_head(head)
        offer = head + offered
        message = yield from self._read_flight(offer)
        # So far the handshake has cost at most one hash. The driver may make it wait here before the
        # expensive steps.
        self.has_opened = True
        yield 0
        suite = negotiation.choose(offered, negotiation.numbers_of(self._suites))
        answer = negotiation.answer_of(suite, offered, self._suites)
        before = answer
        if suite is None or suite.number != offered[0]:
            self._send(answer)
            if suite is None:
                yield 0  # sends the answer before this generator ends
                raise NoCommonSuite(f"it offers only {negotiation.names_of(offered)}")
            offer += _framed(message)
            message = yield from self._read_flight(b"")
            before = b""
        noise = self._begin(suite, offer, answer)
        if noise.read(message):
            raise RemoteProtocolError("a first handshake message with a payload")
        self._send(before + _framed(noise.write(self._proof)))
        self.is_last = True
        last = yield from self._read_message()
        return _session(self._check_peer(noise.read(last), noise), suite, noise)

    def _begin(self, suite: Suite, offer: bytes, answer: bytes) -> Handshake:
        """Begin the Noise handshake. After a wrong guess, `offer` also includes the wasted message."""
        return Handshake(
            initiator=self._initiator,
            static=self._static,
            ephemeral=self._entropy(KEY_BYTES),
            prologue=negotiation.prologue(self._swarm.name, offer, answer),
            cipher=suite.cipher,
            pattern=suite.pattern(private=self._swarm.is_private),
            psk=self._secret,
            kem_seed=self._entropy(kem.SEED_BYTES) if suite.hybrid and self._initiator else None,
        )

    def _check_peer(self, payload: bytes, noise: Handshake) -> PeerId:
        peer = check_identity_payload(payload, noise.remote_static)
        if self._expected is not None and peer != self._expected:
            raise WrongIdentity(self._expected, peer)
        return peer

    # --- the wire format -----------------------------------------------------------------------------

    def _send(self, flight: bytes) -> None:
        """Queue one of our flights; in a private swarm, with its tag."""
        if self._secret is not None:
            self._tag = _tag_of(self._secret, self._tag, flight)
            flight += self._tag
        self._outgoing += flight

    def _read_flight(self, before: bytes) -> Reading:
        """Read the message at the end of a flight and check the flight's tag. `before` is the part of the
        flight already read."""
        message = yield from self._read_message()
        yield from self._check_tag(before + _framed(message))
        return message

    def _read_message(self) -> Reading:
        length = int.from_bytes((yield _LENGTH_BYTES), "big")
        if length > MESSAGE_BYTES_MAX:
            raise RemoteProtocolError(f"a handshake message of {length} bytes")
        return (yield length)

    def _check_tag(self, flight: bytes) -> Generator[int, bytes, None]:
        """In a private swarm, read and check the tag that follows a received flight."""
        if not self._swarm.is_private:
            return
        came = yield SWARM_TAG_BYTES
        for secret in self._secrets if self._secret is None else (self._secret,):
            if hmac.compare_digest(_tag_of(secret, self._tag, flight), came):
                if self._secret is None and not self._knocks.take(came):
                    raise RemoteProtocolError("a first flight that was received before")
                self._secret, self._tag = secret, came
                return
        raise RemoteProtocolError("a flight whose tag does not show a key of this swarm")


def _session(peer: PeerId, suite: Suite, noise: Handshake) -> HandshakeResult:
    sending, receiving = noise.split()
    return HandshakeResult(peer, suite, sending, receiving, noise.hash)


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


def _tag_of(secret: bytes, before: bytes, flight: bytes) -> bytes:
    """Return the tag over this flight and the previous tag, which in turn covers all earlier flights. So a
    flight is valid at only one position and in only one direction."""
    key = hmac.digest(secret, _TAG_KEY, hashlib.sha256)
    return hmac.digest(key, bytes((len(before),)) + before + flight, hashlib.sha256)
