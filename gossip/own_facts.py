"""The facts that this peer signs, and the check of others' signatures. The decision what to sign is
elsewhere."""

from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from gossip.member import Profile
from gossip.messages import (
    AliveFact,
    Body,
    BroadcastBody,
    DeadBody,
    LeftBody,
    SuspectBody,
    alive_body,
    announced,
    check_body,
    milliseconds,
    sign_body,
)


class OwnFacts:
    """Signs for one peer. `checks` counts the checked signatures of other peers."""

    __slots__ = ("_signer", "checks", "life", "rival")

    def __init__(self, signer: Signer, life: bytes) -> None:
        self._signer = signer
        self.checks = 0
        self.life = life
        # A different life of this identity. Once it is set, our facts name it.
        self.rival = b""

    def alive(self, profile: Profile, incarnation: int) -> AliveFact:
        """Return this peer's alive fact for its own list. It has all addresses, some of which may not fit the
        signed fact."""
        body = alive_body(profile, incarnation, self.life, self.rival)
        return announced(sign_body(self._signer, body), profile, body)

    def left(self, incarnation: int) -> Fact:
        """Return this peer's goodbye."""
        return sign_body(self._signer, LeftBody(incarnation))

    def suspect(self, peer: PeerId, incarnation: int, silence_seconds: float) -> Fact:
        """Return the accusation that `peer` has not answered for `silence_seconds`."""
        return sign_body(self._signer, SuspectBody(peer, incarnation, milliseconds(silence_seconds)))

    def dead(self, peer: PeerId, incarnation: int, silence_milliseconds: int) -> Fact:
        """Return the verdict that `peer` has not refuted in time."""
        return sign_body(self._signer, DeadBody(peer, incarnation, silence_milliseconds))

    def broadcast(self, body: BroadcastBody) -> Fact:
        """Return the fact of a user's broadcast."""
        return sign_body(self._signer, body)

    def check(self, fact: Fact, body: Body) -> None:
        """Check another peer's signature. Raises RemoteProtocolError if it is wrong."""
        self.checks += 1
        check_body(self._signer, fact, body)
